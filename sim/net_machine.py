"""The shared resources of a described cluster in a `FluidSystem`, and the activities that use them.

Per rank: compute, device memory, the copy link each way. Per group of accelerators behind a PCIe switch: its uplink
each way. Per host: DRAM bandwidth, random lookups, cores. Per link of the fabric: its bandwidth. What a stage shares
with whom follows from where its bytes go; nothing is a typed-in ratio. Resources are made when first used.

One rank may stand for several that are alike and do the same at the same time: `alike` is how many of them share the
host's (and PCIe switch's) resources; their common use is then booked at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sim.fluid import Activity, FluidSystem, Resource
from topologies.fabric import Fabric

__all__ = ["Machine"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a resource belongs, for tables: what it is, its host (None: a network link), its rank."""

    kind: str
    host: int | None
    rank: int | None


class Machine:
    """Resources of a fabric's ranks, hosts and links.

    Args:
        fluid: the system that shares them
        communication_share: share of a rank's compute that a flow at full speed takes, for kernels that move the bytes;
            0 (the default) means none. Assumed unless calibrated.
    """

    def __init__(self, fluid: FluidSystem, fabric: Fabric, *, communication_share: float = 0.0) -> None:
        if not 0 <= communication_share < 1:
            raise ValueError(f"communication_share must be 0 or more and below 1, got {communication_share}")
        self.fluid, self.fabric = fluid, fabric
        self.communication_share = communication_share
        self._made: dict[str, Resource] = {}
        self._places: list[_Place] = []

    def _resource(self, name: str, capacity_per_s: float, place: _Place) -> Resource:
        if name not in self._made:
            self._made[name] = self.fluid.resource(name, capacity_per_s)
            self._places.append(place)
        return self._made[name]

    def _host(self, rank: int) -> int:
        if not 0 <= rank < self.fabric.world_size:
            raise ValueError(f"rank must be 0 to {self.fabric.world_size - 1}, got {rank}")
        return rank // self.fabric.cluster.ranks_per_node

    def _of_host(self, rank: int, kind: str, capacity_per_s: float) -> Resource:
        host = self._host(rank)
        return self._resource(f"host {host} {kind}", capacity_per_s, _Place(kind, host, None))

    def _of_rank(self, rank: int, kind: str, capacity_per_s: float) -> Resource:
        return self._resource(f"rank {rank} {kind}", capacity_per_s, _Place(kind, self._host(rank), rank))

    def compute(self, rank: int, flops: float, memory_bytes: float = 0.0, *, share: float = 1.0) -> Activity:
        """Floating-point work; with `memory_bytes` the slower of arithmetic and device memory counts (a roofline)."""
        accelerator = self.fabric.cluster.accelerator
        unit = self._of_rank(rank, "compute", accelerator.compute_flops_per_s.value)
        uses = {unit: 1.0}
        if memory_bytes > 0:
            memory = self._of_rank(rank, "device_memory", accelerator.memory_bandwidth_bytes_per_s.value)
            uses[memory] = memory_bytes / flops
        return Activity(work=flops, uses=uses, share=share, label=f"compute rank {rank}")

    def copy_d2d(self, rank: int, size_bytes: float) -> Activity:
        """A copy inside device memory: every byte is read and written."""
        rate = self.fabric.cluster.accelerator.memory_bandwidth_bytes_per_s.value
        memory = self._of_rank(rank, "device_memory", rate)
        return Activity(work=size_bytes, uses={memory: 2.0}, label=f"copy_d2d rank {rank}")

    def copy_h2d(self, rank: int, size_bytes: float, *, alike: int = 1) -> Activity:
        """A copy from host to device: DRAM, the PCIe switch, the rank's own link, device memory."""
        return self._copy(rank, size_bytes, "h2d", alike)

    def copy_d2h(self, rank: int, size_bytes: float, *, alike: int = 1) -> Activity:
        """A copy from device to host."""
        return self._copy(rank, size_bytes, "d2h", alike)

    def _copy(self, rank: int, size_bytes: float, way: str, alike: int) -> Activity:
        cluster = self.fabric.cluster
        host = cluster.host
        group = host.accelerators_per_pcie_switch
        switch = rank // group
        uplink = self._resource(
            f"pcie switch {switch} {way}",
            host.pcie_switch_bandwidth_bytes_per_s.value,
            _Place(f"pcie_switch_{way}", self._host(rank), None),
        )
        memory = self._of_rank(rank, "device_memory", cluster.accelerator.memory_bandwidth_bytes_per_s.value)
        uses: dict[Resource, float] = {
            self._of_rank(rank, f"copy_{way}", host.pcie_bandwidth_bytes_per_s.value): 1.0,
            uplink: float(min(alike, group)),
            self._of_host(rank, "dram", host.dram_bandwidth_bytes_per_s.value): float(alike),
            memory: 1.0,
        }
        return Activity(work=size_bytes, uses=uses, label=f"copy_{way} rank {rank}")

    def lookup(self, rank: int, rows: float, row_bytes: float, *, alike: int = 1) -> Activity:
        """Random rows read from the rank's host: its lookup rate, and DRAM bandwidth of whole 64-byte lines."""
        host = self.fabric.cluster.host
        lines = float(np.ceil(row_bytes / 64) * 64)
        rate = self._of_host(rank, "lookup", host.lookup_rate_rows_per_s.value)
        dram = self._of_host(rank, "dram", host.dram_bandwidth_bytes_per_s.value)
        return Activity(work=rows, uses={rate: float(alike), dram: lines * alike}, label=f"lookup rank {rank}")

    def cpu(self, rank: int, core_s: float, cores: float, *, alike: int = 1) -> Activity:
        """Host work (prefetch, dedup) of `core_s` core seconds on at most `cores` cores."""
        pool = self._of_host(rank, "cores", self.fabric.cluster.host.cores.value)
        return Activity(work=core_s, uses={pool: float(alike)}, cap_per_s=cores, label=f"cpu rank {rank}")

    def flow(
        self, src: int, dst: int, size_bytes: float, *, flows_per_link: Mapping[int, float] | None = None
    ) -> Activity:
        """Bytes from one rank to another over the links between them.

        Args:
            flows_per_link: how many flows that are alike use each link, where this one stands for several; default 1
        """
        (route,) = self.fabric.routes(np.array([src]), np.array([dst]))
        links = [int(link) for link in route if link < self.fabric.num_links]
        if not links:
            raise ValueError(f"a flow needs two ranks, got {src} twice")
        uses: dict[Resource, float] = {}
        for link in links:
            name = self.fabric.link_name(link)
            resource = self._resource(name, float(self.fabric.capacity[link]), _Place("link", None, None))
            uses[resource] = 1.0 if flows_per_link is None else flows_per_link.get(link, 1.0)
        if self.communication_share:
            slowest = float(self.fabric.capacity[links].min())
            peak = self.fabric.cluster.accelerator.compute_flops_per_s.value
            for rank in (src, dst):
                uses[self._of_rank(rank, "compute", peak)] = self.communication_share * peak / slowest
        return Activity(work=size_bytes, uses=uses, label=f"flow {src} -> {dst}")

    def usage(self) -> pd.DataFrame:
        """What every resource has done so far: name, kind, host, rank, work, busy_ns, utilisation; busiest first."""
        rows = [
            (use.name, place.kind, place.host, place.rank, use.work, use.busy_ns, use.utilisation)
            for use, place in zip(self.fluid.usage(), self._places, strict=True)
        ]
        columns = ["name", "kind", "host", "rank", "work", "busy_ns", "utilisation"]
        table = pd.DataFrame(rows, columns=columns).astype({"host": "Int64", "rank": "Int64"})
        return table.sort_values(["utilisation", "name"], ascending=[False, True], ignore_index=True)
