"""The step time without simulation: the maximum cycle ratio of the loop's dependency graph, and what limits it.

Nodes are the ops of one iteration, micro-batches apart. An edge says that an op cannot start before another one,
issued `distance` iterations earlier, has ended: stream order, the wrap from the last op of a stream to its first of the
next iteration, and waits. In steady state every cycle of the graph turns once per `distance` iterations, so the step
takes at least the durations along a cycle over its distance, and exactly the largest such ratio when nothing contends.

Source: Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity (1992), theorem 2.23 (cycle time of a max-plus
linear system); the search improves a candidate ratio with Bellman-Ford until no cycle exceeds it, on whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from nestpipe.base import DeadlockError, ScheduleError
from nestpipe.ir import Edge, Loop, LoopGraph, Op, OpKind, loop_graph
from sim.engine.host import HOST, HostLane

__all__ = ["Bound", "CycleStep", "max_cycle_ratio"]


class CycleStep(NamedTuple):
    """One op of the critical cycle. `batch` and `micro_batch` are as in the loop; `ns` is the op's duration."""

    kind: OpKind
    batch: int
    micro_batch: int | None
    stream: str
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The step time that the loop's dependencies allow, and the cycle that sets it.

    Attributes:
        step_ns: exact, as a fraction of nanoseconds.
        cycle: the ops along the critical cycle, in the order they run.
        iterations: how many iterations the cycle spans.
    """

    step_ns: Fraction
    cycle: tuple[CycleStep, ...]
    iterations: int

    def text(self) -> str:
        """The critical cycle in one line, ops that take no time left out and repeats of a kind summed."""
        shares: dict[str, int] = {}
        for step in self.cycle:
            if step.ns:
                name = f"host of {step.kind}" if step.stream == HOST else step.kind.value
                shares[name] = shares.get(name, 0) + step.ns
        total = sum(shares.values()) or 1
        return " -> ".join(f"{kind} {100 * ns / total:.1f} %" for kind, ns in shares.items())


def max_cycle_ratio(loop: Loop, duration_ns: Callable[[Op], int], host: HostLane | None = None, rank: int = 0) -> Bound:
    """The steady-state step time of `loop` when nothing contends, and its critical cycle.

    Args:
        loop: the schedule.
        duration_ns: nanoseconds of an op; it is given with its batch offset and its absolute micro-batch.
        host: the thread that issues the ops, where there is one.
        rank: whose thread.

    Raises:
        DeadlockError: if ops wait for each other in a circle within or against the order of iterations.
        ScheduleError: if the loop has no cycle (it is empty).
    """
    graph = loop_graph(loop)
    weights = [duration_ns(op) for op in graph.ops]
    if host is not None:
        graph, issue_ns = host.extended(graph, rank)
        weights += issue_ns
    backwards = _positive_cycle(graph, lambda edge: 1 - edge.distance * (len(graph.ops) + 1))
    if backwards is not None:
        names = " -> ".join(_name(graph, edge.source) for edge in backwards)
        raise DeadlockError(f"{loop.name} cannot run: these ops wait for each other in a circle: {names}")
    best: list[Edge] | None = None
    ratio = Fraction(-1)
    while True:
        numerator, denominator = ratio.numerator, ratio.denominator
        cycle = _positive_cycle(
            graph,
            lambda e: weights[e.source] * denominator - numerator * e.distance,  # noqa: B023
        )
        if cycle is None:
            break
        best = cycle
        ratio = Fraction(sum(weights[edge.source] for edge in cycle), sum(edge.distance for edge in cycle))
    if best is None:
        raise ScheduleError(f"{loop.name}: a loop without ops has no step time")
    return Bound(
        step_ns=ratio,
        cycle=tuple(_step(graph, edge.source, weights[edge.source]) for edge in best),
        iterations=sum(edge.distance for edge in best),
    )


def _step(graph: LoopGraph, i: int, ns: int) -> CycleStep:
    op = graph.ops[i]
    return CycleStep(op.kind, op.batch, op.micro_batch, graph.streams[i], ns)


def _name(graph: LoopGraph, i: int) -> str:
    op = graph.ops[i]
    micro_batch = "" if op.micro_batch is None else f" m{op.micro_batch}"
    return f"{op.kind} t{op.batch:+d}{micro_batch} ({graph.streams[i]})"


def _positive_cycle(graph: LoopGraph, weight: Callable[[Edge], int]) -> list[Edge] | None:
    """A cycle whose weights sum to more than 0, in order, or None. Bellman-Ford on longest paths from everywhere."""
    edges, num_nodes = graph.edges, len(graph.ops)
    weights = [weight(edge) for edge in edges]
    length = [0] * num_nodes
    into: list[Edge | None] = [None] * num_nodes
    changed: int | None = None
    for _ in range(num_nodes):
        changed = None
        for edge, value in zip(edges, weights, strict=True):
            if length[edge.source] + value > length[edge.target]:
                length[edge.target] = length[edge.source] + value
                into[edge.target] = edge
                changed = edge.target
        if changed is None:
            return None
        cycle = _cycle_from(into, changed)
        if cycle is not None:
            return cycle
    return None


def _cycle_from(into: list[Edge | None], node: int) -> list[Edge] | None:
    """The cycle that following `into` backwards from `node` runs into, if any; such a cycle is always positive."""
    path: list[int] = []
    place: dict[int, int] = {}
    while node not in place:
        place[node] = len(path)
        path.append(node)
        edge = into[node]
        if edge is None:
            return None
        node = edge.source
    members = path[place[node] :]
    cycle = [edge for member in members if (edge := into[member]) is not None]
    return cycle[::-1]
