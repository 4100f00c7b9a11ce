"""One schedule on one cluster: the program, its costs, the Timeline, the metrics and what limits the step."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from nestpipe.base import CaseError, ns_to_ms
from nestpipe.checks import require_safe
from nestpipe.ir import Loop, OpKind, Resource, unroll, with_micro_batches
from nestpipe.timeline import StepMetrics, Timeline, measure
from sim.costs.demand import Demand, demands_of_case, origin_of
from sim.costs.hardware import HardwareCosts
from sim.engine import Bound, Jitter, TimedCosts, World, max_cycle_ratio, simulate
from topologies.cluster import Cluster, load_cluster
from traces.workloads import Case, GrowthLaws, batch_times

__all__ = [
    "Run",
    "case_loop",
    "case_run",
    "case_step_ms",
    "hardware_run",
    "home_cluster",
    "provenance",
    "require_runnable",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A simulated run and what was computed from it.

    Attributes:
        timeline: when each op ran.
        metrics: of the steady steps.
        bound: the step time without contention and jitter, and its critical cycle.
        provenance: the share of the critical cycle that rests on each kind of number.
        stages: with a topology, for each op kind its time alone, the resource that sets it and how full that is.
        load: with a topology, for each resource the work done and its utilisation over the run.
    """

    timeline: Timeline
    metrics: StepMetrics
    bound: Bound
    provenance: Mapping[str, float]
    stages: pd.DataFrame | None = None
    load: pd.DataFrame | None = None


def case_loop(case: Case, loop: Loop, values: Mapping[str, float], micro_batches: int | None = None) -> Loop:
    """The loop with its number of micro-batches: the one asked for, or the case's where the schedule has several.

    Raises:
        CaseError: if there are more micro-batches than samples per worker.
    """
    if micro_batches is None:
        micro_batches = int(values["micro_batches"]) if loop.micro_batches > 1 else 1
    if not 1 <= micro_batches <= case.batch_per_worker:
        raise CaseError(
            f"micro_batches must lie between 1 and the batch per worker, {case.batch_per_worker}, got {micro_batches}"
        )
    return with_micro_batches(loop, micro_batches)


def require_runnable(loop: Loop) -> None:
    """Refuses a loop that the checks find malformed, deadlocked or racing; staleness is allowed, it costs no time.

    Raises:
        ScheduleError, DeadlockError: with the check's witness.
    """
    require_safe(loop, allow_staleness=sys.maxsize)


def case_run(
    case: Case,
    work: GrowthLaws,
    loop: Loop,
    world_size: int,
    *,
    values: Mapping[str, float] | None = None,
    cluster: Cluster | None = None,
    steps: int = 20,
    jitter: Jitter | None = None,
    fold_ranks: bool = True,
    communication_share: float = 0.0,
    check: bool = True,
    meta: Mapping[str, Any] | None = None,
) -> Run:
    """Simulates a schedule on a case's cluster.

    Args:
        case: the published cluster.
        work: its fit.
        loop: the schedule, with the number of micro-batches to run.
        world_size: number of ranks; the domain, where the schedule has one, is the case's or the whole world.
        values: the assumptions; by default the case's own.
        cluster: the hardware that ops share where they overlap, None for ops that share nothing. What ops ask for is
            worked out on the case's own cluster, so another one changes their times.
        steps: batches to run.
        jitter: differences between ranks.
        fold_ranks: one representative per class of ranks that are alike.
        communication_share: with `cluster`, see `hardware_run`.
        check: whether the checks look at the loop first; a caller that runs one loop often checks it once itself.
            A stale schedule may be simulated: what is predicted is time.
        meta: further facts for the Timeline.

    Raises:
        ScheduleError, DeadlockError: if the checks reject the schedule.
        CaseError, TopologyError: if a number is impossible.
    """
    values = case.values() if values is None else values
    has_domains = any(stream.resource in (Resource.DOMAIN, Resource.REPLICA) for stream in loop.streams)
    domain_size = min(int(values["domain_size"]), max(1, world_size)) if has_domains else None
    world = World(world_size=world_size, domain_size=domain_size)
    meta = {"case": case.case, **(meta or {})}
    global_batch = case.batch_per_worker * world_size
    if check:
        require_runnable(loop)
    if cluster is None:
        costs = TimedCosts(
            batch_ns=batch_times(work, values, loop, world_size),
            micro_batches=loop.micro_batches,
            jitter=jitter or Jitter(),
        )
        timeline = simulate(unroll(loop, steps), costs, world, fold_ranks=fold_ranks, meta=meta)
        bound = max_cycle_ratio(loop, costs.op_ns)
        rests = provenance(case, loop, bound, world_size, domain_size)
        return Run(
            timeline=timeline, metrics=measure(timeline, global_batch=global_batch), bound=bound, provenance=rests
        )
    home = home_cluster(case)
    origins = _origins(case, loop, world_size, domain_size, moved=cluster != home)
    demands = {
        kind: replace(demand, origin=origins[kind])
        for kind, demand in demands_of_case(work, values, loop, home, world_size).items()
    }
    return hardware_run(
        loop,
        cluster,
        demands,
        world,
        global_batch=global_batch,
        steps=steps,
        jitter=jitter,
        fold_ranks=fold_ranks,
        communication_share=communication_share,
        meta=meta,
    )


