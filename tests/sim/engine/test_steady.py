"""The step that a run shows is the steady one, whatever the number of steps."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.ir import Loop, OpKind, unroll, with_micro_batches
from nestpipe.schedules import load, names
from nestpipe.timeline import measure
from sim.engine.bound import max_cycle_ratio
from sim.engine.costs import Jitter, TimedCosts
from sim.engine.engine import simulate
from sim.engine.folding import World
from sim.engine.recursion import rank_step_ns
from sim.engine.steady import steady_start

MS = 1_000_000
WORLD = World(world_size=4, domain_size=2)


def shown_ns(loop: Loop, costs: TimedCosts, steps: int) -> float:
    """The step latency that a simulation of the loop shows."""
    start = steady_start(loop, steps, costs.op_ns, max_cycle_ratio(loop, costs.op_ns))
    program = unroll(loop, start.steps or steps)
    timeline = simulate(program, costs, WORLD, earliest_ns=start.earliest_ns, meta={"period": start.period})
    return measure(timeline).step_latency_ms * MS


def near_tie(rng: np.random.Generator) -> tuple[Loop, TimedCosts]:
    """A loop of the catalogue whose longest ops differ by a nanosecond to one per cent."""
    loop = load(str(rng.choice(names())))
    loop = with_micro_batches(loop, int(rng.choice([1, 2, 3])) if loop.micro_batches > 1 else 1)
    longest = int(rng.integers(1_000, 1_000_000))
    below = longest - rng.integers(0, int(rng.choice([2, 20, longest // 100 + 1])), len(OpKind))
    short = rng.integers(0, longest, len(OpKind))
    chosen = np.where(rng.random(len(OpKind)) < rng.choice([0.1, 0.3, 0.6]), below, short * (rng.random() < 0.7))
    times = {kind: int(ns) for kind, ns in zip(OpKind, chosen, strict=True)} | {OpKind.LOOKUP: longest}
    if rng.random() < 0.5:  # a lead of the readers, worked off slowly
        times = {OpKind.READ: int(below[0]), OpKind.COPY_H2D: int(short[0] * 0.4), OpKind.LOOKUP: longest}
    return loop, TimedCosts(batch_ns=times, micro_batches=loop.micro_batches)


def check_near_ties(count: int, seed: int, *, simulated: int) -> int:
    """Holds `count` loops against their bound, every `simulated`-th by events, too; gives how many started steady."""
    rng, started = np.random.default_rng(seed), 0
    for number in range(count):
        loop, costs = near_tie(rng)
        bound = max_cycle_ratio(loop, costs.op_ns)
        start = steady_start(loop, 20, costs.op_ns, bound)
        started += bool(start.earliest_ns)
        found = rank_step_ns(loop, 20, costs, WORLD, start)
        assert found.tolist() == pytest.approx([float(bound.step_ns)] * 4, abs=1e-6), (loop.name, costs)
        if number % simulated == 0:
            assert shown_ns(loop, costs, 20) == pytest.approx(float(bound.step_ns), abs=1e-3), (loop.name, costs)
    return started


def test_the_step_of_near_ties_is_the_bound_to_the_nanosecond() -> None:
    assert check_near_ties(200, seed=1, simulated=10) > 5


@pytest.mark.slow
def test_the_step_of_many_near_ties_is_the_bound_to_the_nanosecond() -> None:
    assert check_near_ties(10_000, seed=2, simulated=50) > 500


@pytest.mark.parametrize("steps", [20, 40])
def test_a_lead_that_takes_many_steps_to_work_off_is_not_shown(steps: int) -> None:
    loop = with_micro_batches(load("nestpipe"), 1)
    times = {OpKind.READ: 494 * MS, OpKind.COPY_H2D: 106 * MS, OpKind.LOOKUP: 504 * MS}
    costs = TimedCosts(batch_ns=times)
    with_empty_buffers = measure(simulate(unroll(loop, steps), costs, WORLD)).step_latency_ms
    assert with_empty_buffers == 494
    assert shown_ns(loop, costs, steps) == 504 * MS
    start = steady_start(loop, steps, costs.op_ns, max_cycle_ratio(loop, costs.op_ns))
    shaken = TimedCosts(batch_ns=times, jitter=Jitter(cv=1e-6))
    assert rank_step_ns(loop, steps, shaken, WORLD, start).mean() == pytest.approx(504 * MS, rel=1e-5)


def test_a_window_too_short_for_the_period_is_lengthened() -> None:
    times = {OpKind.ALL_TO_ALL_KEYS: 300, OpKind.LOOKUP: 301, OpKind.FORWARD: 100}
    loop, costs = with_micro_batches(load("nestpipe"), 1), TimedCosts(batch_ns=times)
    bound = max_cycle_ratio(loop, costs.op_ns)
    assert bound.iterations == 2
    assert bound.step_ns.denominator == 2
    start = steady_start(loop, 7, costs.op_ns, bound)
    assert start.steps is not None
    assert start.steps > 7
    assert shown_ns(loop, costs, 7) == pytest.approx(float(bound.step_ns), abs=1e-3)
