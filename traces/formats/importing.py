"""Any supported file or folder into one trace table and one summary; formats are told apart by content, not by name.

`import_traces([...])` is all that the command line does. Files named one by one must all be understood; in a folder,
what is no trace is left out and listed with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError, ns_to_us
from traces.formats.chakra import chakra_rows, looks_like_chakra, read_chakra, read_chakra_json
from traces.formats.collective_logs import looks_like_log, read_bus_ratios, read_collective_log
from traces.formats.execution_trace import NOT_COLLECTIVES, EtRank, et_rows, read_execution_trace, read_param_trace
from traces.formats.kineto import looks_like_kineto, read_events
from traces.formats.kineto_join import Joined, join
from traces.formats.kineto_table import kineto_frames, waits_by_event
from traces.formats.measures import coverage, rank_summary
from traces.formats.reading import load_json, parse_json, read_head, read_text
from traces.formats.skew import clock_offsets_ns, match
from traces.formats.summary import collective_rows, log_summary, matched_summary, ratio_summary, table_summary
from traces.formats.workload_files import AICB_HEADER, looks_like_workload, read_aicb, read_workload_text
from traces.table import (
    CSV_PREFIX,
    SourceFile,
    TraceTable,
    concat,
    is_table,
    make_table,
    read_table,
    source_file,
    write_tables,
)

__all__ = ["Imported", "detect", "find_files", "import_to", "import_traces"]

FORMATS = {
    "kineto": "PyTorch profiler (Kineto, Chrome JSON)",
    "execution_trace": "PyTorch execution trace",
    "param": "PARAM communication trace",
    "chakra": "Chakra protobuf",
    "chakra_json": "Chakra JSON",
    "collective_log": "benchmark of collectives",
    "bus_ratios": "table of bus bandwidth ratios",
    "workload": "ASTRA-sim or SimAI workload",
    "aicb": "AICB workload",
    "table": "trace table",
}


@dataclass(slots=True)
class Imported:
    """The table and the JSON-ready summary of an import."""

    table: TraceTable
    summary: dict[str, Any]


@dataclass(slots=True)
class _Import:
    """What has been read so far, by format."""

    kineto: list[Joined] = field(default_factory=list)
    traces: list[EtRank] = field(default_factory=list)
    tables: list[TraceTable] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    sources: list[SourceFile] = field(default_factory=list)


def detect(path: str | os.PathLike[str]) -> str:
    """The format of a file, one of `FORMATS`, from its content.

    Raises:
        TraceError: unreadable, or none of them.
    """
    head = read_head(path)
    if head.startswith(b"PAR1"):
        return "table" if is_table(path) else "collective_log"
    if head.startswith(CSV_PREFIX.encode()):
        return "table"
    stripped = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not stripped:
        raise TraceError(f"{path}: the file is empty; expected a trace, a log or a workload")
    if looks_like_log(stripped):
        return "collective_log"
    if stripped[:1] in (b"{", b"["):
        return _detect_json(path, head, stripped)
    if looks_like_chakra(head):
        return "chakra"
    text = stripped.decode("utf-8", "replace")
    first = text.partition("\n")[0]
    if first.startswith("Size,"):
        return "bus_ratios"
    if {name.strip() for name in first.split(",")} >= set(AICB_HEADER):
        return "aicb"
    if looks_like_workload(text):
        return "workload"
    if re.search(r"^\w+,:\s", text, re.MULTILINE):
        raise TraceError(
            f"{path}: SimAI's bus bandwidths by group: no sizes and no times, so nothing to import; "
            "write them into a topology file"
        )
    if b"\0" in head[:4096]:
        raise TraceError(f"{path}: a binary file, but no Chakra trace and no Parquet table; {_expectation()}")
    return "collective_log"


def _expectation() -> str:
    return "expected one of: " + "; ".join(FORMATS.values())


def _detect_json(path: str | os.PathLike[str], head: bytes, stripped: bytes) -> str:
    if looks_like_kineto(head):
        return "kineto"
    if b'"workload_graph"' in head:
        return "chakra_json"
    if stripped.startswith(b"{") and b'"schema"' in head and (b'"nodes"' in head or b'"start_ts"' in head):
        return "execution_trace"
    if stripped.startswith(b"["):
        return "collective_log" if b'"busBw"' in head else "param" if b'"comms"' in head else _unknown_json(path)
    if b'"nccl_version"' in head or b'"out_of_place"' in head or b'"busBw"' in head:
        return "collective_log"
    # the telling key may come late in a large file
    if b'"ph"' in head:
        return "kineto"
    document = load_json(path)
    for key, name in (("traceEvents", "kineto"), ("nodes", "execution_trace"), ("results", "collective_log")):
        if isinstance(document, dict) and isinstance(document.get(key), list):
            return name
    return _unknown_json(path)


def _unknown_json(path: str | os.PathLike[str]) -> str:
    load_json(path)  # a file that is not even JSON is better told so
    raise TraceError(f"{path}: JSON of no known trace format; {_expectation()}")


def find_files(paths: Iterable[str | os.PathLike[str]]) -> list[tuple[Path, bool]]:
    """The files to import and whether each was named itself (True) or found in a folder (False), in order.

    Raises:
        TraceError: a path that does not exist, or an empty folder.
    """
    found: list[tuple[Path, bool]] = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
            if not inside:
                raise TraceError(f"{path}: the folder holds no file")
            found.extend((inner, False) for inner in inside)
        elif path.exists():
            found.append((path, True))
        else:
            raise TraceError(f"{path}: no such file or folder")
    if not found:
        raise TraceError("nothing to import: give at least one file or folder")
    return found


# -- one file --------------------------------------------------------------------------------------------------------


def _read(state: _Import, path: Path, kind: str, partial: bool, on_progress: Callable[[int], None] | None) -> None:
    name = os.fspath(path)
    rows: list[dict[str, Any]] = []
    rank: int | None = None
    if kind == "kineto":
        joined = join(read_events(path, partial=partial, on_progress=on_progress))
        state.kineto.append(joined)
        rank = joined.events.rank
    elif kind in ("execution_trace", "param"):
        is_param = kind == "param"
        trace = read_param_trace(path, load_json(path)) if is_param else read_execution_trace(path, partial=partial)
        state.traces.append(trace)
        rank = trace.rank
    elif kind in ("chakra", "chakra_json"):
        trace_nodes = read_chakra(path) if kind == "chakra" else read_chakra_json(path, _object(path))
        rows, summary = chakra_rows(trace_nodes)
        rank = trace_nodes.rank
        state.ranks.append(summary)
    elif kind == "table":
        state.tables.append(read_table(path))
        state.sections.setdefault("tables", []).append(table_summary(name, state.tables[-1]))
    elif kind == "collective_log":
        frame = read_collective_log(path)
        rows = collective_rows(frame)
        state.sections.setdefault("collective_logs", []).extend(log_summary(name, frame))
    elif kind == "bus_ratios":
        ratios = read_bus_ratios(path)
        state.sections.setdefault("bus_ratios", []).append(ratio_summary(name, ratios))
    else:
        reader = read_aicb if kind == "aicb" else read_workload_text
        rows, summary = reader(path, read_text(path))
        state.sections.setdefault("workloads", []).append(summary)
    source = source_file(path, kind, rank)
    state.sources.append(source)
    state.files.append({"file": name, "format": kind, "rank": rank, "sha256": source.sha256})
    if rows:
        state.tables.append(make_table(rows, where=name))


def _object(path: Path) -> Mapping[str, Any]:
    document = parse_json(path, read_text(path))
    if not isinstance(document, dict):
        raise TraceError(f"{path}: expected a JSON object with workload_graph")
    return document


# -- all files together ----------------------------------------------------------------------------------------------


def _same_rank_twice(ranks: Sequence[tuple[int | None, str]]) -> None:
    seen: dict[int, str] = {}
    for rank, path in ranks:
        if rank is None:
            continue
        if rank in seen:
            raise TraceError(f"{path}: holds rank {rank}, and so does {seen[rank]}; import separate runs separately")
        seen[rank] = path


def _number_unknown(joined: Sequence[Joined]) -> list[str]:
    """Several files that do not say their rank are numbered in order; a single one stays unknown."""
    unknown = [one for one in joined if one.events.rank is None]
    if len(joined) < 2 or not unknown:
        return []
    taken = {one.events.rank for one in joined}
    free = (number for number in range(len(joined) + len(taken)) if number not in taken)
    for one in unknown:
        one.events.rank, one.events.rank_source = next(free), "order of the files"
    return [f"{len(unknown)} files do not say their rank; numbered in the order given"]


def attach_splits(joined: Joined, trace: EtRank) -> bool:
    """Fills the per-peer sizes that a profiler trace lacks from the execution trace of the same rank and run.

    Collectives are matched by order, and only if the whole sequence agrees in name and bytes: ids drift.
    """
    own = sorted(joined.collectives, key=lambda found: found.start_ns)
    others = [one for one in trace.collectives if one.recorded not in NOT_COLLECTIVES]
    if [(f.collective, f.bytes_in) for f in own] != [(o.collective, o.bytes_in) for o in others]:
        return False
    for found, other in zip(own, others, strict=True):
        found.bytes_out = other.bytes_out if found.bytes_out is None else found.bytes_out
        if other.splits:
            found.args.setdefault("In split size", list(other.splits))
            found.args.setdefault("Out split size", list(other.splits_out))
        if other.group_size:
            found.args.setdefault("Group size", other.group_size)
    return True


def _finish_kineto(state: _Import) -> tuple[Iterator[TraceTable], list[str]]:
    """The ranks' rows, made as they are asked for, and notes; their summaries go into `state`."""
    joined = sorted(state.kineto, key=lambda one: (one.events.rank is None, one.events.rank))
    _same_rank_twice([(one.events.rank, one.events.path) for one in joined])
    notes = _number_unknown(joined)
    for trace in state.traces:
        for one in joined:
            if one.events.rank == trace.rank and len(joined) > 0 and attach_splits(one, trace):
                notes.append(f"rank {trace.rank}: sizes per peer taken from {Path(trace.path).name} ({trace.schema})")
    matched, unmatched = match(joined)
    notes += unmatched
    offsets = clock_offsets_ns(matched, len(joined)) if joined else []
    if any(offsets):
        notes.append("the ranks' clocks differ; aligned by the common end of their collectives")
    starts = [_first_ns(one) - offset for one, offset in zip(joined, offsets, strict=True)]
    origin = min(starts, default=0)
    waits_of = [waits_by_event(matched, position) for position in range(len(joined))]
    for position, (one, offset, waits) in enumerate(zip(joined, offsets, waits_of, strict=True)):
        summary = rank_summary(one)
        summary["clock_offset_us"] = ns_to_us(offset)
        if waits:
            summary["comm_wait_us"] = ns_to_us(sum(waits.values()))
            total = sum(e.duration_ns for m in matched for e in m.exchanges if e.position == position)
            summary["comm_transfer_us"] = ns_to_us(total - sum(waits.values()))
        state.ranks.append(summary)
    if matched:
        state.sections["matched_collectives"] = matched_summary(matched, offsets, joined)
    state.kineto = joined
    rows = (
        make_table(frame, where=one.events.path)
        for one, offset, waits in zip(joined, offsets, waits_of, strict=True)
        for frame in kineto_frames(one, waits, offset, origin)
    )
    return rows, notes


