"""The trace table: what each op cost and moved, and where every number comes from.

One row is one op of one rank. Columns that a Timeline has too have the same names and meanings, so a measured run and a
simulated one can be replayed alike:

| column | type | meaning |
|---|---|---|
| `rank` | int | whose op it is |
| `step`, `batch`, `micro_batch` | int | iteration it ran in, batch and micro-batch it worked on |
| `stream` | text | in-order queue it ran on (`device stream 7`, `host 4711`, `compute`) |
| `kind` | text | an `OpKind`, or one of `EXTRA_KINDS` |
| `op` | text | the op's own name (kernel, node, host call) |
| `start_ns`, `end_ns`, `duration_ns` | int | when, on the rank's clock after alignment, and how long |
| `wait_ns` | int | part of the duration spent waiting for a slower peer; 0 for the last to arrive |
| `bytes`, `bytes_out` | int | bytes the rank put in and got out (collective), or moved (copy) |
| `keys`, `unique_keys` | int | keys looked up or sent, and how many of them differ |
| `flops` | int | floating-point operations |
| `collective`, `group`, `group_size` | text, text, int | what was exchanged, in which process group of how many ranks |
| `splits`, `splits_out` | text | elements to and from each peer, a JSON list, for uneven exchanges |
| `launch_ns`, `launch_end_ns`, `thread` | int, int, text | the host call that queued it, and its host thread |
| `source` | text | provenance: an `Origin`, a colon, and the file, formula or table |

A missing value (`<NA>`) is unknown or does not apply; nothing stands for it. `source` is never missing.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from nestpipe.base import TraceError, atomic_file, unknown_name
from nestpipe.ir import OpKind
from nestpipe.timeline import COLUMNS as TIMELINE_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLUMNS",
    "EXTRA_KINDS",
    "TIMELINE_COLUMNS",
    "Origin",
    "SourceFile",
    "TraceTable",
    "concat",
    "from_timeline",
    "is_table",
    "make_table",
    "provenance",
    "read_table",
    "source_file",
    "to_timeline",
    "validate",
    "write_table",
    "write_tables",
]

FORMAT_VERSION: Final = 1
METADATA_KEY: Final = b"nestpipe.trace"
CSV_PREFIX: Final = "# nestpipe trace "

TEXT_COLUMNS: Final = ("stream", "kind", "op", "collective", "group", "splits", "splits_out", "thread", "source")
COLUMNS: Final = (
    *("rank", "step", "batch", "micro_batch", "stream", "kind", "op", "start_ns", "end_ns", "duration_ns", "wait_ns"),
    *(
        "bytes",
        "bytes_out",
        "keys",
        "unique_keys",
        "flops",
        "collective",
        "group",
        "group_size",
        "splits",
        "splits_out",
    ),
    *("launch_ns", "launch_end_ns", "thread", "source"),
)
INT_COLUMNS: Final = tuple(name for name in COLUMNS if name not in TEXT_COLUMNS)
REQUIRED: Final = ("kind", "source")

EXTRA_KINDS: Final = {
    "step": "the profiler's step range on the host",
    "host_wait": "a host call that blocks until the device is done",
    "host_call": "a host call that may stall by itself (memory, input) or that orders streams",
    "host_work": "a stretch in which the host had recorded work open",
    "unclassified": "device work without an op kind; the coverage gives the reason",
}
KINDS: Final = frozenset(kind.value for kind in OpKind) | EXTRA_KINDS.keys()
# times may lie before a clock's epoch and steps before the first one (a prologue); everything else counts something
_SIGNED: Final = ("step", "start_ns", "end_ns", "launch_ns", "launch_end_ns")


class Origin(StrEnum):
    """Where a number comes from; every `source` starts with one."""

    MEASURED = "measured"
    RECORDED = "recorded"
    SIMULATED = "simulated"
    FITTED = "fitted"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"
    ASSUMED = "assumed"


def provenance(origin: Origin, where: str) -> str:
    """The text of a `source` cell.

    >>> provenance(Origin.MEASURED, "rank0.json.gz")
    'measured: rank0.json.gz'
    """
    return f"{origin.value}: {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A file that a table was made from: base name, format, SHA-256 of its bytes, rank where it is one rank's."""

    name: str
    format: str
    sha256: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable:
    """Rows with `COLUMNS`, valid, and the files they came from."""

    frame: pd.DataFrame
    files: tuple[SourceFile, ...] = ()


