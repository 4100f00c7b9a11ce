"""The configurations of a scenario: a grid that is never held in memory, addressed by index.

Axes, slowest first: cluster, variant, world size, batch, then `sweep.axes` in the order of the file. A variant is a
schedule with its number of micro-batches and its domain size; schedules that have neither are not repeated for them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Final, NamedTuple, TypeAlias, get_args

import msgspec

from nestpipe.base import CaseError, DeadlockError, NestPipeError, ScheduleError, explain, unknown_name
from nestpipe.checks import num_micro_batches_to_check, require_safe
from nestpipe.ir import Loop, OpKind, Resource, with_micro_batches
from nestpipe.schedules import load
from sim.costs import CaseWorkload, ModelWorkload, TraceWorkload, anchored_trace
from sim.scenario.assumptions import check_assumptions
from sim.scenario.file import Scenario
from sim.scenario.sections import ClusterChoice, Keys, Range, WorkloadChoice
from topologies.cluster import Cluster, load_cluster
from traces.keys import KeyRatios, read_key_files
from traces.table import read_table
from traces.workloads import ASSUMPTIONS, Case, preset

__all__ = [
    "AUTO_MICRO_BATCHES_MAX",
    "OWN_CLUSTER",
    "Configuration",
    "Grid",
    "Value",
    "Variant",
    "loop_of",
    "sweepable",
    "with_value",
]

Value: TypeAlias = float | int | str
#: The name of the only cluster of a scenario that lists none: the one that the workload was measured on.
OWN_CLUSTER: Final = "own"
#: `micro_batches: auto` tries the powers of two up to this and to the batch per worker.
AUTO_MICRO_BATCHES_MAX: Final = 64
_SECTIONS: Final = ("factors", "micro_batching", "jitter", "stragglers", "memory", "failures")


class Variant(NamedTuple):
    """A schedule, its number of micro-batches and, where it has domains, their size."""

    schedule: str
    micro_batches: int
    domain_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One point of the grid. `settings` are the values of `sweep.axes`, by dotted path."""

    index: int
    cluster: str
    variant: Variant
    world_size: int
    batch_per_worker: int | None
    global_batch: int | None
    settings: tuple[tuple[str, Value], ...] = ()

    def at(self, world_size: int) -> Configuration:
        """The same at another world size."""
        return replace(self, world_size=world_size)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A scenario with everything that it names loaded, so that it can be evaluated on another machine.

    Attributes:
        scenario: as in the file.
        workload: the case, model or trace.
        loops: for each schedule its loop.
        hardware: for each cluster with a topology what that describes.
        staleness: for each schedule and number of micro-batches that stands for its own (see `nestpipe.checks.window`)
        how
            many updates a read may be behind, or why the schedule must not run at all.
    """

    scenario: Scenario
    workload: CaseWorkload | ModelWorkload | TraceWorkload
    loops: Mapping[str, Loop]
    hardware: Mapping[str, Cluster] = field(default_factory=dict)
    staleness: Mapping[tuple[str, int], int | str] = field(default_factory=dict)

    @classmethod
    def of(cls, scenario: Scenario) -> Grid:
        """Loads what the scenario names and checks every value of every axis.

        Raises:
            CaseError: if a name is unknown or a value impossible.
            ScheduleError: if a schedule cannot be read.
        """
        choice = scenario.workload
        described = {name: each.topology for name, each in scenario.clusters.items() if each.topology is not None}
        hardware = {name: load_cluster(topology) for name, topology in described.items()}
        scenario = _filled(scenario, hardware)
        grid = cls(
            scenario=scenario,
            workload=_workload(choice),
            loops={name: load(name) for name in scenario.schedules},
            hardware=hardware,
        )
        if grid.case is not None:
            check_assumptions(grid.case, scenario)
        for key, values in grid.axes.items():
            for value in values:
                changed = with_value(scenario, key, value)
                if grid.case is not None and key.startswith("workload."):
                    check_assumptions(grid.case, changed)
        checked: dict[tuple[str, int], int | str] = {}
        for variant in grid.variants:
            loop = loop_of(grid, variant)
            key_of = (variant.schedule, num_micro_batches_to_check(loop))
            if key_of not in checked:
                checked[key_of] = _staleness(with_micro_batches(loop, key_of[1]))
        return replace(grid, staleness=checked)

    @cached_property
    def axes(self) -> dict[str, tuple[Value, ...]]:
        """The values of each of `sweep.axes`."""
        axes = self.scenario.sweep.axes
        return {key: each.values() if isinstance(each, Range) else each for key, each in axes.items()}

    @property
    def batch_per_worker(self) -> int | None:
        """The workload's own batch per worker; None for a model, which has none."""
        return self.workload.batch_per_worker

    @property
    def case(self) -> Case | None:
        """The case, where the workload is one."""
        return self.workload.case if isinstance(self.workload, CaseWorkload) else None

    @property
    def keys(self) -> KeyRatios | None:
        """The key files that a model's lookups are like, where it names some."""
        return self.workload.keys if isinstance(self.workload, ModelWorkload) else None

    @cached_property
    def clusters(self) -> Mapping[str, ClusterChoice]:
        """The candidate clusters by name."""
        return self.scenario.clusters or {OWN_CLUSTER: ClusterChoice()}

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Every schedule with every number of micro-batches and domain size that applies to it."""
        found = []
        for name in self.scenario.schedules:
            loop = self.loops[name]
            domains = any(stream.resource in (Resource.DOMAIN, Resource.REPLICA) for stream in loop.streams)
            for micro_batches in self._micro_batches(loop):
                found += [Variant(name, micro_batches, size) for size in (self._domain_sizes() if domains else (None,))]
        return tuple(found)

    def _micro_batches(self, loop: Loop) -> tuple[int, ...]:
        given = self.scenario.micro_batches
        if loop.micro_batches == 1:
            return (1,)
        if given is None:
            return (self._assumed("micro_batches", loop.micro_batches),)
        if given == "auto":
            batches = [batch for batch in self.batches if batch is not None]
            most = min(AUTO_MICRO_BATCHES_MAX, max(batches, default=AUTO_MICRO_BATCHES_MAX))
            return tuple(2**power for power in range(int(math.log2(most)) + 1))
        return (given,) if isinstance(given, int) else tuple(int(each) for each in given)

    def _domain_sizes(self) -> tuple[int | None, ...]:
        given = self.scenario.domain_sizes
        if given is None:
            return (self._assumed("domain_size", 0) or None,)
        return (given,) if isinstance(given, int) else given

    def _assumed(self, name: str, otherwise: int) -> int:
        chosen = self.scenario.workload.assumptions.get(name)
        if chosen is None and self.case is not None:
            chosen = self.case.values()[name]
        return int(otherwise if chosen is None else chosen)

    @cached_property
    def batches(self) -> tuple[int | None, ...]:
        """The batches to try: per worker, or global where the scenario fixes that; None for the workload's own."""
        given = self.scenario.global_batch
        given = self.scenario.batch_per_worker if given is None else given
        return (given,) if given is None or isinstance(given, int) else given

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        axes = [self.clusters, self.variants, self.scenario.world_sizes, self.batches, *self.axes.values()]
        return tuple(len(axis) for axis in axes)

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __getitem__(self, index: int) -> Configuration:
        if not 0 <= index < len(self):
            raise IndexError(index)
        digits, rest = [], index
        for size in reversed(self._sizes):
            rest, digit = divmod(rest, size)
            digits.append(digit)
        cluster, variant, world_size, batch, *others = reversed(digits)
        chosen = self.batches[batch]
        fixed = self.scenario.global_batch is not None
        return Configuration(
            index=index,
            cluster=list(self.clusters)[cluster],
            variant=self.variants[variant],
            world_size=self.scenario.world_sizes[world_size],
            batch_per_worker=None if fixed else chosen,
            global_batch=chosen if fixed else None,
            settings=tuple((key, self.axes[key][digit]) for key, digit in zip(self.axes, others, strict=True)),
        )

    def stale(self, variant: Variant) -> int:
        """How many updates a read of this variant may be behind.

        Raises:
            ScheduleError: if the schedule must not run at all.
        """
        found = self.staleness[variant.schedule, num_micro_batches_to_check(loop_of(self, variant))]
        if isinstance(found, str):
            raise ScheduleError(found)
        return found

    def chosen(self) -> tuple[int, ...] | range:
        """The indices that the search tries, ascending: all of them, or `points` drawn with `sweep.seed`."""
        sweep = self.scenario.sweep
        if sweep.search == "grid" or sweep.points is None or sweep.points >= len(self):
            return range(len(self))
        return tuple(sorted(random.Random(sweep.seed).sample(range(len(self)), sweep.points)))


