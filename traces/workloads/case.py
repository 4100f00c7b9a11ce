"""A published cluster as a case: the rows that are fitted, the rows that are predicted, and everything assumed between.

A case file gives the baseline's step at one or more world sizes. `fit` turns these into one growth law each for the
lookup path, the All2All and the compute; `batch_times` gives the time of every op kind at any world size, from the fit
and the assumptions. No other published row is read by either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import numpy as np

from nestpipe.base import CaseError, Config, decode, ms_to_ns, read_yaml, unknown_name
from nestpipe.ir import Loop, OpKind, Resource
from nestpipe.timeline import METRICS

__all__ = [
    "ASSUMPTIONS",
    "Assumption",
    "Case",
    "FitRow",
    "Growth",
    "GrowthLaw",
    "GrowthLaws",
    "Method",
    "Published",
    "batch_times",
    "case_names",
    "fit",
    "growth_laws",
    "load_case",
]

Mechanism = Literal["constant", "per_peer", "log2", "power"]
_PARAMETERS: Final[Mapping[str, int]] = {"constant": 1, "per_peer": 2, "log2": 2, "power": 2}
_STAGES: Final = {
    OpKind.READ: "read_share",
    OpKind.COPY_H2D: "copy_h2d_share",
    OpKind.ALL_TO_ALL_KEYS: "keys_share",
    OpKind.LOOKUP: "lookup_share",
    OpKind.WRITE_BACK: "write_back_share",
}
_LONGEST_MS: Final = 1e9
#: The assumptions that a case must state, with the range each must lie in.
ASSUMPTIONS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "micro_batches": (1, 4096),
        "dedup_ms": (0, _LONGEST_MS),
        "sync_ms": (0, _LONGEST_MS),
        **dict.fromkeys(_STAGES.values(), (0, 1)),
        "forward_share": (0, 1),
        "update_share": (0, 1),
        "rows_share": (0, 1),
        "row_duplication": (1, 1e6),
        "all_reduce_ms": (0, _LONGEST_MS),
        "domain_size": (1, 1e6),
        "table_sync_ms": (0, _LONGEST_MS),
        "key_bytes_share": (0, 1),
    }
)
_WHOLE: Final = frozenset({"micro_batches", "domain_size"})


class Assumption(Config, frozen=True, kw_only=True):
    """An unpublished number: the value used, the plausible range over which it is varied, and why."""

    value: float
    low: float
    high: float
    why: str


class GrowthLaw(Config, frozen=True, kw_only=True):
    """How a quantity grows with the number of workers, and why."""

    mechanism: Mechanism
    why: str


class Laws(Config, frozen=True, kw_only=True):
    """The growth law of each fitted quantity."""

    lookup: GrowthLaw
    communication: GrowthLaw
    compute: GrowthLaw


class Method(Config, frozen=True, kw_only=True):
    """A published method and the schedule that stands for it."""

    method: str
    schedule: str
    baseline: bool = False


class FitRow(Config, frozen=True, kw_only=True):
    """The baseline's step at one world size, in milliseconds; compute is what lookup and communication leave."""

    world_size: int
    step_latency_ms: float
    lookup_ms: float
    communication_ms: float
    source: str

    @property
    def compute_ms(self) -> float:
        """Milliseconds of dense compute."""
        return self.step_latency_ms - self.lookup_ms - self.communication_ms


class Published(Config, frozen=True, kw_only=True):
    """Published metrics of one method at one world size, to compare with."""

    method: str
    world_size: int
    metrics: dict[str, float]
    source: str


class Case(Config, frozen=True, kw_only=True):
    """A case file; see traces/cases/ for the format by example."""

    case: str
    title: str
    source: str
    batch_per_worker: int
    base_world_size: int
    headline_world_size: int
    world_sizes: tuple[int, ...]
    methods: tuple[Method, ...]
    fit: tuple[FitRow, ...]
    growth: Laws
    assumptions: dict[str, Assumption]
    published: tuple[Published, ...] = ()
    topology: str | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_fit(self)
        _check_assumptions(self)
        names = [each.method for each in self.methods]
        if sum(each.baseline for each in self.methods) != 1:
            raise CaseError("methods: exactly one method must have 'baseline: true'")
        for row in self.published:
            if row.method not in names:
                raise CaseError("published: " + unknown_name("method", row.method, names))
            for metric in row.metrics:
                if metric not in METRICS:
                    raise CaseError(f"published: {row.method}: " + unknown_name("metric", metric, METRICS))
            if row.world_size not in self.sizes:
                raise CaseError(
                    f"published: {row.method}: world_size {row.world_size} is not among the sizes that are run, "
                    f"{', '.join(map(str, self.sizes))}; add it to world_sizes"
                )

    @property
    def baseline(self) -> Method:
        """The method that is fitted and that speedups refer to."""
        return next(each for each in self.methods if each.baseline)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All world sizes that are run, ascending."""
        return tuple(sorted({*self.world_sizes, self.base_world_size, self.headline_world_size}))

    def values(self) -> dict[str, float]:
        """The assumptions' values by name."""
        return {name: each.value for name, each in self.assumptions.items()}


