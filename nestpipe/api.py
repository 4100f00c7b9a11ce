"""The command line's verbs from Python: tables are pandas frames, figures are returned, nothing is printed.

    from nestpipe import api

    run = api.simulate("nestpipe", world_size=1536)
    run.metrics                                   # a frame: metric, value, unit
    run.figure()                                  # a matplotlib Figure; a notebook shows it

    planned = api.plan("examples/plan.yaml")
    planned.best, planned.ranked, planned.front, planned.moves
    planned.figure()

Scenarios are given as the path of a file, a `Scenario` or its `Grid` (`sim.scenario`). Runs in parallel start
processes: in a script, call them under `if __name__ == "__main__":`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pandas as pd

from nestpipe.checks import Report
from nestpipe.ir import Loop
from nestpipe.schedules import load
from nestpipe.timeline import METRICS, Timeline, metric_values
from sim.engine import Jitter
from sim.scenario import Goodput, Grid, Plan, Scenario, load_scenario
from sim.sweep import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "BreakEven",
    "Curves",
    "Planned",
    "Reproduced",
    "Simulated",
    "break_even",
    "check",
    "diff",
    "estimate",
    "goodput",
    "plan",
    "report",
    "reproduce",
    "scale",
    "simulate",
    "sweep",
]

PathLike: TypeAlias = str | os.PathLike[str]
AnyScenario: TypeAlias = PathLike | Scenario | Grid
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """One simulated schedule.

    Attributes:
        metrics: columns metric, value, unit.
        parts: columns part, ms, share: where a step goes; the shares sum to 1.
        limit: the critical cycle in words.
        rests_on: the share of the critical cycle by where its numbers come from.
        timeline: when each op ran.
    """

    metrics: pd.DataFrame
    parts: pd.DataFrame
    limit: str
    rests_on: Mapping[str, float]
    timeline: Timeline

    def figure(self) -> Figure:
        """Two steady steps, stream by stream."""
        from reports.figures import timelines

        return timelines({str(self.timeline.meta["schedule"]): self.timeline})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reproduced:
    """A published cluster, fitted and predicted: `rows` in long format and the size that efficiency refers to."""

    rows: pd.DataFrame
    base_world_size: int

    def figure(self) -> Figure:
        """Scaling efficiency against workers with the published points."""
        from reports.figures import scaling_efficiency

        return scaling_efficiency(self.rows, base=self.base_world_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curves:
    """Scaling curves: `rows` in long format, `limits` where each falls below `threshold` and why."""

    rows: pd.DataFrame
    limits: pd.DataFrame
    base_world_size: int
    threshold: float

    def table(self, metric: str = "scaling_efficiency") -> pd.DataFrame:
        """Methods down, world sizes across."""
        rows = self.rows[self.rows["metric"] == metric]
        return rows.pivot(index="method", columns="world_size", values="value").loc[list(dict.fromkeys(rows["method"]))]

    def figure(self, metric: str = "scaling_efficiency") -> Figure:
        """One metric against workers; `scaling_efficiency` or `qps`, or any other of `rows`."""
        from reports.figures import plots

        if metric == "scaling_efficiency":
            return plots.scaling_efficiency(self.rows, base=self.base_world_size)
        return plots.qps(self.rows) if metric == "qps" else plots.curve(self.rows, metric)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BreakEven:
    """Gains over a baseline on a map, and the edges at which schedules stop paying."""

    gains: pd.DataFrame
    edges: pd.DataFrame
    x: str
    y: str | None
    baseline: str
    pays_at: float

    def figure(self) -> Figure:
        """Heat maps with the edge as a contour, or curves if there is one axis."""
        from reports.figures import gain_curve, gain_map

        if self.y is None:
            return gain_curve(self.gains, self.x, baseline=self.baseline, pays_at=self.pays_at)
        return gain_map(self.gains, self.x, self.y, baseline=self.baseline, pays_at=self.pays_at)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """A plan and the sweep it was made from."""

    plan: Plan
    results: pd.DataFrame
    currency: str

    @property
    def best(self) -> pd.Series[Any]:
        """The recommended configuration."""
        return pd.Series(self.plan.best, name="best")

    @property
    def runner_up(self) -> pd.Series[Any] | None:
        """The next best one that differs in more than its number of micro-batches."""
        return None if self.plan.runner_up is None else pd.Series(self.plan.runner_up, name="runner-up")

    @property
    def ranked(self) -> pd.DataFrame:
        """The best feasible configurations, best first."""
        return self.plan.ranked

    @property
    def front(self) -> pd.DataFrame:
        """What no other feasible configuration beats in cost, QPS and device memory."""
        return self.plan.front

    @property
    def moves(self) -> pd.DataFrame:
        """What each input does to the objective, the strongest first."""
        return pd.DataFrame([asdict(move) | {"span": move.span} for move in self.plan.moves])

    def figure(self) -> Figure:
        """Cost against QPS of the feasible configurations, the front filled."""
        from reports.figures import front

        other = None if self.plan.runner_up is None else int(self.plan.runner_up["index"])
        fine = self.results[self.results["index"].isin(self.plan.feasible_indices)]
        return front(fine, self.plan.front, best=int(self.plan.best["index"]), runner_up=other, currency=self.currency)


def simulate(
    schedule: str | Loop,
    *,
    case: str = "nestpipe_paper",
    world_size: int | None = None,
    micro_batches: int | None = None,
    topology: str | None = None,
    steps: int = 20,
    jitter: float = 0.0,
    stragglers: Mapping[int, float] | None = None,
    seed: int = 0,
) -> Simulated:
    """Simulates one schedule on a case's cluster.

    Args:
        schedule: a catalogue name, a file of schedule text, or a loop.
        case: a published cluster, by name or file.
        world_size: number of ranks; by default the case's headline size.
        micro_batches: by default the case's, where the schedule has several.
        topology: a cluster on whose hardware overlapping ops share; without one they share nothing.
        steps: batches to run.
        jitter: coefficient of variation of each local op of each rank.
        stragglers: factors of single ranks.
        seed: of the jitter.
    """
    from sim.costs import CaseWorkload, Options, require_runnable
    from sim.costs import run as run_of
    from topologies.cluster import load_cluster

    workload = CaseWorkload.of(case)
    loop = workload.loop(load(schedule) if isinstance(schedule, str) else schedule, micro_batches)
    require_runnable(loop)
    options = Options(
        world_size=world_size or workload.case.headline_world_size,
        steps=steps,
        jitter=Jitter(cv=jitter, stragglers=stragglers or {}, seed=seed),
    )
    cluster = None if topology is None else load_cluster(topology)
    run = run_of(loop, workload, cluster, options, meta={"case": workload.case.case})
    values = metric_values(run.metrics)
    parts = {name: ms for name, ms in run.metrics.parts_ms.items() if ms}
    return Simulated(
        metrics=pd.DataFrame(
            {
                "metric": list(values),
                "value": list(values.values()),
                "unit": ["" if METRICS[name].unit == "%" else METRICS[name].unit for name in values],
            }
        ),
        parts=pd.DataFrame(
            {
                "part": list(parts),
                "ms": list(parts.values()),
                "share": [ms / run.metrics.step_latency_ms for ms in parts.values()],
            }
        ),
        limit=run.bound.text(),
        rests_on=run.rests_on,
        timeline=run.timeline,
    )


def reproduce(case: str = "nestpipe_paper", *, steps: int = 20) -> Reproduced:
    """Fits a published cluster's baseline and predicts every other published row."""
    from sim.costs import reproduce as run
    from traces.workloads import load_case

    the_case = load_case(case)
    found = run(the_case, steps=steps)
    rows = pd.DataFrame([{name: getattr(row, name) for name in row.__slots__} for row in found.rows])
    return Reproduced(rows=rows, base_world_size=the_case.base_world_size)


