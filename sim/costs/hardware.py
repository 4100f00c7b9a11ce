"""Costs from hardware: every op takes what it asks for from resources that others use too.

Device arithmetic and device memory are a rank's own and its compute stream is in order, so compute takes a fixed time,
the longer of arithmetic and memory traffic, unless collectives are said to take a share of the device. Everything else
is an activity on shared resources (`sim.engine.fluid`): a host's memory bandwidth and lookup rate, the host link and
its PCIe switch, and the links of the network. A collective is one activity on all kinds of links that its traffic
crosses, in the proportions that `sim.network.cost` counts, never faster than it would be alone; collectives that
overlap share the links.

An activity's work is 1 and its share of a full resource is one over its time alone: what competes for a link moves the
same bytes per second, whatever it has in all, as flows do under max-min fairness.

Links are kept by kind and site (a domain, or the world), not one by one, so a run costs the same for any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import simpy

from nestpipe.base import NS_PER_S, CaseError, ns_to_ms, split_evenly
from nestpipe.ir import COLLECTIVES, Op, OpKind, Resource
from sim.costs.demand import Demand
from sim.engine import Activity, Actors, Capacity, FluidSystem, Jitter
from sim.network import LinkLoad, Transfer, group_transfer
from topologies.cluster import Cluster, TierKind
from topologies.fabric import Fabric

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["HardwareCosts"]

_SAME_RATE = 1e-6
_LOCAL_RESOURCES = ("dram", "rows", "h2d", "d2h", "h2d switch", "d2h switch")


class _Work(NamedTuple):
    """Time of its own, then an activity."""

    fixed_ns: int
    activity: Activity


class HardwareCosts:
    """Costs of a workload on a cluster; implements `sim.engine.costs.SharedCosts`. Make a new one for each run.

    Args:
        cluster: the hardware.
        demands: what each op kind asks for, per rank and batch.
        world_size: number of ranks.
        micro_batches: micro-batches split a batch's demand evenly.
        domain_size: ranks per domain, where the schedule has domains.
        resources: for each kind of collective the group it runs on; the world if it is missing.
        jitter: factors on the local ops of ranks.
        compute_efficiency: share of the accelerator's arithmetic rate that is reached; assumed.
        communication_share: share of the device that a collective's kernels take while it moves bytes at full rate, so
            that compute slows down meanwhile; 0 unless given, and assumed unless calibrated.

    Raises:
        CaseError: an efficiency outside (0, 1] or a share outside [0, 1).
        TopologyError: more ranks than the cluster has.
    """

    def __init__(
        self,
        cluster: Cluster,
        demands: Mapping[OpKind, Demand],
        *,
        world_size: int,
        micro_batches: int = 1,
        domain_size: int | None = None,
        resources: Mapping[OpKind, Resource] | None = None,
        jitter: Jitter | None = None,
        compute_efficiency: float = 1.0,
        communication_share: float = 0.0,
    ) -> None:
        if not 0 < compute_efficiency <= 1:
            raise CaseError(f"compute_efficiency must be above 0 and at most 1, got {compute_efficiency}")
        if not 0 <= communication_share < 1:
            raise CaseError(f"communication_share must be at least 0 and below 1, got {communication_share}")
        self.cluster, self.demands, self.world_size = cluster, dict(demands), world_size
        self.micro_batches, self.domain_size, self.resources = micro_batches, domain_size, dict(resources or {})
        self.jitter = jitter or Jitter()
        self.efficiency, self.communication_share = compute_efficiency, communication_share
        self.fabric = Fabric(cluster, world_size)
        self._transfers: dict[tuple[OpKind, Resource, float], Transfer] = {}

    # --- what the engine asks -------------------------------------------------------------------------------------

    def colours(self, world_size: int) -> Sequence[int] | None:
        """See `Costs.colours`."""
        return self.jitter.colours(world_size)

    def partitions(self, world_size: int) -> Mapping[str, Any]:
        """Ranks share a host and a PCIe switch."""
        ranks = np.arange(world_size, dtype=np.int64)
        host = self.cluster.host
        return {"host": ranks // host.accelerators_per_host, "switch": ranks // host.accelerators_per_pcie_switch}

    def bind(self, env: simpy.Environment, actors: Actors) -> None:
        """Makes the resources of a run."""
        self._fluid = FluidSystem(env)
        self._actors = actors
        self._actor_of = {int(rank): actor for actor, rank in enumerate(actors.ranks.tolist())}
        self._resources: dict[tuple[str, int], Capacity] = {}
        sites = actors.groups.get(Resource.DOMAIN, np.zeros(len(actors.ranks), dtype=np.int64))
        self._site = sites
        self._ranks_at = np.bincount(sites, weights=actors.weights)

    def local(self, ops: Sequence[Op], rank: int) -> Sequence[Any]:
        """See `Costs.local`."""
        factors = self.jitter.factors(len(ops), rank)
        actor = self._actor_of[rank]
        return [
            0 if op.kind in COLLECTIVES else self._local_work(op, actor, float(factor))
            for op, factor in zip(ops, factors, strict=True)
        ]

    def collective(self, op: Op, resource: Resource, ranks: Sequence[int], group_size: int) -> Any:
        """See `Costs.collective`."""
        demand = self.demands.get(op.kind)
        if demand is None:
            return 0
        share = self._share(op)
        fixed = round(demand.fixed_ns * share)
        if not demand.sent_bytes or group_size < 2:
            return fixed
        found = self._transfer(op.kind, resource, demand.sent_bytes * share)
        members = [self._actor_of[rank] for rank in ranks]
        uses = self._link_uses(found, members, group_size)
        latency = round(found.latency_s * NS_PER_S)
        moving_s = max(found.time_s - latency / NS_PER_S, 1e-12)
        if self.communication_share:
            uses |= {self._device(member): self.communication_share * moving_s for member in members}
        alone = 1.0 / moving_s
        return _Work(fixed + latency, Activity(work=1.0, uses=uses, cap_per_s=alone, share=alone, label=op.kind))

    def start(self, env: simpy.Environment, work: Any) -> simpy.Event:
        """See `Costs.start`."""
        if not work.fixed_ns:
            return self._fluid.start(work.activity)
        return env.process(self._after(env, work))

    def _after(self, env: simpy.Environment, work: _Work) -> Any:
        yield env.timeout(work.fixed_ns)
        yield self._fluid.start(work.activity)

    # --- local ops ------------------------------------------------------------------------------------------------

    def _share(self, op: Op) -> float:
        if op.micro_batch is None:
            return 1.0
        return split_evenly(1_000_000, self.micro_batches, op.micro_batch) / 1_000_000

    def _compute_ns(self, demand: Demand) -> float:
        device = self.cluster.accelerator
        arithmetic = demand.flops / (device.compute_flops_per_s.value * self.efficiency)
        memory = demand.device_bytes / device.memory_bandwidth_bytes_per_s.value
        return max(arithmetic, memory) * NS_PER_S

    def _amounts(self, demand: Demand) -> dict[str, float]:
        named = zip(
            _LOCAL_RESOURCES,
            (
                demand.dram_bytes,
                demand.host_rows,
                demand.h2d_bytes,
                demand.d2h_bytes,
                demand.h2d_bytes,
                demand.d2h_bytes,
            ),
            strict=True,
        )
        return {name: amount for name, amount in named if amount}

    def _capacity(self, name: str) -> float:
        host = self.cluster.host
        return {
            "dram": host.dram_bandwidth_bytes_per_s.value,
            "rows": host.lookup_rate_rows_per_s.value,
            "h2d": host.pcie_bandwidth_bytes_per_s.value,
            "d2h": host.pcie_bandwidth_bytes_per_s.value,
            "h2d switch": host.pcie_switch_bandwidth_bytes_per_s.value,
            "d2h switch": host.pcie_switch_bandwidth_bytes_per_s.value,
        }[name]

    def _sharers(self, name: str) -> int:
        """Ranks on one resource when all are at it."""
        host = self.cluster.host
        if name in ("dram", "rows"):
            return min(host.accelerators_per_host, self.world_size)
        return min(host.accelerators_per_pcie_switch, self.world_size) if name.endswith("switch") else 1

    def _local_work(self, op: Op, actor: int, factor: float) -> Any:
        demand = self.demands.get(op.kind)
        if demand is None:
            return 0
        share = self._share(op) * factor
        compute_ns = self._compute_ns(demand)
        if compute_ns and self.communication_share:
            device_s = compute_ns * share / NS_PER_S
            uses = {self._device(actor): device_s}
            fixed = round(demand.fixed_ns * share)
            return _Work(fixed, Activity(work=1.0, uses=uses, share=1.0 / device_s, label=op.kind))
        fixed = round((demand.fixed_ns + compute_ns) * share)
        amounts = self._amounts(demand)
        if not amounts:
            return fixed
        uses = {}
        for name, amount in amounts.items():
            resource, alike = self._local_resource(name, actor)
            uses[resource] = amount * share * alike
        alone_s = max(amount * share / self._capacity(name) for name, amount in amounts.items())
        return _Work(fixed, Activity(work=1.0, uses=uses, share=1.0 / alone_s, label=op.kind))

    def _device(self, actor: int) -> Capacity:
        """The device of an actor; its capacity is one device, work on it is in seconds."""
        return self._resource("device", actor, 1.0)

    def _local_resource(self, name: str, actor: int) -> tuple[Capacity, int]:
        """The resource of this actor, and how many ranks like it are on it."""
        if name in ("h2d", "d2h"):
            part, alike = actor, 1
        else:
            partition = "switch" if name.endswith("switch") else "host"
            part = int(self._actors.groups[partition][actor])
            alike = int(self._actors.alike[partition][actor])
        return self._resource(name, part, self._capacity(name)), alike

    def _resource(self, name: str, part: int, capacity: float) -> Capacity:
        found = self._resources.get((name, part))
        if found is None:
            found = self._resources[name, part] = self._fluid.resource(f"{name} {part}", capacity)
        return found

    # --- collectives ----------------------------------------------------------------------------------------------

    def _transfer(self, kind: OpKind, resource: Resource, sent_bytes: float) -> Transfer:
        """Traffic of one group alone; see `group_transfer`."""
        key = (kind, resource, sent_bytes)
        if key not in self._transfers:
            self._transfers[key] = group_transfer(self.fabric, kind, resource, self.domain_size, sent_bytes)
        return self._transfers[key]

    def _link_uses(self, found: Transfer, members: Sequence[int], group_size: int) -> dict[Capacity, float]:
        """Bytes on a link of each kind, averaged over all links of the kind at each site that the group touches."""
        weights = np.bincount(
            self._site[list(members)],
            weights=self._actors.weights[list(members)].astype(np.float64),
            minlength=len(self._ranks_at),
        )
        groups = weights.sum() / group_size
        uses: dict[Capacity, float] = {}
        for load in found.loads:
            if load.bytes_per_link <= 0:
                continue
            capacity = load.bytes_per_link / load.busy_s
            if load.name.endswith("trunk"):
                total = load.bytes_per_link * load.num_links * groups
                uses[self._resource(load.name, 0, capacity)] = total / self._num_trunks(load.name, load.num_links)
                continue
            for site in np.flatnonzero(weights):
                share = weights[site] / self._ranks_at[site]
                uses[self._resource(load.name, int(site), capacity)] = load.bytes_per_link * float(share)
        return uses

    def _num_trunks(self, name: str, at_least: float) -> float:
        """Links of a kind of trunk in the whole machine."""
        for number, layer in enumerate(self.fabric.layers):
            if layer.tier.kind is TierKind.TRUNK and name.startswith(layer.tier.name):
                return max(float(self.fabric.layers[number - 1].switches), at_least)
        return at_least

    # --- what was found -------------------------------------------------------------------------------------------

    def op_ns(self, op: Op) -> int:
        """Nanoseconds of an op when nothing else runs, the host's other ranks doing the same; for the cycle bound."""
        demand = self.demands.get(op.kind)
        if demand is None:
            return 0
        share = self._share(op)
        if op.kind in COLLECTIVES:
            resource = self.resources.get(op.kind, Resource.WORLD)
            moving = self._transfer(op.kind, resource, demand.sent_bytes * share).time_s if demand.sent_bytes else 0.0
            return round(demand.fixed_ns * share) + round(moving * NS_PER_S)
        amounts = self._amounts(demand)
        slowest = max((a * self._sharers(n) / self._capacity(n) for n, a in amounts.items()), default=0.0)
        return round((demand.fixed_ns + self._compute_ns(demand) + slowest * NS_PER_S) * share)

    def stages(self) -> pd.DataFrame:
        """For each op kind: time alone per batch (ms), the resource that sets it and how full that is meanwhile."""
        import pandas as pd

        rows = []
        for kind, demand in self.demands.items():
            alone = self.op_ns(Op(kind=kind, batch=0))
            name, busy_s = self._busiest(kind, demand, self.resources.get(kind, Resource.WORLD))
            share = busy_s * NS_PER_S / alone if alone else 0.0
            rows.append((kind.value, ns_to_ms(alone), name, min(1.0, share), demand.origin))
        return pd.DataFrame(rows, columns=["kind", "alone_ms", "busiest_resource", "utilisation", "origin"])

    def _busiest(self, kind: OpKind, demand: Demand, resource: Resource) -> tuple[str, float]:
        options = {n: a * self._sharers(n) / self._capacity(n) for n, a in self._amounts(demand).items()}
        device = self.cluster.accelerator
        options["device arithmetic"] = demand.flops / (device.compute_flops_per_s.value * self.efficiency)
        options["device memory"] = demand.device_bytes / device.memory_bandwidth_bytes_per_s.value
        options["time of its own"] = demand.fixed_ns / NS_PER_S
        if kind in COLLECTIVES and demand.sent_bytes:
            found = self._transfer(kind, resource, demand.sent_bytes)
            options |= {self._named(load): load.busy_s for load in found.loads}
        name = max(options, key=lambda each: options[each])
        return name, options[name]

    def _named(self, load: LinkLoad) -> str:
        """A kind of link, and which of its links gives less than described if one of those is the busiest."""
        for each in self.cluster.degraded:
            tier = next(tier for tier in self.cluster.tiers if tier.name == each.tier)
            rate = tier.bandwidth_bytes_per_s
            busiest_rate = load.bytes_per_link / load.busy_s if load.busy_s else 0.0
            if rate is None or load.name not in (f"{each.tier} up", f"{each.tier} down"):
                continue
            if abs(busiest_rate / (rate.value * each.share) - 1) < _SAME_RATE:
                return f"{load.name} ({each})"
        return load.name

    def load(self) -> pd.DataFrame:
        """After a run: for each resource its work, the time it was in use and its utilisation over the whole run."""
        import pandas as pd

        rows = [(use.name, use.work, use.busy_ns, use.utilisation) for use in self._fluid.usage()]
        return pd.DataFrame(rows, columns=["resource", "work", "busy_ns", "utilisation"])
