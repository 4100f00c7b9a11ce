"""What interpreting a schedule costs: against a hand-written loop that calls the same ops in the same order.

    python benchmarks/bench_executor.py [--ranks 1 2] [--pairs 400]

Both ways train the `sync` schedule, in which one op follows another, so any difference is the interpreter's: threads,
waits and records. They take turns step by step in one run, each with a model of its own, and go first in turn (loop,
program, program, loop, ...), so that drift of the machine and what one leaves in its caches cancel; half way they swap
their models, whose places in memory matter. Both threads of a rank keep to one core. A step lasts from the start of its
`read` to the end of its `write_back`.

What is printed is the median over the pairs of steps of (program - loop) / loop with a 95 % confidence interval of that
median (bootstrap), for wall time and for CPU time of all threads of rank 0, and the same difference in microseconds per
op. The gap is the time from one op's end to the next one's start, inside the interpreted steps: what interpreting adds
where nothing else disturbs. The second table runs programs of empty ops, and times the unrolling and planning before.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from executor.app import RankPool, RunOptions, make_trainer
from executor.runtime import Cost, OpTable, ProcessGroups, Runtime, Trainer, plan_lanes
from nestpipe.ir import Op, OpKind, OpRef, Program, unroll, with_micro_batches
from nestpipe.schedules import load

WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds of a step by hand and of the interpreted one beside it: wall, CPU, and between the ops of the latter."""

    wall_s: tuple[float, float]
    cpu_s: tuple[float, float]
    gap_s: float


