"""Measuring op costs on the devices at hand."""

from executor.profile.driver import run_on_testbed
from executor.profile.measure import ProfilePlan, full_plan, measure_costs, quick_plan
from executor.profile.probe import is_disturbed
from executor.profile.run import RunConfig, config_from, loop_of, run_configs, sizes_of_run
from executor.profile.samples import check_separate
from executor.profile.sizes import RunSizes

__all__ = [
    "ProfilePlan",
    "RunConfig",
    "RunSizes",
    "check_separate",
    "config_from",
    "full_plan",
    "is_disturbed",
    "loop_of",
    "measure_costs",
    "quick_plan",
    "run_configs",
    "run_on_testbed",
    "sizes_of_run",
]