def sweepable(scenario: Scenario) -> Iterator[str]:
    """The dotted paths of the keys that `sweep.axes` may vary."""
    for section in _SECTIONS:
        part = getattr(scenario, section)
        if part is not None:
            yield from (f"{section}.{name}" for name in part.__struct_fields__ if name not in ("time", "why", "source"))
    for name, cluster in scenario.clusters.items():
        fields = [field for field in cluster.__struct_fields__ if field not in ("factors", "source", "topology")]
        yield from (f"clusters.{name}.{field}" for field in fields)
        factors = [field for field in cluster.factors.__struct_fields__ if field != "time"]
        yield from (f"clusters.{name}.factors.{field}" for field in factors)
    yield from (f"workload.assumptions.{name}" for name in ASSUMPTIONS if name not in ("micro_batches", "domain_size"))


def with_value(scenario: Scenario, key: str, value: Value) -> Scenario:
    """The scenario with another value at a dotted path, validated.

    Raises:
        CaseError: if the key is unknown or cannot be varied, or if the value is impossible.
    """
    if key not in set(sweepable(scenario)) and not key.startswith("factors.time."):
        raise CaseError("sweep.axes: " + unknown_name("key", key, sweepable(scenario)))
    try:
        changed: Scenario = _replaced(scenario, Scenario, key, value)
        return changed
    except (ValueError, msgspec.ValidationError) as cause:
        raise CaseError(f"sweep.axes.{key}: {cause}") from None


