"""`nestpipe simulate`: one schedule at one size."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from nestpipe.cli._common import Format, digest, provenance
from nestpipe.errors import CaseError

__all__ = ["simulate"]


def _stragglers(texts: list[str]) -> dict[int, float]:
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
        if match is None:
            raise CaseError(f"--straggler must be RANK:FACTOR, for example 17:1.5, got {text!r}")
        found[int(match[1])] = float(match[2])
    return found


def simulate(
    schedule: Annotated[str, typer.Option(metavar="NAME|FILE", help="A catalogue name or a file of schedule text.")],
    case: Annotated[str, typer.Option(metavar="NAME|FILE", help="A case: costs per op kind.")] = "nestpipe_paper",
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks; the case's headline size by default.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Batches to run.")] = 20,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per batch.")] = None,
    domain_size: Annotated[int | None, typer.Option(help="Ranks per domain, for 2D sparse parallelism.")] = None,
    jitter: Annotated[float, typer.Option(help="Coefficient of variation of each local op of each rank.")] = 0.0,
    straggler: Annotated[
        list[str] | None, typer.Option(metavar="RANK:FACTOR", help="A slower rank; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    unfold: Annotated[bool, typer.Option("--unfold", help="Simulate every rank, alike or not.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the run here, for report and diff.")] = None,
    output: Annotated[Format, typer.Option("--format")] = Format.TEXT,
) -> None:
    """Simulates one schedule on a case's cluster and prints its metrics, where the time goes and what limits it."""
    from nestpipe.schedules import load
    from nestpipe.text import show
    from sim.costs import Jitter
    from sim.reproduce import run_metrics, status_of
    from sim.run import case_loop, case_run
    from traces.case import load_case, workload

    the_case = load_case(case)
    if world_size is None:
        world_size = the_case.headline_world_size
    values = the_case.values()
    if domain_size is not None:
        values["domain_size"] = domain_size
    loop = case_loop(the_case, load(schedule), values, micro_batches)
    work = workload(the_case)
    noise = Jitter(cv=jitter, stragglers=_stragglers(straggler or []), seed=seed)
    facts = provenance(
        schedule=schedule,
        schedule_digest=digest(show(loop)),
        case=the_case.case,
        case_source=the_case.source,
        world_size=world_size,
        micro_batches=loop.micro_batches,
        steps=steps,
        jitter=jitter,
        seed=seed if jitter else None,
        stragglers=straggler,
    )
    run = case_run(
        the_case, work, loop, world_size, values=values, steps=steps, jitter=noise, fold_ranks=not unfold, meta=facts
    )
    baseline_loop = case_loop(the_case, load(the_case.baseline.schedule), values)
    baseline = case_run(the_case, work, baseline_loop, world_size, values=values, steps=steps)
    base = case_run(the_case, work, loop, the_case.base_world_size, values=values, steps=steps)
    metrics = run_metrics(run, baseline, base)
    status = status_of(the_case, schedule == the_case.baseline.schedule, loop, world_size)
    rows = [
        {
            "method": loop.name,
            "world_size": world_size,
            "metric": name,
            "published": None,
            "value": value,
            "relative_error": None,
            "status": status,
        }
        for name, value in metrics.items()
    ]
    result: dict[str, Any] = {
        "provenance": facts,
        "schedule": loop.name,
        "world_size": world_size,
        "metrics": metrics,
        "rows": rows,
        "parts_ms": run.metrics.parts_ms,
        "limit": {
            "step_ns": float(run.bound.step_ns),
            "iterations": run.bound.iterations,
            "cycle": [step._asdict() for step in run.bound.cycle],
            "text": run.bound.text(),
        },
        "critical_cycle_rests_on": dict(run.provenance),
        "speedup_relative_to": the_case.baseline.method,
        "scaling_efficiency_relative_to": the_case.base_world_size,
    }
    if out is not None:
        from reports.runs import write_run

        write_run(out, run=result, timeline=run.timeline)
    _print(output, result)


def _print(output: Format, result: dict[str, Any]) -> None:
    import pandas as pd

    from reports.tables import csv, parts, results

    rows = pd.DataFrame(result["rows"])
    if output is Format.JSON:
        typer.echo(json.dumps(result, indent=1))
    elif output is Format.CSV:
        typer.echo(csv(rows), nl=False)
    else:
        for key, value in result["provenance"].items():
            typer.echo(f"# {key}: {value}")
        typer.echo(results(rows.drop(columns=["relative_error"])))
        typer.echo()
        typer.echo(parts({str(result["schedule"]): result["parts_ms"]}, title="Where the step goes"))
        typer.echo()
        limit = result["limit"]
        typer.echo(f"What limits this step, per {limit['iterations']} iteration(s): {limit['text']}")
        shares = ", ".join(f"{share:.1%} {name}" for name, share in result["critical_cycle_rests_on"].items())
        typer.echo(f"The critical cycle rests on numbers that are {shares}")
