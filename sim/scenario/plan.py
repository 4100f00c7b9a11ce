"""The cheapest configuration that meets a scenario's constraints, what else is on the front, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pandas as pd

from nestpipe.base import ORIGINS, CaseError
from sim.scenario.constraints import better, limits, shown, violations
from sim.scenario.evaluate import Evaluator, Row
from sim.scenario.file import Scenario
from sim.scenario.goodput import Goodput, goodput
from sim.scenario.grid import Configuration, Grid
from sim.scenario.infeasible import InfeasibleError, infeasible
from sim.scenario.memory import Need
from sim.scenario.pareto import pareto
from sim.scenario.sensitivity import Move, moves

__all__ = ["FRONT", "InfeasibleError", "Plan", "plan"]

#: What the front trades: column and whether less is better.
FRONT: Final[tuple[tuple[str, bool], ...]] = (("cost_per_hour", True), ("qps", False), ("device_bytes", True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `nestpipe plan` shows.

    Attributes:
        metric: the objective's column; `minimise` says whether less is better.
        best: the recommended row.
        runner_up: the best feasible row that differs in more than its number of micro-batches, if any.
        ranked: the best feasible rows, best first.
        front: feasible rows that no other feasible row beats in cost, QPS and device memory.
        by_micro_batches: rows that differ from the best in their number of micro-batches only.
        moves: inputs, the one that moves the objective most first.
        margins: for each constraint of the best row its limit, value and slack relative to the limit.
        need: what the best row needs in memory.
        goodput: of the best row, with the spread over simulated horizons.
        evaluated, feasible: number of configurations.
        feasible_indices: which ones.
        excluded: for each cluster without a feasible configuration the constraints that rule it out.
    """

    metric: str
    minimise: bool
    best: Mapping[str, Any]
    runner_up: Mapping[str, Any] | None
    ranked: pd.DataFrame
    front: pd.DataFrame
    by_micro_batches: pd.DataFrame
    moves: tuple[Move, ...]
    margins: pd.DataFrame
    need: Need | None
    goodput: Goodput | None
    evaluated: int
    feasible: int
    feasible_indices: tuple[int, ...]
    excluded: Mapping[str, str]

    def rests_on(self) -> dict[str, float]:
        """The shares of the best row's critical cycle by where its numbers come from, those that are not 0."""
        return {name: share for name in ORIGINS if (share := self.best[name]) == share and share}


def plan(grid: Grid, results: pd.DataFrame, *, top: int = 5) -> Plan:
    """The plan from the results of a sweep over the scenario's grid.

    Args:
        grid: what was swept.
        results: its rows, as `sim.sweep.sweep.sweep` gives them.
        top: how many ranked rows to keep.

    Raises:
        CaseError: if the scenario has no objective.
        InfeasibleError: if no row meets the constraints.
    """
    scenario = grid.scenario
    if scenario.objective is None:
        raise CaseError("plan needs an objective: objective: {minimise: cost_per_million_samples}, for example")
    metric, minimise = scenario.objective.metric, scenario.objective.minimise is not None
    rows = [_plain(row) for row in results.to_dict("records")]
    ok = [row for row in rows if row["status"] == "ok"]
    feasible = [row for row in ok if not violations(row, scenario)]
    if not feasible:
        raise infeasible(rows, ok, scenario)
    ranked = sorted(feasible, key=lambda row: better(metric, minimise, row))
    best = ranked[0]
    runner_up = next((row for row in ranked if not _alike(grid, row, best)), ranked[1] if len(ranked) > 1 else None)
    configuration = grid[int(best["index"])]
    evaluator = Evaluator(grid=grid)
    settings = evaluator.scenario_of(configuration)
    return Plan(
        metric=metric,
        minimise=minimise,
        best=best,
        runner_up=runner_up,
        ranked=pd.DataFrame(ranked[:top]),
        front=pareto(pd.DataFrame(feasible), [each for each in FRONT if _known(feasible, each[0])]),
        by_micro_batches=pd.DataFrame([row for row in ok if _alike(grid, row, best)]).sort_values("micro_batches"),
        moves=tuple(moves(grid, best, runner_up, metric)),
        margins=_margins(best, scenario),
        need=evaluator.need(configuration),
        goodput=None
        if settings.failures is None
        else goodput(settings.failures, configuration.world_size, seeds=200, seed=scenario.seed),
        evaluated=len(rows),
        feasible=len(feasible),
        feasible_indices=tuple(int(row["index"]) for row in feasible),
        excluded=_excluded(rows, feasible, scenario),
    )


def _excluded(rows: Sequence[Row], feasible: Sequence[Row], scenario: Scenario) -> dict[str, str]:
    found = {}
    for name in sorted({str(row["cluster"]) for row in rows} - {str(row["cluster"]) for row in feasible}):
        mine = [row for row in rows if row["cluster"] == name]
        found[name] = str(infeasible(mine, [row for row in mine if row["status"] == "ok"], scenario))
    return found


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A record with None for what is missing."""
    return {str(key): None if pd.isna(value) else value for key, value in row.items()}


def _known(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return all(row.get(column) is not None for row in rows)


def _alike(grid: Grid, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two rows differ in their number of micro-batches at most."""
    a, b = grid[int(one["index"])], grid[int(other["index"])]

    def without(each: Configuration) -> Configuration:
        return replace(each, index=0, variant=each.variant._replace(micro_batches=1))

    return without(a) == without(b)


def _margins(row: Mapping[str, Any], scenario: Scenario) -> pd.DataFrame:
    lines = []
    for name, (column, limit, most) in limits(row, scenario).items():
        value = row.get(column)
        if value is not None:
            slack = (limit - value if most else value - limit) / limit if limit else 0.0
            lines.append(
                {
                    "constraint": name,
                    "limit": ("at most " if most else "at least ") + shown(column, limit),
                    "value": shown(column, value),
                    "slack": slack,
                }
            )
    return pd.DataFrame(lines, columns=["constraint", "limit", "value", "slack"]).sort_values("slack", kind="stable")
