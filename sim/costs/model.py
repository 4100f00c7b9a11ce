"""A workload model on described hardware: sizes are the model's, or those of key files, and times follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nestpipe.base import CaseError
from nestpipe.ir import Loop, OpKind, with_micro_batches
from sim.costs.demand import Demand, demands_of_preset, num_owners
from sim.costs.workload import OpCosts, Options, costs_of
from topologies.cluster import Cluster
from traces.keys import KeyRatios, KeyStatistics
from traces.workloads import WorkloadModel, key_uses

__all__ = ["ModelWorkload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorkload:
    """A model with the repeated keys of a file, or with none that repeats.

    Attributes:
        model: what a step computes.
        keys: how often keys repeat; None for never.
        batch_per_worker: samples per rank and step unless the options say otherwise.
    """

    model: WorkloadModel
    keys: KeyRatios | None = None
    batch_per_worker: int | None = None

    @property
    def domain_size(self) -> None:
        """A model has no domains of its own."""
        return

    def loop(self, loop: Loop, micro_batches: int | None = None) -> Loop:
        """The loop with the number of micro-batches asked for, or its own."""
        return loop if micro_batches is None else with_micro_batches(loop, micro_batches)

    def demands(self, loop: Loop, cluster: Cluster | None, options: Options) -> dict[OpKind, Demand]:
        """See `ByKind.demands`.

        Raises:
            CaseError: without a cluster.
            TraceError: if the keys say nothing about such a batch.
        """
        if cluster is None:
            raise CaseError("workload: a model needs a topology: clusters: {NAME: {topology: NAME or FILE}}")
        return demands_of_preset(
            self.model,
            cluster,
            loop,
            batch=self._batch(options),
            world_size=options.world_size,
            statistics=self._statistics(loop, options),
        )

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        """See `Workload.costs`."""
        return costs_of(self.demands(loop, cluster, options), loop, cluster, options)

    def _batch(self, options: Options) -> int:
        batch = self.batch_per_worker if options.batch_per_worker is None else options.batch_per_worker
        if batch is None:
            raise CaseError("batch_per_worker is missing; a model does not say how large a batch is")
        return batch

    def _statistics(self, loop: Loop, options: Options) -> KeyStatistics | None:
        if self.keys is None:
            return None
        owners = num_owners(loop, options.world_size, options.domain_size)
        return self.keys.at(self._batch(options), owners, loop.micro_batches)

    def facts(self) -> dict[str, object]:
        """The model, for the provenance of a result."""
        return {
            "model": self.model.name,
            "model_tables": ", ".join(f"{t.num_rows:,} rows of {t.dim}" for t in self.model.tables[:4]),
            "model_keys_per_sample": self.model.lookups(1),
            "model_dense_parameters": self.model.dense_parameters,
            "model_source": self.model.source,
            "batch_per_rank": self.batch_per_worker,
            "keys": None if self.keys is None else ", ".join(self.keys.facts["files"]),
            "keys_digest": None if self.keys is None else self.keys.digest,
        }

    def key_facts(self, loop: Loop, options: Options) -> dict[str, Any] | None:
        """What the step took from the keys; None without any."""
        statistics = self._statistics(loop, options)
        if self.keys is None or statistics is None:
            return None
        batch, owners = self._batch(options), num_owners(loop, options.world_size, options.domain_size)
        uses = key_uses(self.model, batch, loop.micro_batches, statistics)
        return {
            **self.keys.facts,
            "batch": batch,
            "owners": owners,
            "rows": [use._asdict() for use in uses],
            "notes": list(self.keys.notes(batch, owners, loop.micro_batches)),
        }

    def assumptions(self, loop: Loop, options: Options) -> list[dict[str, object]]:  # noqa: ARG002
        """What nobody measured."""
        sizes = "every size by roofline; no key repeats" if self.keys is None else "every size but keys by roofline"
        found: list[tuple[str, object, str]] = [
            ("compute_efficiency", options.compute_efficiency, "share of peak arithmetic reached"),
            ("model", self.model.name, sizes),
        ]
        if self.keys is not None:
            own = self.keys.lookups_per_sample
            why = f"the model's; the files have {own:.4g}, and their ratios are taken to hold for the model"
            found.append(("keys_per_sample", self.model.lookups(1), why))
            why = "all ranks take the time of the one that owns most of the keys: they wait for it in every All2All"
            found.append(("busiest_owner", "every rank", why))
        return [{"name": name, "value": value, "why": why} for name, value, why in found]
