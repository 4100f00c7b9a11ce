"""Recorded network cases: topologies, message programs and routes to solve them on."""

from sim.network.oracle.cases import CaseFile, Network, evaluate_cases, read_cases
from sim.network.oracle.programs import build_program

__all__ = [
    "CaseFile",
    "Network",
    "build_program",
    "evaluate_cases",
    "read_cases",
]
