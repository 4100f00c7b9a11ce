"""The work of a step: published cases, models, measured cost tables."""

from traces.workloads.case import ASSUMPTIONS, Case, Growth, GrowthLaws, batch_times, growth_laws, load_case
from traces.workloads.cost_table import (
    COST_COLUMNS,
    CostFit,
    CostTable,
    costs_of,
    fit_kind,
    read_cost_table,
    resample,
    summarise,
)
from traces.workloads.key_use import key_uses
from traces.workloads.models import WorkloadModel, preset
from traces.workloads.synthesis import AcceleratorRates, synthesise

__all__ = [
    "ASSUMPTIONS",
    "COST_COLUMNS",
    "AcceleratorRates",
    "Case",
    "CostFit",
    "CostTable",
    "Growth",
    "GrowthLaws",
    "WorkloadModel",
    "batch_times",
    "costs_of",
    "fit_kind",
    "growth_laws",
    "key_uses",
    "load_case",
    "preset",
    "read_cost_table",
    "resample",
    "summarise",
    "synthesise",
]