def _check_sizes(case: Case) -> None:
    sizes = {"batch_per_worker": case.batch_per_worker, "base_world_size": case.base_world_size}
    sizes |= {"headline_world_size": case.headline_world_size}
    sizes |= {f"world_sizes[{i}]": size for i, size in enumerate(case.world_sizes)}
    for name, size in sizes.items():
        if size < 1:
            raise CaseError(f"{name} must be at least 1, got {size}")
    if not case.fit:
        raise CaseError("fit: at least one row of the baseline is needed")


def _check_fit(case: Case) -> None:
    for i, row in enumerate(case.fit):
        numbers = {"step_latency_ms": row.step_latency_ms, "lookup_ms": row.lookup_ms}
        numbers |= {"communication_ms": row.communication_ms, "world_size": row.world_size}
        for name, number in numbers.items():
            if not 0 < number <= _LONGEST_MS:
                raise CaseError(f"fit[{i}].{name} must be positive and at most {_LONGEST_MS:g}, got {number}")
        if row.compute_ms <= 0:
            raise CaseError(
                f"fit[{i}]: lookup_ms + communication_ms = {row.lookup_ms + row.communication_ms:g} leave no compute "
                f"in step_latency_ms = {row.step_latency_ms:g}"
            )
    sizes = [row.world_size for row in case.fit]
    if len(set(sizes)) != len(sizes):
        raise CaseError(f"fit: a world size is given twice in {sizes}")
    laws = {name: getattr(case.growth, name) for name in ("lookup", "communication", "compute")}
    for name, law in laws.items():
        if _PARAMETERS[law.mechanism] > len(sizes):
            raise CaseError(
                f"growth.{name}: {law.mechanism} has {_PARAMETERS[law.mechanism]} numbers to fit and the case "
                f"{len(sizes)} row; use 'constant' or give another row"
            )


def _check_assumptions(case: Case) -> None:
    for name in case.assumptions:
        if name not in ASSUMPTIONS:
            raise CaseError("assumptions: " + unknown_name("assumption", name, ASSUMPTIONS))
    for name, (least, most) in ASSUMPTIONS.items():
        each = case.assumptions.get(name)
        if each is None:
            raise CaseError(f"assumptions: {name} is missing; give value, low, high and why")
        for key, number in (("value", each.value), ("low", each.low), ("high", each.high)):
            if not (least <= number <= most and math.isfinite(number)):
                raise CaseError(f"assumptions.{name}.{key} must lie between {least:g} and {most:g}, got {number:g}")
            if name in _WHOLE and number != int(number):
                raise CaseError(f"assumptions.{name}.{key} must be a whole number, got {number:g}")
        if not each.low <= each.value <= each.high:
            raise CaseError(f"assumptions.{name}: value {each.value:g} must lie between low and high")
    values = case.values()
    total = sum(values[name] for name in _STAGES.values())
    if abs(total - 1) > 1e-9:
        raise CaseError(f"assumptions: {', '.join(_STAGES.values())} must sum to 1, got {total:g}")
    dense = values["forward_share"] + values["update_share"]
    if dense > 1:
        raise CaseError(f"assumptions: forward_share + update_share must not exceed 1, got {dense:g}")
    shortest = min(row.lookup_ms for row in case.fit)
    if values["dedup_ms"] > shortest:
        raise CaseError(
            f"assumptions.dedup_ms {values['dedup_ms']:g} is longer than the shortest lookup path, {shortest:g} ms"
        )


def case_names() -> tuple[str, ...]:
    """The cases that ship with the tool."""
    found = (entry.name for entry in files("traces.cases").iterdir() if entry.name.endswith(".yaml"))
    return tuple(sorted(name.removesuffix(".yaml") for name in found))


