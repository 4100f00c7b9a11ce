"""A scenario file: the workload, the candidate clusters, what to try, what must hold, and what is to be best.

One file serves `scale`, `sweep` and `plan`; each reads what it needs. A key with a list is tried with every value, and
`sweep.axes` adds any other numeric key by its dotted path. docs/planning.md describes every key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from nestpipe.base import GIB, CaseError, Config, Count, Positive, bytes_text, parse_bytes, read_yaml, unknown_name
from nestpipe.schedules import names
from sim.scenario.sections import (
    ClusterChoice,
    Constraints,
    Factors,
    Failures,
    JitterModel,
    Memory,
    MicroBatching,
    Objective,
    Seed,
    Stragglers,
    Sweep,
    WorkloadChoice,
    WorldSize,
)

__all__ = ["Scenario", "load_scenario", "warnings"]

_Many: TypeAlias = Annotated[int, Meta(ge=1, le=100_000)]


class Scenario(Config, frozen=True, kw_only=True):
    """The whole file. Lists are tried with every value; `seeds` is how often what is random is drawn.

    With `contention`, on clusters with a topology, ops that overlap share links, hosts and copy engines; every
    configuration is then simulated, which takes some hundred times longer than its cycle bound.
    """

    scenario: str
    title: str = ""
    workload: WorkloadChoice
    clusters: dict[str, ClusterChoice] = msgspec.field(default_factory=dict)
    schedules: tuple[str, ...]
    world_sizes: tuple[WorldSize, ...]
    base_world_size: WorldSize | None = None
    batch_per_worker: tuple[Count, ...] | Count | None = None
    global_batch: tuple[Count, ...] | Count | None = None
    micro_batches: tuple[Count, ...] | Count | Literal["auto"] | None = None
    domain_sizes: tuple[Count, ...] | Count | None = None
    factors: Factors = Factors()
    micro_batching: MicroBatching = MicroBatching()
    jitter: JitterModel = JitterModel()
    stragglers: Stragglers = Stragglers()
    vary_assumptions: bool = False
    seeds: _Many = 10
    seed: Seed = 0
    steps: _Many = 20
    contention: bool = False
    efficiency_threshold: Positive = 0.9
    memory: Memory | None = None
    failures: Failures | None = None
    currency: str = "USD"
    sweep: Sweep = Sweep()
    objective: Objective | None = None
    constraints: Constraints = Constraints()

    def __post_init__(self) -> None:
        for name in ("schedules", "world_sizes"):
            if not getattr(self, name):
                raise ValueError(f"{name}: give at least one")
        for name in ("schedules", "world_sizes", "batch_per_worker", "global_batch", "micro_batches", "domain_sizes"):
            values = getattr(self, name)
            values = values if isinstance(values, tuple) else () if values in (None, "auto") else (values,)
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: a value is given twice")
        if self.batch_per_worker is not None and self.global_batch is not None:
            raise ValueError("batch_per_worker and global_batch contradict each other; give one")
        _priced(self)
        _reachable(self)
        topologies = [cluster.topology for cluster in self.clusters.values()]
        if self.workload.model is not None and (not topologies or None in topologies):
            raise ValueError("workload.model needs clusters, each with a topology: its times follow from the hardware")
        if self.contention and (not topologies or None in topologies):
            raise ValueError(
                "contention needs clusters, each with a topology: what is shared follows from the hardware"
            )
        if self.vary_assumptions and self.workload.case is None:
            raise ValueError("vary_assumptions needs a case: a trace or a model states no ranges")

    @property
    def is_random(self) -> bool:
        """Whether seeds differ: jitter, stragglers or varied assumptions."""
        return self.jitter.cv > 0 or self.stragglers.share > 0 or self.vary_assumptions


def _priced(scenario: Scenario) -> None:
    """Costs need prices: an objective or a budget without them cannot be answered."""
    asked = [
        name for name in ("cost_per_hour_max", "cost_per_million_samples_max") if getattr(scenario.constraints, name)
    ]
    asked = [f"constraints.{name}" for name in asked]
    if scenario.objective is not None and scenario.objective.metric.startswith("cost"):
        asked.append(f"objective {scenario.objective.metric}")
    if not asked:
        return
    free = [name for name, cluster in scenario.clusters.items() if cluster.accelerator_hour == 0]
    if free and asked[-1].startswith("objective"):
        raise ValueError(
            f"clusters.{free[0]}.accelerator_hour is 0, so {asked[-1]} is 0 whatever is chosen; give a price or "
            "another objective"
        )
    unpriced = [
        name
        for name, cluster in scenario.clusters.items()
        if cluster.accelerator_hour is None and cluster.topology is None
    ]
    if unpriced or not scenario.clusters:
        where = f"clusters.{unpriced[0]}.accelerator_hour" if unpriced else "clusters.NAME.accelerator_hour"
        raise ValueError(f"{asked[0]} needs a price: give {where}")


def _reachable(scenario: Scenario) -> None:
    """Constraints that no listed value can meet contradict the file itself."""
    constraints = scenario.constraints
    sizes = scenario.world_sizes
    if constraints.world_size_max is not None and min(sizes) > constraints.world_size_max:
        raise ValueError(
            f"constraints.world_size_max {constraints.world_size_max} contradicts world_sizes, "
            f"which start at {min(sizes)}"
        )
    if constraints.world_size_min is not None and max(sizes) < constraints.world_size_min:
        raise ValueError(
            f"constraints.world_size_min {constraints.world_size_min} contradicts world_sizes, "
            f"which end at {max(sizes)}"
        )
    if constraints.expected_qps_min is not None and scenario.failures is None:
        raise ValueError("constraints.expected_qps_min needs 'failures': without them expected QPS is not known")
    if scenario.objective is not None and scenario.objective.metric == "device_bytes" and scenario.memory is None:
        raise ValueError("objective device_bytes needs 'memory'")


def warnings(scenario: Scenario) -> tuple[str, ...]:
    """What is allowed and probably not meant: devices with less memory than any accelerator has."""
    found = []
    for name, cluster in scenario.clusters.items():
        size = cluster.device_memory_bytes
        if size is not None and parse_bytes(size) < GIB:
            found.append(
                f"clusters.{name}.device_memory_bytes is {bytes_text(parse_bytes(size))}, less than 1 GiB; "
                "is a unit missing? Write 64 GiB, for example"
            )
    return tuple(found)


def load_scenario(path: Path | str) -> Scenario:
    """The scenario of a YAML file. Files that it names are relative to its folder.

    Raises:
        CaseError: if it cannot be read, has an unknown key or an impossible value; names file, key and value.
    """
    path = Path(path)
    scenario = read_yaml(path, Scenario, CaseError)
    return _beside(scenario, path.parent)


def _beside(scenario: Scenario, folder: Path) -> Scenario:
    """The scenario with relative file names that exist beside it made paths."""

    def found(name: str | None) -> str | None:
        return str(folder / name) if name is not None and (folder / name).is_file() else name

    choice = scenario.workload
    keys = choice.keys
    if keys is not None:
        keys = msgspec.structs.replace(keys, files=tuple(found(file) or file for file in keys.files))
    clusters = {
        name: msgspec.structs.replace(cluster, topology=found(cluster.topology))
        for name, cluster in scenario.clusters.items()
    }
    return msgspec.structs.replace(
        scenario,
        clusters=clusters,
        workload=msgspec.structs.replace(choice, case=found(choice.case), trace=found(choice.trace), keys=keys),
        schedules=tuple(_known(found(name)) for name in scenario.schedules),
    )


def _known(schedule: str | None) -> str:
    if schedule is None or (schedule not in names() and not Path(schedule).is_file()):
        raise CaseError("schedules: " + unknown_name("schedule", schedule or "", names()) + "; a file works too")
    return schedule
