"""Costs from measured ops: what the simulator needs to run a program as the profiled devices would.

Every op takes what the fit of its kind says for its sizes. Three things decide when: the lane must be woken
(`handoff_ns`, if the op waited for another stream, else `issue_ns`), the cores of a host are shared by everything that
computes on it, and links are shared by the transfers in flight. A shaped link lets through at once what it has saved
while idle, up to its burst (a token bucket), and then its rate.

A collective's fit has a part in its bytes (packing, latency: local) and a part in the time on the wire. The simulator
spends the first on the ranks and turns the second into flows between every pair of ranks, each on the sender's and the
receiver's link, so that collectives at the same time slow each other down as they do for real. And a NIC takes turns: a
message that comes while another collective's data is queued waits until that has gone, at every step of its algorithm.
Small collectives beside large ones take several times as long for it.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import simpy

from nestpipe.base import NS_PER_S, CaseError
from nestpipe.ir import COLLECTIVES, Op, OpKind, Program, Resource
from nestpipe.timeline import Timeline
from sim.engine import Activity, Capacity, FluidSystem
from traces.workloads import CostFit

__all__ = ["CalibratedCosts", "Machine", "OpSizes", "with_starts"]

Sizes = Mapping[str, float]
#: Collectives that send all they have at once; the others send again when something has arrived.
_ONE_STEP: Final = (OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS)
#: kind, batch, micro-batch.
OpName = tuple[OpKind, int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The shared resources of the ranks.

    Attributes:
        link_bytes_per_s: rate of each rank's NIC, each way.
        burst_bytes: what an idle NIC lets through at once.
        cores: cores that all ranks share; None if nothing is short of them.
        crowding: ranks per core where costs were measured, if more than 1. All did the same at the same time there:
            the local parts of collectives took that many times as long, and so did local ops unless they ran to
            completion. Here the queue for cores is simulated instead.
        run_to_completion: whether what has a core keeps it until it is done and others queue, as real-time threads do;
            else all that is ready shares the cores evenly.
        transfer_cores: cores that a flow takes at the full rate of its link.
        turn_bytes: by kind, the bytes of other collectives that a collective lets pass in all where it finds its links
            busy: its steps times what a connection may have queued.
        handoff_ns: from the end of an op to the start of one that waited for it on another stream.
        issue_ns: from the end of an op to the start of the next of its stream.
    """

    link_bytes_per_s: tuple[float, ...]
    burst_bytes: float = 0.0
    cores: float | None = None
    crowding: float = 1.0
    run_to_completion: bool = False
    transfer_cores: float = 0.0
    turn_bytes: Mapping[OpKind, float] = field(default_factory=dict)
    handoff_ns: int = 0
    issue_ns: int = 0

    def __post_init__(self) -> None:
        for rank, rate in enumerate(self.link_bytes_per_s):
            if not rate > 0:
                raise CaseError(f"machine: link_bytes_per_s of rank {rank} must be positive, got {rate}")
        for name in ("burst_bytes", "transfer_cores", "handoff_ns", "issue_ns"):
            if not getattr(self, name) >= 0:
                raise CaseError(f"machine: {name} must not be negative, got {getattr(self, name)}")
        for kind, num_bytes in self.turn_bytes.items():
            if not num_bytes >= 0:
                raise CaseError(f"machine: turn_bytes of {kind} must not be negative, got {num_bytes}")
        if not self.crowding >= 1:
            raise CaseError(f"machine: crowding must be 1 or more, got {self.crowding}")
        if self.cores is not None and not self.cores > 0:
            raise CaseError(f"machine: cores must be positive, got {self.cores}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.link_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSizes:
    """How large the ops of a run are.

    Attributes:
        of: for each rank, by op, the sizes that fits depend on.
        traffic: by collective, float64 (ranks, ranks), bytes that the row's rank sends to the column's.
    """

    of: Sequence[Mapping[OpName, Sizes]]
    traffic: Mapping[OpName, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """An op of one rank on one lane: what it takes when it has a core to itself."""

    op: int
    rank: int
    lane: int
    time_ns: float
    busy_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """A collective: half of its constant part, the flows, then the rest of its local part for what has arrived."""

    op: int
    kind: OpKind
    ranks: tuple[int, ...]
    lane: int
    before_ns: float
    after_ns: float
    turn_bytes: float
    traffic: npt.NDArray[np.float64] | None

    def flows(self) -> list[tuple[int, int, float]]:
        """Sender, receiver and bytes of every transfer."""
        if self.traffic is None:
            return []
        pairs = [(src, dst) for src in self.ranks for dst in self.ranks if self.traffic[src, dst] > 0]
        return [(src, dst, float(self.traffic[src, dst])) for src, dst in pairs]


@dataclass(slots=True, kw_only=True)
class _State:
    """The state of one simulation: the shared resources, when each lane was last busy, what each link has saved."""

    env: simpy.Environment
    fluid: FluidSystem
    cores: Capacity | None
    queue: simpy.Resource | None
    lane_end: dict[tuple[int, int], int] = field(default_factory=dict)
    links: list[_Link] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class CalibratedCosts:
    """A `Costs` made of fits, sizes and a machine; one object serves one simulation after the other.

    Attributes:
        program: what will be simulated.
        fits: for each kind of the program.
        sizes: of every op of the program.
        machine: the shared resources.
        busy: for each kind, how long an op keeps a core of its host busy, from its start, where that is not all of the
            time it takes: on an accelerator or where it is emulated. None if local ops compute on the shared cores.
        spread: coefficient of variation of single ops around their fit, by kind; empty for none.
        seed: of that variation.
        gaps: filled by the simulation: the wait for the lane, by rank and op index (see `with_starts`).
    """

    program: Program
    fits: Mapping[OpKind, CostFit]
    sizes: OpSizes
    machine: Machine
    busy: Mapping[OpKind, CostFit] | None = None
    spread: Mapping[OpKind, float] = field(default_factory=dict)
    seed: int = 0
    gaps: dict[tuple[int, int], int] = field(default_factory=dict)
    _run: _State | None = None
    _lanes: dict[int, int] = field(default_factory=dict)
    _index: dict[OpName, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = sorted({op.kind for op in self.program.ops} - self.fits.keys() - {OpKind.WAIT})
        if missing:
            raise CaseError(
                f"the cost table has no cost of {', '.join(missing)}, which {self.program.name} needs; "
                "profile again with a schedule that has it"
            )
        number = 0
        for lane, stream in enumerate(self.program.streams):
            for op in stream.ops:
                self._lanes[number] = lane
                self._index[op.kind, op.batch, op.micro_batch] = number
                number += 1

    def colours(self, world_size: int) -> Sequence[int]:
        """Every rank is its own: their sizes differ."""
        return range(world_size)

    def local(self, ops: Sequence[Op], rank: int) -> Sequence[Any]:
        """See `Costs.local`."""
        generator = np.random.default_rng([self.seed, rank])
        return [
            None if op.kind in COLLECTIVES else self._local(number, op, rank, generator)
            for number, op in enumerate(ops)
        ]

    def _local(self, number: int, op: Op, rank: int, generator: np.random.Generator) -> _Local:
        time_ns = busy_ns = 0.0
        if op.kind is not OpKind.WAIT:
            sizes = self.sizes.of[rank][op.kind, op.batch, op.micro_batch]
            factor = self._factor(op.kind, generator)
            crowding = 1.0 if self.machine.run_to_completion else self.machine.crowding
            time_ns = self.fits[op.kind].time_ns(sizes) * factor
            if self.busy is None:
                busy_ns = time_ns = time_ns / crowding
            elif op.kind in self.busy:
                busy_ns = self.busy[op.kind].time_ns(sizes) / crowding
        return _Local(op=number, rank=rank, lane=self._lanes[number], time_ns=time_ns, busy_ns=busy_ns)

    def collective(self, op: Op, resource: Resource, ranks: Sequence[int], group_size: int) -> _Exchange:  # noqa: ARG002
        """See `Costs.collective`."""
        name = (op.kind, op.batch, op.micro_batch)
        number = self._index[name]
        fit = self.fits[op.kind]
        generator = np.random.default_rng([self.seed, self.machine.world_size, number])
        sizes = [{**self.sizes.of[rank][name], "wire_ns": 0.0} for rank in ranks]
        factor = self._factor(op.kind, generator) / self.machine.crowding
        return _Exchange(
            op=number,
            kind=op.kind,
            ranks=tuple(ranks),
            lane=self._lanes[number],
            before_ns=fit.constant_ns / 2 * factor,
            after_ns=(max(fit.time_ns(size) for size in sizes) - fit.constant_ns / 2) * factor,
            turn_bytes=self.machine.turn_bytes.get(op.kind, 0.0),
            traffic=self.sizes.traffic.get(name),
        )

    def _factor(self, kind: OpKind, generator: np.random.Generator) -> float:
        cv = self.spread.get(kind, 0.0)
        if not cv:
            return 1.0
        sigma = np.sqrt(np.log1p(cv**2))
        return float(generator.lognormal(-0.5 * sigma**2, sigma))

    def start(self, env: simpy.Environment, work: Any) -> simpy.Event:
        """See `Costs.start`."""
        if self._run is None or self._run.env is not env:
            self._run = self._begin(env)
        process = self._compute(self._run, work) if isinstance(work, _Local) else self._exchange(self._run, work)
        return env.process(process)

    def _begin(self, env: simpy.Environment) -> _State:
        machine, fluid = self.machine, FluidSystem(env)
        self.gaps.clear()
        links = [
            _Link(
                resource=fluid.resource(f"{way} of rank {rank}", rate),
                rate=rate / NS_PER_S,
                size=machine.burst_bytes,
                tokens=machine.burst_bytes,
                rests=env.event(),
            )
            for way in ("egress", "ingress")
            for rank, rate in enumerate(machine.link_bytes_per_s)
        ]
        cores, queue = None, None
        if machine.cores is not None:
            cores = fluid.resource("cores", machine.cores * NS_PER_S)
            queue = simpy.Resource(env, capacity=max(round(machine.cores), 1)) if machine.run_to_completion else None
        return _State(env=env, fluid=fluid, cores=cores, queue=queue, links=links)

    def _gap(self, run: _State, rank: int, lane: int, number: int) -> int:
        """How long the lane takes to start an op; it sleeps if the op had to wait."""
        last = run.lane_end.get((rank, lane), 0)
        gap = self.machine.handoff_ns if int(run.env.now) > last else self.machine.issue_ns
        self.gaps[rank, number] = gap
        return gap

    def _compute(self, run: _State, work: _Local) -> Generator[simpy.Event, Any, None]:
        yield run.env.timeout(self._gap(run, work.rank, work.lane, work.op))
        ready = run.env.now
        began = run.env.now
        if run.queue is not None and work.busy_ns > 0:
            with run.queue.request() as core:
                yield core
                began = run.env.now
                self.gaps[work.rank, work.op] += int(began - ready)
                yield run.env.timeout(round(work.busy_ns))
        elif work.busy_ns > 0:
            yield self._on_cores(run, work.busy_ns)
        if self.busy is not None:
            yield run.env.timeout(max(int(began) + round(work.time_ns) - int(run.env.now), 0))
        run.lane_end[work.rank, work.lane] = int(run.env.now)

    def _exchange(self, run: _State, work: _Exchange) -> Generator[simpy.Event, Any, None]:
        gaps = [self._gap(run, rank, work.lane, work.op) for rank in work.ranks]
        yield run.env.timeout(max(gaps))
        waits = yield from self._on_ranks(run, work.ranks, work.before_ns)
        for rank, wait_ns in zip(work.ranks, waits, strict=True):
            self.gaps[rank, work.op] += wait_ns
        flows = work.flows()
        size = self.machine.world_size
        links = [run.links[index] for index in {end for src, dst, _ in flows for end in (src, size + dst)}]
        left = yield from self._turns(run, work.turn_bytes, links)
        yield from self._transfer(run, flows, links)
        yield from self._on_ranks(run, work.ranks, work.after_ns)
        if work.kind not in _ONE_STEP:
            yield from self._turns(run, left, links)
        for rank in work.ranks:
            run.lane_end[rank, work.lane] = int(run.env.now)

    def _on_ranks(
        self, run: _State, ranks: Sequence[int], time_ns: float
    ) -> Generator[simpy.Event, Any, Sequence[int]]:
        """A local part of a collective, on a core of every rank; how long each rank queued for its core."""
        if run.queue is not None:
            parts = [run.env.process(self._queue_for_core(run, run.queue, time_ns)) for _ in ranks]
            yield run.env.all_of(parts)
            return [int(part.value or 0) for part in parts]
        yield run.env.all_of([self._on_cores(run, time_ns) for _ in ranks])
        return [0 for _ in ranks]

    def _queue_for_core(self, run: _State, queue: simpy.Resource, time_ns: float) -> Generator[simpy.Event, Any, int]:
        ready_ns = int(run.env.now)
        with queue.request() as core:
            yield core
            began_ns = int(run.env.now)
            yield run.env.timeout(round(time_ns))
        return began_ns - ready_ns

    def _on_cores(self, run: _State, time_ns: float) -> simpy.Event:
        """Work of one lane that takes `time_ns` alone, on one of the shared cores."""
        uses = {run.cores: 1.0} if run.cores is not None else {}
        return run.fluid.start(Activity(work=time_ns, uses=uses, cap_per_s=NS_PER_S))

    def _transfer(
        self, run: _State, flows: Sequence[tuple[int, int, float]], links: Sequence[_Link]
    ) -> Generator[simpy.Event, Any, None]:
        """All flows at once; each takes its share of what its links have saved, then the wire."""
        ranks = self.machine.world_size
        load = np.zeros(2 * ranks)
        for src, dst, num_bytes in flows:
            load[[src, ranks + dst]] += num_bytes
        saved = [link.saved(int(run.env.now)) for link in run.links]
        events, used = [], []
        for src, dst, num_bytes in flows:
            free = min(num_bytes, *(saved[end] * num_bytes / load[end] for end in (src, ranks + dst)))
            used += [(src, free), (ranks + dst, free)]
            if num_bytes > free:
                ends = (run.links[src], run.links[ranks + dst])
                uses = {end.resource: 1.0 for end in ends}
                if run.cores is not None and self.machine.transfer_cores:
                    uses[run.cores] = self.machine.transfer_cores / min(end.rate for end in ends)
                events.append(run.fluid.start(Activity(work=num_bytes - free, uses=uses)))
        for link, free in used:
            run.links[link].spend(int(run.env.now), free)
        for each in links:
            each.begin(run.env)
        yield run.env.all_of(events)
        for each in links:
            each.end(int(run.env.now))

    def _turns(self, run: _State, left: float, links: Sequence[_Link]) -> Generator[simpy.Event, Any, float]:
        """Wait while other collectives keep the links busy, until `left` bytes of theirs have passed; what is left."""
        while left >= 1:
            used = [link for link in links if link.active]
            if not used:
                break
            began, rate = run.env.now, min(link.rate for link in used)
            yield run.env.any_of([run.env.timeout(math.ceil(left / rate)), *(link.rests for link in used)])
            left -= (run.env.now - began) * rate
        return left


def with_starts(timeline: Timeline, gaps: Mapping[tuple[int, int], int]) -> Timeline:
    """The Timeline with ops that start when their lane has started them, as a measured one has it.

    Args:
        timeline: of a simulation with `CalibratedCosts`.
        gaps: what it left in `CalibratedCosts.gaps`.
    """
    start_ns, wait_ns = timeline.start_ns.copy(), timeline.wait_ns.copy()
    row_of = {int(rank): row for row, rank in enumerate(timeline.ranks)}
    for (rank, number), gap in gaps.items():
        start_ns[row_of[rank], number] += gap
    return replace(timeline, start_ns=np.minimum(start_ns, timeline.end_ns), wait_ns=wait_ns)


@dataclass(slots=True, kw_only=True)
class _Link:
    """What a link has saved while idle: `tokens` bytes at `since_ns`, growing at `rate` bytes/ns up to `size`.

    `rests` happens when the last of the transfers under way ends.
    """

    resource: Capacity
    rate: float
    size: float
    tokens: float
    rests: simpy.Event
    since_ns: int = 0
    active: int = 0

    def saved(self, now_ns: int) -> float:
        """Bytes that could pass at once now; nothing is saved while a transfer is under way."""
        if self.active:
            return 0.0
        return min(self.size, self.tokens + (now_ns - self.since_ns) * self.rate)

    def spend(self, now_ns: int, num_bytes: float) -> None:
        """Take bytes out of what is saved."""
        self.tokens = max(self.saved(now_ns) - num_bytes, 0.0)
        self.since_ns = now_ns

    def begin(self, env: simpy.Environment) -> None:
        """A transfer starts."""
        if not self.active:
            self.rests = env.event()
        self.active += 1

    def end(self, now_ns: int) -> None:
        """A transfer has ended."""
        self.active -= 1
        self.since_ns = now_ns
        if not self.active:
            self.rests.succeed()