def _first_ns(joined: Joined) -> int:
    events = joined.events
    moments = [min(events.device_start_ns)] if events.device_start_ns else []
    moments += [found.start_ns for found in events.steps[:1]]
    moments += [found.start_ns for found in joined.collectives[:1]]
    return events.base_ns + min(moments, default=0)


def _finish_traces(state: _Import) -> list[TraceTable]:
    """Execution traces: sizes of their own where no profiler trace of the rank carries them already."""
    _same_rank_twice([(trace.rank, trace.path) for trace in state.traces])
    profiled = {one.events.rank for one in state.kineto}
    tables: list[TraceTable] = []
    for trace in sorted(state.traces, key=lambda one: (one.rank is None, one.rank)):
        rows, summary = et_rows(trace)
        if state.kineto and trace.rank in profiled:
            state.sections.setdefault("execution_traces", []).append(summary)
            continue
        state.ranks.append(summary)
        tables.append(make_table(rows, where=trace.path))
    return tables


Progress = Callable[[Path], Callable[[int], None] | None]


def import_traces(
    paths: Iterable[str | os.PathLike[str]], *, partial: bool = False, on_file: Progress | None = None
) -> Imported:
    """Everything in the given files and folders as one table and one summary.

    Args:
        paths: files, or folders that are searched for files.
        partial: import the whole events of profiler traces that are cut short.
        on_file: called before each file; returns what to call with the number of bytes read so far.

    Raises:
        TraceError: a named file that is no trace, two files of the same rank, or nothing usable at all.
    """
    tables, files, summary = _import(paths, partial, on_file)
    table = concat(list(tables))
    return Imported(TraceTable(frame=table.frame, files=files), {**summary, "num_rows": len(table.frame)})


