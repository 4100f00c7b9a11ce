"""`nestpipe trace`: bring in what profilers, benchmarks and other simulators wrote, and hand tables to their tools."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from nestpipe.base import TraceError, output_dir
from nestpipe.cli._common import provenance
from nestpipe.cli._render import Format, Output, render
from traces.formats import import_to, write_chakra, write_kineto, write_perfetto
from traces.table import read_table, write_table

__all__ = ["export", "import_"]


class ExportFormat(StrEnum):
    """What a trace table can be written as."""

    KINETO = "kineto"
    CHAKRA = "chakra"
    PERFETTO = "perfetto"
    CSV = "csv"
    PARQUET = "parquet"


class _Progress:
    """A bar on stderr over the bytes of the files; silent where stderr is no terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self.context: AbstractContextManager[Any] = self._bar if console.is_terminal else nullcontext()

    def file(self, path: Path) -> Callable[[int], None]:
        """Starts a task for a file; call the result with the unpacked bytes read so far."""
        packed = path.suffix == ".gz"
        task = self._bar.add_task(path.name, total=None if packed else path.stat().st_size)
        return lambda done: self._bar.update(task, completed=done)


def import_(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, or folders to search.")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="Trace table to write: .parquet, or .csv.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Take the whole events of files that are cut short.")
    ] = False,
    output: Output = Format.TEXT,
) -> None:
    """Read profiler traces, execution traces, benchmark logs and workloads into one trace table."""
    if out is not None:
        if Path(out).suffix not in (".parquet", ".csv"):
            raise TraceError(f"--out must end in .parquet or .csv, got {out!r}")
        output_dir(Path(out).parent)
    progress = _Progress()
    with progress.context:
        summary = import_to(out, paths, partial=partial, on_file=progress.file)
    render(
        output,
        document=lambda: {"provenance": provenance(), **summary},
        rows=lambda: _rows(summary),
        text=lambda: _text(summary, out),
        indent=2,
    )


_RANK_COLUMNS = (
    *("rank", "world_size", "num_steps", "compute_us", "comm_us", "exposed_us", "exposed_with_mem_us", "span_us"),
    *("num_compute_kernels", "num_comm_kernels", "num_mem_events", "comm_transfer_us", "comm_wait_us", "file"),
)


_LOG_COLUMNS = (
    *("file", "collective", "world_size", "dtype", "num_rows", "size_bytes_min", "size_bytes_max", "time_us_min"),
    *("average_busbw_gb_per_s", "source"),
)


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """A line per rank; for benchmarks, which have no ranks, a line per collective and world size."""
    logs = summary.get("collective_logs", [])
    rows, columns = (summary["ranks"], _RANK_COLUMNS) if summary["ranks"] or not logs else (logs, _LOG_COLUMNS)
    return [{name: row.get(name) for name in columns} for row in rows]


def _text(summary: dict[str, Any], out: str | None) -> str:
    lines: list[str] = []
    for rank in summary["ranks"]:
        lines.append(_rank_line(rank))
        for name, one in rank.get("collectives", {}).items():
            unknown = one.get("without_size", 0)
            size = f"{one['bytes']} bytes in" if unknown < one["count"] else "unknown bytes"
            lines.append(f"  {name}: {one['count']} x, {size}" + (f", {unknown} of unknown size" if unknown else ""))
    for log in summary.get("collective_logs", []):
        largest = log["largest"]
        lines.append(
            f"{log['file']}: {log['collective']} over {log['world_size']} ranks, {log['num_rows']} sizes, "
            f"largest {log['size_bytes_max']} bytes in {largest['time_us']} us"
        )
    for section in ("workloads", "tables", "bus_ratios"):
        lines.extend(f"{one['file']}: {section[:-1].replace('_', ' ')}" for one in summary.get(section, []))
    coverage = summary["coverage"]
    if coverage["classified_share"] is not None:
        lines.append(f"classified {100 * coverage['classified_share']:.1f} % of {coverage['device_us']} us device time")
    lines.extend(
        f"  not classified: {one['us']} us in {one['count']} events: {one['reason']}"
        for one in coverage["unclassified"]
    )
    lines.extend(f"note: {note}" for note in coverage["notes"])
    lines.extend(f"left out {refused['reason']}" for refused in coverage["refused"])
    lines.append(f"{summary['num_rows']} rows" + (f" written to {out}" if out is not None else ""))
    return "\n".join(lines)


def _rank_line(rank: dict[str, Any]) -> str:
    head = f"rank {rank['rank'] if rank['rank'] is not None else 'unknown'} of {rank['world_size'] or 'unknown'}"
    if "compute_us" not in rank:
        length = rank.get("duration_us")
        times = "no times" if length is None else f"{length} us recorded"
        return f"{head}: {rank['num_nodes']} nodes, {times} ({rank['file']})"
    return (
        f"{head}: {rank['num_steps']} steps, compute {rank['compute_us']} us, communication {rank['comm_us']} us, "
        f"exposed {rank['exposed_us']} us"
    )


def export(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A trace table, .parquet or .csv.")],
    out: Annotated[str, typer.Option("--out", "-o", help="File to write; a folder for one file per rank.")],
    to: Annotated[ExportFormat, typer.Option(help="What to write.")] = ExportFormat.KINETO,
    ranks: Annotated[str | None, typer.Option(help="Ranks to write, e.g. 0,1,8-15; all by default.")] = None,
) -> None:
    """Write a trace table for the tools that people have: HTA and Chrome, Chakra and ASTRA-sim, Perfetto."""
    trace = read_table(table)
    frame = trace.frame
    if ranks is not None:
        frame = frame[frame["rank"].isin(_rank_list(ranks))].reset_index(drop=True)
        if frame.empty:
            raise TraceError(f"{table}: holds none of the ranks {ranks}")
    if to in (ExportFormat.CSV, ExportFormat.PARQUET):
        if Path(out).suffix != f".{to.value}":
            raise TraceError(f"--out must end in .{to.value}, got {out!r}")
        output_dir(Path(out).parent)
        write_table(replace(trace, frame=frame), out)
        return
    if to is ExportFormat.PERFETTO:
        output_dir(Path(out).parent)
        write_perfetto(frame, out)
        return
    output_dir(Path(out))
    if to is ExportFormat.KINETO:
        written, warnings = write_kineto(frame, out), list[str]()
    else:
        written, warnings = write_chakra(frame, out)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
    sys.stdout.write("".join(f"{path}\n" for path in written))


def _rank_list(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise TraceError(f"--ranks must list whole numbers and runs of them such as 0,1,8-15, got {text!r}")
        ranks.extend(range(int(first), int(last) + 1 if dash else int(first) + 1))
    return ranks
