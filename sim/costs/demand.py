"""What each op asks of the hardware, per rank and batch: arithmetic, bytes, rows, latency.

Two sources. `demands_of_model` reads the rows that `traces.workloads.synthesis` makes of a model, whose sizes are known
and whose times follow from the hardware. `demands_of_case` goes the other way: the times of a published cluster are
known, and what they ask of its hardware is worked out so that an op that shares nothing takes the fitted time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from nestpipe.base import NS_PER_S
from nestpipe.ir import COLLECTIVES, KINDS, Cost, Loop, OpKind, Resource
from sim.network import group_size_bytes, group_transfer
from topologies.cluster import Cluster
from topologies.fabric import Fabric
from traces.keys import KeyStatistics
from traces.workloads import AcceleratorRates, Growth, GrowthLaws, WorkloadModel, batch_times, synthesise

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Demand", "demands_of_case", "demands_of_model", "demands_of_preset", "num_owners", "origin_of"]

_FITTED = frozenset({OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What an op kind asks for, per rank and batch.

    Attributes:
        fixed_ns: time that shares nothing, spent first: latency, software, waiting for a disk.
        flops: arithmetic on the device.
        device_bytes: device memory traffic.
        host_rows: random rows read or written in host memory.
        dram_bytes: host memory traffic.
        h2d_bytes, d2h_bytes: over the host link.
        sent_bytes: what a rank puts into a collective, its own share included.
        origin: where the numbers come from: measured, fitted, interpolated, extrapolated or assumed.
    """

    fixed_ns: int = 0
    flops: float = 0.0
    device_bytes: float = 0.0
    host_rows: float = 0.0
    dram_bytes: float = 0.0
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    sent_bytes: float = 0.0
    origin: str = "assumed"


def demands_of_preset(
    model: WorkloadModel,
    cluster: Cluster,
    loop: Loop,
    *,
    batch: int,
    world_size: int,
    statistics: KeyStatistics | None = None,
) -> dict[OpKind, Demand]:
    """Demands of a workload model; only the sizes of its synthetic rows are used, the times are the hardware's.

    Args:
        model: what a step computes.
        cluster: the hardware.
        loop: the schedule, with its number of micro-batches.
        batch: samples a rank takes per step.
        world_size: number of ranks.
        statistics: of the key stream, at as many ranks as share a copy of the tables (`num_owners`); None for keys
            that never repeat.

    Raises:
        TraceError: sizes out of range, or statistics that do not cover the number of micro-batches.
    """
    device, host = cluster.accelerator, cluster.host
    share = host.dram_bandwidth_bytes_per_s.value / cluster.ranks_per_node
    outer = [tier.bandwidth_bytes_per_s.value for tier in cluster.tiers if tier.bandwidth_bytes_per_s is not None]
    rates = AcceleratorRates(
        flops_per_s=device.compute_flops_per_s.value,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s.value,
        h2d_bandwidth_bytes_per_s=host.pcie_bandwidth_bytes_per_s.value,
        host_read_bandwidth_bytes_per_s=share,
        host_memory_bandwidth_bytes_per_s=share,
        network_bandwidth_bytes_per_s=outer[-1],
    )
    rows = synthesise(
        model, rates, batch=batch, world_size=world_size, micro_batches=loop.micro_batches, statistics=statistics
    )
    return demands_of_model(rows, loop)


def num_owners(loop: Loop, world_size: int, domain_size: int | None) -> int:
    """Ranks that share one copy of the tables: those of a domain where the schedule has domains, else all."""
    domains = any(stream.resource is Resource.DOMAIN for stream in loop.streams)
    return min(domain_size, world_size) if domains and domain_size is not None else world_size


def demands_of_model(rows: pd.DataFrame, loop: Loop) -> dict[OpKind, Demand]:
    """Demands from rows of one rank and step with flops, bytes and unique_keys (see
    `traces.workloads.synthesis.synthesise`).

    A kind without rows of its own moves as many bytes as the one that its record names: the replicas of
    two-dimensional sparse parallelism exchange the rows that `write_back` writes and the keys that `all_to_all[keys]`
    sends.
    """
    sums = rows.groupby("kind")[["flops", "bytes", "unique_keys"]].sum().astype(np.float64)
    found: dict[OpKind, Demand] = {}
    for kind in dict.fromkeys(op.kind for op in loop.ops):
        name = kind if kind.value in sums.index else KINDS[kind].sized_like
        if name is not None and name.value in sums.index:
            flops, size, keys = (float(value) for value in np.asarray(sums.loc[name.value], dtype=np.float64))
            found[kind] = _demand(KINDS[kind].cost, flops, size, keys)
    return found


