"""Times and costs of a scenario's ops on a described cluster: a model's or a case's demands, changed by factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from nestpipe.base import NS_PER_US
from nestpipe.ir import ALL_TO_ALLS, COLLECTIVES, COMPUTE, Loop, MicroBlock, Op, OpKind
from sim.costs import Demand, HardwareCosts, demands_of_case, demands_of_preset, home_cluster, num_owners
from sim.engine import Jitter
from sim.scenario.sections import Factors, MicroBatching
from topologies.cluster import Cluster
from traces.keys import KeyRatios
from traces.workloads import Case, GrowthLaws, WorkloadModel

__all__ = ["blocks_of", "case_demands", "changed", "hardware_costs", "hardware_times", "model_demands"]

_HOST = frozenset({OpKind.LOOKUP, OpKind.WRITE_BACK})
_ROWS = frozenset({OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS})
_COMPUTED = COMPUTE | {OpKind.DEDUP}


def model_demands(
    model: WorkloadModel,
    hardware: Cluster,
    loop: Loop,
    *,
    batch_per_worker: int,
    world_size: int,
    domain_size: int | None,
    keys: KeyRatios | None,
) -> dict[OpKind, Demand]:
    """What a model's ops ask for; without `keys` no key repeats.

    Raises:
        TraceError: if the keys say nothing about such a configuration.
    """
    statistics = None
    if keys is not None:
        statistics = keys.at(batch_per_worker, num_owners(loop, world_size, domain_size), loop.micro_batches)
    return demands_of_preset(
        model, hardware, loop, batch=batch_per_worker, world_size=world_size, statistics=statistics
    )


def case_demands(
    case: Case, law: GrowthLaws, assumptions: Mapping[str, float], loop: Loop, world_size: int
) -> dict[OpKind, Demand]:
    """What a case's ops ask for, worked out on the case's own topology, to be met by another one.

    Raises:
        CaseError: if the case does not name its topology.
    """
    return demands_of_case(law, assumptions, loop, home_cluster(case), world_size)


def changed(
    demands: Mapping[OpKind, Demand], factors: Factors, micro_batching: MicroBatching, loop: Loop
) -> dict[OpKind, Demand]:
    """The demands under factors: bytes over bandwidth, costs per peer as time of their own, rows by cost and skew."""
    found = {}
    duplication = factors.row_duplication * micro_batching.row_duplication_per_doubling ** math.log2(loop.micro_batches)
    overhead_ns = micro_batching.overhead_us * NS_PER_US * (loop.micro_batches - 1)
    in_block = blocks_of(loop)
    for kind, demand in demands.items():
        fixed, sent = float(demand.fixed_ns), demand.sent_bytes
        if kind in COLLECTIVES:
            fixed *= factors.peer_cost
            sent *= (factors.skew if kind in ALL_TO_ALLS else 1.0) / factors.link_bandwidth
            sent *= duplication if kind in _ROWS and loop.micro_batches > 1 else 1.0
        rows = factors.lookup_cost * factors.skew if kind in _HOST else 1.0
        compute = factors.compute_time if kind in _COMPUTED else 1.0
        time = factors.time.get(kind.value, 1.0) * (factors.communication_time if kind in COLLECTIVES else 1.0)
        found[kind] = replace(
            demand,
            fixed_ns=round(fixed * time + (overhead_ns if kind in in_block else 0)),
            sent_bytes=sent * time,
            host_rows=demand.host_rows * rows * time,
            dram_bytes=demand.dram_bytes * rows * time,
            h2d_bytes=demand.h2d_bytes * rows * time,
            d2h_bytes=demand.d2h_bytes * rows * time,
            flops=demand.flops * compute * time,
            device_bytes=demand.device_bytes * compute * time,
        )
    return found


def hardware_costs(
    hardware: Cluster,
    demands: Mapping[OpKind, Demand],
    loop: Loop,
    *,
    world_size: int,
    domain_size: int | None,
    jitter: Jitter | None = None,
    compute_efficiency: float = 1.0,
) -> HardwareCosts:
    """New costs for one run."""
    return HardwareCosts(
        hardware,
        demands,
        world_size=world_size,
        micro_batches=loop.micro_batches,
        domain_size=world_size if domain_size is None else domain_size,
        jitter=jitter,
        compute_efficiency=compute_efficiency,
    )


def hardware_times(costs: HardwareCosts, loop: Loop) -> dict[OpKind, int]:
    """Nanoseconds per batch of each op kind when nothing else runs but the same op on the host's other ranks."""
    in_block = blocks_of(loop)
    found = {}
    for stream in loop.streams:
        for kind in dict.fromkeys(op.kind for op in stream.ops):
            parts = range(loop.micro_batches) if kind in in_block else (None,)
            found[kind] = sum(costs.op_ns(Op(kind=kind, batch=0, micro_batch=m), stream.resource) for m in parts)
    return found


def blocks_of(loop: Loop) -> frozenset[OpKind]:
    """The kinds that run once per micro-batch."""
    blocks = (item for stream in loop.streams for item in stream.body if isinstance(item, MicroBlock))
    return frozenset(op.kind for block in blocks for op in block.ops)
