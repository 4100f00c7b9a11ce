"""What every source of work answers: how long an op takes alone, what it asks of the hardware, where that comes from.

A case, a model, a trace and a cost table are workloads; whatever runs a schedule takes any of them. Those that know an
op kind by its demand per batch (`ByKind`) can also be changed: a scenario's factors are a workload around another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nestpipe.ir import Loop, MicroBlock, Op, OpKind, Resource
from nestpipe.timeline import Timeline
from sim.costs.demand import Demand
from sim.costs.hardware import HardwareCosts
from sim.engine import Costs, Jitter, TimedCosts, World
from topologies.cluster import Cluster

__all__ = ["ByKind", "OpCosts", "Options", "Workload", "batch_ns", "blocks_of", "costs_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a schedule is run.

    Attributes:
        world_size: number of ranks.
        domain_size: ranks per domain, where the schedule has domains; by default the workload's own.
        batch_per_worker: samples per rank and step; by default the workload's own.
        steps: batches to run.
        jitter: differences between ranks.
        fold_ranks: one representative per class of ranks that are alike.
        contention: on a cluster, whether ops that overlap share what they use; else each takes its time alone.
        compute_efficiency: share of the accelerator's arithmetic rate that is reached; assumed.
        communication_share: on a cluster, share of the device that a collective takes while it moves bytes at full
            rate.
    """

    world_size: int
    domain_size: int | None = None
    batch_per_worker: int | None = None
    steps: int = 20
    jitter: Jitter = field(default_factory=Jitter)
    fold_ranks: bool = True
    contention: bool = True
    compute_efficiency: float = 1.0
    communication_share: float = 0.0

    def world(self, loop: Loop) -> World:
        """The ranks, with domains where the schedule has some.

        Raises:
            TopologyError: if a size is less than 1 or the domains do not divide the world.
        """
        domains = any(stream.resource in (Resource.DOMAIN, Resource.REPLICA) for stream in loop.streams)
        size = self.domain_size if domains else None
        return World(world_size=self.world_size, domain_size=None if size is None else min(size, self.world_size))


def _as_it_is(timeline: Timeline) -> Timeline:
    return timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCosts:
    """The ops of one loop under some options.

    Attributes:
        costs: what the engine asks.
        op_ns: nanoseconds of an op of the loop alone; None where every op of a program has its own.
        origin: for each kind where its time comes from, one of `nestpipe.base.ORIGINS`; what is missing is assumed.
        finish: what a Timeline of these costs still needs.
    """

    costs: Costs
    op_ns: Callable[[Op], int] | None
    origin: Mapping[OpKind, str]
    finish: Callable[[Timeline], Timeline] = _as_it_is


class Workload(Protocol):
    """A source of work; `batch_per_worker` and `domain_size` are its own, None where it has none."""

    @property
    def batch_per_worker(self) -> int | None: ...

    @property
    def domain_size(self) -> int | None: ...

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        """What the ops of `loop` cost on a cluster, or on the machine of the workload's own numbers.

        Raises:
            NestPipeError: if the workload does not know.
        """
        ...


class ByKind(Workload, Protocol):
    """A workload that knows ops by kind."""

    def demands(self, loop: Loop, cluster: Cluster | None, options: Options) -> Mapping[OpKind, Demand]:
        """What each op kind of `loop` asks for, per rank and batch; without a cluster, time of its own alone.

        Raises:
            NestPipeError: if the workload does not know.
        """
        ...


def costs_of(demands: Mapping[OpKind, Demand], loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
    """The costs of ops that are known by what they ask for.

    Raises:
        CaseError, TopologyError: if a number is impossible.
    """
    origin = {kind: demand.origin for kind, demand in demands.items()}
    if cluster is None:
        times = {kind: demand.fixed_ns for kind, demand in demands.items()}
    else:
        hardware = HardwareCosts(
            cluster,
            demands,
            world_size=options.world_size,
            micro_batches=loop.micro_batches,
            domain_size=options.world(loop).domain_size,
            resources={op.kind: stream.resource for stream in loop.streams for op in stream.ops},
            jitter=options.jitter,
            compute_efficiency=options.compute_efficiency,
            communication_share=options.communication_share,
        )
        if options.contention:
            return OpCosts(costs=hardware, op_ns=hardware.op_ns, origin=origin)
        times = batch_ns(loop, hardware.op_ns)
    timed = TimedCosts(batch_ns=times, micro_batches=loop.micro_batches, jitter=options.jitter)
    return OpCosts(costs=timed, op_ns=timed.op_ns, origin=origin)


def batch_ns(loop: Loop, op_ns: Callable[[Op], int]) -> dict[OpKind, int]:
    """Nanoseconds per batch of each op kind, all micro-batches together."""
    in_block = blocks_of(loop)
    return {
        kind: sum(
            op_ns(Op(kind=kind, batch=0, micro_batch=m))
            for m in (range(loop.micro_batches) if kind in in_block else (None,))
        )
        for kind in dict.fromkeys(op.kind for op in loop.ops)
    }


def blocks_of(loop: Loop) -> frozenset[OpKind]:
    """The kinds that run once per micro-batch."""
    blocks = (item for stream in loop.streams for item in stream.body if isinstance(item, MicroBlock))
    return frozenset(op.kind for block in blocks for op in block.ops)
