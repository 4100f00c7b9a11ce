"""Any supported file or folder into one trace table and one summary; formats are detected from content, not from names.

`import_traces([...])` is all that the command line does. Files named one by one must all be understood; in a folder,
other files are skipped and listed with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError
from traces.formats import (
    aicb,
    bus_ratios,
    chakra,
    chakra_json,
    collective_logs,
    execution_trace,
    kineto,
    param,
    trace_table,
    workload,
)
from traces.formats.format import Format, Head, Options
from traces.formats.ranks import put_together
from traces.formats.reading import load_json
from traces.table import SourceFile, TraceTable, concat, make_table, source_file, write_tables

__all__ = ["FORMATS", "Imported", "detect", "find_files", "import_to", "import_traces"]

# asked in this order; the last takes any other text
FORMATS = (
    Format("kineto", "PyTorch profiler (Kineto, Chrome JSON)", kineto),
    Format("chakra_json", "Chakra JSON", chakra_json),
    Format("execution_trace", "PyTorch execution trace", execution_trace),
    Format("param", "PARAM communication trace", param),
    Format("chakra", "Chakra protobuf", chakra),
    Format("bus_ratios", "table of bus bandwidth ratios", bus_ratios),
    Format("workload", "ASTRA-sim or SimAI workload", workload),
    Format("aicb", "AICB workload", aicb),
    Format("table", "trace table", trace_table),
    Format("collective_log", "benchmark of collectives", collective_logs),
)


@dataclass(slots=True)
class Imported:
    """The table and the JSON-ready summary of an import."""

    table: TraceTable
    summary: dict[str, Any]


@dataclass(slots=True)
class _Import:
    """What has been read so far."""

    traces: list[object] = field(default_factory=list)
    tables: list[TraceTable] = field(default_factory=list)
    sections: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"ranks": []})
    files: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[SourceFile] = field(default_factory=list)


def detect(path: str | os.PathLike[str]) -> Format:
    """The format of a file, from its content.

    Raises:
        TraceError: unreadable, or none of `FORMATS`.
    """
    head = Head.of(Path(path))
    if not head.stripped:
        raise TraceError(f"{path}: the file is empty; expected a trace, a log or a workload")
    found = _first(head)
    if found is None and head.is_json:
        # the telling key may come late in a large file
        document = load_json(path)
        lists = (
            [key for key, value in document.items() if isinstance(value, list)] if isinstance(document, dict) else []
        )
        found = _first(replace(head, lists=frozenset(lists)))
    if found is None:
        what = (
            "JSON of no known trace format" if head.is_json else "a binary file, but no Chakra trace or Parquet table"
        )
        raise TraceError(f"{path}: {what}; expected one of: {'; '.join(one.title for one in FORMATS)}")
    return found


def _first(head: Head) -> Format | None:
    return next((one for one in FORMATS if one.reader.sniff(head)), None)


def find_files(paths: Iterable[str | os.PathLike[str]]) -> list[tuple[Path, bool]]:
    """The files to import, in order, each with True if it was named itself, False if it was found in a folder.

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


def _read(state: _Import, path: Path, options: Options) -> None:
    name, kind = os.fspath(path), detect(path)
    found = kind.reader.summarise(kind.reader.read(path, options))
    source = source_file(path, kind.name, found.rank)
    if isinstance(found.rows, TraceTable):
        state.tables.append(found.rows)
    elif found.rows:
        state.tables.append(make_table(found.rows, where=name))
    if found.trace is not None:
        state.traces.append(found.trace)
    if found.summaries:
        state.sections.setdefault(found.section, []).extend(found.summaries)
    state.notes.extend(found.notes)
    state.sources.append(source)
    state.files.append({"file": name, "format": kind.name, "rank": found.rank, "sha256": source.sha256})


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
        try:
            _read(state, path, Options(partial=partial, on_progress=on_file(path) if on_file is not None else None))
        except TraceError as error:
            if named:
                raise
            state.refused.append({"file": os.fspath(path), "reason": str(error)})
    if not state.files:
        reasons = "; ".join(refused["reason"] for refused in state.refused[:3])
        raise TraceError(f"nothing could be imported: {reasons}")
    together = put_together(state.traces)
    together.coverage["notes"] += state.notes
    files = (*(file for inner in state.tables for file in inner.files), *state.sources)
    ranks = [*state.sections.pop("ranks"), *together.ranks]
    summary: dict[str, Any] = {
        "ranks": sorted(ranks, key=lambda one: (one["rank"] is None, one["rank"] or 0)),
        "coverage": {**together.coverage, "refused": state.refused},
        **state.sections,
        **together.sections,
        "files": state.files,
    }
    return chain(together.tables, state.tables), files, summary
