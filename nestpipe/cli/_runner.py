"""What `nestpipe simulate` runs: a case's loops or a model's, on one cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from nestpipe.base import CaseError

if TYPE_CHECKING:
    from nestpipe.ir import Loop
    from sim.costs import Run
    from topologies.cluster import Cluster
    from traces.keys import KeyRatios, KeyStatistics
    from traces.workloads import WorkloadModel

__all__ = ["Runner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs loops of one workload on one cluster: a case's or a model's."""

    run: Callable[..., Run]
    loop: Callable[[Loop, int | None], Loop]
    status: Callable[[Loop, str, int], str]
    facts: dict[str, object]
    assumptions: Callable[[Loop, int], list[dict[str, object]]]
    keys: Callable[[Loop, int], dict[str, Any] | None]
    moved: bool
    baseline_schedule: str
    base_world_size: int
    headline_world_size: int

    @classmethod
    def of_case(cls, name: str, cluster: Cluster | None, domain_size: int | None) -> Runner:
        """A published cluster, on other hardware if `cluster` is given."""
        from sim.costs import case_loop, case_run, home_cluster, status_of
        from traces.workloads import growth_laws, load_case

        case = load_case(name)
        values = case.values()
        if domain_size is not None:
            values["domain_size"] = domain_size

        def assumed(loop: Loop, world_size: int) -> list[dict[str, object]]:
            used = {
                **values,
                "micro_batches": loop.micro_batches,
                "domain_size": min(values["domain_size"], world_size),
            }
            return [
                {"name": name, "value": used[name], "low": each.low, "high": each.high, "why": each.why}
                for name, each in case.assumptions.items()
            ]

        return cls(
            run=partial(case_run, case, growth_laws(case), values=values, cluster=cluster, check=False),
            loop=lambda loop, micro_batches: case_loop(case, loop, values, micro_batches),
            status=lambda loop, schedule, size: status_of(case, schedule == case.baseline.schedule, loop, size),
            facts={"case": case.case, "case_source": case.source},
            assumptions=assumed,
            keys=lambda *_: None,
            moved=cluster is not None and cluster != home_cluster(case),
            baseline_schedule=case.baseline.schedule,
            base_world_size=case.base_world_size,
            headline_world_size=case.headline_world_size,
        )

    @classmethod
    def of_model(
        cls,
        name: str,
        sizes: dict[str, int],
        cluster: Cluster | None,
        batch: int | None,
        domain_size: int | None,
        compute_efficiency: float,
        keys: KeyRatios | None,
    ) -> Runner:
        """A workload model on described hardware; with `keys`, lookups and sizes follow from a key stream."""
        from nestpipe.ir import with_micro_batches
        from traces.workloads import preset

        if cluster is None:
            raise CaseError("--model needs --topology NAME|FILE: times follow from the hardware")
        workload = preset(name, sizes)
        each = _ModelRun(
            model=workload,
            cluster=cluster,
            batch=512 if batch is None else batch,
            domain_size=domain_size,
            compute_efficiency=compute_efficiency,
            keys=keys,
        )
        return cls(
            run=each.run,
            loop=lambda loop, micro_batches: loop if micro_batches is None else with_micro_batches(loop, micro_batches),
            status=lambda *_: "assumed",
            facts={
                "model": name,
                "model_tables": ", ".join(f"{t.num_rows:,} rows of {t.dim}" for t in workload.tables[:4]),
                "model_keys_per_sample": workload.lookups(1),
                "model_dense_parameters": workload.dense_parameters,
                "model_source": workload.source,
                "batch_per_rank": each.batch,
                "keys": None if keys is None else ", ".join(keys.facts["files"]),
                "keys_digest": None if keys is None else keys.digest,
            },
            assumptions=each.assumptions,
            keys=each.key_facts,
            moved=False,
            baseline_schedule="sync",
            base_world_size=cluster.ranks_per_node,
            headline_world_size=cluster.ranks_default,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelRun:
    """A model on a cluster, with the keys of a file or with none that repeats."""

    model: WorkloadModel
    cluster: Cluster
    batch: int
    domain_size: int | None
    compute_efficiency: float
    keys: KeyRatios | None

    def run(self, loop: Loop, world_size: int, **options: Any) -> Run:
        from sim.costs import demands_of_preset, hardware_run
        from sim.engine import World

        demands = demands_of_preset(
            self.model,
            self.cluster,
            loop,
            batch=self.batch,
            world_size=world_size,
            statistics=None if self.keys is None else self._statistics(self.keys, loop, world_size),
        )
        world = World(world_size=world_size, domain_size=min(self.domain_size or world_size, world_size))
        return hardware_run(
            loop,
            self.cluster,
            demands,
            world,
            global_batch=self.batch * world_size,
            compute_efficiency=self.compute_efficiency,
            **options,
        )

    def _statistics(self, keys: KeyRatios, loop: Loop, world_size: int) -> KeyStatistics:
        from sim.costs import num_owners

        return keys.at(self.batch, num_owners(loop, world_size, self.domain_size), loop.micro_batches)

    def key_facts(self, loop: Loop, world_size: int) -> dict[str, Any] | None:
        """What the step took from the keys; None without any."""
        from sim.costs import num_owners
        from traces.workloads import key_uses

        if self.keys is None:
            return None
        owners = num_owners(loop, world_size, self.domain_size)
        statistics = self._statistics(self.keys, loop, world_size)
        uses = key_uses(self.model, self.batch, loop.micro_batches, statistics)
        return {
            **self.keys.facts,
            "batch": self.batch,
            "owners": owners,
            "rows": [use._asdict() for use in uses],
            "notes": list(self.keys.notes(self.batch, owners, loop.micro_batches)),
        }

    def assumptions(self, *_: object) -> list[dict[str, object]]:
        """What nobody measured."""
        found: list[dict[str, object]] = [
            {
                "name": "compute_efficiency",
                "value": self.compute_efficiency,
                "why": "share of peak arithmetic reached",
            }
        ]
        why = "every size by roofline; no key repeats" if self.keys is None else "every size but keys by roofline"
        found.append({"name": "model", "value": self.model.name, "why": why})
        if self.keys is not None:
            own = self.keys.lookups_per_sample
            found.append(
                {
                    "name": "keys_per_sample",
                    "value": self.model.lookups(1),
                    "why": f"the model's; the files have {own:.4g}, and their ratios are taken to hold for the model",
                }
            )
            why = "all ranks take the time of the one that owns most of the keys: they wait for it in every All2All"
            found.append({"name": "busiest_owner", "value": "every rank", "why": why})
        return found
