"""`nestpipe plan`: the cheapest configurations that meet the constraints, and how sure that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import pandas as pd
import typer

from nestpipe import api
from nestpipe.base import CaseError, bytes_text, write_text
from nestpipe.cli._common import decimals
from nestpipe.cli._render import Format, Output, as_json, render
from nestpipe.cli._scenario import CORES, Dask, DryRun, ScenarioFile, Workers, counting, dry_run, facts_of, load
from reports.runs import Column, text
from sim.scenario import Grid, Plan

__all__ = ["plan"]

_FEW: Final = 500  # configurations that one process evaluates before others have started


def plan(
    scenario: ScenarioFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Keep sweep, plan and plots here; run again to continue."),
    ] = None,
    workers: Workers = CORES,
    dask: Dask = None,
    top: Annotated[int, typer.Option(min=1, help="How many configurations to list.")] = 5,
    dry: DryRun = False,
    output: Output = Format.TEXT,
) -> None:
    """The best configuration that meets a scenario's constraints, the front, what it rests on, and the runner-up.

    Example: nestpipe plan examples/plan.yaml --out out/plan
    """
    grid = load(scenario)
    if grid.scenario.objective is None:
        raise CaseError(
            f"{scenario}: plan needs an objective, for example objective: {{minimise: cost_per_million_samples}}"
        )
    if dry:
        dry_run(grid, output, workers=workers, dask=dask, where=out)
        return
    with counting(len(grid.chosen()), "planning") as tell:
        processes = 1 if out is None and len(grid.chosen()) <= _FEW else workers
        planned = api.plan(grid, out=out, workers=processes, dask=dask, top=top, progress=tell)
    found = planned.plan
    facts = facts_of(grid, objective=f"{'minimise' if found.minimise else 'maximise'} {found.metric}")
    invalid = _invalid(planned.results)
    render(
        output,
        facts=facts,
        document=lambda: _json(found, invalid),
        rows=lambda: found.ranked,
        text=lambda: "\n".join(["", *_text(grid, found, invalid)]),
    )
    if out is not None:
        from reports.figures import save

        write_text(out / "plan.json", as_json(_json(found, invalid), facts))
        for path in (out / "plan.json", save(planned.figure(), out / "front.png")):
            typer.echo(f"wrote {path}", err=True)


def _invalid(results: pd.DataFrame) -> dict[str, int]:
    """How many configurations were not evaluated, by reason, the most frequent first."""
    reasons = results[results["status"] != "ok"]["reason"].value_counts()
    return {str(reason): int(count) for reason, count in reasons.items()}


def _json(found: Plan, invalid: Mapping[str, int]) -> dict[str, Any]:
    return {
        "evaluated": found.evaluated,
        "feasible": found.feasible,
        "cannot_be": dict(invalid),
        "infeasible_clusters": dict(found.excluded),
        "best": dict(found.best),
        "rests_on": found.rests_on(),
        "runner_up": None if found.runner_up is None else dict(found.runner_up),
        "ranked": found.ranked.to_dict("records"),
        "front": found.front.to_dict("records"),
        "by_micro_batches": found.by_micro_batches.to_dict("records"),
        "sensitivity": [dataclasses.asdict(move) | {"span": move.span} for move in found.moves],
        "constraints": found.margins.to_dict("records"),
        "memory": None if found.need is None else {"device": dict(found.need.device), "host": dict(found.need.host)},
        "goodput": None if found.goodput is None else dataclasses.asdict(found.goodput),
    }


def _text(grid: Grid, found: Plan, invalid: Mapping[str, int]) -> list[str]:
    rests = ", ".join(f"{share:.0%} {name}" for name, share in found.rests_on().items())
    lines = ["Recommended: " + _words(grid, found.best), "  limited by " + str(found.best["limit"])]
    lines.append(f"  busiest: {found.best['busiest']}, {100 * found.best['busiest_share']:.0f} % of the step")
    lines.append(f"  its critical cycle rests on numbers that are {rests}")
    if found.runner_up is not None:
        best, other = float(found.best[found.metric]), float(found.runner_up[found.metric])
        worse = f"{100 * abs(other / best - 1):.1f} % worse in" if best else f"{other:.4g} against 0 in"
        lines.append(f"Runner-up: {_words(grid, found.runner_up)}; {worse} {found.metric}")
    lines += ["", "Invalid configurations:"] if invalid else []
    lines += [f"  {count:,} x {reason}" for reason, count in list(invalid.items())[:5]]
    for name, why in found.excluded.items():
        lines += ["", f"Cluster {name} is infeasible: {why.rpartition(chr(10))[0] or why}"]
    counts = f"{found.feasible:,} feasible of {found.evaluated:,} evaluated"
    for title, frame in (
        (f"Best by {found.metric}, {counts}:", found.ranked),
        ("Front of cost, QPS and device memory:", found.front),
        ("Number of micro-batches N:", found.by_micro_batches),
    ):
        lines += ["", text(frame, _columns(grid, frame), title=title)]
    slack = Column(name="slack", header="slack (%)", digits=1, scale=100)
    margins = [Column(name="constraint"), Column(name="limit"), Column(name="value"), slack]
    lines += ["", text(found.margins, margins, title="Constraints, the tightest first:")]
    lines += _memory(grid, found)
    lines += _failures(found)
    return lines + _sensitivity(found)


def _words(grid: Grid, row: Mapping[str, Any]) -> str:
    money = grid.scenario.currency
    words = f"{int(row['world_size']):,} accelerators"
    if grid.scenario.clusters:
        words += f" of {row['cluster']}"
    words += f", {row['schedule']} with N = {int(row['micro_batches'])}"
    if row["domain_size"] is not None:
        words += f" in domains of {int(row['domain_size'])}"
    words += f", batch {int(row['batch_per_worker'])} per worker: {row['qps']:,.0f} samples/s"
    if row["cost_per_hour"] is not None:
        hour, million = float(row["cost_per_hour"]), float(row["cost_per_million_samples"])
        words += (
            f", {hour:,.{decimals([hour], 0, 2)}f} {money}/h, "
            f"{million:,.{decimals([million], 3, 4)}f} {money}/million samples"
        )
    return words


def _columns(grid: Grid, frame: pd.DataFrame) -> list[Any]:
    def places(name: str, least: int, significant: int) -> int:
        return decimals((float(value) for value in frame[name].dropna()), least, significant)

    money = grid.scenario.currency
    columns = [
        *(Column(name=name) for name in ("cluster", "schedule")),
        Column(name="micro_batches", header="N"),
        Column(name="domain_size", header="domain"),
        Column(name="world_size", header="workers"),
        Column(name="batch_per_worker", header="batch"),
        *(Column(name=key, digits=4) for key in grid.axes),
        Column(name="step_ms", header="step (ms)", digits=places("step_ms", 1, 3)),
        Column(name="qps", header="QPS", digits=0),
        Column(name="goodput", header="goodput (%)", digits=1, scale=100),
        Column(name="scaling_efficiency", header="eff. (%)", digits=1, scale=100),
        Column(name="cost_per_hour", header=f"{money}/h", digits=places("cost_per_hour", 0, 2)),
        Column(
            name="cost_per_million_samples",
            header=f"{money}/M samples",
            digits=places("cost_per_million_samples", 3, 4),
        ),
        Column(name="device_bytes", header="device (GiB)", digits=2, scale=1 / 2**30),
        Column(name="host_bytes", header="host (GiB)", digits=1, scale=1 / 2**30),
    ]
    return [column for column in columns if column.name in frame and frame[column.name].notna().any()]


def _memory(grid: Grid, found: Plan) -> list[str]:
    if found.need is None:
        return ["", "Memory was not checked: the scenario has no memory section"]
    lines = ["", "Memory of one rank:"]
    for place, parts in (("device", found.need.device), ("host", found.need.host)):
        shown = sorted(((size, name) for name, size in parts.items() if size), reverse=True)
        lines.append(f"  {place}: " + ", ".join(f"{name} {bytes_text(size)}" for size, name in shown))
    cluster = grid.clusters[str(found.best["cluster"])]
    if cluster.device_memory_bytes is None:
        lines.append("  not compared with a device: the cluster gives no device_memory_bytes")
    return lines


def _failures(found: Plan) -> list[str]:
    each = found.goodput
    if each is None:
        return []
    kind = "best interval" if each.is_optimal else "given interval"
    expected, low, high = (100 * share for share in (each.expected, each.low, each.high))
    return [
        "",
        f"Failures: one every {each.mtbf_s / 3600:,.1f} h, {each.failures:,.1f} in the horizon; goodput "
        f"{expected:.2f} % expected [{low:.2f} .. {high:.2f} in 90 % of simulated horizons]",
        f"  checkpoint every {each.interval_s / 60:,.1f} min ({kind}; Young {each.young_s / 60:,.1f}, Daly "
        f"{each.daly_s / 60:,.1f} min)",
    ]


def _sensitivity(found: Plan) -> list[str]:
    rows = [
        {
            "input": move.input,
            "range": f"{move.low:.4g} .. {move.high:.4g}",
            "low": move.change(move.objective_low),
            "high": move.change(move.objective_high),
            "choice": "changes" if move.changes_choice else "stays",
        }
        for move in found.moves
        if move.span >= 0.0005 or move.changes_choice
    ]
    if not rows:
        return ["", f"No input moves {found.metric} by 0.05 % or changes the choice"]
    columns = [
        Column(name="input"),
        Column(name="range"),
        *(Column(name=end, header=f"at {end} (%)", digits=1, scale=100, sign=True) for end in ("low", "high")),
        Column(name="choice", header="choice"),
    ]
    title = f"What moves {found.metric}, one at a time (factors by -20 % and +25 %, assumptions over their range):"
    return ["", text(pd.DataFrame(rows), columns, title=title)]
