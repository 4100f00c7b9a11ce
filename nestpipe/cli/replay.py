"""`nestpipe trace replay`: a recorded trace run again, as it was, changed, or under another schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import pandas as pd
import typer

from nestpipe.base import NS_PER_MS, NestPipeError, TraceError, ns_to_us, unknown_name
from nestpipe.cli._common import digest, provenance
from nestpipe.cli._render import Format, Output, render
from nestpipe.ir import Loop, show, with_micro_batches
from nestpipe.schedules import load, names
from reports.runs import Column, parts, text
from sim.costs import (
    Mode,
    Options,
    Run,
    TraceCosts,
    TraceWorkload,
    anchored_trace,
    blocks_of,
    require_runnable,
    run,
)
from sim.engine import Anchor, Scales
from sim.engine import replay as replay_trace
from sim.network import read_measured
from topologies.cluster import load_cluster
from traces.formats import import_traces
from traces.recording import classified_share, recorded_schedule
from traces.table import read_table

__all__ = ["replay"]

_CLASSIFIED_MIN: Final = 0.5
_HOST_BOUND: Final = 0.95


def replay(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="A trace table, or traces to import.")],
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="Run this schedule with the trace's op costs; `recorded` is the one found."
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="With --schedule: mean, step, distribution or fitted.")] = "mean",
    batch_scale: Annotated[float, typer.Option(help="With --schedule: batch per rank over the recorded one.")] = 1.0,
    world_size: Annotated[int | None, typer.Option(help="With --schedule: number of ranks.")] = None,
    domain_size: Annotated[int | None, typer.Option(min=1, help="With --schedule: ranks per domain.")] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="With --schedule: network that scales transfers.")
    ] = None,
    curves: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOG", help="Measured collectives of --topology (nccl-tests, HCCL); repeatable."),
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="With --schedule: micro-batches.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="With --schedule: batches to run.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of mode distribution.")] = 0,
    compute_scale: Annotated[float, typer.Option(min=0, help="Factor on device ops, replaying as recorded.")] = 1.0,
    host_scale: Annotated[float, typer.Option(min=0, help="Factor on host time, replaying as recorded.")] = 1.0,
    transfer_scale: Annotated[float, typer.Option(min=0, help="Factor on transfers, replaying as recorded.")] = 1.0,
    output: Output = Format.TEXT,
) -> None:
    """Runs a recorded trace again: op by op as it was (or with scaled parts), or its op costs under a schedule."""
    frame = _frame(paths)
    share = classified_share(frame)
    if schedule is not None and share is not None and share < _CLASSIFIED_MIN:
        raise TraceError(
            f"{paths[0]}: only {share:.1%} of the device time is classified, too little to predict a schedule from; "
            f"at least {_CLASSIFIED_MIN:.0%} must be (trace import lists what is not, and why)"
        )
    workload, found, facts = _anchor(frame)
    for warning in facts["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    if schedule is None:
        _as_recorded(
            frame, found, facts, paths, output, compute=compute_scale, host=host_scale, transfer=transfer_scale
        )
    else:
        _under_schedule(
            workload,
            _recorded_loop(facts["schedule"]) if schedule == "recorded" else schedule,
            output,
            found,
            facts,
            mode=mode,
            batch_scale=batch_scale,
            world_size=world_size,
            domain_size=domain_size,
            micro_batches=micro_batches,
            steps=steps,
            topology=topology,
            curves=curves or [],
            seed=seed,
        )


def _anchor(frame: pd.DataFrame) -> tuple[TraceWorkload, Anchor | None, dict[str, Any]]:
    """The recorded step under the schedule it was recorded with; without launches and steps there is none."""
    try:
        workload, found = anchored_trace(frame)
    except NestPipeError as error:
        warning = f"unanchored: the recorded step cannot be predicted again, so nothing shows what to trust: {error}"
        facts = {"schedule": recorded_schedule(frame), "anchored": False, "status": "unanchored", "warnings": [warning]}
        return TraceWorkload(frame=frame), None, facts
    return workload, found, found.as_dict()


def _recorded_loop(found: str) -> str:
    """The catalogue's name of the schedule that was found.

    Raises:
        TraceError: if it has none.
    """
    if found not in names():
        raise TraceError(
            f"--schedule recorded: the recording shows {found!r}, which the catalogue does not have; "
            f"name a file or one of {', '.join(names())}"
        )
    return found


def _frame(paths: list[Path]) -> pd.DataFrame:
    if len(paths) == 1 and paths[0].suffix in (".parquet", ".csv"):
        return read_table(paths[0]).frame
    return import_traces(paths).table.frame


def _as_recorded(
    frame: pd.DataFrame,
    found: Anchor | None,
    anchored: dict[str, Any],
    paths: list[Path],
    output: Format,
    **scales: float,
) -> None:
    result = replay_trace(frame, Scales(**scales))
    steps = result.steps.assign(
        recorded_ms=result.steps["recorded_ns"] / NS_PER_MS, replayed_ms=result.steps["replayed_ns"] / NS_PER_MS
    )

    def document() -> dict[str, Any]:
        rows, errors = result.steps.to_dict("records"), result.steps["relative_error"].dropna()
        worst = errors.abs().max() if len(errors) else None
        notes = {"notes": list(result.notes)} if result.notes else {}
        return {"anchor": anchored, "steps": rows, "worst_relative_error": worst, **notes}

    columns = [
        Column(name="rank"),
        Column(name="step"),
        Column(name="recorded_ms", header="recorded (ms)", digits=3),
        Column(name="replayed_ms", header="replayed (ms)", digits=3),
        Column(name="relative_error", header="change (%)", digits=2, scale=100, sign=True),
    ]
    render(
        output,
        facts=provenance(traces=[path.name for path in paths], **scales),
        document=document,
        rows=lambda: result.steps,
        text=lambda: "\n".join(
            [*_anchor_lines(found, anchored), text(steps, columns), *(f"\nnote: {note}" for note in result.notes)]
        ),
    )


def _anchor_lines(found: Anchor | None, facts: dict[str, Any]) -> list[str]:
    return [*([f"WARNING: {each}" for each in facts["warnings"]] if found is None else found.lines()), ""]


def _under_schedule(
    workload: TraceWorkload,
    schedule: str,
    output: Format,
    found: Anchor | None,
    anchored: dict[str, Any],
    *,
    mode: str,
    batch_scale: float,
    world_size: int | None,
    domain_size: int | None,
    micro_batches: int | None,
    steps: int,
    topology: str | None,
    curves: list[Path],
    seed: int,
) -> None:
    if curves and topology is None:
        raise TraceError("--curves needs --topology, the cluster that was measured")
    network = None if topology is None else load_cluster(topology)
    if curves and network is not None:
        network = replace(network, measured=read_measured(curves))
    if mode not in list(Mode):
        raise TraceError(unknown_name("mode", mode, list(Mode)))
    loop = load(schedule)
    if micro_batches is not None:
        loop = with_micro_batches(loop, micro_batches)
    require_runnable(loop)
    workload = replace(
        workload,
        mode=Mode(mode),
        batch_scale=batch_scale,
        network=network,
        seed=seed,
    )
    options = Options(world_size=world_size or workload.world_size, domain_size=domain_size, steps=steps)
    facts = provenance(
        schedule=loop.name,
        schedule_digest=digest(show(loop)),
        steps=steps,
        topology=topology,
        mode=Mode(mode),
        batch_scale=batch_scale,
        world_size=options.world_size,
        seed=seed,
    )
    result = {
        "anchor": anchored,
        **_result(run(loop, workload, None, options)),
        "without_latest_rank": _without_latest(loop, workload, options, found),
    }
    render(
        output,
        facts=facts,
        document=lambda: result,
        rows=lambda: [{"part": part, "ms": ms} for part, ms in result["parts_ms"].items()],
        text=lambda: "\n".join([*_anchor_lines(found, anchored), *_run_lines(result, loop.name)]),
    )


def _result(run: Run) -> dict[str, Any]:
    """Metrics, what limits the step, what kind of numbers that rests on, and which kinds of op have no cost at all."""
    costs = run.ops.costs
    assert isinstance(costs, TraceCosts)
    kinds = dict.fromkeys(op.kind for op in run.loop.ops)
    return {
        "step_latency_ms": run.metrics.step_latency_ms,
        "parts_ms": run.metrics.parts_ms,
        "utilization": run.metrics.utilization,
        "exposed_communication_ratio": run.metrics.exposed_communication_ratio,
        "limit": run.bound.text(),
        "host": _host(run, costs),
        "critical_cycle_rests_on": run.rests_on,
        "without_cost": [kind.value for kind in kinds if kind not in costs.batch_ns],
        "batch_us": {kind.value: ns_to_us(float(each.mean())) for kind, each in costs.batch_ns.items()},
        "assumptions": list(costs.assumptions),
    }


def _host(run: Run, costs: TraceCosts) -> dict[str, Any] | None:
    """The host thread of the busiest rank: its own time in a step, and the share of the step that it is busy."""
    if costs.host is None:
        return None
    inner = blocks_of(run.loop)
    times = {kind: run.loop.micro_batches if kind in inner else 1 for kind in costs.host.kinds}
    ms = max(costs.host.step_ns(rank, times) for rank in range(len(costs.host.work_ns))) / NS_PER_MS
    share = ms / run.metrics.step_latency_ms if run.metrics.step_latency_ms else 0.0
    return {"busiest_ms": ms, "share_of_step": share, "bounds_the_step": share >= _HOST_BOUND}


def _without_latest(
    loop: Loop, workload: TraceWorkload, options: Options, found: Anchor | None
) -> dict[str, Any] | None:
    """The step if the rank that others wait for most had a host like theirs; None where none is late."""
    if found is None or not found.late_ms:
        return None
    late = next(iter(found.late_ms))
    even = run(loop, workload.without_rank(late), None, options)
    return {"rank": late, "step_latency_ms": even.metrics.step_latency_ms, "status": "assumed"}


def _host_lines(host: dict[str, Any] | None) -> list[str]:
    if host is None:
        return []
    bound = ": the job is bound by its host" if host["bounds_the_step"] else ""
    busy = f"{host['busiest_ms']:.3f} ms of it ({host['share_of_step']:.0%})"
    return [f"The host thread of the busiest rank works {busy}{bound}"]


def _run_lines(result: dict[str, Any], schedule: str) -> list[str]:
    words = ", ".join(f"{share:.0%} {name}" for name, share in result["critical_cycle_rests_on"].items() if share)
    missing = len(result["without_cost"])
    nothing = f", and on {missing} kinds of op that are not in the trace and cost nothing" if missing else ""
    share = result["anchor"].get("classified_share")
    of = f", of the {share:.1%} of the device time that is classified" if share is not None and share < 0.995 else ""
    return [
        parts({schedule: result["parts_ms"]}, title="Where the step goes"),
        f"\nWhat limits this step: {result['limit']}",
        *_host_lines(result["host"]),
        *(
            [f"Without rank {even['rank']}, the latest, it would take {even['step_latency_ms']:.3f} ms (assumed)"]
            if (even := result["without_latest_rank"]) is not None
            else []
        ),
        f"It rests on numbers that are {words}{of}{nothing}",
        "\nAssumed:",
        *(f"  {each}" for each in result["assumptions"]),
    ]