def source_file(path: str | os.PathLike[str], format: str, rank: int | None = None) -> SourceFile:
    """Describes a file for a table's metadata; reads it once for the digest.

    Raises:
        TraceError: not readable.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    return SourceFile(name=Path(path).name, format=format, sha256=digest.hexdigest(), rank=rank)


def _unknown_columns(names: Iterable[str], where: str) -> None:
    for name in names:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise TraceError(f"{where}: unknown column {name!r}; a trace table has {', '.join(COLUMNS)}{hint}")


def _typed(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {}
    for name in COLUMNS:
        dtype: Any = pd.Int64Dtype() if name in INT_COLUMNS else pd.StringDtype()
        if name not in frame:
            columns[name] = pd.array([None] * len(frame), dtype=dtype)
            continue
        try:
            columns[name] = frame[name].astype(dtype)
        except (TypeError, ValueError, OverflowError) as error:
            what = "whole numbers" if name in INT_COLUMNS else "text"
            raise TraceError(f"{where}: column {name!r} must hold {what}: {error}") from error
    columns = {name: getattr(column, "array", column) for name, column in columns.items()}
    return pd.DataFrame(columns, columns=list(COLUMNS), copy=False)


def _shown(value: Any) -> str:
    return repr(value.item() if hasattr(value, "item") else value)


def _row_error(frame: pd.DataFrame, bad: pd.Series, where: str, name: str, expected: str) -> None:
    mask = bad.fillna(False).astype(bool)
    if mask.any():
        row = int(mask.to_numpy().argmax())
        raise TraceError(f"{where}: row {row}: {name} {expected}, got {_shown(frame[name].iloc[row])}")


def validate(frame: pd.DataFrame, where: str = "trace table") -> pd.DataFrame:
    """The frame with all columns, in order and typed, once every row has been checked.

    Raises:
        TraceError: names column, row, value and what was expected.
    """
    _unknown_columns(frame.columns, where)
    for name in REQUIRED:
        if name not in frame:
            raise TraceError(f"{where}: column {name!r} is missing; a trace table needs it")
    table = _typed(frame, where)
    for kind in table["kind"].dropna().unique():
        if kind not in KINDS:
            raise TraceError(f"{where}: {unknown_name('kind', str(kind), KINDS)}")
    for name in REQUIRED:
        _row_error(table, table[name].isna(), where, name, "must not be missing")
    origins = table["source"].map(lambda text: text.partition(":")[0], na_action="ignore")
    _row_error(
        table, ~origins.isin([o.value for o in Origin]), where, "source", f"must start with one of {', '.join(Origin)}"
    )
    for name in INT_COLUMNS:
        if name not in _SIGNED:
            _row_error(table, table[name] < 0, where, name, "must not be negative")
    # new columns, never an assignment into one: the arrays may be those of the frame that was given
    table["end_ns"] = table["end_ns"].fillna(table["start_ns"] + table["duration_ns"])
    spans = table["end_ns"] - table["start_ns"]
    table["duration_ns"] = table["duration_ns"].fillna(spans)
    _row_error(table, spans < 0, where, "end_ns", "must not lie before start_ns")
    _row_error(table, spans != table["duration_ns"], where, "duration_ns", "must be end_ns - start_ns")
    _row_error(table, table["wait_ns"] > table["duration_ns"], where, "wait_ns", "must not exceed duration_ns")
    _row_error(table, table["unique_keys"] > table["keys"], where, "unique_keys", "must not exceed keys")
    return table


def make_table(
    rows: pd.DataFrame | Sequence[Mapping[str, Any]], files: Iterable[SourceFile] = (), where: str = "trace table"
) -> TraceTable:
    """A valid table from rows that have at least `kind` and `source`.

    Raises:
        TraceError: as `validate`.
    """
    import pandas as pd

    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame.from_records(list(rows), columns=_used(rows))
    return TraceTable(frame=validate(frame, where), files=tuple(files))


def _used(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    seen = dict.fromkeys(REQUIRED)
    for row in rows:
        seen.update(dict.fromkeys(row))
    return list(seen)


def concat(tables: Sequence[TraceTable]) -> TraceTable:
    """The rows and files of several tables, one after the other."""
    import pandas as pd

    if not tables:
        return make_table([])
    frames = [table.frame for table in tables if len(table.frame)]
    frame = pd.concat(frames, ignore_index=True) if len(frames) > 1 else (frames or [tables[0].frame])[0]
    return TraceTable(frame=frame, files=tuple(file for table in tables for file in table.files))


# -- files -----------------------------------------------------------------------------------------------------------


def _metadata(files: Sequence[SourceFile]) -> str:
    named = [{"name": f.name, "format": f.format, "sha256": f.sha256, "rank": f.rank} for f in files]
    return json.dumps({"version": FORMAT_VERSION, "files": named}, sort_keys=True)


def _files(path: str, text: str) -> tuple[SourceFile, ...]:
    try:
        value = json.loads(text)
        version = value["version"]
        files = tuple(SourceFile(**file) for file in value["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path}: the trace table's metadata is damaged: {error}") from error
    if version != FORMAT_VERSION:
        raise TraceError(f"{path}: trace table version {version!r} is not known; this program reads {FORMAT_VERSION}")
    return files


def write_table(table: TraceTable, path: str | os.PathLike[str]) -> None:
    """Writes Parquet, or CSV where the name ends in `.csv`; the file appears whole or not at all.

    Raises:
        TraceError: the file cannot be written.
    """
    write_tables([table], table.files, path)


def write_tables(tables: Iterable[TraceTable], files: Sequence[SourceFile], path: str | os.PathLike[str]) -> int:
    """Writes tables one after the other as one, holding one at a time; returns the number of rows.

    Args:
        tables: the rows, in order; their own files are not looked at.
        files: what all of them were made from.
        path: Parquet, or CSV where the name ends in `.csv`; the file appears whole or not at all.

    Raises:
        TraceError: the file cannot be written.
    """
    write = _write_csv if Path(path).suffix == ".csv" else _write_parquet
    with atomic_file(path, TraceError) as file:
        return write(file, tables, _metadata(files))


def _write_csv(file: IO[bytes], tables: Iterable[TraceTable], metadata: str) -> int:
    file.write(f"{CSV_PREFIX}{metadata}\n".encode())
    text, rows = io.TextIOWrapper(file, "utf-8", newline="", write_through=True), 0
    for index, table in enumerate(tables):
        table.frame.to_csv(text, index=False, lineterminator="\n", header=index == 0)
        rows += len(table.frame)
    text.detach()
    return rows


def _write_parquet(file: IO[bytes], tables: Iterable[TraceTable], metadata: str) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.int64() if name in INT_COLUMNS else pa.string()) for name in COLUMNS])
    rows = 0
    with pq.ParquetWriter(file, schema.with_metadata({METADATA_KEY: metadata.encode()}), compression="zstd") as writer:
        for table in tables:
            writer.write_table(pa.Table.from_pandas(table.frame, schema=schema, preserve_index=False))
            rows += len(table.frame)
    return rows


def is_table(path: str | os.PathLike[str]) -> bool:
    """Whether a Parquet file is a trace table (by its metadata, or its columns where it has none)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, pa.ArrowInvalid, pa.ArrowException):
        return True  # reading it as one gives the better error
    return METADATA_KEY in (schema.metadata or {}) or set(REQUIRED) <= set(schema.names)


