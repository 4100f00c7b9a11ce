"""What a simulation costs: events, time and memory against ranks, steps and micro-batches.

Run: python benchmarks/bench_engine.py [--quick]. CPU seconds are for orientation; compare the ratios, which are taken
within one run, and the events, which do not depend on the machine.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import simpy

from nestpipe.ir import unroll, with_micro_batches
from nestpipe.schedules import load
from sim.engine import Jitter, TimedCosts, World, engine
from traces.workloads import batch_times, growth_laws, load_case


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    ops: int
    events: int
    cpu_s: float


class _Counting(simpy.Environment):
    """Counts the events that are scheduled."""

    scheduled = 0

    def schedule(self, *args, **options) -> None:  # type: ignore[no-untyped-def]
        _Counting.scheduled += 1
        super().schedule(*args, **options)


def run(world_size: int, steps: int, micro_batches: int, *, unfold: bool, count: bool = False) -> Cost:
    """Simulates nestpipe on the paper's cluster; counting events slows the run, so it is done apart."""
    case = load_case("nestpipe_paper")
    loop = with_micro_batches(load("nestpipe"), micro_batches)
    costs = TimedCosts(
        batch_ns=batch_times(growth_laws(case), case.values(), loop, world_size),
        micro_batches=micro_batches,
        jitter=Jitter(cv=0.05 if unfold else 0.0),
    )
    program = unroll(loop, steps)
    world = World(world_size=world_size)
    events = 0
    if count:
        original, _Counting.scheduled = simpy.Environment, 0
        engine.simpy.Environment = _Counting  # type: ignore[misc]
        try:
            engine.simulate(program, costs, world)
        finally:
            engine.simpy.Environment = original  # type: ignore[misc]
        events = _Counting.scheduled
    start = time.process_time()
    engine.simulate(program, costs, world)
    ranks = world_size if unfold else 1
    return Cost(ops=ranks * len(program.ops), events=events, cpu_s=time.process_time() - start)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    quick = parser.parse_args().quick
    largest = 192 if quick else 1536
    unit = run(largest // 12, 20, 8, unfold=True, count=True)
    print(
        f"{'ranks':>8} {'steps':>6} {'N':>4} {'':<10} {'ops':>10} {'events/op':>10} {'us/op':>8} {'ratio':>7} "
        f"{'cpu s':>8}"
    )
    rows = [
        (largest, 20, 8, False),
        (100_000, 20, 8, False),
        (largest // 12, 20, 8, True),
        (largest // 4, 20, 8, True),
        (largest // 4, 40, 8, True),
        (largest // 4, 20, 16, True),
        (largest, 20, 8, True),
    ]
    for world_size, steps, micro_batches, unfold in rows:
        small = world_size <= largest // 4 or not unfold
        cost = run(world_size, steps, micro_batches, unfold=unfold, count=small)
        ratio = (cost.cpu_s / cost.ops) / (unit.cpu_s / unit.ops)
        events = f"{cost.events / cost.ops:.2f}" if cost.events else "-"
        print(
            f"{world_size:>8} {steps:>6} {micro_batches:>4} {'unfolded' if unfold else 'folded':<10} {cost.ops:>10} "
            f"{events:>10} {1e6 * cost.cpu_s / cost.ops:>8.2f} {ratio:>7.2f} {cost.cpu_s:>8.2f}"
        )
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
