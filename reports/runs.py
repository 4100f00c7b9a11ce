"""A run on disk: a directory with `run.json` (what came out and where it comes from) and `timeline.parquet`.

`run.json` is a `Record`: provenance, metrics, the partition of a step, the critical cycle, resources, assumptions, the
curve it belongs to and the names of exported traces beside it. Every number carries its status. A directory is written
beside its place and then renamed, so a run is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, SupportsFloat

import msgspec

from nestpipe.errors import TraceError, unknown_name
from nestpipe.metrics import PARTS, StepMetrics
from nestpipe.timeline import Timeline
from reports.style import STATUSES
from reports.tables import METRICS
from reports.timeline_file import read_timeline, write_timeline

__all__ = [
    "RUN_FILE",
    "TIMELINE_FILE",
    "Assumption",
    "CriticalCycle",
    "CurvePoint",
    "CycleOp",
    "MetricValue",
    "Record",
    "ResourceUse",
    "Run",
    "critical_cycle",
    "metric_values",
    "read_run",
    "write_run",
]

RUN_FILE: Final = "run.json"
TIMELINE_FILE: Final = "timeline.parquet"
_FORMAT: Final = "nestpipe run v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One metric of the run; `status` says where the number comes from, `published` what a publication gives."""

    metric: str
    value: float
    status: str
    published: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleOp:
    """One op of the critical cycle, as in the loop: `batch` is relative to the step, `ns` its duration."""

    kind: str
    batch: int
    micro_batch: int | None
    stream: str
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalCycle:
    """What limits the step: its ops in the order they run, how many steps they span, the step time they allow."""

    step_ns: float
    iterations: int
    ops: tuple[CycleOp, ...]
    status: str


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
    """Something the result rests on that nobody measured: its value, range, source and how far it moves the result."""

    name: str
    value: str
    unit: str = ""
    varied_over: str = ""
    effect: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One point of a scaling curve in long format; `low` and `high` bound it where an interval is known."""

    method: str
    world_size: int
    metric: str
    value: float
    status: str
    published: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What `run.json` holds.

    Attributes:
        name: what the run is called in reports; its directory's name if empty.
        provenance: version, command, seed, digests and whatever else says how to get the same result again.
        metrics: one value per metric.
        parts_ms: the partition of a step in milliseconds, as in `StepMetrics.parts_ms`.
        parts_status: where the partition comes from.
        critical_cycle: what limits the step, where that is known.
        resources: how busy each resource is.
        assumptions: what the result rests on.
        curve: the scaling curve that the run belongs to.
        exports: names of files in the run's directory by kind, such as perfetto or kineto.
    """

    provenance: dict[str, Any]
    metrics: tuple[MetricValue, ...]
    parts_ms: dict[str, float]
    parts_status: str
    name: str = ""
    critical_cycle: CriticalCycle | None = None
    resources: tuple[ResourceUse, ...] = ()
    assumptions: tuple[Assumption, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    exports: dict[str, str] = field(default_factory=dict)
    format: str = _FORMAT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run as read: its name, where it lies, its record and its Timeline."""

    name: str
    path: Path
    record: Record
    timeline: Timeline


def metric_values(metrics: StepMetrics, status: str, published: Mapping[str, float] | None = None) -> tuple[Any, ...]:
    """The metrics of one run as `MetricValue`s, those that do not apply left out.

    Args:
        metrics: as measured from a Timeline.
        status: where they come from, one of `reports.style.STATUSES`.
        published: published values by metric.
    """
    values = {name: getattr(metrics, name, None) for name in METRICS}
    return tuple(
        MetricValue(metric=name, value=value, status=status, published=(published or {}).get(name))
        for name, value in values.items()
        if value is not None
    )


def critical_cycle(
    step_ns: SupportsFloat, cycle: Iterable[tuple[str, int, int | None, str, int]], iterations: int, *, status: str
) -> CriticalCycle:
    """The critical cycle for a record from the fields of a bound: (kind, batch, micro_batch, stream, ns) per op."""
    ops = tuple(CycleOp(kind=str(k), batch=b, micro_batch=m, stream=s, ns=int(ns)) for k, b, m, s, ns in cycle)
    return CriticalCycle(step_ns=float(step_ns), iterations=iterations, ops=ops, status=status)


def write_run(
    directory: str | os.PathLike[str],
    record: Record,
    timeline: Timeline,
    *,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a run; one that is there already is replaced at once.

    Args:
        directory: where; made with its parents. Must not exist, be empty or hold a run.
        record: what came out.
        timeline: when everything ran.
        files: further files by name, such as exported traces named in `record.exports`.

    Raises:
        TraceError: if the record has an unknown status or metric, the directory holds something else or cannot be
            written.
    """
    directory = Path(directory)
    _check(record, str(directory / RUN_FILE))
    if directory.exists() and not (directory / RUN_FILE).is_file() and not _is_empty_directory(directory):
        raise TraceError(f"{directory}: exists and is not a run; choose another directory or remove it")
    temporary: Path | None = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
        temporary.chmod(0o755)
        content = msgspec.json.format(msgspec.json.encode(record), indent=1)
        (temporary / RUN_FILE).write_bytes(content + b"\n")
        write_timeline(timeline, temporary / TIMELINE_FILE)
        for name, data in (files or {}).items():
            (temporary / Path(name).name).write_bytes(data)
        _put(temporary, directory)
    except OSError as error:
        raise TraceError(f"{directory}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory


def _put(temporary: Path, directory: Path) -> None:
    """Renames `temporary` to `directory`; what was there goes away only once the new one is in place."""
    if not directory.exists() or _is_empty_directory(directory):
        os.replace(temporary, directory)
        return
    old = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}.old."))
    try:
        os.replace(directory, old / "run")
        try:
            os.replace(temporary, directory)
        except OSError:
            os.replace(old / "run", directory)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def read_run(directory: str | os.PathLike[str]) -> Run:
    """The run in a directory.

    Raises:
        TraceError: if it is not a run, or a file in it cannot be read; names the file and the field.
    """
    directory = Path(directory)
    path = directory / RUN_FILE
    if not path.is_file():
        what = "is missing" if directory.is_dir() else "cannot be found: there is no such directory"
        raise TraceError(f"{path} {what}; expected a directory written by nestpipe simulate --out DIR")
    record = _read_record(path)
    timeline = read_timeline(directory / TIMELINE_FILE)
    return Run(name=record.name or directory.resolve().name, path=directory, record=record, timeline=timeline)


def _read_record(path: Path) -> Record:
    try:
        data = path.read_bytes()
        with contextlib.suppress(msgspec.DecodeError):
            head = msgspec.json.decode(data)
            found = head.get("format") if isinstance(head, dict) else None
            if found != _FORMAT:
                raise TraceError(f"{path}: format must be {_FORMAT!r}, got {found!r}; write the run again")
        record = msgspec.json.decode(data, type=Record)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}: {error}") from None
    _check(record, str(path))
    return record


