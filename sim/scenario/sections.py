"""The sections of a scenario file: workload, clusters, factors, randomness, memory, failures, search, objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from nestpipe.base import AtLeastOne, Config, Count, NotNegative, Positive, Share, parse_bytes, unknown_name
from nestpipe.ir import OpKind

__all__ = [
    "METRICS",
    "ClusterChoice",
    "Constraints",
    "Factors",
    "Failures",
    "JitterModel",
    "Keys",
    "Memory",
    "MicroBatching",
    "Objective",
    "Range",
    "Seed",
    "Stragglers",
    "Sweep",
    "WorkloadChoice",
    "WorldSize",
]

#: What can be the objective: the name of a result column and whether less of it is better.
METRICS: Final[Mapping[str, bool]] = {
    "step_ms": True,
    "cost_per_hour": True,
    "cost_per_million_samples": True,
    "device_bytes": True,
    "world_size": True,
    "qps": False,
    "expected_qps": False,
    "scaling_efficiency": False,
}
Bytes: TypeAlias = int | str
_VALUES_MAX: Final = 100_000
_POINTS_MAX: Final = 10_000_000
#: Seeds of random generators are whole numbers from 0.
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
WorldSize: TypeAlias = Annotated[int, Meta(ge=1, le=2**24)]
_Cv: TypeAlias = Annotated[float, Meta(ge=0, le=10)]
_Long: TypeAlias = Annotated[float, Meta(gt=0, le=1e15)]


def _size(name: str, value: Bytes) -> int:
    """The bytes of a key's value; a ValueError names the key."""
    try:
        return parse_bytes(value)
    except ValueError as cause:
        raise ValueError(f"{name}: {cause}") from None


class Keys(Config, frozen=True, kw_only=True):
    """Key files whose ratios of repeated keys a model's lookups have; see docs/keys.md.

    Attributes:
        files: one after the other.
        columns: which hold keys; the layout's own choice without.
        order_by: column to sort the samples by; file order without.
        sequence: makes samples of user histories of so many items; needs two columns, user and item.
        resample: draws samples with replacement where the files are too short; extrapolates otherwise.
        seed: of the draw and of clustering.
    """

    files: tuple[str, ...]
    columns: tuple[str, ...] = ()
    order_by: str | None = None
    sequence: Count | None = None
    resample: bool = False
    seed: Seed = 0

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files: give at least one")


