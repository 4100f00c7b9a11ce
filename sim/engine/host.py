"""The host as a lane: one thread that issues the ops of a schedule in order and blocks where it was seen to.

An op starts no earlier than the host begins to issue it and ends no earlier than the host has issued all of it. Where
a schedule has its ops issued in another order, the host's work moves with them. The thread issues each iteration's ops
in the order in which they were recorded, as far as what they wait for allows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nestpipe.ir import Edge, Loop, LoopGraph, Op, OpKind, loop_graph

__all__ = ["HOST", "Awaited", "HostLane", "Issue", "issue_order", "split"]

#: The name of the lane where streams are named.
HOST = "host thread"


class Awaited(NamedTuple):
    """What the host waits for: an op, its batch relative to the issued one's, and for its end or only its start.

    `share` of the host's work on an op is done when it waits for that very op; other waits come before the op.
    """

    kind: OpKind
    ahead: int
    whole: bool
    share: float = 1.0


class Issue(NamedTuple):
    """One op to issue: its index, the ops to wait for first, and what of itself to wait for in between."""

    op: int
    first: tuple[tuple[int, bool], ...]
    own: Awaited | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLane:
    """What the host does.

    Attributes:
        order: the place of each op of an iteration, by kind and micro-batch; see `issue_order`.
        work_ns: for some ranks, in turn, the host's own time per op of each kind; kinds that are missing are issued by
            something else. Each micro-batch takes as long as a batch: it has as many calls.
        awaits: for each kind what the host waits for before it issues it; of its own kind and batch, in between.
    """

    order: Mapping[tuple[OpKind, int | None], int]
    work_ns: Sequence[Mapping[OpKind, int]]
    awaits: Mapping[OpKind, tuple[Awaited, ...]]

    def of_rank(self, rank: int) -> Mapping[OpKind, int]:
        """The host's own time per op of each kind on a rank; recorded ranks repeat."""
        return self.work_ns[rank % len(self.work_ns)]

    @property
    def kinds(self) -> frozenset[OpKind]:
        """The kinds that the host issues."""
        return frozenset(kind for each in self.work_ns for kind in each)

    def step_ns(self, rank: int, micro: Mapping[OpKind, int]) -> int:
        """The host's own time in a step of a rank, given how often each kind is issued."""
        return sum(ns * micro.get(kind, 0) for kind, ns in self.of_rank(rank).items())

    def issues(self, ops: Sequence[Op]) -> list[Issue]:
        """The ops of a program in the order in which the host issues them."""
        hosted = [i for i, op in enumerate(ops) if op.kind in self.kinds]
        hosted.sort(key=lambda i: (ops[i].step, self.order[ops[i].kind, ops[i].micro_batch]))
        last: dict[tuple[OpKind, int], int] = {}
        found = []
        for i in hosted:
            op = ops[i]
            first, own = [], None
            for awaited in self.awaits.get(op.kind, ()):
                if awaited.kind is op.kind and not awaited.ahead:
                    own = awaited
                elif (other := last.get((awaited.kind, op.batch + awaited.ahead))) is not None:
                    first.append((other, awaited.whole))
            found.append(Issue(i, tuple(first), own))
            last[op.kind, op.batch] = i
        return found

    def extended(self, graph: LoopGraph, rank: int) -> tuple[LoopGraph, list[int]]:
        """The steady state with the lane of a rank: nodes for the issue of each op, and the host's time of these.

        An op that the host waits for while issuing it has two nodes, before and after the wait.
        """
        place = {i: self.order[op.kind, op.micro_batch] for i, op in enumerate(graph.ops) if op.kind in self.kinds}
        order = sorted(place, key=lambda i: place[i])
        own = {i: next((each for each, j, _ in self._awaited(graph, place, i) if j == i), None) for i in order}
        nodes = [(i, part) for i in order for part in ((0,) if own[i] is None else (0, 1))]
        number = {node: len(graph.ops) + at for at, node in enumerate(nodes)}
        first = {i: number[i, 0] for i in order}
        last = {i: number[i, 0 if own[i] is None else 1] for i in order}
        into: dict[int, list[Edge]] = {}
        for edge in graph.edges:
            into.setdefault(edge.target, []).append(edge)
        edges = list(graph.edges)
        # an op that is not issued yet holds up what follows it
        edges += [Edge(last[e.source], e.target, e.distance) for e in graph.edges if e.source in last]
        for at, i in enumerate(order):
            wrap, following = int(at == len(order) - 1), order[(at + 1) % len(order)]
            edges += [Edge(last[i], target, wrap) for target in (first[following], following)]
            for awaited, source, distance in self._awaited(graph, place, i):
                if source == i:
                    edges += [Edge(first[i], last[i], 0), *_after(into, awaited, i, last[i], 0)]
                else:
                    edges += [e for target in (first[i], i) for e in _after(into, awaited, source, target, distance)]
        extended = LoopGraph(
            ops=(*graph.ops, *(graph.ops[i] for i, _ in nodes)),
            streams=(*graph.streams, *(HOST for _ in nodes)),
            edges=tuple(edges),
        )
        work = self.of_rank(rank)
        return extended, [split(work.get(graph.ops[i].kind, 0), own[i])[part] for i, part in nodes]

    def _awaited(self, graph: LoopGraph, place: Mapping[int, int], i: int) -> Iterator[tuple[Awaited, int, int]]:
        """What the host waits for at an op: its index, and how many iterations earlier it was issued."""
        op = graph.ops[i]
        for awaited in self.awaits.get(op.kind, ()):
            if awaited.kind is op.kind and not awaited.ahead:
                yield awaited, i, 0
                continue
            for other in sorted((j for j in place if graph.ops[j].kind is awaited.kind), key=lambda j: -place[j])[:1]:
                distance = graph.ops[other].batch - op.batch - awaited.ahead
                if distance > 0 or (distance == 0 and place[other] < place[i]):
                    yield awaited, other, distance


