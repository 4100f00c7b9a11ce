"""What collectives take on a topology: algorithms, routes, and max-min fair rates."""

from sim.network.accuracy import Given, Predicted, predict_log
from sim.network.classes import LinkLoad, PairTraffic, Transfer, transfer
from sim.network.collectives import ALGORITHMS, Place, Round, Split, Traffic
from sim.network.cost import Collectives, group_size_bytes, group_transfer, network_costs
from sim.network.curves import read_curves, read_measured
from sim.network.problem import Floats, FlowProblem, Ints
from sim.network.solve import Measured, flow_problem, measure, simulate
from sim.network.vector import simulate_vector

__all__ = [
    "ALGORITHMS",
    "Collectives",
    "Floats",
    "FlowProblem",
    "Given",
    "Ints",
    "LinkLoad",
    "Measured",
    "PairTraffic",
    "Place",
    "Predicted",
    "Round",
    "Split",
    "Traffic",
    "Transfer",
    "flow_problem",
    "group_size_bytes",
    "group_transfer",
    "measure",
    "network_costs",
    "predict_log",
    "read_curves",
    "read_measured",
    "simulate",
    "simulate_vector",
    "transfer",
]
