"""A Timeline as a Parquet file: its columns, the weight of each rank, and its meta."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nestpipe.base import TraceError, atomic_file, unknown_name
from nestpipe.ir import OpKind
from nestpipe.timeline.timeline import COLUMNS, Timeline, from_frame

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["read_timeline", "write_timeline"]

_KEY: Final = b"nestpipe.timeline"
_WEIGHT: Final = "weight"
_TEXT: Final = ("stream", "kind", "op")
_NEEDED: Final = ("step", "batch", "micro_batch", "rank", "stream", "kind", "start_ns", "end_ns")
_NULLABLE: Final = ("micro_batch", "bytes", "keys", "unique_keys")


def write_timeline(timeline: Timeline, path: str | os.PathLike[str], *, option: str = "--out") -> Path:
    """Writes the Timeline as Parquet, whole or not at all; the same Timeline gives the same bytes.

    Raises:
        TraceError: if the file cannot be written; names `option` as the way out.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    frame = timeline.frame()
    places = np.searchsorted(np.sort(timeline.ranks), frame["rank"].to_numpy())
    frame[_WEIGHT] = timeline.weights[np.argsort(timeline.ranks, kind="stable")][places]
    table = pa.Table.from_pandas(frame, preserve_index=False)
    meta = json.dumps(dict(timeline.meta), sort_keys=True, default=str).encode()
    table = table.replace_schema_metadata({_KEY: meta})
    with atomic_file(path, TraceError, option=option) as file:
        pq.write_table(table, file, compression="zstd")
    return Path(path)


def read_timeline(path: str | os.PathLike[str]) -> Timeline:
    """The Timeline in a Parquet file; `weight`, `op`, `wait_ns`, sizes and meta may be left out.

    Raises:
        TraceError: if the file cannot be read or a column is missing or of the wrong type; names file and column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise TraceError(f"{path}: there is no such file; expected a Timeline as Parquet") from None
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    frame = _frame(table, path)
    try:
        timeline = from_frame(frame[[name for name in COLUMNS if name in frame.columns]], _meta(table, path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    if _WEIGHT not in frame.columns:
        return timeline
    weights = frame.groupby("rank", sort=True)[_WEIGHT].first().to_numpy(dtype=np.int64)
    if (weights < 1).any():
        raise TraceError(f"{path}: weight must be at least 1, got {weights.min()}")
    return replace(timeline, weights=weights)


def _frame(table: pa.Table, path: Path) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    missing = [name for name in _NEEDED if name not in table.column_names]
    if missing:
        raise TraceError(f"{path}: missing column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    if not table.num_rows:
        raise TraceError(f"{path}: has no rows; expected one per op and rank")
    columns: dict[str, Any] = {}
    for name in (*COLUMNS, _WEIGHT):
        if name not in table.column_names:
            continue
        column = table.column(name)
        if name in _TEXT:
            columns[name] = pd.Categorical(column.to_pandas())
        elif name in _NULLABLE:
            columns[name] = _whole(column, name, path).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
        else:
            columns[name] = _whole(column, name, path).to_numpy()
    frame = pd.DataFrame(columns)
    for kind in frame["kind"].cat.categories:
        if kind not in set(OpKind):
            raise TraceError(f"{path}: column kind: {unknown_name('kind', str(kind), [k.value for k in OpKind])}")
    return frame


def _whole(column: pa.ChunkedArray, name: str, path: Path) -> pa.ChunkedArray:
    """The column as int64. Tools without nullable integers store those with empty cells as floats; these are taken."""
    import pyarrow as pa

    nullable = name in _NULLABLE
    if not (pa.types.is_integer(column.type) or (nullable and _is_nullable_number(column.type))):
        raise TraceError(f"{path}: column {name} must hold whole numbers, got {column.type}")
    if column.null_count and not nullable:
        raise TraceError(f"{path}: column {name} must not have empty cells, got {column.null_count}")
    try:
        return column.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise TraceError(f"{path}: column {name} must hold whole numbers: {error}") from None


def _is_nullable_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_null(kind) or pa.types.is_floating(kind))


def _meta(table: pa.Table, path: Path) -> dict[str, Any]:
    raw = (table.schema.metadata or {}).get(_KEY, b"{}")
    try:
        meta = json.loads(raw)
    except ValueError as error:
        raise TraceError(f"{path}: metadata {_KEY.decode()} is not JSON: {error}") from None
    return meta if isinstance(meta, dict) else {}
