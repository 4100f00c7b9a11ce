"""A run beside its baseline and the size that it is compared with, as commands print it and write it for `report`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nestpipe.base import ns_to_ms
from nestpipe.ir import Loop
from nestpipe.schedules import load
from nestpipe.timeline import metric_values
from sim.costs.case import CaseWorkload, status_of
from sim.costs.model import ModelWorkload
from sim.costs.reproduce import metric_status
from sim.costs.run import Run, run
from sim.costs.workload import Options
from topologies.cluster import Cluster

__all__ = ["run_record", "run_status"]


def run_status(
    found: Run, workload: CaseWorkload | ModelWorkload, cluster: Cluster | None, *, baseline: bool, changed: bool
) -> str:
    """What the numbers of a run are; a case that is changed or moved to another cluster no longer predicts.

    Args:
        found: the run.
        workload: what it ran.
        cluster: where it ran, if it shared hardware.
        baseline: whether its schedule is the case's baseline.
        changed: whether options differ from what the case was measured with.
    """
    if isinstance(workload, ModelWorkload):
        return "assumed"
    status = status_of(workload.case, baseline, found.loop, found.options.world_size)
    changed = changed or workload.is_moved(cluster)
    return "assumed" if changed and status in ("fitted", "predicted") else status


def run_record(
    found: Run,
    workload: CaseWorkload | ModelWorkload,
    cluster: Cluster | None,
    *,
    status: str,
    baseline: str,
    base_world_size: int,
) -> dict[str, Any]:
    """The metrics, parts, limit and resources of a run.

    Args:
        found: the run.
        workload: what it ran.
        cluster: where it ran, if it shared hardware.
        status: what its numbers are, see `run_status`.
        baseline: name or file of the schedule that the speedup refers to; run with the same options.
        base_world_size: ranks that scaling efficiency refers to; the schedule is run at that size.
    """
    loop, options = found.loop, found.options
    compared = {
        "baseline_ms": _step_ms(workload, cluster, workload.loop(load(baseline)), options),
        "base_ms": _step_ms(workload, cluster, loop, _smaller(options, base_world_size)),
    }
    keys = workload.key_facts(loop, options) if isinstance(workload, ModelWorkload) else None
    return {
        **_result(found, status, compared),
        "speedup_relative_to": baseline,
        **_resources(found, status),
        "assumptions": workload.assumptions(loop, options),
        **({} if keys is None else {"keys": keys}),
        "scaling_efficiency_relative_to": base_world_size,
    }


def _smaller(options: Options, world_size: int) -> Options:
    """The options at the base size, without stragglers that are not there."""
    there = {rank: factor for rank, factor in options.jitter.stragglers.items() if rank < world_size}
    return replace(options, world_size=world_size, jitter=replace(options.jitter, stragglers=there))


def _step_ms(workload: CaseWorkload | ModelWorkload, cluster: Cluster | None, loop: Loop, options: Options) -> float:
    """The step latency of a run that is only compared with; with jitter the recursion gives it without simulating."""
    found = run(loop, workload, cluster, options)
    return ns_to_ms(found.step_ns) if options.jitter.is_random else found.metrics.step_latency_ms


def _result(run: Run, status: str, compared: dict[str, float]) -> dict[str, Any]:
    """The run as it is printed and written; `compared` are the step latencies that its metrics need."""
    metrics = metric_values(run.metrics, **compared)
    row = {"method": run.loop.name, "world_size": run.options.world_size}
    return {
        "schedule": run.loop.name,
        "world_size": run.options.world_size,
        "metrics": metrics,
        "rows": [
            {
                **row,
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
        "critical_cycle_rests_on": run.rests_on,
        "steady": run.steady | {"note": run.steady_note},
    }


def _resources(run: Run, status: str) -> dict[str, Any]:
    """What sets the time of each op and how full links and hosts are; nothing without a cluster."""
    if run.stages is None or run.load is None:
        return {}
    return {
        "stages": run.stages.to_dict("records"),
        "load": run.load.to_dict("records"),
        "resources": [
            {"resource": name, "busy": min(1.0, float(busy)), "status": status}
            for name, busy in zip(run.load["resource"], run.load["utilisation"], strict=True)
        ],
    }