def load_case(name_or_file: str) -> Case:
    """The case of a shipped name or of a YAML file.

    Raises:
        CaseError: if there is no such case, or a number in it is missing or impossible; names file, key and value.
    """
    if name_or_file in case_names():
        text = (files("traces.cases") / f"{name_or_file}.yaml").read_text(encoding="utf-8")
        return decode(text, Case, CaseError, source=f"{name_or_file}.yaml")
    path = Path(name_or_file)
    if not path.is_file():
        raise CaseError(unknown_name("case", name_or_file, case_names()) + "; a YAML file works too")
    return read_yaml(path, Case, CaseError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A fitted growth law: milliseconds at a world size P.

    constant: a; per_peer: a + b (P - 1); log2: a + b log2 P; power: a P^b.
    """

    mechanism: Mechanism
    a: float
    b: float

    def at(self, world_size: float) -> float:
        """Milliseconds at this world size, never less than 0."""
        match self.mechanism:
            case "constant":
                return self.a
            case "per_peer":
                return max(0.0, self.a + self.b * (world_size - 1))
            case "log2":
                return max(0.0, self.a + self.b * math.log2(world_size))
            case "power":
                return float(self.a * world_size**self.b)

    def text(self) -> str:
        """The law with its numbers."""
        forms = {
            "constant": f"{self.a:.4g} ms",
            "per_peer": f"{self.a:.4g} ms + {self.b:.4g} ms x (P - 1)",
            "log2": f"{self.a:.4g} ms + {self.b:.4g} ms x log2 P",
            "power": f"{self.a:.4g} ms x P^{self.b:.4g}",
        }
        return forms[self.mechanism]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthLaws:
    """What the fit knows: a growth law each for the lookup path, the All2All and the compute."""

    lookup: Growth
    communication: Growth
    compute: Growth


def fit(rows: tuple[FitRow, ...], laws: Laws) -> GrowthLaws:
    """Growth laws through the baseline's rows: exact with as many rows as numbers, least squares with more."""

    def law(mechanism: Mechanism, quantity: str) -> Growth:
        sizes = np.array([row.world_size for row in rows], dtype=np.float64)
        times = np.array([getattr(row, quantity) for row in rows], dtype=np.float64)
        if mechanism == "constant" or len(rows) == 1:
            return Growth(mechanism="constant", a=float(times.mean()), b=0.0)
        if mechanism == "power":
            b, log_a = np.polyfit(np.log(sizes), np.log(times), 1)
            return Growth(mechanism=mechanism, a=float(np.exp(log_a)), b=float(b))
        b, a = np.polyfit(sizes - 1 if mechanism == "per_peer" else np.log2(sizes), times, 1)
        return Growth(mechanism=mechanism, a=float(a), b=float(b))

    return GrowthLaws(
        lookup=law(laws.lookup.mechanism, "lookup_ms"),
        communication=law(laws.communication.mechanism, "communication_ms"),
        compute=law(laws.compute.mechanism, "compute_ms"),
    )


def growth_laws(case: Case) -> GrowthLaws:
    """The fit of a case."""
    return fit(case.fit, case.growth)


def batch_times(work: GrowthLaws, assumptions: Mapping[str, float], loop: Loop, world_size: int) -> dict[OpKind, int]:
    """Nanoseconds per batch of each op kind of `loop` at `world_size`.

    The lookup path is dedup plus stages in fixed shares. Row and gradient All2All share the communication time; on a
    stream that runs inside a domain they take the time that the fit gives a world of the domain's size. The lookup path
    grows with the whole world in either case, since the host serves the same number of samples.

    Args:
        work: the fit.
        assumptions: a value for each of `ASSUMPTIONS`.
        loop: the schedule, for its groups and its micro-batches.
        world_size: number of ranks.
    """
    kinds = {op.kind: stream.resource for stream in loop.streams for op in stream.ops}
    in_domain = kinds.get(OpKind.ALL_TO_ALL_ROWS) is Resource.DOMAIN
    domain = min(assumptions["domain_size"], world_size)
    peers = domain if in_domain else world_size
    replicas = world_size / domain
    duplication = assumptions["row_duplication"] if loop.micro_batches > 1 else 1.0
    communication = work.communication.at(peers) * duplication
    compute = work.compute.at(world_size)
    stages = max(0.0, work.lookup.at(world_size) - assumptions["dedup_ms"])
    backward_share = 1 - assumptions["forward_share"] - assumptions["update_share"]
    times_ms = {
        OpKind.DEDUP: assumptions["dedup_ms"],
        OpKind.SYNC: assumptions["sync_ms"],
        OpKind.ALL_TO_ALL_ROWS: communication * assumptions["rows_share"],
        OpKind.ALL_TO_ALL_GRADS: communication * (1 - assumptions["rows_share"]),
        OpKind.FORWARD: compute * assumptions["forward_share"],
        OpKind.BACKWARD: compute * backward_share,
        OpKind.UPDATE: compute * assumptions["update_share"],
        OpKind.ALL_REDUCE: assumptions["all_reduce_ms"],
        OpKind.ALL_REDUCE_TABLES: assumptions["table_sync_ms"] if replicas > 1 else 0.0,
        **{kind: stages * assumptions[share] for kind, share in _STAGES.items()},
    }
    return {kind: ms_to_ns(time) for kind, time in times_ms.items() if kind in kinds}
