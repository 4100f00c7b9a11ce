"""One schedule, one workload, one cluster: the run that every command shows.

`run` prepares it; its parts are worked out when they are asked for, each once. The bound needs no simulation, and
neither does a step time with jitter where ops share nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from nestpipe.base import NS_PER_MS, CaseError, shares_by_origin
from nestpipe.checks import require_safe
from nestpipe.ir import COLLECTIVES, Loop, Op, OpKind, refuse_parts, unroll
from nestpipe.timeline import StepMetrics, Timeline, measure, steady_window, step_ends
from sim.costs.hardware import HardwareCosts
from sim.costs.workload import OpCosts, Options, Workload, batch_ns
from sim.engine import (
    HOST,
    Bound,
    CycleStep,
    HostLane,
    Start,
    TimedCosts,
    World,
    max_cycle_ratio,
    rank_step_ns,
    simulate,
    steady_start,
)
from topologies.cluster import Cluster

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Run", "require_runnable", "run"]


#: The largest change of pace, between the halves of its window, of a run that counts as steady.
_DRIFT_MAX: Final = 1e-3
#: The most steps that a run is lengthened to.
_STEPS_MAX: Final = 320


def require_runnable(loop: Loop) -> None:
    """Refuses a loop that the checks find malformed, deadlocked or racing; staleness is allowed, it costs no time.

    Raises:
        ScheduleError, DeadlockError: with the check's witness.
    """
    require_safe(loop, allow_staleness=sys.maxsize)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A schedule on a workload and a cluster, and what follows from it.

    Attributes:
        loop: the schedule, with its number of micro-batches.
        ops: what its ops cost.
        world: number of ranks and size of a domain.
        options: as run, the workload's own batch and domain filled in.
        meta: further facts for the Timeline.
    """

    loop: Loop
    ops: OpCosts
    world: World
    options: Options
    meta: Mapping[str, Any]

    @cached_property
    def start(self) -> Start:
        """Where the run starts so that its steps are steady ones: at the pace of its slowest rank."""
        alone = self.ops.op_ns
        if alone is None or getattr(self.ops.costs, "host", None) is not None:  # host calls: another pace
            return Start(steps=self.options.steps)
        factor = max(self.options.jitter.stragglers.values(), default=1.0)
        if factor <= 1 or math.isinf(factor):  # the simulation refuses what is infinite
            return steady_start(self.loop, self.options.steps, alone, self.bound)

        def slowed(op: Op) -> int:
            return alone(op) if op.kind in COLLECTIVES else round(alone(op) * Fraction(factor))

        return steady_start(self.loop, self.options.steps, slowed, max_cycle_ratio(self.loop, slowed))

    @cached_property
    def timeline(self) -> Timeline:
        """When each op ran. Where ops share what they use, as many steps as it takes until their pace holds."""
        steps = self.start.steps or self.options.steps
        found = self._simulate(steps)
        if isinstance(self.ops.costs, HardwareCosts) and not self.options.jitter.cv:
            while (self._drift(found) or 0.0) > _DRIFT_MAX and 2 * steps <= _STEPS_MAX:
                steps *= 2
                found = self._simulate(steps)
        return found

    def _simulate(self, steps: int) -> Timeline:
        start = self.start
        found = simulate(
            unroll(self.loop, steps),
            self.ops.costs,
            self.world,
            fold_ranks=self.options.fold_ranks,
            earliest_ns=start.earliest_ns,
            meta={**self.meta, **({"period": start.period} if start.period > 1 else {})},
        )
        return self.ops.finish(found)

    def _drift(self, timeline: Timeline) -> float | None:
        """How much the pace of the halves of the steady steps differs, relative to the first; None if too few."""
        window = steady_window(timeline)
        half = window.steps // 2 // self.start.period * self.start.period
        if not half:
            return None
        steps, ends = step_ends(timeline)
        at = {int(step): i for i, step in enumerate(steps)}
        last, middle, first = (int(ends[:, at[window.last - n * half]].max()) for n in range(3))
        return abs((last - middle) / max(1, middle - first) - 1)

    @cached_property
    def steady(self) -> dict[str, Any]:
        """How many steps were run, whether they had to start in the steady state, and by how much their pace drifts."""
        return {
            "steps": self.timeline.meta["steps"],
            "starts_steady": bool(self.start.earliest_ns),
            "drift": None if self.options.jitter.cv else self._drift(self.timeline),
        }

    @property
    def steady_note(self) -> str | None:
        """In words what was done to show a steady step; None where the steps that were asked for show it."""
        found, asked = self.steady, self.options.steps
        notes = [f"{asked} steps would not reach it, so the run starts in it"] if found["starts_steady"] else []
        notes += [f"{found['steps']} steps run instead of {asked}"] if found["steps"] != asked else []
        if found["drift"] is None and not self.options.jitter.cv:
            notes.append("too few steps to compare the pace of their halves")
        if (found["drift"] or 0.0) > _DRIFT_MAX:
            notes.append(f"not reached: the pace still changes by {found['drift']:.2%} between halves of the window")
        return "; ".join(notes) or None

    @cached_property
    def metrics(self) -> StepMetrics:
        """Of the steady steps."""
        batch = self.options.batch_per_worker
        return measure(self.timeline, global_batch=None if batch is None else batch * self.options.world_size)

    @cached_property
    def bound(self) -> Bound:
        """The step time without contention and jitter, and its critical cycle.

        Raises:
            CaseError: if every op of the program has a cost of its own, so that no step stands for the others.
        """
        if self.ops.op_ns is None:
            raise CaseError(f"{self.loop.name}: a cost table knows every op by itself, so there is no cycle bound")
        host: HostLane | None = getattr(self.ops.costs, "host", None)
        if host is None:
            return max_cycle_ratio(self.loop, self.ops.op_ns)
        ranks = range(min(self.world.world_size, len(host.work_ns)))
        each = [max_cycle_ratio(self.loop, self.ops.op_ns, host, rank) for rank in ranks]
        return max(each, key=lambda bound: bound.step_ns)

    @cached_property
    def batch_ns(self) -> dict[OpKind, int]:
        """Nanoseconds per batch of each op kind alone."""
        return {} if self.ops.op_ns is None else batch_ns(self.loop, self.ops.op_ns)

    @cached_property
    def rests_on(self) -> dict[str, float]:
        """The share of the critical cycle by where its numbers come from."""
        return shares_by_origin((self._origin(step), step.ns) for step in self.bound.cycle)

    def _origin(self, step: CycleStep) -> str:
        """Where the time of an op comes from; what its micro-batches cost the host was not recorded."""
        if step.stream == HOST and self.loop.micro_batches > 1:
            return "assumed"
        return self.ops.origin.get(step.kind, "assumed")

    @cached_property
    def step_ns(self) -> float:
        """The steady step, mean over ranks, by the soonest exact way: bound, recursion or simulation."""
        if not isinstance(self.ops.costs, TimedCosts) or (self.ops.costs.host and self.options.jitter.is_random):
            return self.metrics.step_latency_ms * NS_PER_MS
        if not self.options.jitter.is_random:
            return float(self.bound.step_ns)
        return float(rank_step_ns(self.loop, self.options.steps, self.ops.costs, self.world, self.start).mean())

    @property
    def stages(self) -> pd.DataFrame | None:
        """On a cluster, for each op kind its time alone, the resource that sets it and how full that is."""
        return self.ops.costs.stages() if isinstance(self.ops.costs, HardwareCosts) else None

    @property
    def load(self) -> pd.DataFrame | None:
        """On a cluster, for each resource the work done and its utilisation over the run."""
        if not isinstance(self.ops.costs, HardwareCosts):
            return None
        _ = self.timeline  # the load is that of the simulation
        return self.ops.costs.load()


def run(
    loop: Loop,
    workload: Workload,
    cluster: Cluster | None,
    options: Options,
    *,
    meta: Mapping[str, Any] | None = None,
) -> Run:
    """A schedule on a workload and a cluster; a stale schedule may be run, what is predicted is time.

    Args:
        loop: the schedule, with the number of micro-batches to run; see `require_runnable`.
        workload: what its ops cost.
        cluster: the hardware that ops share where they overlap; None for the workload's own, on which they share
            nothing that the workload does not say.
        options: size, steps, jitter.
        meta: further facts for the Timeline.

    Raises:
        NestPipeError: if a number is impossible or the workload does not know the ops.
    """
    refuse_parts(loop, "the simulator")
    options = replace(
        options,
        batch_per_worker=workload.batch_per_worker if options.batch_per_worker is None else options.batch_per_worker,
        domain_size=workload.domain_size if options.domain_size is None else options.domain_size,
    )
    world = options.world(loop)
    meta = {**({} if cluster is None else {"topology": cluster.name}), **(meta or {})}
    return Run(loop=loop, ops=workload.costs(loop, cluster, options), world=world, options=options, meta=meta)