def _demand(cost: Cost, flops: float, size: float, keys: float) -> Demand:
    """What an op asks for, by its arithmetic, bytes and rows."""
    match cost:
        case Cost.NOTHING:
            return Demand()
        case Cost.HOST_MEMORY:
            return Demand(dram_bytes=size)
        case Cost.HOST_TO_DEVICE:
            return Demand(dram_bytes=size, h2d_bytes=size)
        case Cost.DEVICE_TO_HOST:
            return Demand(dram_bytes=size, d2h_bytes=size)
        case Cost.ROWS_TO_DEVICE:
            return Demand(host_rows=keys, dram_bytes=size, h2d_bytes=size)
        case Cost.ROWS_TO_HOST:
            return Demand(host_rows=keys, dram_bytes=size, d2h_bytes=size)
        case Cost.DEVICE_COPY | Cost.DEVICE_MEMORY:
            return Demand(device_bytes=size)
        case Cost.ARITHMETIC | Cost.MESSAGE:
            return Demand(flops=flops, device_bytes=size)
    return Demand(sent_bytes=size)


def demands_of_case(
    work: GrowthLaws, assumptions: Mapping[str, float], loop: Loop, cluster: Cluster, world_size: int
) -> dict[OpKind, Demand]:
    """Demands that take the fitted times on `cluster`, and share its hardware where they overlap.

    The part of an All2All of rows or gradients that does not grow with the number of ranks is taken to be bytes on the
    network; the growing part is software and latency per peer and shares nothing. The key All2All moves
    `key_bytes_share` of the bytes of the rows. Lookup and write-back share the host's memory with its other ranks,
    which all were at it at the same time when the times were measured; copy_h2d has the host link. Reading samples
    shares nothing.

    Args:
        work: the fit.
        assumptions: a value for each of `traces.workloads.case.ASSUMPTIONS`.
        loop: the schedule.
        cluster: the hardware.
        world_size: number of ranks.
    """
    times = batch_times(work, assumptions, loop, world_size)
    still = batch_times(replace(work, communication=_constant(work.communication)), assumptions, loop, world_size)
    dram = cluster.host.dram_bandwidth_bytes_per_s.value / min(cluster.ranks_per_node, world_size) / NS_PER_S
    sharers = min(cluster.host.accelerators_per_pcie_switch, world_size)
    switch = cluster.host.pcie_switch_bandwidth_bytes_per_s.value / sharers
    link = min(cluster.host.pcie_bandwidth_bytes_per_s.value, switch) / NS_PER_S
    flops = cluster.accelerator.compute_flops_per_s.value / NS_PER_S
    # what runs on another, larger cluster may have more ranks than this one can have
    fabric = Fabric(replace(cluster, ranks_max=max(cluster.ranks_max, world_size)), world_size)
    resources = {op.kind: stream.resource for stream in loop.streams for op in stream.ops}
    domain = min(int(assumptions["domain_size"]), world_size)

    def sent(kind: OpKind, ns: int, size: float | None = None) -> Demand:
        """`ns` in all: `size` bytes on the network (by default the part that does not grow), then time of its own."""
        where = kind, resources[kind], domain
        if size is None:
            moving = float(min(ns, still[kind]))
            size = group_size_bytes(fabric, *where, moving / NS_PER_S)
        else:
            moving = group_transfer(fabric, *where, size).time_s * NS_PER_S
        if not size:
            return Demand(fixed_ns=ns, origin=origin_of(kind))
        return Demand(fixed_ns=max(0, round(ns - moving)), sent_bytes=size, origin=origin_of(kind))

    found: dict[OpKind, Demand] = {}
    for kind, ns in times.items():
        origin = origin_of(kind)
        if kind in (OpKind.LOOKUP, OpKind.WRITE_BACK):
            found[kind] = Demand(dram_bytes=ns * dram, origin=origin)
        elif kind is OpKind.COPY_H2D:
            found[kind] = Demand(h2d_bytes=ns * link, origin=origin)
        elif kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.DEDUP):
            found[kind] = Demand(flops=ns * flops, origin=origin)
        elif kind in COLLECTIVES and kind is not OpKind.ALL_TO_ALL_KEYS and ns:
            found[kind] = sent(kind, ns)
        else:
            found[kind] = Demand(fixed_ns=ns, origin=origin)
    if OpKind.ALL_TO_ALL_KEYS in times and OpKind.ALL_TO_ALL_ROWS in found:
        size = found[OpKind.ALL_TO_ALL_ROWS].sent_bytes * assumptions["key_bytes_share"]
        found[OpKind.ALL_TO_ALL_KEYS] = sent(OpKind.ALL_TO_ALL_KEYS, times[OpKind.ALL_TO_ALL_KEYS], size)
    return found


def origin_of(kind: OpKind) -> str:
    """Whether a case's time of an op kind is fitted, or only its share of a fitted total, or itself, is assumed."""
    return "fitted" if kind in _FITTED else "assumed"


def _constant(growth: Growth) -> Growth:
    """What of a growth law does not grow: its value for a lone rank."""
    return Growth(mechanism="constant", a=growth.at(1), b=0.0)
