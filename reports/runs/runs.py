"""A run on disk: a directory with `run.json` (see `reports.runs.records`) and `timeline.parquet`.

A directory is written beside its place and then renamed, so a run is there whole or not at all. Simulated and measured
runs look alike; the command line writes them, `nestpipe report` and `nestpipe diff` read them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from nestpipe.base import TraceError, atomic_folder
from nestpipe.timeline import Timeline, from_frame, read_timeline, write_timeline
from reports.runs.records import FORMAT, Record, decode, encode
from traces.table import METADATA_KEY, read_table, to_timeline

__all__ = ["RUN_FILE", "TIMELINE_FILE", "SavedRun", "read_run", "read_side", "write_run"]

RUN_FILE: Final = "run.json"
TIMELINE_FILE: Final = "timeline.parquet"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedRun:
    """A run as read: its name, where it lies, its record and its Timeline."""

    name: str
    path: Path
    record: Record
    timeline: Timeline


def write_run(
    directory: str | os.PathLike[str],
    *,
    run: Record | Mapping[str, Any],
    timeline: Timeline,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Writes a run; one that is there already is replaced at once.

    Args:
        directory: where; made with its parents. Must not exist, be empty or hold a run.
        run: what came out: a record or a mapping of its fields.
        timeline: when everything ran.
        files: further files by name, such as exported traces named in the record's `exports`.

    Raises:
        TraceError: if the record is not one, the directory holds something else or cannot be written.
    """
    directory = Path(directory)
    content = encode({"format": FORMAT, **run} if isinstance(run, Mapping) else run)
    decode(content, str(directory / RUN_FILE))
    if directory.exists() and not (directory / RUN_FILE).is_file() and not _is_empty_directory(directory):
        raise TraceError(f"{directory}: exists and is not a run; choose another directory or remove it")
    with atomic_folder(directory, TraceError) as folder:
        (folder / RUN_FILE).write_bytes(msgspec.json.format(content, indent=1) + b"\n")
        write_timeline(timeline, folder / TIMELINE_FILE)
        for name, data in (files or {}).items():
            (folder / Path(name).name).write_bytes(data)
    return directory


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def read_run(directory: str | os.PathLike[str]) -> SavedRun:
    """The run in a directory.

    Raises:
        TraceError: if it is not a run, or a file in it cannot be read; names the file and the field.
    """
    directory = Path(directory)
    path = directory / RUN_FILE
    if not path.is_file():
        what = "is missing" if directory.is_dir() else "cannot be found: there is no such directory"
        raise TraceError(f"{path} {what}; expected a directory written by nestpipe simulate --out DIR")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    record = decode(data, str(path))
    timeline = read_timeline(directory / TIMELINE_FILE)
    return SavedRun(name=record.name or directory.resolve().name, path=directory, record=record, timeline=timeline)


def read_side(path: str | os.PathLike[str]) -> tuple[str, Timeline]:
    """The name and Timeline of a run's directory, or of a Parquet file that holds a Timeline or a trace table.

    Raises:
        TraceError: if it is none of these or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        run = read_run(path)
        return run.name, run.timeline
    if not path.exists():
        raise TraceError(f"{path}: there is no such file or directory; expected a run or a Timeline as Parquet")
    return path.stem, _read_trace(path) if _is_trace(path) else read_timeline(path)


def _is_trace(path: Path) -> bool:
    """Whether a Parquet file is a trace table, which has its own metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with contextlib.suppress(OSError, pa.ArrowException):
        return METADATA_KEY in (pq.read_schema(path).metadata or {})
    return False


def _read_trace(path: Path) -> Timeline:
    """The ops of a trace table that have a place in a schedule."""
    frame = to_timeline(read_table(path))
    placed = frame["step"].notna() & frame["batch"].notna()
    if not placed.any():
        raise TraceError(f"{path}: no op of this trace has a step and a batch; a Timeline cannot be made of it")
    try:
        return from_frame(frame[placed].reset_index(drop=True), {"source": "measured", "schedule": path.stem})
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
