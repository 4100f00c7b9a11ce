"""The pure part of the runtime: what each stream does next, and what it has to wait for.

A `Plan` is a program with every dependency resolved to "stream s has finished its first p ops". Nothing here touches a
device, a process group or a clock, so it can be tested by hand.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.base import ScheduleError
from nestpipe.checks import instance_of
from nestpipe.ir import Data, Op, OpRef, Program, Resource, op_name

__all__ = ["LanePlan", "Plan", "Task", "make_plan", "touched", "uses_of"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A program ready to be run: one lane per stream."""

    program: Program
    lanes: tuple[LanePlan, ...]


def make_plan(program: Program) -> Plan:
    """Resolve every wait of the program to a lane and a number of finished ops.

    Waits for earlier ops of the same stream are dropped (a stream is in order), and of several waits for one stream
    only the last is kept.

    Raises:
        ScheduleError: if an op appears twice, a wait names no op, or an op waits for a later one of its own stream.

    >>> from nestpipe.ir.model import unroll
    >>> from nestpipe.schedules import load
    >>> plan = make_plan(unroll(load("sync"), 1))
    >>> [task.op.kind.value for task in plan.lanes[-1].tasks]
    ['dedup', 'forward', 'backward', 'update']
    """
    where: dict[OpRef, tuple[int, int]] = {}
    for lane, stream in enumerate(program.streams):
        for position, op in enumerate(stream.ops):
            if where.setdefault(op.ref, (lane, position)) != (lane, position):
                raise ScheduleError(f"{program.name}: {op_name(op)} appears twice; an op runs once per batch")
    waits = [
        [_waits(program, where, op, (lane, position)) for position, op in enumerate(stream.ops)]
        for lane, stream in enumerate(program.streams)
    ]
    wakes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for lane, counts in enumerate(waits):
        for wait in set(itertools.chain.from_iterable(counts)):
            wakes[wait].append(lane)
    lanes = tuple(
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
    return Plan(program=program, lanes=lanes)


def _waits(
    program: Program, where: Mapping[OpRef, tuple[int, int]], op: Op, place: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """What an op, the one at `place`, waits for on other lanes, as pairs (lane, number of finished ops)."""
    lane, position = place
    counts: dict[int, int] = {}
    for ref in op.after:
        if ref not in where:
            raise ScheduleError(f"{program.name}: {op_name(op)} waits for {op_name(ref)}, which no stream runs")
        other, at = where[ref]
        if other == lane and at >= position:
            raise ScheduleError(
                f"{program.name}: {op_name(op)} waits for {op_name(ref)}, which its own stream "
                f"{program.streams[lane].name} runs later; swap them or drop the wait"
            )
        if other != lane:
            counts[other] = max(counts.get(other, 0), at + 1)
    return tuple(sorted(counts.items()))


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
