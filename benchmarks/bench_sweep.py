"""How fast scenarios are evaluated, what a sweep holds in memory, and the recursion against the engine.

    python benchmarks/bench_sweep.py                       # about 2 minutes
    python benchmarks/bench_sweep.py --configurations 10000

Prints one line per measurement. Times are minima over repeats where a repeat is short; the machine is named, say
beside the numbers whether it was doing anything else.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import msgspec

from nestpipe.base import CaseError, decode
from nestpipe.ir import unroll
from nestpipe.schedules import load
from nestpipe.timeline import measure
from sim.engine import Jitter, TimedCosts, World, rank_step_ns, simulate
from sim.scenario import Evaluator, Grid, Scenario
from sim.sweep import sweep_to
from traces.workloads import batch_times, growth_laws, load_case

SCENARIO = """
scenario: bench
workload: {case: nestpipe_paper}
schedules: [sync, dbp, fwp, nestpipe]
world_sizes: [1536]
micro_batches: [4, 8, 16]
clusters: {a: {accelerator_hour: 2.5}}
sweep:
  axes:
    factors.communication_time: {from: 0.1, to: 10, num: 50, scale: log}
    factors.compute_time: {from: 0.1, to: 10, num: 50, scale: log}
"""


def _grid(configurations: int) -> Grid:
    scenario = decode(SCENARIO, Scenario, CaseError, source="bench")
    picked = msgspec.structs.replace(scenario.sweep, search="random", points=configurations)
    return Grid.of(msgspec.structs.replace(scenario, sweep=picked))


def _peak_mib() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024


def _single() -> None:
    grid = _grid(60)
    evaluator = Evaluator(grid=grid)
    for micro_batches in (1, 4, 8, 16):
        picked = [grid[i] for i in grid.chosen() if grid[i].variant.micro_batches == micro_batches][:8]
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for each in picked:
                evaluator.row(each)
            best = min(best, (time.perf_counter() - began) / len(picked))
        print(f"one configuration at 1,536 ranks, N = {micro_batches:2d}: {1000 * best:6.2f} ms")


def _sweeps(configurations: int, workers: int) -> None:
    for count in (configurations // 4, configurations):
        grid = _grid(count)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            sweep_to(Path(folder), grid, workers=workers)
            wall = time.perf_counter() - began
        rate = f"{60 * count / wall:7,.0f} per minute, peak {_peak_mib():5.0f} MiB per process"
        print(f"{count:6,} configurations, {workers} workers: {wall:6.1f} s, {rate}")


def _recursion() -> None:
    case = load_case("nestpipe_paper")
    loop = load("nestpipe")
    world = World(world_size=1536)
    costs = TimedCosts(
        batch_ns=batch_times(growth_laws(case), case.values(), loop, 1536),
        micro_batches=loop.micro_batches,
        jitter=Jitter(cv=0.05, seed=1),
    )
    rank_step_ns(loop, 20, costs, world)
    began = time.perf_counter()
    mine = rank_step_ns(loop, 20, costs, world).mean() / 1e6
    middle = time.perf_counter()
    theirs = measure(simulate(unroll(loop, 20), costs, world)).step_latency_ms
    end = time.perf_counter()
    print(f"1,536 ranks with jitter, 20 steps: recursion {middle - began:.2f} s, engine {end - middle:.2f} s", end="")
    print(f", {(end - middle) / (middle - began):.0f} times, results differ by {abs(mine / theirs - 1):.1e}")


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configurations", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    load_average = os.getloadavg()[0]
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load_average:.1f}"
    print(f"{machine}, Python {platform.python_version()}")
    _single()
    _sweeps(given.configurations, given.workers)
    _recursion()


if __name__ == "__main__":
    main()
