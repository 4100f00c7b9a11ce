"""How long an op takes and what it asks of the hardware, from a case, a model, a trace or a cost table."""

from sim.costs.calibrated import CalibratedCosts, Machine, OpSizes, with_starts
from sim.costs.case import Run, case_loop, case_run, hardware_run, home_cluster, provenance, require_runnable
from sim.costs.demand import Demand, demands_of_case, demands_of_preset, num_owners
from sim.costs.hardware import HardwareCosts
from sim.costs.reproduce import Reproduction, metric_status, reproduce, run_metrics, status_of, varied
from sim.costs.trace import Mode, TraceCosts, costs_from_trace

__all__ = [
    "CalibratedCosts",
    "Demand",
    "HardwareCosts",
    "Machine",
    "Mode",
    "OpSizes",
    "Reproduction",
    "Run",
    "TraceCosts",
    "case_loop",
    "case_run",
    "costs_from_trace",
    "demands_of_case",
    "demands_of_preset",
    "hardware_run",
    "home_cluster",
    "metric_status",
    "num_owners",
    "provenance",
    "reproduce",
    "require_runnable",
    "run_metrics",
    "status_of",
    "varied",
    "with_starts",
]
