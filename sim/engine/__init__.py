"""How a program runs: SimPy streams, shared resources, folded ranks, and two answers without simulating."""

from sim.engine.anchor import Anchor, anchor
from sim.engine.bound import Bound, CycleStep, max_cycle_ratio
from sim.engine.costs import Costs, Jitter, TimedCosts, Work
from sim.engine.engine import simulate
from sim.engine.fluid import Activity, Capacity, FluidSystem
from sim.engine.folding import Actors, World
from sim.engine.host import HOST, Awaited, HostLane, issue_order
from sim.engine.maxmin import MaxMin
from sim.engine.recursion import rank_step_ns
from sim.engine.replay import Scales, replay
from sim.engine.steady import Start, steady_start

__all__ = [
    "HOST",
    "Activity",
    "Actors",
    "Anchor",
    "Awaited",
    "Bound",
    "Capacity",
    "Costs",
    "CycleStep",
    "FluidSystem",
    "HostLane",
    "Jitter",
    "MaxMin",
    "Scales",
    "Start",
    "TimedCosts",
    "Work",
    "World",
    "anchor",
    "issue_order",
    "max_cycle_ratio",
    "rank_step_ns",
    "replay",
    "simulate",
    "steady_start",
]
