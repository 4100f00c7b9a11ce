"""How long an op takes and what it asks of the hardware, from a case, a model, a trace or a cost table; and the run."""

from sim.costs.anchored import anchored_trace
from sim.costs.calibrated import CalibratedCosts, Machine, OpSizes
from sim.costs.case import CaseWorkload, scaled_law, status_of
from sim.costs.demand import Demand, num_owners
from sim.costs.hardware import HardwareCosts
from sim.costs.model import ModelWorkload
from sim.costs.record import run_record, run_status
from sim.costs.reproduce import Reproduction, metric_status, reproduce, varied
from sim.costs.run import Run, require_runnable, run
from sim.costs.table import TableWorkload
from sim.costs.trace import Mode, TraceCosts, TraceWorkload
from sim.costs.workload import ByKind, OpCosts, Options, Workload, blocks_of, costs_of

__all__ = [
    "ByKind",
    "CalibratedCosts",
    "CaseWorkload",
    "Demand",
    "HardwareCosts",
    "Machine",
    "Mode",
    "ModelWorkload",
    "OpCosts",
    "OpSizes",
    "Options",
    "Reproduction",
    "Run",
    "TableWorkload",
    "TraceCosts",
    "TraceWorkload",
    "Workload",
    "anchored_trace",
    "blocks_of",
    "costs_of",
    "metric_status",
    "num_owners",
    "reproduce",
    "require_runnable",
    "run",
    "run_record",
    "run_status",
    "scaled_law",
    "status_of",
    "varied",
]
