"""Who waits for whom, and which ranks form a group. Whatever needs to know asks here.

An op comes after the op before it in its stream and after every op that it waits for; a collective comes, on all ranks
of its group, after the last of them has arrived. `program_graph` says so of a program, op by op; `loop_graph` of the
steady state of a loop, where an edge also says how many iterations earlier the op is that comes first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

from nestpipe.base import ScheduleError
from nestpipe.ir.model import GROUPS, Loop, Op, OpRef, Program, Resource, op_name
from nestpipe.ir.unroll import check_waits, iteration, targets

__all__ = ["Edge", "LoopGraph", "ProgramGraph", "group_of", "group_ranks", "loop_graph", "program_graph"]

#: An int, or an array of them.
_Number = TypeVar("_Number")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramGraph:
    """What comes before each op of a program. Ops are named by their index in `Program.ops`.

    Attributes:
        ops: stream by stream, in program order.
        streams: for each op the number of its stream.
        index: the index of the op that a reference names.
        preceding: for each op the one before it in its stream, if any, then those that it waits for, as written.
    """

    ops: tuple[Op, ...]
    streams: tuple[int, ...]
    index: dict[OpRef, int]
    preceding: tuple[tuple[int, ...], ...]

    def run(self) -> tuple[int, ...]:
        """One possible run: the ops that can run at all, each after those before it and as early as its step allows."""
        following: list[list[int]] = [[] for _ in self.ops]
        for i, earlier in enumerate(self.preceding):
            for op in earlier:
                following[op].append(i)
        waiting = [len(earlier) for earlier in self.preceding]
        ready = [(self.ops[i].step, i) for i, count in enumerate(waiting) if not count]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            _, op = heapq.heappop(ready)
            found.append(op)
            for later in following[op]:
                waiting[later] -= 1
                if not waiting[later]:
                    heapq.heappush(ready, (self.ops[later].step, later))
        return tuple(found)

    def waits(self) -> tuple[tuple[int, ...], ...]:
        """For each op what it has to wait for itself, given that streams run in order.

        Of several waits for one stream the last counts, if the op's own stream has not waited for it or a later one
        before; a wait for an earlier op of its own stream is none.
        """
        found: list[tuple[int, ...]] = []
        seen: dict[int, int] = {}
        for i, earlier in enumerate(self.preceding):
            own = self.streams[i]
            if i == 0 or self.streams[i - 1] != own:
                seen, waited = {}, earlier
            else:
                waited = earlier[1:]
            seen[own] = i - 1
            last: dict[int, int] = {}
            for other in waited:
                stream = self.streams[other]
                last[stream] = max(other, last.get(stream, other))
            found.append(tuple(other for stream, other in last.items() if other > seen.get(stream, -1)))
            seen |= {stream: max(other, seen.get(stream, other)) for stream, other in last.items()}
        return tuple(found)


def program_graph(program: Program) -> ProgramGraph:
    """What comes before each op of a program.

    Raises:
        ScheduleError: if an op occurs twice, or a wait names an op that the program does not have.
    """
    ops = program.ops
    streams = tuple(number for number, stream in enumerate(program.streams) for _ in stream.body)
    index = {op.ref: i for i, op in enumerate(ops)}
    if len(index) < len(ops):
        twice = next(op for i, op in enumerate(ops) if index[op.ref] != i)
        raise ScheduleError(f"{program.name}: {op_name(twice)} appears twice; an op runs once per batch; keep one")
    preceding: list[tuple[int, ...]] = []
    for i, op in enumerate(ops):
        for ref in op.after:
            if ref not in index:
                raise ScheduleError(
                    f"{program.name}: {op_name(op)} waits for {op_name(ref)}, which the program does not have; "
                    "add it or drop the wait"
                )
        before = (i - 1,) if i and streams[i - 1] == streams[i] else ()
        preceding.append(before + tuple(index[ref] for ref in op.after))
    return ProgramGraph(ops=ops, streams=streams, index=index, preceding=tuple(preceding))


class Edge(NamedTuple):
    """Op `target` starts after op `source`, issued `distance` iterations earlier, has ended."""

    source: int
    target: int
    distance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopGraph:
    """The steady state of a loop.

    Attributes:
        ops: the ops of one iteration, stream by stream, with absolute micro-batch and without waits.
        streams: for each op the name of its stream.
        edges: stream order, the way from the last op of a stream to its first of the next iteration, and waits.
    """

    ops: tuple[Op, ...]
    streams: tuple[str, ...]
    edges: tuple[Edge, ...]


def loop_graph(loop: Loop) -> LoopGraph:
    """What comes before what in the steady state of a loop.

    Raises:
        ScheduleError: if a wait names an op that the loop does not have.
    """
    check_waits(loop)
    ops: list[Op] = []
    streams: list[str] = []
    edges: list[Edge] = []
    waits: list[tuple[Op, int | None]] = []
    for stream in loop.streams:
        first = len(ops)
        for op, micro_batch, m in iteration(stream, loop.micro_batches):
            if len(ops) > first:
                edges.append(Edge(len(ops) - 1, len(ops), 0))
            waits.append((op, m))
            ops.append(replace(op, micro_batch=micro_batch, after=()))
            streams.append(stream.name)
        if len(ops) > first:
            edges.append(Edge(len(ops) - 1, first, 1))
    index = {(op.name, op.micro_batch): i for i, op in enumerate(ops)}
    for at, (op, m) in enumerate(waits):
        for ref in op.after:
            for target in targets(ref, m, loop.micro_batches):
                other = index[ref.name, target]
                edges.append(Edge(other, at, ops[other].batch - ref.batch))
    return LoopGraph(ops=tuple(ops), streams=tuple(streams), edges=tuple(edges))


def group_of(resource: Resource, rank: _Number, domain_size: int, node_size: int | None = None) -> _Number:
    """The number of the group in which a rank meets others; works on an int and on an array of them.

    `world` is one group; a `domain` is `domain_size` consecutive ranks; a `replica` group has the ranks that hold the
    same shard, one of each domain. A `node` is `node_size` consecutive ranks; a `rail` has the ranks of the same local
    rank, one of each node.

    >>> [group_of(Resource.DOMAIN, rank, 2) for rank in range(4)], [group_of(Resource.REPLICA, r, 2) for r in range(4)]
    ([0, 0, 1, 1], [0, 1, 0, 1])

    Raises:
        ValueError: if the resource is not a group of ranks, or a node or rail without `node_size`.
    """
    ranks: Any = rank
    size = _size_of(resource, domain_size, node_size)
    if resource is Resource.WORLD:
        numbers = ranks * 0
    elif resource in (Resource.DOMAIN, Resource.NODE):
        numbers = ranks // size
    else:
        numbers = ranks % size
    return cast(_Number, numbers)


def _size_of(resource: Resource, domain_size: int, node_size: int | None) -> int:
    """Ranks per domain or node, whichever the group is about."""
    if resource not in GROUPS:
        raise ValueError(f"{resource} is not a group of ranks; expected one of {', '.join(sorted(GROUPS))}")
    if resource not in (Resource.NODE, Resource.RAIL):
        return domain_size
    if node_size is None:
        raise ValueError(f"streams on {resource} need the number of ranks per node")
    return node_size


def group_ranks(
    resource: Resource, group: int, world_size: int, domain_size: int, node_size: int | None = None
) -> range:
    """The ranks of one group, by its number; see `group_of`.

    >>> group_ranks(Resource.REPLICA, 1, 4, 2)
    range(1, 4, 2)

    Raises:
        ValueError: if the resource is not a group of ranks, or a node or rail without `node_size`.
    """
    size = _size_of(resource, domain_size, node_size)
    if resource in (Resource.DOMAIN, Resource.NODE):
        return range(group * size, (group + 1) * size)
    first = group_of(resource, group, domain_size, node_size)
    return range(first, world_size, 1 if resource is Resource.WORLD else size)
