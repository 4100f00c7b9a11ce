"""Where a run has to start so that the steps it shows are steady ones.

A run that starts with empty buffers works off a lead of its fast streams before it reaches its pace. With buffers d
batches deep and two cycles that differ by x % that takes about 100 d / x steps, so no number of steps is always enough.
The steady state itself is known, though: an op of iteration k starts at `k * step + offset`, where the offsets are the
longest paths from the critical cycle over the dependencies, each op counted with its duration and each iteration with
minus the step. A run whose first ops start no earlier than that is steady from its first step on.

Source: Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity (1992), theorem 3.23 (eigenvectors of a max-plus
matrix are longest paths from nodes of the critical graph).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from nestpipe.ir import Loop, LoopGraph, Op, OpKind, OpRef, Program, loop_graph, program_graph, unroll
from nestpipe.timeline import Window
from sim.engine.bound import Bound

__all__ = ["Start", "steady_start"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a loop is run so that its window is steady.

    Attributes:
        steps: batches to run; None for as many as were asked for.
        period: iterations after which the steady state repeats; a window of a multiple of them has the exact mean.
        earliest_ns: for ops of the first iterations of the program the time before which they do not start; empty
            where a run with empty buffers is steady in its window.
    """

    steps: int | None = None
    period: int = 1
    earliest_ns: Mapping[OpRef, int] = field(default_factory=dict)


def steady_start(loop: Loop, steps: int, duration_ns: Callable[[Op], int], bound: Bound) -> Start:
    """Where a run has to start to be steady in its window, when nothing contends and all ranks are alike.

    Args:
        loop: the schedule.
        steps: batches to run; more if the steady state repeats after more than their window holds.
        duration_ns: as for `max_cycle_ratio`.
        bound: its answer.

    Raises:
        TraceError: if the steps leave no window.
    """
    graph, period = loop_graph(loop), bound.iterations
    durations = {_place(op): duration_ns(op) for op in graph.ops}
    while True:
        program = unroll(loop, steps)
        ends, ahead = _step_ends(program, durations)
        window = Window.of(len(ends), first=min(ends), last=max(ends), ahead=ahead)
        if window.steps >= period:
            break
        steps *= 2
    window = window.whole(period)
    if ends[window.last] - ends[window.first] == bound.step_ns * window.steps:
        return Start(steps=steps, period=period)
    return Start(steps=steps, period=period, earliest_ns=_earliest_ns(program, graph, durations, bound))


def _place(op: Op) -> OpRef:
    """The op of the loop that an op of a program is an instance of."""
    return replace(op.ref, batch=0)


def _step_ends(program: Program, durations: Mapping[OpRef, int]) -> tuple[dict[int, int], int]:
    """When each step ends on the only rank, see `nestpipe.timeline.step_ends`, and how many batches are prefetched."""
    graph = program_graph(program)
    ends = [0] * len(graph.ops)
    for i in graph.run():
        ends[i] = max((ends[other] for other in graph.preceding[i]), default=0) + durations[_place(graph.ops[i])]
    updates = any(op.kind is OpKind.UPDATE for op in graph.ops)
    found: dict[int, int] = {}
    for op, end in zip(graph.ops, ends, strict=True):
        if not updates or op.kind is OpKind.UPDATE:
            step = op.batch if updates else op.step
            found[step] = max(found.get(step, 0), end)
    latest = 0
    for step in sorted(found):
        latest = found[step] = max(latest, found[step])
    return found, max(op.batch - op.step for op in graph.ops)


def _earliest_ns(program: Program, graph: LoopGraph, durations: Mapping[OpRef, int], bound: Bound) -> dict[OpRef, int]:
    """The steady start times of the ops of as many iterations as a dependency reaches back."""
    step, scale = bound.step_ns.numerator, bound.step_ns.denominator
    weights = [durations[_place(graph.ops[e.source])] * scale - step * e.distance for e in graph.edges]
    critical = bound.cycle[0]
    offsets: list[int | None] = [None] * len(graph.ops)
    for i, (op, stream) in enumerate(zip(graph.ops, graph.streams, strict=True)):
        if (op.kind, op.batch, op.micro_batch, stream) == critical[:4]:
            offsets[i] = 0
    while None in offsets:
        _lengthen(graph, weights, offsets)
        if None in offsets:  # nothing critical comes before it: it may run ahead as far as it likes
            offsets[offsets.index(None)] = min(each for each in offsets if each is not None)
    _lengthen(graph, weights, offsets)
    place = {_place(op): i for i, op in enumerate(graph.ops)}
    batches = [op.batch for op in graph.ops]
    reach = max(edge.distance for edge in graph.edges) + max(batches) - min(batches)
    first = min(op.step for op in program.ops)
    times = {
        op.ref: (step * (op.step - first) + (offsets[place[_place(op)]] or 0)) // scale
        for op in program.ops
        if op.step < reach
    }
    earliest = min(times.values())
    return {ref: time - earliest for ref, time in times.items()}


def _lengthen(graph: LoopGraph, weights: list[int], offsets: list[int | None]) -> None:
    """Longest paths from the nodes that have an offset; there is no cycle of positive weight."""
    changed = True
    while changed:
        changed = False
        for edge, weight in zip(graph.edges, weights, strict=True):
            start, old = offsets[edge.source], offsets[edge.target]
            if start is not None and (old is None or start + weight > old):
                offsets[edge.target], changed = start + weight, True
