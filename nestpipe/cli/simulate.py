"""`nestpipe simulate`: one schedule at one size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nestpipe.cli._common import Format, digest, provenance
from nestpipe.errors import CaseError

if TYPE_CHECKING:
    from nestpipe.ir import Loop
    from sim.run import Run
    from topologies.cluster import Cluster

__all__ = ["simulate"]


def _stragglers(texts: list[str]) -> dict[int, float]:
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", text)
        if match is None:
            raise CaseError(f"--straggler must be RANK:FACTOR, for example 17:1.5, got {text!r}")
        found[int(match[1])] = float(match[2])
    return found


def _sizes(texts: list[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        match = re.fullmatch(r"(\w+)=(\d+)", text)
        if match is None:
            raise CaseError(f"--model-size must be NAME=N with a whole number, for example dim=512, got {text!r}")
        found[match[1]] = int(match[2])
    return found


def simulate(
    schedule: Annotated[str, typer.Option(metavar="NAME|FILE", help="A catalogue name or a file of schedule text.")],
    case: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A published cluster: costs per op kind.")
    ] = "nestpipe_paper",
    model: Annotated[
        str | None, typer.Option(help="Instead of a case: hstu, hstu_large_ml1m, fuxi_alpha or dlrm on --topology.")
    ] = None,
    model_size: Annotated[
        list[str] | None, typer.Option(metavar="NAME=N", help="With --model: another size, dim=512; repeatable.")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Hardware that ops share where they overlap.")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks; the case's headline size by default.")
    ] = None,
    base_world_size: Annotated[int | None, typer.Option(help="Size that scaling efficiency is relative to.")] = None,
    steps: Annotated[int, typer.Option(help="Batches to run.")] = 20,
    batch: Annotated[int | None, typer.Option(help="Samples per rank and step, with --model.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per batch.")] = None,
    domain_size: Annotated[int | None, typer.Option(min=1, help="Ranks per domain, for 2D sparse parallelism.")] = None,
    compute_efficiency: Annotated[float, typer.Option(help="Share of peak arithmetic reached, with --model.")] = 1.0,
    communication_share: Annotated[
        float, typer.Option(help="Share of a device that a collective takes at full rate, with --topology; assumed.")
    ] = 0.0,
    jitter: Annotated[float, typer.Option(help="Coefficient of variation of each local op of each rank.")] = 0.0,
    straggler: Annotated[
        list[str] | None, typer.Option(metavar="RANK:FACTOR", help="A slower rank; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the jitter.")] = 0,
    unfold: Annotated[bool, typer.Option("--unfold", help="Simulate every rank, alike or not.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the run here, for report and diff.")] = None,
    output: Annotated[Format, typer.Option("--format")] = Format.TEXT,
) -> None:
    """Simulates one schedule and prints its metrics, where the time goes and what limits it."""
    from nestpipe.schedules import load
    from nestpipe.text import show
    from sim.costs import Jitter
    from sim.reproduce import metric_status, run_metrics
    from sim.run import require_runnable
    from topologies.cluster import load_cluster

    cluster = None if topology is None else load_cluster(topology)
    if communication_share and cluster is None:
        raise CaseError("--communication-share needs --topology NAME|FILE: without one nothing is shared")
    noise = Jitter(cv=jitter, stragglers=_stragglers(straggler or []), seed=seed)
    runner = (
        _Runner.of_case(case, cluster, domain_size)
        if model is None
        else _Runner.of_model(model, _sizes(model_size or []), cluster, batch, domain_size, compute_efficiency)
    )
    world_size = runner.headline_world_size if world_size is None else world_size
    base = min(runner.base_world_size, world_size) if base_world_size is None else base_world_size
    loop = runner.loop(load(schedule), micro_batches)
    require_runnable(loop)
    facts = provenance(
        schedule=schedule,
        schedule_digest=digest(show(loop)),
        **runner.facts,
        topology=None if cluster is None else cluster.name,
        world_size=world_size,
        micro_batches=loop.micro_batches,
        domain_size=domain_size,
        steps=steps,
        communication_share=communication_share or None,
        jitter=jitter,
        seed=seed if jitter else None,
        stragglers=straggler,
    )
    options = {"steps": steps, "communication_share": communication_share}
    run = runner.run(loop, world_size, **options, jitter=noise, fold_ranks=not unfold, meta=facts)
    baseline = runner.run(runner.loop(load(runner.baseline_schedule), None), world_size, **options, jitter=noise)
    at_base = replace(noise, stragglers={rank: factor for rank, factor in noise.stragglers.items() if rank < base})
    metrics = run_metrics(run, baseline, runner.run(loop, base, **options, jitter=at_base))
    changed = bool(jitter or straggler or micro_batches or domain_size or communication_share or runner.moved)
    status = runner.status(loop, schedule, world_size)
    if changed and status in ("fitted", "predicted"):
        status = "assumed"
    result: dict[str, Any] = {
        "provenance": facts,
        "schedule": loop.name,
        "world_size": world_size,
        "metrics": metrics,
        "rows": [
            {
                "method": loop.name,
                "world_size": world_size,
                "metric": name,
                "published": None,
                "value": value,
                "relative_error": None,
                "status": metric_status(run, name, status),
            }
            for name, value in metrics.items()
        ],
        "parts_ms": run.metrics.parts_ms,
        "limit": {
            "step_ns": float(run.bound.step_ns),
            "iterations": run.bound.iterations,
            "cycle": [step._asdict() for step in run.bound.cycle],
            "text": run.bound.text(),
        },
        "critical_cycle_rests_on": dict(run.provenance),
        "speedup_relative_to": runner.baseline_schedule,
        "scaling_efficiency_relative_to": base,
    }
    if run.stages is not None and run.load is not None:
        result |= {"stages": run.stages.to_dict("records"), "load": run.load.to_dict("records")}
        result["resources"] = [
            {"resource": name, "busy": min(1.0, float(busy)), "status": status}
            for name, busy in zip(run.load["resource"], run.load["utilisation"], strict=True)
        ]
    result["assumptions"] = runner.assumptions(loop, world_size)
    if out is not None:
        from reports.runs import write_run

        write_run(out, run=result, timeline=run.timeline)
    _print(output, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runner:
    """Runs loops of one workload on one cluster: a case's or a model's."""

    run: Callable[..., Run]
    loop: Callable[[Loop, int | None], Loop]
    status: Callable[[Loop, str, int], str]
    facts: dict[str, object]
    assumptions: Callable[[Loop, int], list[dict[str, object]]]
    moved: bool
    baseline_schedule: str
    base_world_size: int
    headline_world_size: int

    @classmethod
    def of_case(cls, name: str, cluster: Cluster | None, domain_size: int | None) -> _Runner:
        from sim.reproduce import status_of
        from sim.run import case_loop, case_run, home_cluster
        from traces.case import load_case, workload

        case = load_case(name)
        values = case.values()
        if domain_size is not None:
            values["domain_size"] = domain_size

        def assumed(loop: Loop, world_size: int) -> list[dict[str, object]]:
            used = {
                **values,
                "micro_batches": loop.micro_batches,
                "domain_size": min(values["domain_size"], world_size),
            }
            return [
                {"name": name, "value": used[name], "low": each.low, "high": each.high, "why": each.why}
                for name, each in case.assumptions.items()
            ]

        return cls(
            run=partial(case_run, case, workload(case), values=values, cluster=cluster, check=False),
            loop=lambda loop, micro_batches: case_loop(case, loop, values, micro_batches),
            status=lambda loop, schedule, size: status_of(case, schedule == case.baseline.schedule, loop, size),
            facts={"case": case.case, "case_source": case.source},
            assumptions=assumed,
            moved=cluster is not None and cluster.name != home_cluster(case).name,
            baseline_schedule=case.baseline.schedule,
            base_world_size=case.base_world_size,
            headline_world_size=case.headline_world_size,
        )

    @classmethod
    def of_model(
        cls,
        name: str,
        sizes: dict[str, int],
        cluster: Cluster | None,
        batch: int | None,
        domain_size: int | None,
        compute_efficiency: float,
    ) -> _Runner:
        from nestpipe.ir import with_micro_batches
        from sim.demand import demands_of_preset
        from sim.folding import World
        from sim.run import hardware_run
        from traces.models import preset

        if cluster is None:
            raise CaseError("--model needs --topology NAME|FILE: times follow from the hardware")
        samples = 512 if batch is None else batch
        workload = preset(name, sizes)
        hardware: Cluster = cluster

        def run(loop: Loop, world_size: int, **options: Any) -> Run:
            demands = demands_of_preset(workload, hardware, loop, batch=samples, world_size=world_size)
            world = World(world_size=world_size, domain_size=min(domain_size or world_size, world_size))
            return hardware_run(
                loop,
                hardware,
                demands,
                world,
                global_batch=samples * world_size,
                compute_efficiency=compute_efficiency,
                **options,
            )

        return cls(
            run=run,
            loop=lambda loop, micro_batches: loop if micro_batches is None else with_micro_batches(loop, micro_batches),
            status=lambda *_: "assumed",
            facts={
                "model": name,
                "model_tables": ", ".join(f"{t.num_rows:,} rows of {t.dim}" for t in workload.tables[:4]),
                "model_keys_per_sample": workload.lookups(1),
                "model_dense_parameters": workload.dense_parameters,
                "model_source": workload.source,
                "batch_per_rank": samples,
            },
            assumptions=lambda *_: [
                {"name": "compute_efficiency", "value": compute_efficiency, "why": "share of peak arithmetic reached"},
                {"name": "model", "value": name, "why": "every size by roofline; no key repeats"},
            ],
            moved=False,
            baseline_schedule="sync",
            base_world_size=hardware.ranks_per_node,
            headline_world_size=hardware.ranks_default,
        )


def _print(output: Format, result: dict[str, Any]) -> None:
    import pandas as pd

    from nestpipe.units import ns_to_ms
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
        bound_ms = ns_to_ms(limit["step_ns"])
        typer.echo(
            f"What limits this step without jitter and contention, {bound_ms:,.2f} ms, "
            f"per {limit['iterations']} iteration(s): {limit['text']}"
        )
        if "load" in result and result["metrics"]["step_latency_ms"] > 1.001 * bound_ms:
            busiest = max(result["load"], key=lambda each: each["utilisation"])
            typer.echo(
                f"The rest is contention or jitter; busiest: {busiest['resource']}, {busiest['utilisation']:.0%} full"
            )
        if "stages" in result:
            from reports.tables import Column, text

            columns = [
                Column(name="kind"),
                Column(name="alone_ms", header="alone (ms)", digits=3),
                Column(name="busiest_resource", header="busiest resource"),
                Column(name="utilisation", header="full (%)", digits=1, scale=100),
                Column(name="origin"),
            ]
            typer.echo("\n" + text(pd.DataFrame(result["stages"]), columns, title="What sets the time of each op"))
            load = [
                Column(name="resource"),
                Column(name="utilisation", header="full over the run (%)", digits=1, scale=100),
            ]
            typer.echo("\n" + text(pd.DataFrame(result["load"]), load, title="Load of links and hosts") + "\n")
        shares = ", ".join(f"{share:.1%} {name}" for name, share in result["critical_cycle_rests_on"].items())
        typer.echo(f"The critical cycle rests on numbers that are {shares}")
