"""Recorded network cases: topologies, message programs and routes to solve them on."""

from sim.network.oracle.cases import DEFAULT_DRAWS, evaluate_cases, read_cases
from sim.network.oracle.programs import build_plan

__all__ = [
    "DEFAULT_DRAWS",
    "build_plan",
    "evaluate_cases",
    "read_cases",
]
