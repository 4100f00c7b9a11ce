"""The assumptions of a case as a scenario has them: checked like those of the case itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from nestpipe.base import CaseError, unknown_name
from sim.costs import varied
from sim.scenario.file import Scenario
from traces.workloads import ASSUMPTIONS, Case

__all__ = ["assumed_values", "check_assumptions", "drawn_assumptions"]

_STAGES: Final = ("read_share", "copy_h2d_share", "keys_share", "lookup_share", "write_back_share")
_WHOLE: Final = frozenset({"micro_batches", "domain_size"})
_WHERE: Final = "workload.assumptions"


def check_assumptions(case: Case, scenario: Scenario) -> None:
    """Refuses assumptions of the scenario that a case could not state.

    Raises:
        CaseError: if a name is unknown, or a value out of range or not finite; names it and what is expected.
    """
    given = scenario.workload.assumptions
    for name, value in given.items():
        if name not in ASSUMPTIONS:
            raise CaseError(f"{_WHERE}: " + unknown_name("assumption", name, ASSUMPTIONS))
        low, high = ASSUMPTIONS[name]
        if not (low <= value <= high and math.isfinite(value)):
            raise CaseError(f"{_WHERE}.{name} must be a number between {low:g} and {high:g}, got {value:g}")
        if name in _WHOLE and value != int(value):
            raise CaseError(f"{_WHERE}.{name} must be a whole number, got {value:g}")
    shortest = min(row.lookup_ms for row in case.fit)
    if given.get("dedup_ms", 0) > shortest:
        raise CaseError(
            f"{_WHERE}.dedup_ms {given['dedup_ms']:g} is longer than the shortest lookup path of the case, "
            f"{shortest:g} ms"
        )
    assumed_values(case, scenario)


def assumed_values(case: Case, scenario: Scenario) -> dict[str, float]:
    """The case's assumptions with those that the scenario replaces.

    Stages of the lookup path that the scenario does not give shrink or grow in proportion, so that shares sum to 1.

    Raises:
        CaseError: if shares sum to more than 1, or stages are all given and do not sum to 1.
    """
    values = {**case.values(), **scenario.workload.assumptions}
    given = [name for name in _STAGES if name in scenario.workload.assumptions]
    left = 1 - sum(values[name] for name in given)
    if left < -1e-9 or (left > 1e-9 and len(given) == len(_STAGES)):
        raise CaseError(
            f"{_WHERE}: {', '.join(_STAGES)} must sum to 1, got {1 - left:g} for {', '.join(given)}; leave one out"
        )
    others = [name for name in _STAGES if name not in given]
    rest = sum(values[name] for name in others)
    for name in others if given else ():
        values[name] = values[name] * left / rest if rest else left / len(others)
    dense = values["forward_share"] + values["update_share"]
    if dense > 1:
        raise CaseError(f"{_WHERE}: forward_share + update_share must not exceed 1, got {dense:g}")
    return values


def drawn_assumptions(case: Case, values: Mapping[str, float], uniforms: Mapping[str, float]) -> dict[str, float]:
    """Assumptions drawn from triangular distributions between low and high with the mode at the value.

    Args:
        case: for low and high.
        values: the modes.
        uniforms: for each assumption to draw a number in [0, 1).
    """
    drawn = dict(values)
    for name, uniform in uniforms.items():
        each, mode = case.assumptions[name], values[name]
        low, high = min(each.low, mode), max(each.high, mode)
        if high > low:
            drawn = varied(drawn, name, _triangular(uniform, low, mode, high))
    return drawn


def _triangular(uniform: float, low: float, mode: float, high: float) -> float:
    """The quantile of a triangular distribution."""
    cut = (mode - low) / (high - low)
    if uniform < cut:
        return low + math.sqrt(uniform * (high - low) * (mode - low))
    return high - math.sqrt((1 - uniform) * (high - low) * (high - mode))
