"""A scenario's factors and cost of micro-batches, as a workload around another one.

A case's fitted laws are split as the case explains them: the part that does not depend on the number of workers is
bytes and keys, so it grows with skew and shrinks with link bandwidth; the part per peer is messages and scales with
`peer_cost`. For a trace, `skew` and `link_bandwidth` act on collectives as a whole. On a described cluster the factors
act on what the ops ask for. Whatever a factor has touched counts as assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nestpipe.base import NS_PER_US
from nestpipe.ir import ALL_TO_ALLS, COLLECTIVES, COMPUTE, Loop, OpKind
from sim.costs import ByKind, CaseWorkload, Demand, OpCosts, Options, TraceWorkload, blocks_of, costs_of, scaled_law
from sim.engine import TimedCosts
from sim.scenario.sections import Factors, MicroBatching
from topologies.cluster import Cluster

__all__ = ["Changed"]

_COMPUTED = COMPUTE | {OpKind.DEDUP}
_HOST = frozenset({OpKind.LOOKUP, OpKind.WRITE_BACK})
_ROWS = frozenset({OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS})
_LOOKUP_LAW = frozenset({OpKind.READ, OpKind.COPY_H2D, OpKind.ALL_TO_ALL_KEYS, *_HOST})


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A workload under factors, with what more micro-batches cost."""

    workload: ByKind
    factors: Factors
    micro_batching: MicroBatching

    @property
    def batch_per_worker(self) -> int | None:
        """The workload's."""
        return self.workload.batch_per_worker

    @property
    def domain_size(self) -> int | None:
        """The workload's."""
        return self.workload.domain_size

    def demands(self, loop: Loop, cluster: Cluster | None, options: Options) -> dict[OpKind, Demand]:
        """See `ByKind.demands`."""
        touched = self.touched(loop)
        if cluster is not None:
            found = self._on_hardware(self.workload.demands(loop, cluster, options), loop)
        elif isinstance(self.workload, CaseWorkload):
            found = self._laws_changed(self.workload.at_batch(options.batch_per_worker), loop, options)
        else:
            return self._recorded(loop, None, options)
        return {kind: replace(each, origin="assumed") if kind in touched else each for kind, each in found.items()}

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        """See `Workload.costs`."""
        if not isinstance(self.workload, TraceWorkload):
            return costs_of(self.demands(loop, cluster, options), loop, cluster, options)
        # recorded times ask nothing of the hardware: a cluster has scaled the transfers
        found = costs_of(self._recorded(loop, cluster, options), loop, None, options)
        assert isinstance(found.costs, TimedCosts)
        costs = replace(found.costs, host=self.workload.host(loop))
        return replace(found, costs=costs, op_ns=costs.op_ns)

    def _recorded(self, loop: Loop, cluster: Cluster | None, options: Options) -> dict[OpKind, Demand]:
        """A trace's times by factors, transfers as on the cluster's network where there is one."""
        touched = self.touched(loop)
        own = self._own_factors(self.factors.skew / self.factors.link_bandwidth)
        own |= dict.fromkeys(_ROWS, own[OpKind.ALL_TO_ALL_ROWS] * self._duplication(loop))
        found = self._timed(self.workload.demands(loop, cluster, options), own, loop)
        return {kind: replace(each, origin="assumed") if kind in touched else each for kind, each in found.items()}

    def touched(self, loop: Loop) -> frozenset[OpKind]:
        """The kinds that no longer rest on the workload alone."""

        def kinds() -> Iterator[OpKind]:
            factors = self.factors
            if factors.communication_time != 1 or factors.link_bandwidth != 1:
                yield from COLLECTIVES
            if factors.peer_cost != 1:
                yield from (*_LOOKUP_LAW, *_ROWS)
            if factors.lookup_cost != 1:
                yield from _HOST
            if factors.skew != 1:
                yield from (*_HOST, *_ROWS, OpKind.ALL_TO_ALL_KEYS)
            if factors.compute_time != 1:
                yield from _COMPUTED
            if self._duplication(loop) != 1:
                yield from _ROWS
            if self.micro_batching.overhead_us and loop.micro_batches > 1:
                yield from blocks_of(loop)
            yield from (OpKind(kind) for kind, factor in factors.time.items() if factor != 1)

        return frozenset(kinds())

    def _duplication(self, loop: Loop) -> float:
        """Rows sent with micro-batches over rows sent without, beyond what the workload has."""
        if loop.micro_batches == 1:
            return 1.0
        per_doubling = self.micro_batching.row_duplication_per_doubling
        return float(self.factors.row_duplication * per_doubling ** math.log2(loop.micro_batches))

    def _overhead_ns(self, loop: Loop) -> dict[OpKind, float]:
        """What every micro-batch after the first adds to a kind."""
        return dict.fromkeys(blocks_of(loop), self.micro_batching.overhead_us * NS_PER_US * (loop.micro_batches - 1))

    def _laws_changed(self, workload: CaseWorkload, loop: Loop, options: Options) -> dict[OpKind, Demand]:
        """A case's times by changed laws, where it shares nothing."""
        factors, size, laws = self.factors, options.world_size, workload.laws
        sent = factors.skew / factors.link_bandwidth
        communication = scaled_law(laws.communication, sent, factors.peer_cost)
        lookup = scaled_law(laws.lookup, 1.0, factors.peer_cost)
        plain = scaled_law(laws.communication, 1.0, factors.peer_cost).at(size)
        own = self._own_factors(communication.at(size) / plain if plain else 1.0)
        own |= {kind: factors.communication_time * factors.time.get(kind.value, 1.0) for kind in _ROWS}
        values = {**workload.values, "row_duplication": workload.values["row_duplication"] * self._duplication(loop)}
        slower = replace(workload, laws=replace(laws, lookup=lookup, communication=communication), values=values)
        return self._timed(slower.demands(loop, None, options), own, loop)

    def _own_factors(self, sent: float) -> dict[OpKind, float]:
        """The factor on the time of every kind; `sent` is that on All2Alls by skew and bandwidth."""
        factors = self.factors
        own = dict.fromkeys(COLLECTIVES, factors.communication_time / factors.link_bandwidth)
        own |= dict.fromkeys((*_ROWS, OpKind.ALL_TO_ALL_KEYS), factors.communication_time * sent)
        own |= dict.fromkeys(_HOST, factors.lookup_cost * factors.skew)
        own |= dict.fromkeys(_COMPUTED, factors.compute_time)
        for kind, factor in factors.time.items():
            own[OpKind(kind)] = own.get(OpKind(kind), 1.0) * factor
        return own

    def _timed(self, demands: Mapping[OpKind, Demand], own: Mapping[OpKind, float], loop: Loop) -> dict[OpKind, Demand]:
        """Times by their factors, with the overhead of micro-batches."""
        overhead = self._overhead_ns(loop)
        return {
            kind: replace(each, fixed_ns=round(each.fixed_ns * own.get(kind, 1.0) + overhead.get(kind, 0)))
            for kind, each in demands.items()
        }

    def _on_hardware(self, demands: Mapping[OpKind, Demand], loop: Loop) -> dict[OpKind, Demand]:
        """Bytes over bandwidth, costs per peer as time of their own, rows by cost and skew."""
        factors, duplication, overhead = self.factors, self._duplication(loop), self._overhead_ns(loop)
        found = {}
        for kind, demand in demands.items():
            fixed, sent = float(demand.fixed_ns), demand.sent_bytes
            if kind in COLLECTIVES:
                fixed *= factors.peer_cost
                sent *= (factors.skew if kind in ALL_TO_ALLS else 1.0) / factors.link_bandwidth
                sent *= duplication if kind in _ROWS else 1.0
            rows = factors.lookup_cost * factors.skew if kind in _HOST else 1.0
            compute = factors.compute_time if kind in _COMPUTED else 1.0
            time = factors.time.get(kind.value, 1.0) * (factors.communication_time if kind in COLLECTIVES else 1.0)
            found[kind] = replace(
                demand,
                fixed_ns=round(fixed * time + overhead.get(kind, 0)),
                sent_bytes=sent * time,
                host_rows=demand.host_rows * rows * time,
                dram_bytes=demand.dram_bytes * rows * time,
                h2d_bytes=demand.h2d_bytes * rows * time,
                d2h_bytes=demand.d2h_bytes * rows * time,
                flops=demand.flops * compute * time,
                device_bytes=demand.device_bytes * compute * time,
            )
        return found
