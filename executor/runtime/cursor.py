"""The pure part of the runtime: what each stream does next, and what it has to wait for.

Every dependency of a stream is resolved to "stream s has finished its first p ops". Nothing here touches a
device, a process group or a clock, so it can be tested by hand.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nestpipe.base import ScheduleError
from nestpipe.checks import instance_of
from nestpipe.ir import Data, Op, Program, Resource, op_name, program_graph

__all__ = ["LanePlan", "Task", "plan_lanes", "touched", "uses_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One op of a stream, what it waits for and what may wait for it.

    `waits` are pairs (lane, count): that lane must have finished its first `count` ops. `wakes` are the lanes that this
    op may make ready: its own, then those with an op that waits for just this one.
    """

    op: Op
    waits: tuple[tuple[int, int], ...]
    wakes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePlan:
    """A stream with its resource and its tasks in program order."""

    name: str
    resource: Resource
    tasks: tuple[Task, ...]


def plan_lanes(program: Program) -> tuple[LanePlan, ...]:
    """The program ready to be run, a lane per stream: every wait is a lane and a number of finished ops.

    Only waits that the order of streams does not already imply are kept; see `ProgramGraph.waits`.

    Raises:
        ScheduleError: if an op appears twice, a wait names no op, or an op waits for a later one of its own stream.

    >>> from nestpipe.ir import unroll
    >>> from nestpipe.schedules import load
    >>> lanes = plan_lanes(unroll(load("sync"), 1))
    >>> [task.op.kind.value for task in lanes[-1].tasks]
    ['dedup', 'forward', 'backward', 'update']
    """
    place = [(lane, position) for lane, stream in enumerate(program.streams) for position in range(len(stream.body))]
    of_op = iter([_counts(program, place, i, waited) for i, waited in enumerate(program_graph(program).waits())])
    waits = [[next(of_op) for _ in stream.body] for stream in program.streams]
    wakes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for lane, counts in enumerate(waits):
        for wait in set(itertools.chain.from_iterable(counts)):
            wakes[wait].append(lane)
    return tuple(
        LanePlan(
            name=stream.name,
            resource=stream.resource,
            tasks=tuple(
                Task(op=op, waits=waits[lane][position], wakes=(lane, *wakes[lane, position + 1]))
                for position, op in enumerate(stream.ops)
            ),
        )
        for lane, stream in enumerate(program.streams)
    )


def _counts(
    program: Program, place: Sequence[tuple[int, int]], i: int, waited: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """What op number `i` waits for, as pairs (lane, number of finished ops)."""
    lane, _ = place[i]
    for other in waited:
        if place[other][0] == lane:
            raise ScheduleError(
                f"{program.name}: {op_name(program.ops[i])} waits for {op_name(program.ops[other])}, which its own "
                f"stream {program.streams[lane].name} runs later; swap them or drop the wait"
            )
    return tuple(sorted((place[other][0], place[other][1] + 1) for other in waited))


def uses_of(program: Program) -> Mapping[tuple[Data, int], int]:
    """How many ops touch each buffer instance: once that many have finished, the instance is free."""
    uses: Counter[tuple[Data, int]] = Counter()
    for op in program.ops:
        uses.update(touched(op, program.micro_batches))
    return uses


def touched(op: Op, micro_batches: int) -> set[tuple[Data, int]]:
    """The buffer instances that an op reads or writes."""
    return {
        (access.data, instance_of(access, micro_batches))
        for access in (*op.reads, *op.writes)
        if access.batch is not None
    }