def _read_parquet(path: str | os.PathLike[str]) -> tuple[pd.DataFrame, str]:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        arrow = pq.read_table(path)
    except (OSError, pa.ArrowInvalid, pa.ArrowException) as error:
        raise TraceError(f"{path}: not a readable Parquet file: {error}") from error
    metadata = (arrow.schema.metadata or {}).get(METADATA_KEY)
    frame = arrow.to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame, metadata.decode("utf-8", "replace") if metadata else ""


def _read_csv(path: str | os.PathLike[str]) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    try:
        with open(path, encoding="utf-8", newline="") as file:
            first = file.readline()
            metadata = first.removeprefix(CSV_PREFIX).strip() if first.startswith(CSV_PREFIX) else ""
            if not metadata:
                file.seek(0)
            frame = pd.read_csv(file, dtype=str, keep_default_na=False, na_values=[""])
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise TraceError(f"{path}: not a readable CSV file: {error}") from error
    for name in frame.columns.intersection(list(INT_COLUMNS)):
        try:
            frame[name] = pd.array([None if pd.isna(cell) else int(cell) for cell in frame[name]], dtype="Int64")
        except (ValueError, OverflowError, TypeError) as error:
            raise TraceError(f"{path}: column {name!r} must hold whole numbers: {error}") from error
    return frame, metadata


def read_table(path: str | os.PathLike[str]) -> TraceTable:
    """A trace table from Parquet or CSV; the content decides which.

    Raises:
        TraceError: not readable, or an invalid row.
    """
    try:
        with open(path, "rb") as file:
            is_parquet = file.read(4) == b"PAR1"
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    frame, metadata = _read_parquet(path) if is_parquet else _read_csv(path)
    files = _files(os.fspath(path), metadata) if metadata else ()
    return make_table(frame, files, os.fspath(path))


# -- timelines -------------------------------------------------------------------------------------------------------


def from_timeline(timeline: pd.DataFrame, source: str) -> TraceTable:
    """A table from the rows of a Timeline, whose every number gets this `source`.

    Raises:
        TraceError: a Timeline column is missing, or as `validate`.
    """
    missing = [name for name in TIMELINE_COLUMNS if name not in timeline]
    if missing:
        raise TraceError(f"a Timeline has the columns {', '.join(TIMELINE_COLUMNS)}; missing: {', '.join(missing)}")
    frame = timeline.loc[:, list(TIMELINE_COLUMNS)].copy()
    for name in ("stream", "kind", "op"):
        frame[name] = frame[name].astype("string")
    frame["source"] = source
    return make_table(frame)


def to_timeline(table: TraceTable) -> pd.DataFrame:
    """The rows that have an op kind and times, with exactly the columns of a Timeline, in order of start.

    An unknown wait is 0 there. A trace has one row a kernel, so rows may share rank, kind, batch and micro-batch.
    """
    frame = table.frame
    timed = frame["start_ns"].notna() & frame["end_ns"].notna() & ~frame["kind"].isin(list(EXTRA_KINDS))
    chosen = frame.loc[timed, list(TIMELINE_COLUMNS)].fillna({"wait_ns": 0})
    return chosen.sort_values(["start_ns", "rank", "stream"], kind="stable").reset_index(drop=True)
