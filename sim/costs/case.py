"""A published cluster as a workload: its fitted times, split into op kinds as the case explains them.

Alone, ops take the fitted times and share nothing. On a described cluster they ask for what takes the fitted times on
the case's own one (`sim.costs.demand.demands_of_case`), so another cluster changes their times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nestpipe.base import CaseError
from nestpipe.ir import Loop, OpKind, Resource, with_micro_batches
from sim.costs.demand import Demand, demands_of_case, origin_of
from sim.costs.workload import OpCosts, Options, costs_of
from topologies.cluster import Cluster, load_cluster
from traces.workloads import Case, Growth, GrowthLaws, batch_times, growth_laws, load_case

__all__ = ["CaseWorkload", "scaled_law", "status_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseWorkload:
    """A case with its fit.

    Attributes:
        case: the published cluster.
        laws: its fit, at `batch_per_worker`.
        values: its assumptions, or others in their place, at `batch_per_worker`.
        batch_per_worker: samples per rank and step.
    """

    case: Case
    laws: GrowthLaws
    values: Mapping[str, float]
    batch_per_worker: int

    @classmethod
    def of(cls, case: Case | str, values: Mapping[str, float] | None = None) -> CaseWorkload:
        """A case, or the case of a name or file; with other values for its assumptions if they are given.

        Raises:
            CaseError: if there is no such case, or a number in it is impossible.
        """
        case = load_case(case) if isinstance(case, str) else case
        values = case.values() if values is None else values
        return cls(case=case, laws=growth_laws(case), values=values, batch_per_worker=case.batch_per_worker)

    @property
    def domain_size(self) -> int:
        """Ranks per domain that the case assumes."""
        return int(self.values["domain_size"])

    def loop(self, loop: Loop, micro_batches: int | None = None) -> Loop:
        """The loop with its number of micro-batches: the one asked for, or the case's where the schedule has several.

        Raises:
            CaseError: if there are more micro-batches than samples per worker.
        """
        if micro_batches is None:
            micro_batches = int(self.values["micro_batches"]) if loop.micro_batches > 1 else 1
        if not 1 <= micro_batches <= self.batch_per_worker:
            raise CaseError(
                f"micro_batches must lie between 1 and the batch per worker, {self.batch_per_worker}, "
                f"got {micro_batches}"
            )
        return with_micro_batches(loop, micro_batches)

    def at_batch(self, batch_per_worker: int | None) -> CaseWorkload:
        """The case at another batch: bytes, keys and compute grow with it, messages do not."""
        if batch_per_worker is None or batch_per_worker == self.batch_per_worker:
            return self
        ratio = batch_per_worker / self.batch_per_worker
        laws = replace(
            self.laws,
            lookup=scaled_law(self.laws.lookup, ratio, 1.0),
            communication=scaled_law(self.laws.communication, ratio, 1.0),
            compute=scaled_law(self.laws.compute, ratio, ratio),
        )
        values = {**self.values, **{name: self.values[name] * ratio for name in ("dedup_ms", "sync_ms")}}
        return replace(self, laws=laws, values=values, batch_per_worker=batch_per_worker)

    def demands(self, loop: Loop, cluster: Cluster | None, options: Options) -> dict[OpKind, Demand]:
        """See `ByKind.demands`.

        Raises:
            CaseError: on a cluster, if the case does not name its own.
        """
        here = self.at_batch(options.batch_per_worker)
        if options.domain_size is not None:
            here = replace(here, values={**here.values, "domain_size": options.domain_size})
        origins = here.origins(loop, cluster, options)
        if cluster is None:
            times = batch_times(here.laws, here.values, loop, options.world_size)
            return {kind: Demand(fixed_ns=ns, origin=origins[kind]) for kind, ns in times.items()}
        found = demands_of_case(here.laws, here.values, loop, self.home(), options.world_size)
        return {kind: replace(demand, origin=origins[kind]) for kind, demand in found.items()}

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        """See `Workload.costs`."""
        return costs_of(self.demands(loop, cluster, options), loop, cluster, options)

    def home(self) -> Cluster:
        """The described cluster that the case was measured on.

        Raises:
            CaseError: if the case names none, so that its demands on another one are not known.
        """
        if self.case.topology is None:
            raise CaseError(
                f"case {self.case.case} names no topology, so what its ops ask of another cluster is not known"
            )
        return load_cluster(self.case.topology)

    def is_moved(self, cluster: Cluster | None) -> bool:
        """Whether a cluster is another one than the case's own."""
        return cluster is not None and cluster != self.home()

    def origins(self, loop: Loop, cluster: Cluster | None, options: Options) -> dict[OpKind, str]:
        """Where the time of every op kind of the loop comes from.

        Compute and All2All times come from the fit: fitted at the world sizes of its rows, interpolated between and
        extrapolated beyond them; an All2All inside a domain is judged by the domain's size. A fitted time that is
        moved to other hardware than the case's own is extrapolated at every size. The lookup path is fitted in all,
        but its split into stages is assumed, as are dedup, sync, the synchronisation of replicas, and everything at
        another batch.
        """
        sizes = [row.world_size for row in self.case.fit]
        moved = self.is_moved(cluster)
        other_batch = self.batch_per_worker != self.case.batch_per_worker
        domain_size = options.world(loop).domain_size

        def of_fit(size: int) -> str:
            if moved:
                return "extrapolated"
            if size in sizes:
                return "fitted"
            return "interpolated" if min(sizes) < size < max(sizes) else "extrapolated"

        found: dict[OpKind, str] = {}
        for stream in loop.streams:
            size = domain_size if stream.resource is Resource.DOMAIN and domain_size else options.world_size
            for op in stream.ops:
                fitted = origin_of(op.kind) == "fitted" and not other_batch
                found[op.kind] = of_fit(size) if fitted else "assumed"
        return found

    def facts(self) -> dict[str, object]:
        """The case, for the provenance of a result."""
        return {"case": self.case.case, "case_source": self.case.source}

    def assumptions(self, loop: Loop, options: Options) -> list[dict[str, object]]:
        """What nobody published, with the values used."""
        domain_size = min(options.domain_size or self.domain_size, options.world_size)
        used = {**self.values, "micro_batches": loop.micro_batches, "domain_size": domain_size}
        return [
            {"name": name, "value": used[name], "low": each.low, "high": each.high, "why": each.why}
            for name, each in self.case.assumptions.items()
        ]


def scaled_law(growth: Growth, fixed: float, per_peer: float) -> Growth:
    """A law whose part independent of workers and part per peer are scaled apart; a power law scales as a whole."""
    return replace(growth, a=growth.a * fixed, b=growth.b if growth.mechanism == "power" else growth.b * per_peer)


def status_of(case: Case, is_baseline: bool, loop: Loop, world_size: int) -> str:
    """What the numbers of a run are: fitted, predicted, assumed or extrapolated; see `sim.costs.reproduce.Row`."""
    sizes = [row.world_size for row in case.fit]
    if world_size > max(sizes) or world_size < min(sizes):
        return "extrapolated"
    if any(stream.resource is Resource.DOMAIN for stream in loop.streams):
        return "assumed"
    return "fitted" if is_baseline and world_size in sizes else "predicted"
