"""`nestpipe report`: runs as one page. `nestpipe diff`: two runs or Timelines side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nestpipe.base import write_text
from nestpipe.cli._common import provenance
from nestpipe.cli._render import Format, Output, render
from reports.html import page
from reports.runs import as_csv, as_json, as_text, compare, read_rows, read_run, read_side

__all__ = ["diff", "report"]


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Directories written by simulate --out.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write; - for stdout.")] = Path(
        "report.html"
    ),
    title: Annotated[str, typer.Option(help="Heading of the page; made from the runs' names by default.")] = "",
    curve: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Results to draw as the curve: a command's --format json or csv."),
    ] = None,
    rank: Annotated[list[int] | None, typer.Option(help="A rank to show in the timelines; repeatable.")] = None,
) -> None:
    """Writes one self-contained HTML page about one or several runs; the others are compared with the first."""
    made = ", ".join(f"{key}: {value}" for key, value in provenance().items())
    base = Path.cwd() if str(out) == "-" else out.parent
    rows = read_rows(curve) if curve else ()
    html = page([read_run(run) for run in runs], title=title, ranks=rank or None, curve_rows=rows, made=made, base=base)
    if str(out) == "-":
        typer.echo(html, nl=False)
    else:
        write_text(out, html)
        typer.echo(f"wrote {out}", err=True)


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run's directory, or a Timeline as Parquet.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What to compare it with.")],
    most: Annotated[int, typer.Option(min=1, help="How many of the ops that changed most to list.")] = 12,
    tolerance_percent: Annotated[
        float | None, typer.Option(min=0, help="Exit with 1 if step latency differs by more than this.")
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Compares two runs, simulated or measured, op by op: step latency, where the step goes, and what changed."""
    (name_a, timeline_a), (name_b, timeline_b) = read_side(a), read_side(b)
    result = compare(timeline_a, timeline_b, names=(name_a, name_b if name_b != name_a else f"{name_b} (B)"))
    render(
        output,
        facts=provenance(a=str(a), b=str(b)),
        document=lambda: as_json(result),
        rows=lambda: as_csv(result),
        text=lambda: as_text(result, most=most),
    )
    before, after = result.a.metrics.step_latency_ms, result.b.metrics.step_latency_ms
    if tolerance_percent is not None and abs(after / before - 1) * 100 > tolerance_percent:
        typer.echo(
            f"step latency differs by {100 * (after / before - 1):+.2f} %, more than {tolerance_percent:g} %", err=True
        )
        raise typer.Exit(1)
