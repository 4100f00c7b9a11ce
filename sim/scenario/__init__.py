"""Scenario files, and what is worked out from them: plans, scaling curves, sensitivities."""

from sim.scenario.break_even import break_even, edges
from sim.scenario.constraints import better, violations
from sim.scenario.evaluate import COLUMNS, Evaluator, Row, with_keys_known
from sim.scenario.file import Scenario, load_scenario, warnings
from sim.scenario.goodput import Goodput, goodput
from sim.scenario.grid import Grid
from sim.scenario.plan import Plan, plan
from sim.scenario.scale import Scaling, require_plain, scale
from sim.scenario.sections import Failures, JitterModel, Stragglers

__all__ = [
    "COLUMNS",
    "Evaluator",
    "Failures",
    "Goodput",
    "Grid",
    "JitterModel",
    "Plan",
    "Row",
    "Scaling",
    "Scenario",
    "Stragglers",
    "better",
    "break_even",
    "edges",
    "goodput",
    "load_scenario",
    "plan",
    "require_plain",
    "scale",
    "violations",
    "warnings",
    "with_keys_known",
]
