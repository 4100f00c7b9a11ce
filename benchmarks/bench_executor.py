"""What interpreting a schedule costs: against a hand-written loop that calls the same ops in the same order.

    python benchmarks/bench_executor.py [--ranks 2] [--blocks 8]

Both ways train the `sync` schedule, where nothing overlaps, so any difference is the interpreter's: threads, waits and
records. Blocks are interleaved and the minimum is taken. CPU time counts all threads of rank 0. The gap is the time
from one op's end to the next one's start, added up over a step: what interpreting costs, measured inside the run, and
what to look at on a machine that others use too. The last table runs programs of empty ops.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from itertools import pairwise

import torch

from executor.buffers import Buffers
from executor.cursor import make_plan
from executor.lanes import Cost, Runtime
from executor.launch import RankPool
from executor.ops import op_table
from executor.options import RunOptions, make_trainer
from executor.trainer import Trainer
from executor.world import World
from nestpipe.ir import Op, OpKind, OpRef, Program, unroll, with_micro_batches
from nestpipe.schedules import load


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step of a block or of the fastest one: wall, CPU, and between ops."""

    wall_s: float
    cpu_s: float
    gap_s: float = 0.0


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


def by_hand(trainer: Trainer, steps: int) -> Times:
    """Train with a plain loop over the ops."""
    program = unroll(trainer.loop, steps)
    worker = trainer.worker
    worker.first_batch = trainer.next_batch
    worker.buffers = Buffers(program.buffers, program.micro_batches, worker.device)
    table, order = op_table(worker, program), in_order(program)
    trainer.world.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    with torch.no_grad():
        for op in order:
            table[op.kind](op)
    trainer.next_batch += steps
    return Times((time.perf_counter() - start) / steps, (time.process_time() - cpu) / steps)


def interpreted(trainer: Trainer, steps: int) -> Times:
    """Train as usual."""
    before, cpu = trainer.wall_ns, time.process_time()
    trainer.spans.clear()
    trainer.run(steps)
    cpu_s = (time.process_time() - cpu) / steps
    ran = sorted((span.start_ns, span.end_ns) for span in trainer.spans)
    gap_ns = sum(later[0] - earlier[1] for earlier, later in pairwise(ran))
    return Times((trainer.wall_ns - before) / 1e9 / steps, cpu_s, gap_ns / 1e9 / steps)


def compare(world: World, options: RunOptions, blocks: int) -> tuple[Times, Times]:
    """Interleaved blocks on every rank; the fastest of either way, wall and CPU apart."""
    assert options.steps is not None
    trainer = make_trainer(world, options)
    ways = (interpreted, by_hand)
    found = [[way(trainer, options.steps) for way in ways] for _ in range(blocks + 1)][1:]
    by_way = zip(*found, strict=True)
    program, hand = (
        Times(min(t.wall_s for t in way), min(t.cpu_s for t in way), min(t.gap_s for t in way)) for way in by_way
    )
    return hand, program


def empty_ops_us(schedule: str, micro_batches: int, steps: int = 200) -> float:
    """Microseconds per op of a program whose ops do nothing, including all waits between threads."""
    program = unroll(with_micro_batches(load(schedule), micro_batches), steps)
    runtime = Runtime(make_plan(program), {kind: lambda _: Cost() for kind in OpKind}, device=torch.device("cpu"))
    start = time.perf_counter()
    runtime.run()
    return (time.perf_counter() - start) / len(program.ops) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(
        "batch  hidden  loop ms  interpreted ms  overhead  loop CPU ms  interpreted CPU ms  overhead  gap ms  of step"
    )
    with RankPool(options.ranks) as pool:
        for batch, hidden in ((256, 64), (1024, 256), (2048, 512)):
            run = RunOptions(schedule="sync", batch_size=batch, hidden=(hidden,), steps=20, num_rows=20_000)
            hand, program = pool.run(compare, run, options.blocks)[0]
            cells = (
                f"{batch:5}  {hidden:6}",
                f"{hand.wall_s * 1e3:7.2f}  {program.wall_s * 1e3:14.2f}  {program.wall_s / hand.wall_s - 1:8.1%}",
                f"{hand.cpu_s * 1e3:11.2f}  {program.cpu_s * 1e3:18.2f}  {program.cpu_s / hand.cpu_s - 1:8.1%}",
                f"{program.gap_s * 1e3:6.3f}  {program.gap_s / program.wall_s:7.2%}",
            )
            print("  ".join(cells), flush=True)
    print("\nschedule        N  µs per empty op")
    for schedule, micro_batches in (("sync", 1), ("dbp", 1), ("nestpipe", 1), ("nestpipe", 8)):
        best = min(empty_ops_us(schedule, micro_batches) for _ in range(5))
        print(f"{schedule:<14} {micro_batches:2}  {best:15.1f}")


if __name__ == "__main__":
    main()
