"""A trace table or Timeline as Chakra execution traces, one protobuf file per rank, for ASTRA-sim and its relatives.

Chakra is a graph of nodes without resources: what a Timeline knows beyond that is approximated, and each approximation
is returned as a warning and written into the file's metadata. Every cell of the table travels in attributes of our own
(`nestpipe_<column>`), which other readers ignore and `traces.formats.chakra` reads back exactly.

Source: mlcommons/chakra, schema/protobuf/et_def.proto; attribute types as ASTRA-sim 2 reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.base import NS_PER_US, TraceError, atomic_file, write_text
from traces.formats.chakra import COMM_TYPES, NODE_TYPES, PRIVATE_PREFIX
from traces.formats.export_kineto import device_class, table_rows
from traces.formats.phases import UNCLASSIFIED
from traces.formats.protobuf import message, text_field, uint_field, varint
from traces.table import EXTRA_KINDS, INT_COLUMNS, TEXT_COLUMNS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["chakra_nodes", "write_chakra"]

SCHEMA_VERSION = "0.0.4"
WORLD = "0"
INT32_FIELD, INT64_FIELD, UINT64_FIELD, BOOL_FIELD, STRING_FIELD = 7, 9, 13, 27, 29


def _attribute(name: str, number: int, value: int | str) -> bytes:
    body = text_field(1, name)
    body += text_field(number, value) if isinstance(value, str) else uint_field(number, value)
    return message(10, body)


def _node_type(row: Mapping[str, Any], one: str) -> str:
    word = str(row.get("collective") or row["kind"]).partition("[")[0]
    if word in ("send", "recv"):
        return word
    if one == "comm":
        return "collective"
    return "memory_load" if row["kind"] == "read" else "compute"


def _dependencies(rows: list[dict[str, Any]]) -> Iterator[list[int]]:
    """For each row, in order of start: the one before it on its stream, and per other stream the last that fed it.

    A Timeline has times but no edges, so an edge is taken from the last op of the same batch (and micro-batch, where
    both have one) on each other stream that had ended by then.
    """
    last_on_stream: dict[Any, int] = {}
    ended: dict[Any, dict[tuple[Any, Any], int]] = {}
    running: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        started, stream, micro = row.get("start_ns"), row.get("stream"), row.get("micro_batch")
        for end, other in running:
            if started is not None and end <= started:
                done = rows[other]
                ended.setdefault(done.get("batch"), {})[done.get("stream"), done.get("micro_batch")] = other
        running = [(end, other) for end, other in running if started is None or end > started]
        deps: dict[Any, int] = {}
        for (other_stream, other_micro), other in ended.get(row.get("batch"), {}).items():
            if other_stream != stream and (micro is None or other_micro is None or micro == other_micro):
                deps[other_stream] = max(deps.get(other_stream, -1), other)
        before = last_on_stream.get(stream)
        yield sorted({*deps.values(), *([before] if before is not None else [])})
        last_on_stream[stream] = index
        if row.get("end_ns") is not None:
            running.append((row["end_ns"], index))


def _attributes(row: Mapping[str, Any], one: str, kind: str) -> bytes:
    parts = [_attribute("is_cpu_op", BOOL_FIELD, int(one == "host"))]
    size = row.get("bytes")
    if kind == "collective":
        word = str(row.get("collective") or str(row["kind"]).partition("[")[0])
        if word in COMM_TYPES:
            parts.append(_attribute("comm_type", INT64_FIELD, COMM_TYPES.index(word)))
        parts.append(_attribute("comm_size", INT64_FIELD, size or 0))
        parts.append(_attribute("pg_name", STRING_FIELD, str(row.get("group") or WORLD)))
    elif kind in ("send", "recv"):
        parts.append(_attribute("comm_size", INT64_FIELD, size or 0))
        parts.append(_attribute("comm_tag", INT32_FIELD, int(row.get("batch") or 0) & 0x7FFFFFFF))
    else:
        if row.get("flops") is not None:
            parts.append(_attribute("num_ops", INT64_FIELD, row["flops"]))
        if size is not None:
            parts.append(_attribute("tensor_size", UINT64_FIELD, size))
    for name in (*INT_COLUMNS, *TEXT_COLUMNS):
        if row.get(name) is not None:
            number = INT64_FIELD if name in INT_COLUMNS else STRING_FIELD
            parts.append(_attribute(PRIVATE_PREFIX + name, number, row[name]))
    return b"".join(parts)


def chakra_nodes(frame: pd.DataFrame) -> Iterator[bytes]:
    """The node messages of one rank, given its rows, in order of start; the profiler's step ranges are left out."""
    chosen = frame[~frame["kind"].astype("string").isin([kind for kind in EXTRA_KINDS if kind != UNCLASSIFIED])]
    rows = table_rows(chosen.sort_values("start_ns", kind="stable", na_position="last"))
    for index, (row, deps) in enumerate(zip(rows, _dependencies(rows), strict=True)):
        one = device_class(row["kind"], row.get("stream"), row.get("op"), row.get("collective"))
        if row.get("collective") is not None:
            one = "comm"
        kind = _node_type(row, one)
        body = uint_field(1, index) + text_field(2, str(row.get("op") or row["kind"]))
        body += uint_field(3, NODE_TYPES.index(kind))
        if deps:
            body += message(5, b"".join(varint(dep) for dep in deps))
        if row.get("start_ns") is not None:
            body += uint_field(6, max(row["start_ns"], 0) // NS_PER_US)
        duration = _duration_ns(row)
        if duration is not None:
            body += uint_field(7, (duration + NS_PER_US // 2) // NS_PER_US)
        yield body + _attributes(row, one, kind)


def _duration_ns(row: Mapping[str, Any]) -> int | None:
    if row.get("duration_ns") is not None:
        return int(row["duration_ns"])
    if row.get("start_ns") is not None and row.get("end_ns") is not None:
        return int(row["end_ns"] - row["start_ns"])
    return None


def lossy_parts(frame: pd.DataFrame) -> list[str]:
    """What Chakra, or the simulators that read it, cannot say of these rows."""
    warnings = ["dependencies between streams are inferred from times: a Timeline has no edges"]
    count = int(frame.groupby(frame["rank"].fillna(0).astype("int64"))["stream"].nunique().max())
    if count > 2:
        warnings.append(f"{count} streams a rank: ASTRA-sim runs one compute and one communication node at a time")
    kinds = set(frame["kind"].astype("string").dropna())
    if "splits" in frame and frame["splits"].notna().any():
        warnings.append(
            "uneven all_to_all: Chakra has one size a rank; own bytes are written, splits are kept privately"
        )
    if frame["bytes"].isna().any() and any(kind.startswith(("all_", "reduce_scatter")) for kind in kinds):
        missing = frame["bytes"].isna() & frame["kind"].astype("string").str.startswith(("all_", "reduce_scatter"))
        if missing.any():
            warnings.append(f"{int(missing.sum())} collectives of unknown size are written with comm_size 0")
    if kinds & {"send", "recv"}:
        warnings.append("send and recv are written without peers: the table does not hold them")
    if (frame["end_ns"] - frame["start_ns"]).lt(NS_PER_US).any():
        warnings.append(
            "durations are whole microseconds in Chakra; shorter ops become 0 or 1, the exact ns are private"
        )
    return warnings


def _write(path: Path, frame: pd.DataFrame, warnings: list[str]) -> None:
    note = message(2, text_field(1, "nestpipe_lossy") + text_field(STRING_FIELD, "; ".join(warnings)))
    metadata = text_field(1, SCHEMA_VERSION) + note
    with atomic_file(path, TraceError) as file:
        file.write(varint(len(metadata)) + metadata)
        for node in chakra_nodes(frame):
            file.write(varint(len(node)) + node)


def write_chakra(
    frame: pd.DataFrame, folder: str | os.PathLike[str], prefix: str = "trace"
) -> tuple[list[Path], list[str]]:
    """Writes `<prefix>.<rank>.et` for each rank and `comm_group.json`, each whole or not at all.

    Args:
        frame: rows of a trace table or Timeline.
        folder: where to; made if need be.
        prefix: what file names begin with.

    Returns:
        The files written and what was lost on the way.

    Raises:
        TraceError: no rows, or the folder cannot be written to.
    """
    if not len(frame):
        raise TraceError("nothing to export: the table has no rows")
    ranks = frame["rank"].fillna(0).astype("int64")
    warnings = lossy_parts(frame)
    written: list[Path] = []
    for rank in sorted(int(value) for value in ranks.unique()):
        path = Path(folder) / f"{prefix}.{rank}.et"
        _write(path, frame[(ranks == rank).to_numpy()], warnings)
        written.append(path)
    groups = Path(folder) / "comm_group.json"
    write_text(groups, json.dumps({WORLD: list(range(int(ranks.max()) + 1))}) + "\n")
    written.append(groups)
    return written, warnings