class WorkloadChoice(Config, frozen=True, kw_only=True):
    """Where the times of the ops come from: exactly one of case, trace and model.

    Attributes:
        case: a published cluster, by name or file; moves to a topology if the case names its own.
        trace: a trace table; it must say how many samples a rank trained per step, `recorded_batch_per_worker`.
        model: a workload model; needs clusters with a topology.
        keys: key files that the model's lookups are like; without them no key repeats.
        model_sizes: replaces sizes of the model, such as dim, layers, sequence_length or num_items.
        assumptions: replaces values that a case assumes.
        compute_efficiency: share of an accelerator's arithmetic rate that is reached on a topology; assumed.
    """

    case: str | None = None
    trace: str | None = None
    model: str | None = None
    model_sizes: dict[str, int] = msgspec.field(default_factory=dict)
    keys: Keys | None = None
    recorded_batch_per_worker: Count | None = None
    compute_efficiency: Annotated[float, Meta(gt=0, le=1)] = 1.0
    assumptions: dict[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in ("case", "trace", "model") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of case, trace and model, got {', '.join(given) or 'none'}")
        if self.assumptions and self.case is None:
            raise ValueError("assumptions belong to a case; drop them or give one")
        if self.model_sizes and self.model is None:
            raise ValueError("model_sizes belong to a model; drop them or give one")
        if self.keys is not None and self.model is None:
            raise ValueError("keys belong to a model; a case or a trace states times, which keys do not change")
        if (self.trace is None) != (self.recorded_batch_per_worker is None):
            raise ValueError("trace and recorded_batch_per_worker belong together")


class Factors(Config, frozen=True, kw_only=True):
    """What differs from the workload's own cluster, as factors on it; 1 changes nothing.

    Attributes:
        link_bandwidth: on the bandwidth of all links: divides the part of a collective's time that bytes cause.
        peer_cost: on the part of collectives and lookup path that grows with the number of peers.
        communication_time: on the whole time of every collective.
        lookup_cost: on the time of host lookups and write-backs.
        compute_time: on forward, backward, update and dedup.
        skew: load of the busiest owner of rows over the mean, relative to the workload's own.
        row_duplication: bytes of rows and gradients sent with micro-batches over those sent without.
        time: on the time of single op kinds, by their name in schedule text.
    """

    link_bandwidth: Positive = 1.0
    peer_cost: NotNegative = 1.0
    communication_time: NotNegative = 1.0
    lookup_cost: NotNegative = 1.0
    compute_time: NotNegative = 1.0
    skew: Positive = 1.0
    row_duplication: AtLeastOne = 1.0
    time: dict[str, NotNegative] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind in self.time:
            if kind not in list(OpKind):
                raise ValueError("time: " + unknown_name("op kind", kind, list(OpKind)))

    def combined(self, other: Factors) -> Factors:
        """Both at once: the products."""
        names = [field for field in self.__struct_fields__ if field != "time"]
        kinds = {*self.time, *other.time}
        return Factors(
            **{name: getattr(self, name) * getattr(other, name) for name in names},
            time={kind: self.time.get(kind, 1.0) * other.time.get(kind, 1.0) for kind in sorted(kinds)},
        )


class ClusterChoice(Config, frozen=True, kw_only=True):
    """A candidate cluster: how it differs from the workload's own, its memory and its price.

    With a `topology`, name or file, times follow from it, and what is not given here is taken from it. Memory is given
    in bytes or as text with a unit (`64 GiB`). `accelerator_hour` is the price of one for an hour.
    """

    topology: str | None = None
    factors: Factors = Factors()
    accelerator_hour: NotNegative | None = None
    device_memory_bytes: Bytes | None = None
    host_memory_bytes: Bytes | None = None
    accelerators_per_host: Count | None = None
    world_size_max: Count | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("device_memory_bytes", "host_memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 1 <= _size(name, value) < 2**63:
                raise ValueError(f"{name} must be at least 1 and fit 63 bits, got {value!r}")


class MicroBatching(Config, frozen=True, kw_only=True):
    """What more micro-batches cost: a fixed time per op and micro-batch, and rows sent twice for every doubling."""

    overhead_us: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    row_duplication_per_doubling: Annotated[float, Meta(ge=1, le=2)] = 1.0
    why: str = ""


class JitterModel(Config, frozen=True, kw_only=True):
    """The coefficient of variation of every local op of every rank (lognormal, mean 1)."""

    cv: _Cv = 0.0


class Stragglers(Config, frozen=True, kw_only=True):
    """Slow ranks: each rank is one with probability `share`; its ops take `slowdown` x lognormal(1, `cv`), >= 1."""

    share: Share = 0.0
    slowdown: AtLeastOne = 1.0
    cv: _Cv = 0.0


class Memory(Config, frozen=True, kw_only=True):
    """What has to fit; sizes per row, key, sample or worker, see `sim.scenario.memory`."""

    table_rows: NotNegative
    row_bytes: Bytes
    optimizer_row_bytes: Bytes = 0
    keys_per_sample: NotNegative
    unique_ratio: Share = 1.0
    key_bytes: Count = 8
    sample_bytes: Bytes = 0
    activation_bytes_per_sample: Bytes
    dense_parameter_bytes: Bytes
    dense_optimizer_bytes: Bytes = 0
    reserved_device_bytes: Bytes = 0
    reserved_host_bytes: Bytes = 0
    source: str = ""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if name.endswith(("bytes", "bytes_per_sample")):
                _size(name, getattr(self, name))


class Failures(Config, frozen=True, kw_only=True):
    """How often something breaks and what it costs.

    Attributes:
        accelerator_mtbf_hours: mean time between failures that stop the job, per accelerator.
        restart_s: from the failure to the first new step, the checkpoint read included.
        checkpoint_s: time that training stands still for one checkpoint.
        checkpoint_interval_s: training time between checkpoints; left out, the best one is used.
        horizon_hours: how long the job runs; a month.
    """

    accelerator_mtbf_hours: _Long
    restart_s: NotNegative
    checkpoint_s: NotNegative
    checkpoint_interval_s: Positive | None = None
    horizon_hours: _Long = 730.0
    source: str = ""


class Range(Config, frozen=True, kw_only=True):
    """`num` values from `from` to `to`, evenly spaced or, with `scale: log`, evenly spaced in the logarithm."""

    start: float = msgspec.field(name="from")
    to: float
    num: Annotated[int, Meta(ge=2, le=_VALUES_MAX)]
    scale: Literal["linear", "log"] = "linear"

    def __post_init__(self) -> None:
        if self.scale == "log" and not (self.start > 0 and self.to > 0):
            raise ValueError(f"a log range needs positive ends, got {self.start:g} .. {self.to:g}")

    def values(self) -> tuple[float, ...]:
        """The values, ends exact."""
        steps = [i / (self.num - 1) for i in range(self.num)]
        if self.scale == "log":
            inner = [self.start * (self.to / self.start) ** step for step in steps]
        else:
            inner = [self.start + (self.to - self.start) * step for step in steps]
        return (self.start, *inner[1:-1], self.to)


class Sweep(Config, frozen=True, kw_only=True):
    """Which further keys are varied, and how many of the combinations are tried."""

    axes: dict[str, tuple[int | float | str, ...] | Range] = msgspec.field(default_factory=dict)
    search: Literal["grid", "random", "halving"] = "grid"
    points: Annotated[int, Meta(ge=1, le=_POINTS_MAX)] | None = None
    keep: Annotated[float, Meta(ge=0.01, le=0.9)] = 0.25
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.search != "grid" and self.points is None:
            raise ValueError(f"search: {self.search} needs 'points', how many combinations to try")
        for key, values in self.axes.items():
            if not isinstance(values, Range) and len(set(values)) != len(values):
                raise ValueError(f"axes.{key}: a value is given twice")
            if not isinstance(values, Range) and not values:
                raise ValueError(f"axes.{key}: give at least one value")


class Objective(Config, frozen=True, kw_only=True):
    """What is to be best: exactly one of minimise and maximise, the name of a result."""

    minimise: str | None = None
    maximise: str | None = None

    def __post_init__(self) -> None:
        if (self.minimise is None) == (self.maximise is None):
            raise ValueError("give exactly one of minimise and maximise")
        if self.metric not in METRICS:
            raise ValueError(unknown_name("objective", self.metric, METRICS))
        if (self.minimise is not None) is not METRICS[self.metric]:
            raise ValueError(f"{self.metric} is to be {'minimised' if METRICS[self.metric] else 'maximised'}")

    @property
    def metric(self) -> str:
        """The result column."""
        return self.minimise or self.maximise or ""


class Constraints(Config, frozen=True, kw_only=True):
    """What must hold; None asks nothing. A configuration may be stale by no more than `staleness_max` updates."""

    qps_min: NotNegative | None = None
    qps_max: NotNegative | None = None
    expected_qps_min: NotNegative | None = None
    step_ms_max: NotNegative | None = None
    cost_per_hour_max: NotNegative | None = None
    cost_per_million_samples_max: NotNegative | None = None
    scaling_efficiency_min: Annotated[float, Meta(ge=0, le=2)] | None = None
    world_size_min: Annotated[int, Meta(ge=0)] | None = None
    world_size_max: Annotated[int, Meta(ge=0)] | None = None
    staleness_max: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        for name in ("qps", "world_size"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if low is not None and high is not None and low > high:
                raise ValueError(f"{name}_min {low:g} and {name}_max {high:g} contradict each other")
