"""How far each input moves a recommendation, one at a time, and whether it would change the choice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from nestpipe.base import CaseError
from sim.scenario.assumptions import assumed_values
from sim.scenario.constraints import better, violations
from sim.scenario.evaluate import Evaluator
from sim.scenario.file import Scenario
from sim.scenario.grid import Grid, with_value

__all__ = ["Move", "choose", "moves"]

#: Factors that a recommendation is tried with: a fifth less and a quarter more.
_VARIED: Final = ("compute_time", "link_bandwidth", "peer_cost", "lookup_cost", "skew")
_DOWN, _UP = 0.8, 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The objective of the recommendation with one input at its low and high end, without jitter.

    `changes_choice` says whether at either end the recommendation breaks a constraint or the runner-up is better.
    """

    input: str
    low: float
    high: float
    objective_low: float
    objective: float
    objective_high: float
    changes_choice: bool

    @property
    def span(self) -> float:
        """The larger change of the objective, as a fraction of it."""
        return max(abs(self.change(end)) for end in (self.objective_low, self.objective_high))

    def change(self, end: float) -> float:
        """The objective at one end relative to that of the recommendation; an objective of 0 has no such change."""
        return end / self.objective - 1 if self.objective else 0.0


def choose(rows: Sequence[Mapping[str, Any]], scenario: Scenario) -> Mapping[str, Any] | None:
    """The best of the rows that meet the constraints, None if none does."""
    assert scenario.objective is not None
    metric, minimise = scenario.objective.metric, scenario.objective.minimise is not None
    fine = [row for row in rows if row["status"] == "ok" and not violations(row, scenario)]
    return min(fine, key=lambda row: better(metric, minimise, row), default=None)


def moves(grid: Grid, best: Mapping[str, Any], runner_up: Mapping[str, Any] | None, metric: str) -> list[Move]:
    """Every input at both ends of its range, the one that moves the objective most first.

    Args:
        grid: what was swept.
        best: the recommended row.
        runner_up: the one to compare with.
        metric: the objective's column.
    """
    indices = [int(row["index"]) for row in (best, runner_up) if row is not None]

    def at(changed: Grid) -> tuple[float | None, bool]:
        evaluator = Evaluator(grid=changed, max_seeds=0)
        rows = [evaluator.row(changed[index]) for index in indices]
        return rows[0].get(metric), choose(rows, changed.scenario) is rows[0]

    now, _ = at(grid)
    found = []
    for name, low, high, changed in _inputs(grid):
        try:
            (at_low, stays_low), (at_high, stays_high) = at(changed(low)), at(changed(high))
        except CaseError:  # an end of the range that no scenario may have
            continue
        if now is None or at_low is None or at_high is None:
            continue
        found.append(
            Move(
                input=name,
                low=low,
                high=high,
                objective_low=at_low,
                objective=now,
                objective_high=at_high,
                changes_choice=not (stays_low and stays_high),
            )
        )
    return sorted(found, key=lambda move: (-move.span, move.input))


def _inputs(grid: Grid) -> list[tuple[str, float, float, Callable[[float], Grid]]]:
    """Name, low, high and how to get the grid with a value: the case's assumptions, factors, failures."""
    scenario = grid.scenario

    def with_setting(key: str) -> Callable[[float], Grid]:
        return lambda value: replace(grid, scenario=with_value(scenario, key, value))

    found = []
    if grid.case is not None:
        values = assumed_values(grid.case, scenario)
        for name, each in grid.case.assumptions.items():
            if name not in ("micro_batches", "domain_size") and each.low < each.high:
                low, high = min(each.low, values[name]), max(each.high, values[name])
                found.append((name, low, high, with_setting(f"workload.assumptions.{name}")))
    for name in _VARIED:
        now = getattr(scenario.factors, name)
        found.append((f"factors.{name}", now * _DOWN, now * _UP, with_setting(f"factors.{name}")))
    if scenario.failures is not None:
        hours = scenario.failures.accelerator_mtbf_hours
        key = "failures.accelerator_mtbf_hours"
        found.append((key, hours / 2, hours * 2, with_setting(key)))
    return found
