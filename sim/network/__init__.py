"""What collectives take on a topology: algorithms, routes, and max-min fair rates."""

from sim.network.classes import PairTraffic, Transfer, transfer
from sim.network.collectives import Collectives, Split
from sim.network.curves import read_curves
from sim.network.group_transfer import group_transfer, network_costs
from sim.network.problem import Floats, FlowProblem
from sim.network.solve import Measured, flow_problem, measure, simulate
from sim.network.vector import simulate_vector

__all__ = [
    "Collectives",
    "Floats",
    "FlowProblem",
    "Measured",
    "PairTraffic",
    "Split",
    "Transfer",
    "flow_problem",
    "group_transfer",
    "measure",
    "network_costs",
    "read_curves",
    "simulate",
    "simulate_vector",
    "transfer",
]