def import_to(
    out: str | os.PathLike[str] | None,
    paths: Iterable[str | os.PathLike[str]],
    *,
    partial: bool = False,
    on_file: Progress | None = None,
) -> dict[str, Any]:
    """The same, but the table goes into a file as it is made and never is in memory; returns the summary.

    Args:
        out: Parquet, or CSV; None checks the rows and drops them.
        paths, partial, on_file: as `import_traces`.

    Raises:
        TraceError: as `import_traces`, or if the file cannot be written.
    """
    tables, files, summary = _import(paths, partial, on_file)
    rows = sum(len(table.frame) for table in tables) if out is None else write_tables(tables, files, out)
    return {**summary, "num_rows": rows}


def _import(
    paths: Iterable[str | os.PathLike[str]], partial: bool, on_file: Progress | None
) -> tuple[Iterator[TraceTable], tuple[SourceFile, ...], dict[str, Any]]:
    """The rows in pieces, made as they are asked for; the files; the summary without the number of rows."""
    state = _Import()
    for path, named in find_files(paths):
        progress = on_file(path) if on_file is not None else None
        try:
            _read(state, path, detect(path), partial, progress)
        except TraceError as error:
            if named:
                raise
            state.refused.append({"file": os.fspath(path), "reason": str(error)})
    if not state.files:
        reasons = "; ".join(refused["reason"] for refused in state.refused[:3])
        raise TraceError(f"nothing could be imported: {reasons}")
    kineto, notes = _finish_kineto(state)
    tables = chain(kineto, _finish_traces(state), state.tables)
    files = (*(file for inner in state.tables for file in inner.files), *state.sources)
    summary: dict[str, Any] = {"ranks": sorted(state.ranks, key=_rank_order), "coverage": coverage(state.kineto, notes)}
    summary["coverage"]["refused"] = state.refused
    summary.update(state.sections)
    summary["files"] = state.files
    return tables, files, summary


def _rank_order(summary: Mapping[str, Any]) -> tuple[bool, int]:
    rank = summary["rank"]
    return rank is None, rank if rank is not None else 0
