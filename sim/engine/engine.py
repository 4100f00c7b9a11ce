"""Runs a program on modelled hardware: one SimPy process per rank and stream, walking its ops in order.

A local op starts when its stream is free and all it waits for is done. A collective is a rendezvous: each rank arrives,
waits for the last one, and all leave together when the transfer is done. Time is an int of nanoseconds; the same
inputs give the same Timeline, byte for byte.

Cost: about one event per local op, rank and wait, one per collective and group; see benchmarks/bench_engine.py.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from nestpipe.base import CaseError, DeadlockError, ScheduleError
from nestpipe.ir import COLLECTIVES, GROUPS, Op, OpKind, OpRef, Program, Resource, op_name, program_graph
from nestpipe.timeline import Timeline, build
from sim.engine.costs import Costs, SharedCosts, Work
from sim.engine.folding import Actors, World, fold, unfolded
from sim.engine.host import HostLane, Issue, split

__all__ = ["simulate"]

_NOT_YET = -1


def simulate(
    program: Program,
    costs: Costs,
    world: World,
    *,
    fold_ranks: bool = True,
    earliest_ns: Mapping[OpRef, int] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Timeline:
    """The Timeline of `program` on every rank of `world`.

    Args:
        program: the unrolled schedule; every rank runs it.
        costs: the work of each op.
        world: number of ranks and size of a domain.
        fold_ranks: simulate one representative per class of ranks that are alike. The result is the same either way.
        earliest_ns: ops that do not start before a time, see `sim.engine.steady`.
        meta: further facts to carry in the Timeline's `meta`.

    Raises:
        DeadlockError: if the program cannot finish; names each stuck stream, its op and what it waits for.
        ScheduleError: if an op waits for one that the program does not have.
        TopologyError: if the program needs domains and the world has none.
    """
    resources = frozenset(stream.resource for stream in program.streams)
    shared = costs if isinstance(costs, SharedCosts) else None
    partitions = {} if shared is None else shared.partitions(world.world_size)
    if fold_ranks:
        colours = costs.colours(world.world_size)
        actors = fold(world, resources, None if colours is None else np.asarray(colours, dtype=np.int64), partitions)
    else:
        actors = unfolded(world, resources, partitions)
    run = _Run.of(program, costs, actors, earliest_ns or {})
    if shared is not None:
        shared.bind(run.env, actors)
    try:
        processes = run.start()
        with _no_garbage():
            run.env.run(until=run.env.all_of(processes))
    except OverflowError:
        raise CaseError(
            f"{program.name}: an op ends later than the clock can count, 2^63 ns (292 years); give shorter times"
        ) from None
    except RuntimeError as error:
        if all(process.triggered for process in processes):
            raise
        raise DeadlockError(run.stuck()) from error
    return build(
        program,
        ranks=actors.ranks.tolist(),
        weights=actors.weights.tolist(),
        start_ns=run.matrix(run.starts),
        end_ns=run.matrix(run.ends),
        wait_ns=run.matrix(run.waits),
        meta={
            "source": "simulated",
            "world_size": world.world_size,
            "domain_size": world.domain_size,
            "folded": fold_ranks,
            **(meta or {}),
        },
    )


@dataclass(slots=True)
class _Meeting:
    """One collective of one group: who has arrived, when the last did, and the event at which all leave."""

    done: simpy.Event
    arrived: int = 0
    last_arrival_ns: int = 0


@dataclass(slots=True, kw_only=True)
class _Run:
    """The state of one simulation. Times are kept per actor in arrays of one entry per op."""

    env: simpy.Environment
    program: Program
    ops: tuple[Op, ...]
    waits_for: tuple[tuple[int, ...], ...]
    costs: Costs
    actors: Actors
    members: dict[tuple[Resource, int], list[int]]
    earliest: dict[int, int]
    starts: list[array[int]] = field(default_factory=list)
    ends: list[array[int]] = field(default_factory=list)
    waits: list[array[int]] = field(default_factory=list)
    done: list[dict[int, simpy.Event]] = field(default_factory=list)
    meetings: dict[tuple[int, int], _Meeting] = field(default_factory=dict)
    at: dict[tuple[int, str], int] = field(default_factory=dict)
    begun: list[dict[int, simpy.Event]] = field(default_factory=list)
    gates: list[dict[int, tuple[simpy.Event, simpy.Event, simpy.Event]]] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, costs: Costs, actors: Actors, earliest_ns: Mapping[OpRef, int]) -> _Run:
        members: dict[tuple[Resource, int], list[int]] = {}
        for resource in {stream.resource for stream in program.streams} & GROUPS:
            for actor, group in enumerate(actors.groups[resource].tolist()):
                members.setdefault((resource, group), []).append(actor)
        run = cls(
            env=simpy.Environment(),
            program=program,
            ops=program.ops,
            waits_for=program_graph(program).waits(),
            costs=costs,
            actors=actors,
            members=members,
            earliest={i: earliest_ns[op.ref] for i, op in enumerate(program.ops) if op.ref in earliest_ns},
        )
        blank = array("q", [_NOT_YET]) * len(run.ops)
        for _ in range(len(actors.ranks)):
            run.starts.append(blank[:])
            run.ends.append(blank[:])
            run.waits.append(array("q", [0]) * len(run.ops))
            run.done.append({})
            run.begun.append({})
            run.gates.append({})
        return run

    def start(self) -> list[simpy.Process]:
        """All processes, one per actor and stream."""
        processes = []
        host: HostLane | None = getattr(self.costs, "host", None)
        issues = [] if host is None else host.issues(self.ops)
        for actor, rank in enumerate(self.actors.ranks.tolist()):
            work = self.costs.local(self.ops, rank)
            if host is not None:
                self.gates[actor] = {
                    issue.op: (self.env.event(), self.env.event(), self.env.event()) for issue in issues
                }
                processes.append(self.env.process(self.issue(actor, issues, host.of_rank(rank))))
            first = 0
            for stream in self.program.streams:
                indices = range(first, first + len(stream.body))
                first = indices.stop
                steps = [(i, self.waits_for[i], None if self.ops[i].kind in COLLECTIVES else work[i]) for i in indices]
                processes.append(self.env.process(self.walk(actor, stream.name, stream.resource, steps)))
        return processes

    def walk(
        self, actor: int, stream: str, resource: Resource, steps: Sequence[tuple[int, Sequence[int], Work | None]]
    ) -> Generator[simpy.Event, Any, None]:
        """One stream of one rank: wait, start, finish, record, op by op."""
        env: Any = self.env  # its `now` is an int: every delay is
        starts, ends, done = self.starts[actor], self.ends[actor], self.done[actor]
        begun, gates = self.begun[actor], self.gates[actor]
        for i, waits_for, work in steps:
            self.at[actor, stream] = i
            for other in waits_for:
                if ends[other] < 0:
                    if other not in done:
                        done[other] = env.event()
                    yield done[other]
            if self.earliest.get(i, 0) > env.now:
                yield env.timeout(self.earliest[i] - env.now)
            gate = gates.get(i)
            if gate is not None:
                yield gate[0]
            starts[i] = env.now
            if i in begun:
                begun.pop(i).succeed()
            if work is None:
                meeting = self.meet(actor, resource, i)
                yield meeting.done
                self.waits[actor][i] = meeting.last_arrival_ns - starts[i]
            elif work:
                yield env.timeout(work) if type(work) is int else self.costs.start(env, work)
            if gate is not None:
                gate[1].succeed()
                yield gate[2]
            ends[i] = env.now
            if i in done:
                done.pop(i).succeed()
        del self.at[actor, stream]

    def issue(
        self, actor: int, issues: Sequence[Issue], work_ns: Mapping[OpKind, int]
    ) -> Generator[simpy.Event, Any, None]:
        """The host thread of one rank: wait, begin to issue, finish, op by op."""
        env, gates = self.env, self.gates[actor]
        for issue in issues:
            for other, whole in issue.first:
                yield from self.reached(actor, other, whole=whole)
            begin, worked, finish = gates[issue.op]
            begin.succeed()
            before, after = split(work_ns.get(self.ops[issue.op].kind, 0), issue.own)
            if before:
                yield env.timeout(before)
            if issue.own is not None and issue.own.whole:
                yield worked
            elif issue.own is not None:
                yield from self.reached(actor, issue.op, whole=False)
            if after:
                yield env.timeout(after)
            finish.succeed()

    def reached(self, actor: int, i: int, *, whole: bool) -> Generator[simpy.Event, Any, None]:
        """Wait for the end of an op, or only for its start."""
        times, events = (self.ends, self.done) if whole else (self.starts, self.begun)
        if times[actor][i] < 0:
            yield events[actor].setdefault(i, self.env.event())

    def meet(self, actor: int, resource: Resource, i: int) -> _Meeting:
        """Arrive at a collective; the last rank of the group to arrive starts the transfer."""
        group = self.group(actor, resource)
        meeting = self.meetings.get((i, group))
        if meeting is None:
            meeting = self.meetings[i, group] = _Meeting(done=self.env.event())
        meeting.arrived += 1
        members = self.members[resource, group]
        if meeting.arrived == len(members):
            meeting.last_arrival_ns = int(self.env.now)
            ranks = [int(self.actors.ranks[member]) for member in members]
            work = self.costs.collective(self.ops[i], resource, ranks, self.actors.world.group_size(resource))
            transfer = self.env.timeout(work) if type(work) is int else self.costs.start(self.env, work)
            transfer.callbacks.append(meeting.done.trigger)
            del self.meetings[i, group]
        return meeting

    def group(self, actor: int, resource: Resource) -> int:
        if resource not in GROUPS:
            raise ScheduleError(f"{self.program.name}: a collective on {resource}, which is not a group of ranks")
        return int(self.actors.groups[resource][actor])

    def matrix(self, rows: list[array[int]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([np.frombuffer(row, dtype=np.int64) for row in rows], dtype=np.int64)

    def stuck(self) -> str:
        """What each stuck stream waits for, for the message of the deadlock."""
        lines = []
        for (actor, stream), i in sorted(self.at.items()):
            rank = int(self.actors.ranks[actor])
            if self.starts[actor][i] >= 0:
                resource = next(s.resource for s in self.program.streams if s.name == stream)
                members = self.members[resource, self.group(actor, resource)]
                late = [int(self.actors.ranks[m]) for m in members if self.starts[m][i] < 0]
                reason = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late[:8]))} to arrive"
            else:
                waiting = [op_name(self.ops[other]) for other in self.waits_for[i] if self.ends[actor][other] < 0]
                reason = ", ".join(waiting)
            lines.append(f"  rank {rank}, stream {stream}: {op_name(self.ops[i])} waits for {reason}")
        shown = lines[:24] + ([f"  ... and {len(lines) - 24} more streams"] if len(lines) > 24 else [])
        return "\n".join([f"{self.program.name} cannot finish; stuck:", *shown])


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Without the cyclic collector: a run makes millions of short-lived events and no cycles that matter."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