def home_cluster(case: Case) -> Cluster:
    """The described cluster that a case was measured on.

    Raises:
        CaseError: if the case names none, so that its demands on another one are not known.
    """
    if case.topology is None:
        raise CaseError(f"case {case.case} names no topology, so what its ops ask of another cluster is not known")
    return load_cluster(case.topology)


def hardware_run(
    loop: Loop,
    cluster: Cluster,
    demands: Mapping[OpKind, Demand],
    world: World,
    *,
    global_batch: int,
    steps: int = 20,
    jitter: Jitter | None = None,
    fold_ranks: bool = True,
    compute_efficiency: float = 1.0,
    communication_share: float = 0.0,
    meta: Mapping[str, Any] | None = None,
) -> Run:
    """Simulates a schedule on a cluster whose resources the ops share.

    Args:
        loop: the schedule, with the number of micro-batches to run.
        cluster: the hardware.
        demands: what each op kind asks for, per rank and batch.
        world: number of ranks and size of a domain.
        global_batch: samples per step over all ranks.
        steps: batches to run.
        jitter: differences between ranks.
        fold_ranks: one representative per class of ranks that are alike.
        compute_efficiency: share of the accelerator's arithmetic rate that is reached.
        communication_share: share of the device that a collective takes while it moves bytes at full rate.
        meta: further facts for the Timeline.

    Raises:
        CaseError, TopologyError: if a number is impossible.
    """
    costs = HardwareCosts(
        cluster,
        demands,
        world_size=world.world_size,
        micro_batches=loop.micro_batches,
        domain_size=world.domain_size,
        jitter=jitter,
        compute_efficiency=compute_efficiency,
        communication_share=communication_share,
    )
    meta = {"topology": cluster.name, **(meta or {})}
    timeline = simulate(unroll(loop, steps), costs, world, fold_ranks=fold_ranks, meta=meta)
    resources = {op.kind: stream.resource for stream in loop.streams for op in stream.ops}
    bound = max_cycle_ratio(loop, lambda op: costs.op_ns(op, resources[op.kind]))
    total = sum(step.ns for step in bound.cycle) or 1
    rests: dict[str, float] = {}
    for step in bound.cycle:
        origin = demands[step.kind].origin if step.kind in demands else "assumed"
        rests[origin] = rests.get(origin, 0.0) + step.ns / total
    return Run(
        timeline=timeline,
        metrics=measure(timeline, global_batch=global_batch),
        bound=bound,
        provenance=dict(sorted(rests.items())),
        stages=costs.stages(resources),
        load=costs.load(),
    )


def provenance(
    case: Case, loop: Loop, bound: Bound, world_size: int, domain_size: int | None = None
) -> dict[str, float]:
    """The share of the critical cycle that is fitted, interpolated, extrapolated or assumed; sums to 1.

    Compute and All2All times come from the fit: fitted at the world sizes of its rows, interpolated between and
    extrapolated beyond them; an All2All inside a domain is judged by the domain's size. The lookup path is fitted in
    all, but its split into stages is assumed, as are dedup, sync and the synchronisation of replicas.
    """
    origins = _origins(case, loop, world_size, domain_size)
    total = sum(step.ns for step in bound.cycle) or 1
    shares: dict[str, float] = {}
    for step in bound.cycle:
        status = origins[step.kind]
        shares[status] = shares.get(status, 0.0) + step.ns / total
    return dict(sorted(shares.items()))


def _origins(
    case: Case, loop: Loop, world_size: int, domain_size: int | None, *, moved: bool = False
) -> dict[OpKind, str]:
    """Where the time of every op kind of the loop comes from, see `provenance`.

    A fitted time that is `moved` to other hardware than the case's own is extrapolated at every world size.
    """
    sizes = [row.world_size for row in case.fit]

    def of_fit(size: int) -> str:
        if moved:
            return "extrapolated"
        if size in sizes:
            return "fitted"
        return "interpolated" if min(sizes) < size < max(sizes) else "extrapolated"

    found: dict[OpKind, str] = {}
    for stream in loop.streams:
        in_domain = stream.resource is Resource.DOMAIN and domain_size is not None
        size = domain_size if in_domain and domain_size else world_size
        found |= {op.kind: of_fit(size) if origin_of(op.kind) == "fitted" else "assumed" for op in stream.ops}
    return found


def case_step_ms(case: Case, work: GrowthLaws, loop: Loop, world_size: int, values: Mapping[str, float]) -> float:
    """Step latency in milliseconds by the cycle bound alone: what the simulation gives without jitter, sooner."""
    loop = case_loop(case, loop, values)
    costs = TimedCosts(batch_ns=batch_times(work, values, loop, world_size), micro_batches=loop.micro_batches)
    return ns_to_ms(float(max_cycle_ratio(loop, costs.op_ns).step_ns))
