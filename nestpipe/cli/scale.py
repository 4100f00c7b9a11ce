"""`nestpipe scale`: scaling curves per schedule with intervals, and where each falls off and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import pandas as pd
import typer

from nestpipe.base import CaseError, output_dir, write_text
from nestpipe.cli._common import progress
from nestpipe.cli._render import Format, Output, render
from nestpipe.cli._scenario import DryRun, ScenarioFile, dry_run, facts_of, load
from reports.runs import text
from sim.scenario import Grid, Scaling, require_plain
from sim.scenario import scale as run

__all__ = ["scale"]

_MARKS: Final = {"extrapolated": " x", "assumed": " a"}


def scale(
    scenario: ScenarioFile,
    threshold: Annotated[
        float | None, typer.Option(help="Efficiency to look for, as a fraction; the scenario's by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write plots and tables here.")] = None,
    dry: DryRun = False,
    output: Output = Format.TEXT,
) -> None:
    """Scaling efficiency and QPS of every schedule against workers, and what limits it where it falls off.

    Example: nestpipe scale examples/scale.yaml --out out/scale
    """
    grid = load(scenario)
    require_plain(grid)
    wanted = grid.scenario.efficiency_threshold if threshold is None else threshold
    if not 0 < wanted <= 1:
        where = f"{scenario}: efficiency_threshold" if threshold is None else "--threshold"
        raise CaseError(f"{where} must be a fraction above 0 and at most 1 (90 % is 0.9), got {wanted:g}")
    if dry:
        dry_run(grid, output, workers=1, dask=None, where=out)
        return
    if out is not None:
        output_dir(out)
    with progress() as say:
        found = run(grid, threshold=wanted, progress=say)
    found = _with_reach(grid, found)
    render(
        output,
        facts=facts_of(grid, base_world_size=found.base_world_size),
        document=lambda: {
            "threshold": found.threshold,
            "base_world_size": found.base_world_size,
            "rows": found.rows.to_dict("records"),
            "limits": found.limits.to_dict("records"),
            "missing": list(found.missing),
        },
        rows=lambda: found.rows,
        text=lambda: "\n".join(["", *_text(grid, found)]),
    )
    if out is not None:
        for path in _draw(found, out):
            typer.echo(f"wrote {path}", err=True)


def _with_reach(grid: Grid, found: Scaling) -> Scaling:
    """Says of each limit whether it lies outside the sizes that the case was fitted on."""
    sizes = [] if grid.case is None else [row.world_size for row in grid.case.fit]
    outside = [bool(sizes) and not min(sizes) <= size <= max(sizes) for size in found.limits["looked_at"]]
    return replace(found, limits=found.limits.assign(extrapolated=outside))


def _text(grid: Grid, found: Scaling) -> list[str]:
    lines = []
    for metric, title, digits, factor in (
        ("scaling_efficiency", f"Scaling efficiency (%) relative to {found.base_world_size:,} workers", 1, 100),
        ("qps", "QPS (samples/s)", 0, 1),
        ("step_latency_ms", "Step latency (ms)", 1, 1),
    ):
        lines += [text(_wide(found.rows, metric, digits, factor), title=title + _how(grid)), ""]
    lines.append(f"Where efficiency falls below {100 * found.threshold:g} %, without jitter, and what limits it there:")
    for row in found.limits.to_dict("records"):
        where = "nowhere" if pd.isna(row["world_size"]) else f"from {int(row['world_size']):,} workers"
        efficiency = row["scaling_efficiency"]
        if efficiency is None or efficiency != efficiency:
            lines.append(f"  {row['method']}: {where}")
            continue
        status = ", extrapolated" if row["extrapolated"] else ""
        lines.append(f"  {row['method']}: {where} ({100 * efficiency:.1f} % at {int(row['looked_at']):,}{status})")
        lines.append(f"    critical cycle: {row['limit']}")
        lines.append(f"    busiest: {row['busiest']}, {100 * row['busiest_share']:.0f} % of the step")
    return [
        *lines,
        *(["", "Invalid configurations:"] if found.missing else []),
        *(f"  {each}" for each in found.missing),
    ]


def _how(grid: Grid) -> str:
    scenario = grid.scenario
    return f", mean of {scenario.seeds} seeds [5th .. 95th percentile]" if scenario.is_random else ""


def _wide(rows: pd.DataFrame, metric: str, digits: int, factor: float) -> pd.DataFrame:
    """Methods down, world sizes across; values with their status where it is not plain."""
    mine = rows[rows["metric"] == metric].copy()
    mine["cell"] = [
        f"{factor * value:,.{digits}f}"
        + ("" if low is None or low != low else f" [{factor * low:,.{digits}f} .. {factor * high:,.{digits}f}]")
        + _MARKS.get(status, "")
        for value, low, high, status in mine[["value", "low", "high", "status"]].itertuples(index=False)
    ]
    wide = mine.pivot(index="method", columns="world_size", values="cell").loc[list(dict.fromkeys(mine["method"]))]
    wide.columns = [f"{size:,}" for size in wide.columns]
    notes = [
        f"{mark}: {name}" for mark, name in (("x", "extrapolated"), ("a", "assumed")) if name in set(mine["status"])
    ]
    return wide.reset_index(names="method" + (f" ({', '.join(notes)})" if notes else ""))


def _draw(found: Scaling, out: Path) -> list[Path]:
    from reports.figures import qps, save, scaling_efficiency

    written = [
        save(scaling_efficiency(found.rows, base=found.base_world_size), out / "scaling_efficiency.png"),
        save(qps(found.rows), out / "qps.png"),
    ]
    for name, frame in (("rows.csv", found.rows), ("limits.csv", found.limits)):
        write_text(out / name, frame.to_csv(index=False, lineterminator="\n"))
        written.append(out / name)
    return written