def split(work_ns: int, own: Awaited | None) -> tuple[int, int]:
    """The host's work on an op before and after it waits for that op."""
    before = work_ns if own is None else round(work_ns * own.share)
    return before, work_ns - before


def _after(into: Mapping[int, list[Edge]], awaited: Awaited, source: int, target: int, distance: int) -> Iterator[Edge]:
    """That a node comes after the end of another one, or after what that waits for to start."""
    if awaited.whole:
        yield Edge(source, target, distance)
        return
    for edge in into.get(source, ()):
        yield Edge(edge.source, target, edge.distance + distance)


def issue_order(loop: Loop, recorded: Sequence[OpKind]) -> dict[tuple[OpKind, int | None], int]:
    """The order in which one thread can issue the ops of an iteration: as recorded, as far as waits allow.

    Args:
        loop: the schedule.
        recorded: kinds in recorded order; those that are missing come as late as they can.
    """
    graph = loop_graph(loop)
    rank = {kind: at for at, kind in enumerate(recorded)}
    waiting = [0] * len(graph.ops)
    following: list[list[int]] = [[] for _ in graph.ops]
    for edge in graph.edges:
        if edge.distance == 0:
            waiting[edge.target] += 1
            following[edge.source].append(edge.target)

    def key(i: int) -> tuple[int, int, int]:
        return (graph.ops[i].micro_batch or 0, rank.get(graph.ops[i].kind, len(rank)), i)

    ready = [key(i) for i, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: dict[tuple[OpKind, int | None], int] = {}
    while ready:
        *_, i = heapq.heappop(ready)
        order[graph.ops[i].kind, graph.ops[i].micro_batch] = len(order)
        for later in following[i]:
            waiting[later] -= 1
            if not waiting[later]:
                heapq.heappush(ready, key(later))
    return order
