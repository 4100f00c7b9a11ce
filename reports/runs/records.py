"""What a run's `run.json` holds: the result that `nestpipe simulate --format json` prints, and what may go with it.

Every number carries where it comes from, one of `nestpipe.base.provenance.STATUSES`. Fields beyond the first few may be
left out.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from nestpipe.base import ORIGINS, STATUSES, TraceError, explain, unknown_name
from nestpipe.timeline import METRICS, PARTS

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "FORMAT",
    "Assumption",
    "CycleOp",
    "Limit",
    "Record",
    "ResourceUse",
    "ResultRow",
    "check",
    "decode",
    "encode",
    "read_rows",
    "rows_frame",
]

FORMAT: Final = "nestpipe run v1"
_ROW: Final = ("method", "world_size", "metric", "value", "published", "status", "low", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One metric of one method at one size, with the published value where there is one.

    `value` is None where the metric does not apply; `low` and `high` bound it where an interval is known.
    """

    method: str
    world_size: int
    metric: str
    value: float | None
    status: str
    published: float | None = None
    relative_error: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleOp:
    """One op of the critical cycle, as in the loop: `batch` is relative to the step, `ns` its duration."""

    kind: str
    batch: int
    micro_batch: int | None
    stream: str
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What limits the step: the critical cycle in the order it runs, the steps it spans, the step time it allows."""

    step_ns: float
    iterations: int
    cycle: tuple[CycleOp, ...]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """How busy a resource is in steady state: `busy` from 0 to 1, of `capacity` in `unit` where that is known."""

    resource: str
    busy: float
    status: str
    capacity: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """Something that nobody measured: the value used, the range it is varied over, why, and what that moves."""

    name: str
    value: float | str
    low: float | None = None
    high: float | None = None
    why: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `run.json` holds.

    Attributes:
        provenance: version, command, seed, digests and whatever else says how to get the same result again.
        schedule: the name of the schedule.
        world_size: number of ranks.
        rows: one row per metric of this run.
        parts_ms: the partition of a step in milliseconds, as in `StepMetrics.parts_ms`.
        metrics: the values of `rows` by metric.
        limit: what limits the step, where that is known.
        critical_cycle_rests_on: share of the critical cycle's time by status.
        speedup_relative_to: the method whose step latency is divided by this one's.
        scaling_efficiency_relative_to: the base world size.
        name: what the run is called in reports; its directory's name if empty.
        resources: how busy each resource is.
        assumptions: what the result rests on.
        curve: rows of the scaling curve that the run belongs to.
        exports: names of files in the run's directory by kind, such as perfetto or kineto.
    """

    provenance: dict[str, Any]
    schedule: str
    world_size: int
    rows: tuple[ResultRow, ...]
    parts_ms: dict[str, float]
    metrics: dict[str, float | None] = field(default_factory=dict)
    limit: Limit | None = None
    critical_cycle_rests_on: dict[str, float] = field(default_factory=dict)
    speedup_relative_to: str | None = None
    scaling_efficiency_relative_to: int | None = None
    name: str = ""
    resources: tuple[ResourceUse, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    curve: tuple[ResultRow, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT

    @property
    def status(self) -> str:
        """Where the step latency, and with it the partition of the step, comes from."""
        known = {row.metric: row.status for row in self.rows}
        return known.get("step_latency_ms", self.rows[0].status if self.rows else "assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Results:
    """The part of a command's JSON that holds its rows."""

    rows: tuple[ResultRow, ...]


def rows_frame(rows: Sequence[ResultRow]) -> pd.DataFrame:
    """The rows as the long table that `reports.figures.plots` and `reports.runs.tables` take."""
    import pandas as pd

    frame = pd.DataFrame([[getattr(row, name) for name in _ROW] for row in rows], columns=list(_ROW))
    return frame.astype(dict.fromkeys(("value", "published", "low", "high"), np.float64))


def read_rows(path: Path) -> tuple[ResultRow, ...]:
    """Rows of results from the JSON or CSV that commands print with `--format`.

    Raises:
        TraceError: if the file cannot be read or is neither; names the file and the field.
    """
    import pandas as pd

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    try:
        if text.lstrip().startswith("{"):
            rows = msgspec.json.decode(text, type=_Results).rows
        else:
            frame = pd.read_csv(io.StringIO(text), comment="#")
            plain = frame.astype(object).where(frame.notna(), None).to_dict("records")
            rows = msgspec.convert(plain, type=tuple[ResultRow, ...])
    except (msgspec.MsgspecError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        message = f"{path}: {error}; expected results printed with --format json or csv"
        raise TraceError(message) from None
    _check_rows("rows", rows, str(path))
    return rows


def encode(record: Any) -> bytes:
    """A record, or a mapping of the same fields, as JSON. NumPy numbers and enums become plain ones."""
    return msgspec.json.encode(record, enc_hook=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def decode(data: bytes, where: str) -> Record:
    """The record in a JSON text, checked.

    Args:
        data: the JSON.
        where: the file it is from, for messages.

    Raises:
        TraceError: if it is not JSON or a field is missing, of the wrong type or impossible; names file and field.
    """
    try:
        head = msgspec.json.decode(data)
        found = head.get("format") if isinstance(head, dict) else None
        if found != FORMAT:
            raise TraceError(f"{where}: format must be {FORMAT!r}, got {found!r}; simulate again to write it anew")
        record = msgspec.convert(head, Record)
    except msgspec.ValidationError as error:
        raise TraceError(f"{where}: {explain(error, head, Record)}") from None
    except msgspec.DecodeError as error:
        raise TraceError(f"{where}: {error}") from None
    check(record, where)
    return record


def check(record: Record, where: str) -> None:
    """Raises a TraceError for a status, metric or part that nobody knows, or a share outside 0 to 1."""
    _check_rows("rows", record.rows, where)
    _check_rows("curve", record.curve, where)
    for i, use in enumerate(record.resources):
        _check_status(f"{where}: resources[{i}]", use.status)
        if not 0 <= use.busy <= 1:
            raise TraceError(f"{where}: resources[{i}].busy must be between 0 and 1, got {use.busy}")
    for status in record.critical_cycle_rests_on:
        if status not in ORIGINS:
            raise TraceError(f"{where}: critical_cycle_rests_on: {unknown_name('status', status, ORIGINS)}")
    for part, value in record.parts_ms.items():
        if part not in PARTS:
            raise TraceError(f"{where}: parts_ms: {unknown_name('part', part, PARTS)}")
        if not value >= 0:
            raise TraceError(f"{where}: parts_ms[{part!r}] must not be negative, got {value}")
    if record.world_size < 1:
        raise TraceError(f"{where}: world_size must be at least 1, got {record.world_size}")


def _check_rows(name: str, rows: Sequence[ResultRow], where: str) -> None:
    for i, row in enumerate(rows):
        _check_status(f"{where}: {name}[{i}]", row.status)
        if row.metric not in METRICS:
            raise TraceError(f"{where}: {name}[{i}].metric: {unknown_name('metric', row.metric, METRICS)}")


def _check_status(where: str, status: str) -> None:
    if status not in STATUSES:
        raise TraceError(f"{where}.status: {unknown_name('status', status, STATUSES)}")
