"""How a program runs: SimPy streams, shared resources, folded ranks, and two answers without simulating."""

from sim.engine.anchor import Anchor, anchor
from sim.engine.bound import Bound, max_cycle_ratio
from sim.engine.costs import Costs, Jitter, TimedCosts, Work
from sim.engine.engine import simulate
from sim.engine.fluid import Activity, Capacity, FluidSystem
from sim.engine.folding import Actors, World
from sim.engine.maxmin import MaxMin
from sim.engine.recursion import rank_step_ns
from sim.engine.replay import Scales, replay

__all__ = [
    "Activity",
    "Actors",
    "Anchor",
    "Bound",
    "Capacity",
    "Costs",
    "FluidSystem",
    "Jitter",
    "MaxMin",
    "Scales",
    "TimedCosts",
    "Work",
    "World",
    "anchor",
    "max_cycle_ratio",
    "rank_step_ns",
    "replay",
    "simulate",
]
