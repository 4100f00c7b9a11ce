"""`nestpipe sweep`: the grid of a scenario in parallel, resumable, and where schedules stop paying."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final

import pandas as pd
import typer

from nestpipe import api
from nestpipe.base import CaseError, unknown_name
from nestpipe.cli._common import decimals
from nestpipe.cli._render import Format, Output, render
from nestpipe.cli._scenario import CORES, Dask, DryRun, ScenarioFile, Workers, counting, dry_run, facts_of, load
from reports.runs import Column, text
from sim.scenario import Grid

__all__ = ["sweep"]

_SHOWN = 10
#: What the text needs of a row, so that a large sweep is not held in memory whole.
_NUMBERS: Final = (
    *("index", "cluster", "schedule", "micro_batches", "domain_size", "world_size", "batch_per_worker"),
    *("status", "reason", "step_ms", "qps", "expected_qps", "scaling_efficiency"),
    *("cost_per_hour", "cost_per_million_samples", "device_bytes"),
)


def sweep(
    scenario: ScenarioFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Keep results here; run again to continue after a stop."),
    ] = None,
    workers: Workers = CORES,
    dask: Dask = None,
    show_map: Annotated[
        str | None,
        typer.Option(
            "--map",
            rich_help_panel="Where schedules stop paying",
            metavar="X[,Y]",
            help="Where schedules stop paying along one or two swept keys.",
        ),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            rich_help_panel="Where schedules stop paying", help="The schedule that gains on the map refer to."
        ),
    ] = "sync",
    pays_at: Annotated[
        float,
        typer.Option(
            rich_help_panel="Where schedules stop paying", help="The gain from which a schedule pays, as a factor."
        ),
    ] = 1.0,
    dry: DryRun = False,
    output: Output = Format.TEXT,
) -> None:
    """Evaluates every configuration of a scenario, or those its search picks, and says where schedules stop paying.

    Example: nestpipe sweep examples/break_even.yaml --map factors.communication_time,factors.lookup_cost --out out/map
    """
    grid = load(scenario)
    axes = _axes(grid, show_map, baseline)
    if not (pays_at > 0 and math.isfinite(pays_at)):
        raise CaseError(f"--pays-at must be a factor above 0, such as 1.25, got {pays_at:g}")
    if dry:
        dry_run(grid, output, workers=workers, dask=dask, where=out)
        return
    with counting(len(grid.chosen()), "sweeping") as tell:
        columns = [*_NUMBERS, *grid.axes] if output is Format.TEXT else None
        results = api.sweep(grid, out=out, workers=workers, dask=dask, progress=tell, columns=columns)
    _print(grid, results, axes, baseline, pays_at, output, out)


def _axes(grid: Grid, text: str | None, baseline: str) -> list[str]:
    """The axes of the map, checked before anything runs."""
    if text is None:
        return []
    axes = [part.strip() for part in text.split(",")]
    if len(axes) > 2:
        raise CaseError(f"--map takes one or two keys, X or X,Y, got {text!r}")
    known = [*grid.axes, "micro_batches", "world_size", "batch_per_worker"]
    for axis in axes:
        if axis not in known:
            raise CaseError("--map: " + unknown_name("swept key", axis, known))
    if baseline not in grid.scenario.schedules:
        raise CaseError("--baseline: " + unknown_name("schedule", baseline, grid.scenario.schedules))
    return axes


def _print(
    grid: Grid, results: pd.DataFrame, axes: list[str], baseline: str, pays_at: float, output: Format, out: Path | None
) -> None:
    gains = api.break_even(results, *axes, baseline=baseline, pays_at=pays_at) if axes else None

    def document() -> dict[str, Any]:
        frames = {"rows": results} | ({} if gains is None else {"gains": gains.gains, "edges": gains.edges})
        return {name: frame.to_dict("records") for name, frame in frames.items()}

    def lines() -> list[str]:
        return ["", *_text(grid, results), *([] if gains is None else [_edges_text(gains)])]

    render(
        output,
        facts=facts_of(grid),
        document=document,
        rows=lambda: results if gains is None else gains.gains,
        text=lambda: "\n".join(lines()),
    )
    if out is not None:
        typer.echo(f"wrote {out / 'results.parquet'}", err=True)
        if gains is not None:
            from reports.figures import save

            typer.echo(f"wrote {save(gains.figure(), out / 'break_even.png')}", err=True)


def _text(grid: Grid, results: pd.DataFrame) -> list[str]:
    scenario = grid.scenario
    metric, minimise = "step_ms", True
    if scenario.objective is not None:
        metric, minimise = scenario.objective.metric, scenario.objective.minimise is not None
    fine = results[results["status"] == "ok"].sort_values(metric, ascending=minimise, kind="stable")
    columns = [Column(name=name) for name in ("cluster", "schedule", "micro_batches", "domain_size", "world_size")]
    columns[2:] = [Column(name="micro_batches", header="N"), *columns[3:]]
    columns += [Column(name=key, digits=4) for key in grid.axes]
    columns += [
        Column(name="step_ms", header="step (ms)", digits=2),
        Column(name="qps", header="QPS (samples/s)", digits=0),
        Column(name="scaling_efficiency", header="efficiency (%)", digits=1, scale=100),
    ]
    if metric not in ("step_ms", "qps", "scaling_efficiency", "world_size"):
        columns.append(Column(name=metric, digits=decimals(map(float, fine[metric].dropna()), 3, 4)))
    shown = [each for each in columns if fine[each.name].notna().any()]
    words = f"{len(results):,} configurations, {len(results) - len(fine):,} of them invalid; best by {metric}:"
    lines = [text(fine.head(_SHOWN), shown, title=words)] if len(fine) else [words]
    reasons = results[results["status"] != "ok"]["reason"].value_counts()
    return lines + [f"  {count:,} x {reason}" for reason, count in reasons.head(5).items()]


def _edges_text(found: api.BreakEven) -> str:
    columns = [
        Column(name="schedule"),
        *([] if found.y is None else [Column(name=found.y, digits=4)]),
        Column(name="pays", header="pays"),
        Column(name=found.x, digits=4),
        Column(name="gain_min", header="least gain (x)", digits=2),
        Column(name="gain_max", header="most gain (x)", digits=2),
    ]
    where = f"over {found.baseline} along {found.x} (interpolated between points):"
    return text(found.edges, columns, title=f"\nWhere a schedule gains at least {found.pays_at:g}x {where}")