@dataclass(slots=True)
class Turns:
    """Lets two threads run their steps one at a time: 0, 1, 1, 0, 0, 1, ... and notes when each began and ended."""

    taken: int = 0
    times: list[list[tuple[float, float]]] = field(default_factory=lambda: [[], []])
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, who: int) -> None:
        """Wait for one's turn."""
        with self.changed:
            self.changed.wait_for(lambda: ((self.taken + 1) // 2) % 2 == who)
        self.times[who].append((time.perf_counter(), time.process_time()))

    def end(self, who: int) -> None:
        """Give the next one its turn."""
        now = (time.perf_counter(), time.process_time())
        began = self.times[who][-1]
        self.times[who][-1] = (now[0] - began[0], now[1] - began[1])
        with self.changed:
            self.taken += 1
            self.changed.notify_all()

    def wrap(self, table: OpTable, who: int) -> OpTable:
        """The table with steps that take turns."""
        read, write_back = table[OpKind.READ], table[OpKind.WRITE_BACK]

        def first(op: Op) -> Cost:
            self.begin(who)
            return read(op)

        def last(op: Op) -> Cost:
            cost = write_back(op)
            self.end(who)
            return cost

        return {**table, OpKind.READ: first, OpKind.WRITE_BACK: last}


def in_order(program: Program) -> list[Op]:
    """The ops of all streams in one order that respects streams and waits."""
    queues = [list(stream.ops) for stream in program.streams]
    done: set[OpRef] = set()
    order: list[Op] = []
    while any(queues):
        for queue in queues:
            while queue and all(ref in done for ref in queue[0].after):
                op = queue.pop(0)
                done.add(op.ref)
                order.append(op)
    return order


def compare(world: ProcessGroups, options: RunOptions, pairs: int) -> list[Pair]:
    """Train by hand and interpreted in turn, on every rank, and again with the two models swapped."""
    cores = sorted(os.sched_getaffinity(0))
    # threads stay where they are for long, and cores differ in speed
    os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
    one, other = make_trainer(world, options), make_trainer(world, options)
    found = [*in_turn(one, other, pairs // 2 + WARM_UP), *in_turn(other, one, pairs // 2 + WARM_UP)]
    os.sched_setaffinity(0, cores)
    return found


def in_turn(by_hand: Trainer, interpreted: Trainer, steps: int) -> list[Pair]:
    """Train both, one step at a time; the pairs of steps after the first few."""
    turns = Turns()
    program, table = by_hand.prepare(steps)
    order, table = in_order(program), turns.wrap(table, 0)
    program, others = interpreted.prepare(steps)
    runtime = Runtime(plan_lanes(program), turns.wrap(others, 1), device=interpreted.worker.device)
    by_hand.world.barrier()
    thread = threading.Thread(target=runtime.run)
    thread.start()
    with torch.no_grad():
        for op in order:
            table[op.kind](op)
    thread.join()
    for trainer in (by_hand, interpreted):
        trainer.next_batch += steps
    gaps = [0.0] * steps
    for earlier, later in pairwise(
        sorted((span for lane in runtime.records for span in lane), key=lambda s: s.start_ns)
    ):
        if earlier.op.batch == later.op.batch:
            gaps[earlier.op.batch] += (later.start_ns - earlier.end_ns) / 1e9
    both = zip(*turns.times, gaps, strict=True)
    return [Pair((hand[0], mine[0]), (hand[1], mine[1]), gap) for hand, mine, gap in both][WARM_UP:]


def interval(differences: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """The median, and a 95 % bootstrap confidence interval of it."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(differences, size=(4000, len(differences))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(differences)), float(low), float(high)


def report(pairs: list[Pair], num_ops: int) -> str:
    """One line of the first table; `num_ops` in a step."""
    cells = []
    for times in ([pair.wall_s for pair in pairs], [pair.cpu_s for pair in pairs]):
        hand, mine = np.array(times).T
        middle, low, high = interval((mine - hand) / hand)
        per_op_us = float(np.median(mine - hand)) / num_ops * 1e6
        cells.append(f"{np.median(hand) * 1e3:8.2f}  {middle:+7.2%} [{low:+7.2%}, {high:+7.2%}]  {per_op_us:+6.1f}")
    gap_s = float(np.median([pair.gap_s for pair in pairs]))
    cells.append(f"{gap_s / num_ops * 1e6:5.1f}  {gap_s / np.median([pair.wall_s[0] for pair in pairs]):7.2%}")
    return "  ".join(cells)


def empty_ops_us(schedule: str, micro_batches: int, steps: int = 200) -> tuple[float, float, float]:
    """Microseconds per op of a program whose ops do nothing: running it, wall and CPU, and unrolling and planning."""
    start = time.process_time()
    program = unroll(with_micro_batches(load(schedule), micro_batches), steps)
    runtime = Runtime(plan_lanes(program), {kind: lambda _: Cost() for kind in OpKind}, device=torch.device("cpu"))
    planned, wall = time.process_time(), time.perf_counter()
    runtime.run()
    scale = 1e6 / len(program.ops)
    done, now = time.process_time(), time.perf_counter()
    return (now - wall) * scale, (done - planned) * scale, (planned - start) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, {options.pairs} pairs")
    head = f"{'ms/step':>8}  {'overhead [95 % interval]':<26}  {'µs/op':>6}"
    print(f"{'':20}  {'wall':<44}  {'CPU':<44}  gap")
    print(f"ranks  batch  hidden  {head}  {head}  µs/op  of step")
    for ranks in options.ranks:
        with RankPool(ranks) as pool:
            for batch, hidden in ((256, 64), (1024, 256), (2048, 512)):
                run = RunOptions(schedule="sync", batch_size=batch, hidden=(hidden,), num_rows=20_000)
                pairs = pool.run(compare, run, options.pairs)[0]
                print(f"{ranks:5}  {batch:5}  {hidden:6}  {report(pairs, len(load('sync').ops))}", flush=True)
    print("\nschedule        N  µs per empty op: wall   CPU  before the run")
    for schedule, micro_batches in (("sync", 1), ("dbp", 1), ("nestpipe", 1), ("nestpipe", 8)):
        runs = [empty_ops_us(schedule, micro_batches) for _ in range(5)]
        wall, cpu, before = (min(values) for values in zip(*runs, strict=True))
        print(f"{schedule:<14} {micro_batches:2}  {wall:21.1f} {cpu:5.1f}  {before:14.1f}")


if __name__ == "__main__":
    main()