def _replaced(node: Any, kind: Any, path: str, value: Value) -> Any:
    """The node, of type `kind`, with another value at a dotted path; a name in a mapping may have dots itself."""
    if not path:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # a range counts in floats; a number that must be whole may come from it
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as cause:
            raise ValueError(explain(cause, value, kind)) from None
    if isinstance(node, dict):
        name = max((each for each in node if f"{path}.".startswith(f"{each}.")), key=len, default=path)
        inner = next(each for each in reversed(get_args(kind)) if each is not str)
        return {**node, name: _replaced(node.get(name), inner, path[len(name) + 1 :], value)}
    name, _, rest = path.partition(".")
    found = _replaced(getattr(node, name), _type_of(node.__class__, name), rest, value)
    return msgspec.structs.replace(node, **{name: found})


@cache
def _type_of(struct: type, name: str) -> Any:
    """The type of a field."""
    return next(field.type for field in msgspec.structs.fields(struct) if field.name == name)


def loop_of(grid: Grid, variant: Variant) -> Loop:
    """The loop of a variant."""
    return with_micro_batches(grid.loops[variant.schedule], variant.micro_batches)


def _filled(scenario: Scenario, hardware: Mapping[str, Cluster]) -> Scenario:
    """The scenario with prices, memory and sizes of clusters taken from their topologies where it gives none.

    Raises:
        CaseError: if costs are asked for and neither gives a price.
    """
    clusters = dict(scenario.clusters)
    for name, each in hardware.items():
        price = each.price_usd_per_accelerator_hour
        known = {
            "accelerator_hour": None if price is None else price.value,
            "device_memory_bytes": int(each.accelerator.memory_capacity_bytes.value),
            "host_memory_bytes": int(each.host.dram_capacity_bytes.value),
            "accelerators_per_host": each.host.accelerators_per_host,
            "world_size_max": each.ranks_max,
        }
        given = clusters[name]
        missing = {key: value for key, value in known.items() if getattr(given, key) is None}
        clusters[name] = msgspec.structs.replace(given, **missing)
    needs = scenario.objective is not None and scenario.objective.metric.startswith("cost")
    needs |= scenario.constraints.cost_per_hour_max is not None
    needs |= scenario.constraints.cost_per_million_samples_max is not None
    for name, cluster in clusters.items():
        if needs and cluster.accelerator_hour is None:
            raise CaseError(f"clusters.{name}.accelerator_hour: its topology has no price; give one")
    return msgspec.structs.replace(scenario, clusters=clusters)


def _workload(choice: WorkloadChoice) -> CaseWorkload | ModelWorkload | TraceWorkload:
    """What a scenario names, loaded."""
    if choice.case is not None:
        return CaseWorkload.of(choice.case)
    if choice.trace is not None:
        return _trace(choice.trace, choice.recorded_batch_per_worker)
    assert choice.model is not None
    keys = None if choice.keys is None else _ratios(choice.keys)
    return ModelWorkload(model=preset(choice.model, choice.model_sizes), keys=keys)


def _ratios(keys: Keys) -> KeyRatios:
    """The key files of a scenario, read."""
    files = read_key_files(
        keys.files, columns=keys.columns or None, order_by=keys.order_by, sequence=keys.sequence, only=True
    )
    return KeyRatios(files, drawn=keys.resample, seed=keys.seed)


def _trace(path: str, batch_per_worker: int | None) -> TraceWorkload:
    """A trace table, with its host and its anchor where it shows them; else the times of the ops that it knows."""
    frame = read_table(path).frame
    try:
        return anchored_trace(frame, batch_per_worker=batch_per_worker)[0]
    except NestPipeError:
        known = frame["kind"].astype(str).isin([kind.value for kind in OpKind]) & frame["duration_ns"].notna()
        return TraceWorkload(frame=frame[known].reset_index(drop=True), batch_per_worker=batch_per_worker)


def _staleness(loop: Loop) -> int | str:
    """How many updates a read may be behind, or why the schedule must not run."""
    try:
        return require_safe(loop, allow_staleness=sys.maxsize).worst_staleness
    except (ScheduleError, DeadlockError) as error:
        return str(error).splitlines()[0]
