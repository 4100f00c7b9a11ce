"""`nestpipe validate`: predict, then run for real, and say how far the prediction was off and why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestpipe.base import CaseError, atomic_file, write_text
from nestpipe.cli._common import Format, progress, provenance
from nestpipe.cli.profile import Compute

if TYPE_CHECKING:
    import pandas as pd

    from nestpipe.validate import Bench, Outcome, Point, Prediction
    from traces.workloads import CostTable

__all__ = ["validate"]

_CAUSES_SHOWN = 3


def validate(
    costs: Annotated[Path, typer.Option("--costs", help="The cost table, as 'nestpipe profile' writes it.")] = Path(
        "out/costs.json"
    ),
    grid: Annotated[
        str, typer.Option("--grid", help="Which configurations: a grid by name, or a YAML file (docs/validate.md).")
    ] = "quick",
    compute: Annotated[Compute, typer.Option(help="Whether compute is real or emulated.")] = Compute.EMULATED,
    world_size: Annotated[int, typer.Option(help="Ranks of the testbed.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="How often each configuration runs; the median counts.")] = 3,
    draws: Annotated[int, typer.Option(min=2, help="Simulations behind each predicted interval.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of these simulations.")] = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for predictions, results and plots.")] = Path(
        "out/validate"
    ),
    history: Annotated[
        Path | None, typer.Option("--history", help="File that a line with the summary is appended to.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest allowed mean absolute error of the step latency; beyond it, exit 1.")
    ] = 0.05,
    realtime: Annotated[bool, typer.Option(help="Run ranks before everything else on the machine.")] = True,
    backend: Annotated[str, typer.Option(help="Under torchrun: the backend.")] = "gloo",
    device: Annotated[str, typer.Option(help="Under torchrun: cpu or cuda.")] = "cpu",
    rate: Annotated[
        float | None, typer.Option("--rate-mbit-per-s", help="Link rate, where it is given and cannot be shaped.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="End the runs at one link rate after this many seconds.")] = 600.0,
    patience_s: Annotated[
        float,
        typer.Option(min=0, help="Wait, per link rate, for the machine to be as fast as when profiled."),
    ] = 60.0,
    output: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TEXT,
) -> None:
    """Predict every configuration of a grid, write the predictions down, run them all, and compare op by op.

    Exit 1 if the mean absolute error of the step latency is beyond the tolerance.
    """
    from executor.profile import check_separate
    from nestpipe.validate import bench, check_writable, differences, outcome_of, prediction_rows
    from traces.workloads import read_cost_table

    if not tolerance >= 0 or seed < 0:
        raise CaseError(f"--tolerance and --seed must not be negative, got {tolerance:g} and {seed}")
    table = read_cost_table(costs)
    points = _points(grid, compute, rate)
    check_separate(table, [point.config for point in points])
    _history(history)
    with bench(
        world_size=world_size,
        realtime=realtime,
        backend=backend,
        device=device,
        timeout_s=timeout_s,
        patience_s=patience_s,
        probe_ns=max(round(table.number("probe_ns")), 1),
    ) as here:
        if not here.first:
            _measure(points, here, repeats)
            return
        check_writable(out / "predictions.json", history)
        other = differences(table, {"world_size": here.world_size, **here.conditions})
        for difference in other:
            print(f"note: {difference}", file=sys.stderr)
        predictions = _predict(points, table, here.world_size, draws, seed)
        facts = provenance(
            cost_table=str(costs),
            cost_table_digest=table.digest,
            profiled_otherwise=other,
            seed=seed,
            grid=grid,
            **here.conditions,
        )
        # on disk before anything runs, so that nobody need take our word for it
        text = json.dumps({"provenance": facts, "rows": prediction_rows(points, predictions)}, indent=1)
        write_text(out / "predictions.json", text)
        spans = _measure(points, here, repeats)
    with atomic_file(out / "spans.parquet") as file:
        spans.to_parquet(file)
    outcomes = [
        outcome_of(point, prediction, [runs for _, runs in spans[spans["point"] == number].groupby("repeat")])
        for number, (point, prediction) in enumerate(zip(points, predictions, strict=True))
    ]
    result = _write(outcomes, facts, {"grid": grid, "compute": compute.value, "world_size": here.world_size}, out)
    if history is not None:
        _append(history, {"commit": _commit(), **result["summary"]}, out)
    _print(result, output)
    if not result["summary"]["mean_absolute_error"] <= tolerance:
        raise typer.Exit(1)


def _write(
    outcomes: Sequence[Outcome], facts: dict[str, object], conditions: dict[str, object], out: Path
) -> dict[str, Any]:
    """Compare, and write what came out into the folder; the result as it stands in `validation.json`."""
    from nestpipe.validate import compare, kind_errors, status_of, summarise

    rows = compare(outcomes)
    result = {
        "provenance": facts,
        "summary": {**conditions, **summarise(rows)},
        "kinds": kind_errors(outcomes).to_dict("records"),
        "rows": [{**row, "status": status_of(row["extrapolated"])} for row in rows.to_dict("records")],
    }
    write_text(out / "validation.json", json.dumps(result, indent=1, default=_plain))
    write_text(out / "validation.csv", rows.to_csv(index=False))
    _draw(rows, outcomes, out)
    return result


def _points(name: str, compute: Compute, rate_mbit_per_s: float | None) -> list[Point]:
    """The points of a grid, at the rate that is given where links are not shaped."""
    from dataclasses import replace

    from executor.compute import EmulatedDevice
    from nestpipe.validate import bits_per_s, links_given, load_grid

    points = load_grid(name, None if compute is Compute.REAL else EmulatedDevice())
    if links_given(rate_mbit_per_s) and rate_mbit_per_s is not None:
        return [replace(point, rate_bits_per_s=bits_per_s(rate_mbit_per_s)) for point in points]
    if rate_mbit_per_s is not None:
        raise CaseError("--rate-mbit-per-s is for torchrun; on a testbed links have the rates of the grid")
    return points


def _predict(points: Sequence[Point], table: CostTable, world_size: int, draws: int, seed: int) -> list[Prediction]:
    from dataclasses import replace

    from executor.profile import sizes_of_run
    from nestpipe.validate import machine_of, model_error, predict, rehearse

    rehearsed = rehearse(table)
    known: dict[object, Any] = {}
    found = []
    with progress(len(points)) as tell:
        for point in points:
            tell(f"predicting {point.config.schedule}")
            key = replace(point.config, schedule="sync")  # sizes do not depend on the schedule
            if key not in known:
                known[key] = sizes_of_run(point.config, world_size)
            machine = machine_of(table, [point.rate_bits_per_s] * world_size)
            bias = model_error(rehearsed, point.config.variant.split()[0])
            found.append(predict(point.config, table, machine, draws=draws, seed=seed, sizes=known[key], bias=bias))
    return found


def _measure(points: Sequence[Point], here: Bench, repeats: int) -> pd.DataFrame:
    """Run all points of a link rate one after the other, then all of them again, so that repeats lie apart.

    Returns:
        The spans, with columns `point` (position in `points`) and `repeat`.
    """
    import pandas as pd

    frames = []
    for rate in sorted({point.rate_bits_per_s for point in points}):
        chosen = [number for number, point in enumerate(points) if point.rate_bits_per_s == rate]
        frame = here.run([points[number].config for number in chosen] * repeats, rate)
        numbers = pd.Series(chosen * repeats)
        frames.append(frame.assign(point=frame["run"].map(numbers), repeat=frame["run"] // len(chosen)))
    return pd.concat(frames, ignore_index=True)


def _draw(rows: Any, outcomes: Sequence[Outcome], out: Path) -> None:
    from reports.figures import predicted_against_measured, save, timeline_pair

    save(predicted_against_measured(rows), out / "predicted_against_measured.png")
    for schedule in ("sync", "nestpipe"):
        mine = [each for each in outcomes if each.point.config.schedule == schedule]
        if mine:
            pair = timeline_pair(mine[0].prediction.timeline, mine[0].timelines[mine[0].middle], name=schedule)
            save(pair, out / f"timeline_{schedule}.png")


def _append(path: Path, entry: dict[str, Any], out: Path) -> None:
    """Add a line to the history, and draw it anew."""
    from reports.figures import history, save

    entries = [*_history(path), entry]
    write_text(path, "".join(json.dumps(each, default=_plain) + "\n" for each in entries))
    save(history(entries), out / "history.png")


def _history(path: Path | None) -> list[dict[str, Any]]:
    """The entries of a history file, none if there is no file.

    Raises:
        TraceError: if it cannot be read, or is not one JSON object a line with what the figure needs.
    """
    from reports.figures import check_history
    from traces.formats import parse_json, read_text

    if path is None or not path.exists():
        return []
    lines = enumerate(read_text(path).splitlines(), start=1)
    entries = [parse_json(f"{path}: line {number}", line) for number, line in lines if line.strip()]
    check_history(entries, str(path))
    return entries


def _commit() -> str:
    """The commit of the source tree, if this is one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python number."""
    return value.item()


def _print(result: dict[str, Any], output: Format) -> None:
    import pandas as pd

    if output is Format.JSON:
        typer.echo(json.dumps(result, default=_plain))
        return
    rows: list[dict[str, Any]] = result["rows"]
    if output is Format.CSV:
        typer.echo(pd.DataFrame(rows).to_csv(index=False), nl=False)
        return
    _print_rows(rows)
    _print_summary(result["summary"], result["kinds"])
    print("predicted means computed before the run and written to predictions.json", file=sys.stderr)


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    typer.echo(
        f"{'schedule':<12} {'N':>2} {'batch':>5} {'dim':>4} {'Mbit/s':>6} {'predicted':>9} {'interval (ms)':>17} "
        f"{'measured':>9} {'error':>7} {'speedup pred/meas':>18}  main causes (ms)"
    )
    for row in rows:
        causes = {
            name.removeprefix("cause_").removesuffix("_ms"): row[name] for name in row if name.startswith("cause_")
        }
        main = sorted(causes, key=lambda name: -abs(causes[name]))[:_CAUSES_SHOWN]
        speedup = (
            f"{row['predicted_speedup']:.2f} / {row['measured_speedup']:.2f}" if "predicted_speedup" in row else "-"
        )
        typer.echo(
            f"{row['schedule']:<12} {row['micro_batches']:>2} {row['batch_size']:>5} {row['dim']:>4} "
            f"{row['rate_mbit_per_s']:>6g} {row['predicted_ms']:>9.2f} {row['low_ms']:>8.2f}{row['high_ms']:>8.2f}"
            f"{' ' if row['inside'] else '*'} {row['measured_ms']:>9.2f} {row['error']:>+7.1%} {speedup:>18}  "
            + ", ".join(f"{name} {causes[name]:+.2f}" for name in main)
        )


def _print_summary(summary: dict[str, Any], kinds_off: Sequence[dict[str, Any]]) -> None:
    typer.echo(
        f"\n{summary['configurations']} configurations, {summary['compute']} compute, {summary['world_size']} ranks: "
        f"mean |error| {summary['mean_absolute_error']:.2%}, worst {summary['worst_absolute_error']:.2%}, "
        f"bias {summary['bias']:+.2%}"
    )
    if summary["mean_absolute_speedup_error"] is not None:
        typer.echo(f"speedup over sync: mean |error| {summary['mean_absolute_speedup_error']:.2%}")
    typer.echo(
        "exposed row and gradient communication: mean |error| "
        f"{summary['mean_absolute_exposed_error_of_step']:.2%} of the step"
    )
    typer.echo(
        f"measured inside the predicted interval: {summary['inside_interval']} of {summary['configurations']} "
        f"(* outside); schedules further apart than uncertain, ranked right: {summary['rankings_right']} of "
        f"{summary['rankings_judged']}"
    )
    typer.echo("by op kind, mean time measured (ms) and mean error of its prediction:")
    kinds = [f"{row['kind']} {row['measured_ms']:.2f} {row['error']:+.1%}" for row in kinds_off]
    for first in range(0, len(kinds), 4):
        typer.echo("  " + "   ".join(f"{each:<32}" for each in kinds[first : first + 4]).rstrip())
    load = summary["load_average"]
    typer.echo(f"load average of the host while it ran: {load['min']:.1f} to {load['max']:.1f}")
    typer.echo(
        f"machine not as fast as when profiled in any run of {summary['disturbed']} of {summary['configurations']} "
        "configurations"
        + (
            f"; mean |error| of the others {summary['mean_absolute_error_undisturbed']:.2%}, worst "
            f"{summary['worst_absolute_error_undisturbed']:.2%}"
            if 0 < summary["disturbed"] < summary["configurations"]
            else ""
        )
    )
    if summary["extrapolated"]:
        typer.echo(f"{summary['extrapolated']} predictions are extrapolated: some of their sizes were not profiled")
