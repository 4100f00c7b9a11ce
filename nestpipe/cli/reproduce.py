"""`nestpipe reproduce`: the published rows of a case, predicted from its baseline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from nestpipe.base import output_dir, write_text
from nestpipe.cli._common import progress, provenance
from nestpipe.cli._render import Format, Output, render
from reports.runs import csv, parts, results, text
from sim.costs import Reproduction
from sim.costs import reproduce as run_all
from traces.workloads import load_case

__all__ = ["reproduce"]


def reproduce(
    case: Annotated[str, typer.Option(metavar="NAME|FILE", help="A published cluster.")] = "nestpipe_paper",
    steps: Annotated[int, typer.Option(help="Batches per run.")] = 20,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write plots and tables here.")] = None,
    output: Output = Format.TEXT,
) -> None:
    """Fits the baseline's rows of a published cluster, predicts every other row, and prints both side by side."""
    the_case = load_case(case)
    if out is not None:
        output_dir(out)
    with progress() as say:
        result = run_all(the_case, steps=steps, progress=say)
    rows = pd.DataFrame(
        [{name: getattr(row, name) for name in row.__slots__} for row in result.rows],
    )
    render(
        output,
        facts=provenance(case=the_case.case, source=the_case.source, steps=steps),
        document=lambda: _json(result),
        rows=lambda: rows,
        text=lambda: _text(result, rows),
    )
    if out is not None:
        for path in _draw(result, rows, out):
            typer.echo(f"wrote {path}", err=True)


def _json(result: Reproduction) -> dict[str, object]:
    return {
        "rows": [{name: getattr(row, name) for name in row.__slots__} for row in result.rows],
        "fit": {name: getattr(result.work, name).text() for name in result.work.__slots__},
        "assumptions": [
            {"name": name, "value": each.value, "low": each.low, "high": each.high, "why": each.why}
            for name, each in result.case.assumptions.items()
        ],
        "sensitivity": [{name: getattr(each, name) for name in each.__slots__} for each in result.sensitivities],
        "limits": [
            {
                "method": method,
                "world_size": world_size,
                "iterations": run.bound.iterations,
                "cycle": run.bound.text(),
                "rests_on": dict(run.rests_on),
            }
            for (method, world_size), run in result.runs.items()
        ],
    }


def _text(result: Reproduction, rows: pd.DataFrame) -> str:
    case = result.case
    headline = case.headline_world_size
    lines = ["", case.title, ""]
    lines.append(f"Fitted on the {len(case.fit)} row(s) of {case.baseline.method} alone:")
    lines += [f"  {name:<14}{getattr(result.work, name).text()}" for name in result.work.__slots__]
    shown = rows[rows["published"].notna()].drop(columns=["relative_error"])
    lines += ["", results(shown, title=f"Published against computed ({case.baseline.method} is fitted)")]
    curve = rows[rows["metric"].isin(["step_latency_ms", "scaling_efficiency"])].copy()
    curve["cell"] = [
        f"{value:,.1f} ms" if metric == "step_latency_ms" else f"{100 * value:.1f} %"
        for value, metric in zip(curve["value"], curve["metric"], strict=True)
    ]
    for metric, title in (("step_latency_ms", "Step latency"), ("scaling_efficiency", "Scaling efficiency")):
        wide = curve[curve["metric"] == metric].pivot(index="method", columns="world_size", values="cell")
        beyond = max(row.world_size for row in case.fit)
        table = pd.DataFrame({"method": [each.method for each in case.methods]})
        for size in sorted({int(size) for size in curve["world_size"]}):
            table[f"{size:,}{'*' if size > beyond else ''}"] = wide.loc[table["method"], size].to_numpy()
        lines += ["", f"{title} by number of workers (* extrapolated), relative to {case.base_world_size}:"]
        lines.append(table.to_string(index=False))
    headline_parts = {each.method: result.runs[each.method, headline].metrics.parts_ms for each in case.methods}
    lines += ["", parts(headline_parts, title=f"Where the step goes at {headline:,} workers", share=False)]
    lines += ["", f"What limits the step at {headline:,} workers, and what those numbers rest on:"]
    for each in case.methods:
        run = result.runs[each.method, headline]
        rests = ", ".join(f"{share:.0%} {status}" for status, share in run.rests_on.items())
        lines.append(f"  {each.method:<17} {run.bound.text()}  [{rests}]")
    lines += ["", *_sensitivity(result)]
    return "\n".join(lines)


def _sensitivity(result: Reproduction) -> list[str]:
    methods = [each.method for each in result.case.methods]
    table: dict[str, dict[str, object]] = {}
    for each in result.sensitivities:
        row = table.setdefault(
            each.assumption,
            {"assumption": each.assumption, "value": f"{each.value:g}", "range": f"{each.low:g} .. {each.high:g}"},
        )
        low, high = (100 * (end / each.step_ms - 1) for end in (each.step_ms_low, each.step_ms_high))
        row[each.method] = f"{low:+.1f} .. {high:+.1f}" if max(abs(low), abs(high)) >= 0.05 else "-"
    frame = pd.DataFrame(table.values())[["assumption", "value", "range", *methods]]
    title = (
        f"Assumed, not published: each varied over its range alone; change of step latency at "
        f"{result.case.headline_world_size:,} workers in per cent"
    )
    lines = [text(frame, title=title), "", "Why these values:"]
    return lines + [f"  {name}: {each.why}" for name, each in result.case.assumptions.items()]


def _draw(result: Reproduction, rows: pd.DataFrame, folder: Path) -> list[Path]:
    from reports.figures import breakdown, qps, save, scaling_efficiency, speedups, timelines

    case = result.case
    headline = case.headline_world_size
    parts = {each.method: result.runs[each.method, headline].metrics.parts_ms for each in case.methods}
    nested = next((each.method for each in case.methods if each.schedule == "nestpipe"), case.methods[-1].method)
    shown = {each: result.runs[each, headline].timeline for each in (case.baseline.method, nested)}
    figures = {
        "scaling_efficiency": scaling_efficiency(rows, base=case.base_world_size),
        "qps": qps(rows),
        "speedup": speedups(rows, world_size=headline),
        "step_breakdown": breakdown(parts, title=f"Where the time of a step goes at {headline:,} workers"),
        "timeline": timelines(shown),
    }
    written = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(written, figures.values(), strict=True):
        save(figure, path)
    write_text(folder / "rows.csv", csv(rows))
    return [*written, folder / "rows.csv"]