def _check(record: Record, where: str) -> None:
    """Raises a TraceError for a status, metric or part that nobody knows, or a share outside 0 to 1."""
    statuses = [
        ("parts_status", record.parts_status),
        *((f"{name}[{i}].status", item.status) for name in ("metrics", "resources", "curve") for i, item in
          enumerate(getattr(record, name))),
    ]  # fmt: skip
    if record.critical_cycle is not None:
        statuses.append(("critical_cycle.status", record.critical_cycle.status))
    for place, status in statuses:
        if status not in STATUSES:
            raise TraceError(f"{where}: {place}: {unknown_name('status', status, STATUSES)}")
    for name in ("metrics", "curve"):
        for i, item in enumerate(getattr(record, name)):
            if item.metric not in METRICS:
                raise TraceError(f"{where}: {name}[{i}].metric: {unknown_name('metric', item.metric, METRICS)}")
    for part, value in record.parts_ms.items():
        if part not in PARTS:
            raise TraceError(f"{where}: parts_ms: {unknown_name('part', part, PARTS)}")
        if value < 0:
            raise TraceError(f"{where}: parts_ms[{part!r}] must not be negative, got {value}")
    for i, use in enumerate(record.resources):
        if not 0 <= use.busy <= 1:
            raise TraceError(f"{where}: resources[{i}].busy must be between 0 and 1, got {use.busy}")