def check(schedule: str | Loop, *, micro_batches: int | None = None) -> Report:
    """What the checks prove of a schedule: verdict, staleness, findings with witnesses."""
    from nestpipe.checks import check as prove
    from nestpipe.ir import with_micro_batches

    loop = load(schedule) if isinstance(schedule, str) else schedule
    return prove(loop if micro_batches is None else with_micro_batches(loop, micro_batches))


def scale(scenario: AnyScenario, *, threshold: float | None = None) -> Curves:
    """Scaling curves of a scenario's schedules, with intervals over seeds where something is random."""
    from sim.scenario import scale as run

    found = run(_grid(scenario), threshold=threshold)
    return Curves(
        rows=found.rows, limits=found.limits, base_world_size=found.base_world_size, threshold=found.threshold
    )


def estimate(scenario: AnyScenario) -> Estimate:
    """What a sweep or plan would evaluate and how long it takes, measured on a small sample."""
    from sim.sweep import estimate as run

    return run(_grid(scenario))


def sweep(
    scenario: AnyScenario,
    *,
    out: PathLike | None = None,
    workers: int = 1,
    dask: str | None = None,
    progress: Progress | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """One row per configuration of a scenario.

    Args:
        scenario: file or value.
        out: a folder to keep results in; an interrupted sweep continues there.
        workers: processes of this machine.
        dask: address of a Dask scheduler to use instead.
        progress: told how many configurations of how many are done.
        columns: what to read back of results kept in `out`; everything by default.
    """
    from sim.sweep import read_results, sweep_to
    from sim.sweep import sweep as run

    grid = _grid(scenario)
    if out is None:
        return run(grid, workers=workers, dask=dask, progress=progress)
    kept = sweep_to(Path(out), grid, workers=workers, dask=dask, progress=progress)
    return read_results(kept, columns)


def break_even(
    results: pd.DataFrame, x: str, y: str | None = None, *, baseline: str = "sync", pays_at: float = 1.0
) -> BreakEven:
    """Where schedules stop paying along one or two swept keys of a sweep's results."""
    from sim.scenario import break_even as gains_of
    from sim.scenario import edges

    gains = gains_of(results, x, y, baseline=baseline)
    return BreakEven(
        gains=gains,
        edges=edges(gains, x, y, pays_at=pays_at),
        x=x,
        y=y,
        baseline=baseline,
        pays_at=pays_at,
    )


def plan(
    scenario: AnyScenario,
    *,
    out: PathLike | None = None,
    workers: int = 1,
    dask: str | None = None,
    top: int = 5,
    progress: Progress | None = None,
) -> Planned:
    """The best configuration that meets a scenario's constraints, the front and how sure that is; see `sweep`."""
    from sim.scenario import plan as make

    grid = _grid(scenario)
    results = sweep(grid, out=out, workers=workers, dask=dask, progress=progress)
    return Planned(plan=make(grid, results, top=top), results=results, currency=grid.scenario.currency)


def goodput(
    world_size: int,
    *,
    accelerator_mtbf_hours: float,
    restart_s: float,
    checkpoint_s: float,
    checkpoint_interval_s: float | None = None,
    horizon_hours: float = 730.0,
    seeds: int = 200,
) -> Goodput:
    """The share of wall time that trains, with checkpoints and failures; the best interval if none is given."""
    from sim.scenario import Failures
    from sim.scenario import goodput as run

    failures = Failures(
        accelerator_mtbf_hours=accelerator_mtbf_hours,
        restart_s=restart_s,
        checkpoint_s=checkpoint_s,
        checkpoint_interval_s=checkpoint_interval_s,
        horizon_hours=horizon_hours,
    )
    return run(failures, world_size, seeds=seeds)


def report(*runs: PathLike, out: PathLike = "report.html", title: str = "") -> Path:
    """One self-contained page about runs that `nestpipe simulate --out` wrote; gives its path."""
    from nestpipe.base import write_text
    from reports.html import page
    from reports.runs import read_run

    path = Path(out)
    write_text(path, page([read_run(run) for run in runs], title=title, base=path.parent))
    return path


def diff(a: PathLike, b: PathLike) -> pd.DataFrame:
    """Two runs or Timelines side by side: one row per part of the step, in milliseconds."""
    from reports.runs import compare, read_side

    (name_a, one), (name_b, other) = read_side(a), read_side(b)
    return compare(one, other, names=(name_a, name_b)).parts


def _grid(scenario: AnyScenario) -> Grid:
    if isinstance(scenario, Grid):
        return scenario
    return Grid.of(scenario if isinstance(scenario, Scenario) else load_scenario(Path(scenario)))
