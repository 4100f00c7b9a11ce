"""The cost table: what ops took on the devices at hand, and fits that say what they take at other sizes.

One row is one op kind at one size: PARAM-like columns (sizes, then mean, min, median and upper percentiles of the
time), the conditions (world size, link rate, variant) and the source. The table is data; nothing here runs or measures
anything.

A fit is time = wire + c0 + c1 x + ... with coefficients that are not negative, in sizes with a meaning for the kind. It
is a fit of means, since what a step takes on average is the sum of what its ops take on average; the slowest twentieth
of the ops counts as if it took as long as the fastest of them, so that one that hung says little.
Small and large sizes count alike: relative errors are minimised. It knows the range of sizes it has seen, and says of
every answer whether that is interpolated or extrapolated.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nestpipe.base import TraceError, unknown_name
from nestpipe.ir import COLLECTIVES, OpKind
from traces.formats import load_json

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COST_COLUMNS",
    "SIZE_COLUMNS",
    "CostFit",
    "CostTable",
    "costs_of",
    "fit_kind",
    "read_cost_table",
    "resample",
    "summarise",
]

#: The sizes a cost may depend on. `wire_ns` is the time that the busiest link of a collective needs for its bytes at
#: the rate of that link, less what an idle link lets through at once; 0 for everything that uses no link.
SIZE_COLUMNS: Final = ("samples", "keys", "unique_keys", "bytes", "wire_ns")
_CONDITIONS: Final = ("kind", "variant", "world_size", "link_bits_per_s")
_TIMES: Final = ("time_ns_mean", "time_ns_min", "time_ns_p50", "time_ns_p75", "time_ns_p95", "time_ns_max")
COST_COLUMNS: Final = (*_CONDITIONS, *SIZE_COLUMNS, "repeats", *_TIMES, "source")
_VERSION: Final = 2
_ONE: Final = "one"
_WIRE: Final = "wire_ns"
#: Times and sizes lie below; about 146 years in nanoseconds.
_TOO_LARGE: Final = float(1 << 62)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """Measured costs.

    Attributes:
        rows: a table with `COST_COLUMNS`; times in nanoseconds.
        meta: provenance: what was measured, where, when, by what, under which load.
        name: what errors call it, such as its file.
    """

    rows: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)
    name: str = "cost table"

    def __post_init__(self) -> None:
        import pandas as pd

        missing = [name for name in COST_COLUMNS if name not in self.rows.columns]
        if missing:
            raise TraceError(f"{self.name}: missing column {', '.join(missing)}; expected {', '.join(COST_COLUMNS)}")
        if self.rows.empty:
            raise TraceError(f"{self.name}: no rows; write the table anew with 'nestpipe profile'")
        known = sorted(kind.value for kind in OpKind)
        for index, kind in enumerate(self.rows["kind"]):
            if kind not in known:
                raise TraceError(f"{self.name}: row {index}: {unknown_name('kind', str(kind), known)}")
        for name in (*SIZE_COLUMNS, *_TIMES, "repeats"):
            # text is no number, even where it looks like one
            found = self.rows[name].map(lambda value: None if isinstance(value, str) else value)
            values = pd.to_numeric(found, errors="coerce").to_numpy(dtype=np.float64)
            bad = np.flatnonzero(~((values >= 0) & (values < _TOO_LARGE)))
            if len(bad):
                got = self.rows[name].tolist()[bad[0]]
                raise TraceError(
                    f"{self.name}: row {bad[0]}: {name} must be a number that is not negative, got {got!r}"
                )

    def value(self, *keys: str) -> Any:
        """What the meta holds at `keys`, a mapping in a mapping.

        Raises:
            TraceError: if there is nothing; names the table and the keys.
        """
        found: Any = self.meta
        for key in keys:
            if not isinstance(found, Mapping) or key not in found:
                raise self.problem(keys, "is missing")
            found = found[key]
        return found

    def number(self, *keys: str) -> float:
        """The finite number that the meta holds at `keys`, not negative.

        Raises:
            TraceError: if there is none; names the table, the keys and what is there.
        """
        found = self.value(*keys)
        usable = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found) and found >= 0
        if not usable:
            raise self.problem(keys, f"must be a finite number that is not negative, got {found!r}")
        return float(found)

    def problem(self, keys: Sequence[str], what: str) -> TraceError:
        """The error for what is wrong with the meta at `keys`."""
        return TraceError(f"{self.name}: meta.{'.'.join(keys)} {what}; write the table anew with 'nestpipe profile'")

    @property
    def digest(self) -> str:
        """The first 12 hex digits of the SHA-256 of the rows, to tell tables apart."""
        return hashlib.sha256(self.rows[list(COST_COLUMNS)].to_csv(index=False).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """The table as JSON text: version, meta, columns, rows; one row a line."""
        rows = [json.dumps(row) for row in self.rows[list(COST_COLUMNS)].to_numpy(dtype=object).tolist()]
        head = json.dumps({"version": _VERSION, "meta": dict(self.meta), "columns": list(COST_COLUMNS)}, indent=1)
        return head.removesuffix("\n}") + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"


def read_cost_table(path: str | os.PathLike[str]) -> CostTable:
    """The table in a file that `CostTable.to_json` describes.

    Raises:
        TraceError: if the file cannot be read, is of another version, or lacks a column.
    """
    import pandas as pd

    value = load_json(path)
    if not isinstance(value, Mapping) or not {"meta", "columns", "rows"} <= value.keys():
        raise TraceError(f"{path}: expected a cost table (version, meta, columns, rows); 'nestpipe profile' writes one")
    if value.get("version") != _VERSION:
        raise TraceError(f"{path}: cost table version {value.get('version')!r} is not known; expected {_VERSION}")
    meta, columns, rows = (value[name] for name in ("meta", "columns", "rows"))
    if not isinstance(meta, Mapping):
        raise TraceError(f"{path}: meta must be an object, got {meta!r:.40}")
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise TraceError(f"{path}: columns must be a list of names, got {columns!r:.40}")
    if len(set(columns)) < len(columns):
        raise TraceError(f"{path}: columns must differ, got {', '.join(columns)}")
    if not isinstance(rows, list):
        raise TraceError(f"{path}: rows must be a list, got {rows!r:.40}")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(columns):
            raise TraceError(f"{path}: row {index} must be a list of {len(columns)} values, got {row!r:.40}")
    return CostTable(rows=pd.DataFrame(rows, columns=columns), meta=dict(meta), name=str(path))


def summarise(samples: pd.DataFrame, *, source: str) -> pd.DataFrame:
    """One row per kind, condition and size of many timed ops.

    Args:
        samples: columns kind, variant, world_size, link_bits_per_s, `SIZE_COLUMNS`, time_ns, and `point`, which tells
            the sizes of a sweep apart. Sizes of one point may differ a little (real keys do); their means are kept.
        source: how they were measured.

    Returns:
        A table with `COST_COLUMNS`.
    """
    import pandas as pd

    rows = []
    for (point, *conditions), group in samples.groupby(["point", *_CONDITIONS], sort=True, dropna=False):
        del point
        times = group["time_ns"].to_numpy(dtype=np.float64)
        sizes = [float(group[name].mean()) for name in SIZE_COLUMNS]
        p50, p75, p95 = np.quantile(times, [0.5, 0.75, 0.95])
        values = [np.minimum(times, p95).mean(), times.min(), p50, p75, p95, times.max()]
        rows.append([*conditions, *sizes, len(times), *(round(float(value)) for value in values), source])
    return pd.DataFrame(rows, columns=list(COST_COLUMNS))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFit:
    """What an op of one kind and variant takes, as a function of its sizes.

    Attributes:
        kind, variant: what it is a fit of.
        coefficients: by size (and `one` for the constant): nanoseconds per unit; not negative.
        low, high: the smallest and largest size seen, by size.
        num_points: rows fitted on.
        error: median relative distance between the fit and the means it was fitted on.
        spread: typical relative spread of single ops around their median, (p75 - p50) / p50.
    """

    kind: OpKind
    variant: str
    coefficients: Mapping[str, float]
    low: Mapping[str, float]
    high: Mapping[str, float]
    num_points: int
    error: float
    spread: float

    @property
    def constant_ns(self) -> float:
        """What an op takes however small it is, in nanoseconds."""
        return self.coefficients.get(_ONE, 0.0)

    def time_ns(self, sizes: Mapping[str, float]) -> float:
        """Nanoseconds of an op of these sizes; sizes that are left out count as 0."""
        return sum(
            coefficient * (1.0 if name == _ONE else sizes.get(name, 0.0))
            for name, coefficient in self.coefficients.items()
        )

    def status(self, sizes: Mapping[str, float]) -> str:
        """`interpolated` if every size that matters lies in the range seen, else `extrapolated`."""
        for name, coefficient in self.coefficients.items():
            if name in (_ONE, _WIRE) or coefficient == 0:
                continue
            value, slack = sizes.get(name, 0.0), 0.02 * self.high[name]
            if not self.low[name] - slack <= value <= self.high[name] + slack:
                return "extrapolated"
        return "interpolated"


def fit_kind(rows: pd.DataFrame, kind: OpKind, variant: str, sizes: Sequence[str] | None = None) -> CostFit:
    """The fit of one kind and variant.

    Args:
        rows: a table with `COST_COLUMNS`.
        kind, variant: which rows to fit on.
        sizes: what the time may depend on, by default `costs_of` the kind; sizes that never vary are merged into the
            constant.

    Raises:
        TraceError: if there is no such row.
    """
    sizes = costs_of(kind) if sizes is None else sizes
    mine = rows[(rows["kind"] == kind.value) & (rows["variant"] == variant)]
    if mine.empty:
        known = sorted(set(rows.loc[rows["kind"] == kind.value, "variant"]))
        raise TraceError(f"cost table: no rows of {kind} for variant {variant!r}; it has {', '.join(known) or 'none'}")
    times = mine["time_ns_mean"].to_numpy(dtype=np.float64)
    varying = [name for name in sizes if name != _WIRE and mine[name].nunique() > 1]
    columns = [np.ones(len(mine)), *(mine[name].to_numpy(dtype=np.float64) for name in varying)]
    # how long bytes are on a wire is its rate, not a matter of fit: few points would make any number of it
    wire = mine[_WIRE].to_numpy(dtype=np.float64) if _WIRE in sizes else np.zeros(len(mine))
    solved = _relative_nnls(np.stack(columns, axis=1), times, wire)
    coefficients = {_ONE: float(solved[0]), **dict(zip(varying, map(float, solved[1:]), strict=True))}
    if _WIRE in sizes:
        coefficients[_WIRE] = 1.0
    fitted = np.stack(columns, axis=1) @ solved + wire
    p50, p75 = (mine[f"time_ns_{name}"].to_numpy(dtype=np.float64) for name in ("p50", "p75"))
    return CostFit(
        kind=kind,
        variant=variant,
        coefficients=coefficients,
        low={name: float(mine[name].min()) for name in sizes},
        high={name: float(mine[name].max()) for name in sizes},
        num_points=len(mine),
        error=float(np.median(np.abs(fitted - times) / np.maximum(times, 1.0))),
        spread=float(np.median((p75 - p50) / np.maximum(p50, 1.0))),
    )


def costs_of(kind: OpKind) -> tuple[str, ...]:
    """The sizes that the time of a kind may depend on.

    >>> costs_of(OpKind.ALL_REDUCE)
    ('bytes', 'wire_ns')
    """
    if kind in COLLECTIVES:
        return ("bytes", "wire_ns")
    if kind in (OpKind.FORWARD, OpKind.BACKWARD):
        return ("samples", "keys", "bytes")
    return ("keys", "unique_keys", "bytes")


def resample(rows: pd.DataFrame, generator: np.random.Generator) -> pd.DataFrame:
    """The rows as another run of the profile might have given them, for intervals.

    Each mean is moved by a draw from its own sampling distribution, whose standard error for n repeats is
    sigma / sqrt(n), with sigma from the distance between the quartile and the median.
    Source: variance of the mean, sigma^2 / n; normal quartile 0.6745 sigma.
    """
    rows = rows.copy()
    mean, p50, p75 = (rows[f"time_ns_{name}"].to_numpy(dtype=np.float64) for name in ("mean", "p50", "p75"))
    error = (p75 - p50) / 0.6745 / np.sqrt(np.maximum(rows["repeats"].to_numpy(dtype=np.float64), 1.0))
    rows["time_ns_mean"] = np.maximum(mean + error * generator.standard_normal(len(rows)), 1.0)
    return rows


def _relative_nnls(
    columns: npt.NDArray[np.float64], times: npt.NDArray[np.float64], known: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Coefficients >= 0 of `columns` that, with what is `known`, minimise the relative squared errors of `times`."""
    from scipy.optimize import nnls

    weights = 1.0 / np.maximum(times, 1.0)
    scale = np.maximum(columns.max(axis=0), 1e-12)
    solved, _ = nnls(columns / scale * weights[:, None], (times - known) * weights)
    return np.asarray(solved / scale, dtype=np.float64)
