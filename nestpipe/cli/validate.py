"""`nestpipe validate`: predict, then run for real, and say how far the prediction was off and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from executor.compute import Compute
from nestpipe.base import CaseError
from nestpipe.cli._bench import PANEL, Backend, Device, Patience, Realtime, Timeout, WorldSize
from nestpipe.cli._common import progress, provenance
from nestpipe.cli._render import Format, Output, render

__all__ = ["validate"]


def validate(
    costs: Annotated[Path, typer.Option("--costs", help="The cost table, as 'nestpipe profile' writes it.")] = Path(
        "out/costs.json"
    ),
    grid: Annotated[
        str, typer.Option("--grid", help="Which configurations: a grid by name, or a YAML file (docs/validate.md).")
    ] = "quick",
    compute: Annotated[Compute, typer.Option(help="Whether compute is real or emulated.")] = Compute.EMULATED,
    world_size: WorldSize = 2,
    repeats: Annotated[
        int,
        typer.Option(
            rich_help_panel="Prediction and runs", min=1, help="How often each configuration runs; the median counts."
        ),
    ] = 3,
    draws: Annotated[
        int,
        typer.Option(rich_help_panel="Prediction and runs", min=2, help="Simulations behind each predicted interval."),
    ] = 8,
    seed: Annotated[int, typer.Option(rich_help_panel="Prediction and runs", help="Seed of these simulations.")] = 0,
    out: Annotated[
        Path, typer.Option("--out", "-o", rich_help_panel="Result", help="Folder for predictions, results and plots.")
    ] = Path("out/validate"),
    history: Annotated[
        Path | None,
        typer.Option("--history", rich_help_panel="Result", help="File that a line with the summary is appended to."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel="Result", help="Largest allowed mean absolute error of the step latency; beyond it, exit 1."
        ),
    ] = 0.05,
    realtime: Realtime = True,
    backend: Backend = "gloo",
    device: Device = "cpu",
    rate: Annotated[
        float | None,
        typer.Option("--rate-mbit-per-s", rich_help_panel=PANEL, help="Under torchrun: what a rank's link carries."),
    ] = None,
    timeout_s: Timeout = 600.0,
    patience_s: Patience = 60.0,
    output: Output = Format.TEXT,
) -> None:
    """Predict every configuration of a grid, write the predictions down, run them all, and compare op by op.

    Exit 1 if the mean absolute error of the step latency is beyond the tolerance.
    """
    from executor.profile import check_separate
    from nestpipe import validate as library
    from traces.workloads import read_cost_table

    if not tolerance >= 0 or seed < 0:
        raise CaseError(f"--tolerance and --seed must not be negative, got {tolerance:g} and {seed}")
    table = read_cost_table(costs)
    points = library.at_rate(library.load_grid(grid, compute.device), rate)
    check_separate(table, [point.config for point in points])
    if history is not None:
        library.read_history(history)
    options = library.BenchOptions(
        world_size=world_size,
        realtime=realtime,
        backend=backend,
        device=device,
        timeout_s=timeout_s,
        patience_s=patience_s,
    )
    with library.open_bench(options, probe_ns=max(round(table.number("probe_ns")), 1)) as bench:
        otherwise = library.differences(table, {"world_size": bench.world_size, **bench.conditions})
        if bench.first:
            library.check_writable(out / "predictions.json", history)
            for difference in otherwise:
                print(f"note: {difference}", file=sys.stderr)
        facts = provenance(
            cost_table=str(costs),
            cost_table_digest=table.digest,
            profiled_otherwise=otherwise,
            seed=seed,
            grid=grid,
            **bench.conditions,
        )
        with progress(len(points)) as tell:
            found = library.run_validation(
                points,
                table,
                bench,
                out,
                grid=grid,
                provenance=facts,
                repeats=repeats,
                draws=draws,
                seed=seed,
                tell=tell,
            )
    if found is None:
        return
    if history is not None:
        library.append_history(history, found.summary, out / "history.png")
    render(
        output,
        document=found.document,
        indent=None,
        rows=found.to_csv,
        text=lambda: library.validation_text(found),
    )
    if output is Format.TEXT:
        print("predicted means computed before the run and written to predictions.json", file=sys.stderr)
    if not found.summary["mean_absolute_error"] <= tolerance:
        raise typer.Exit(1)
