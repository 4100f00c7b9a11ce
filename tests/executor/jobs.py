"""What the executor's tests run on the ranks: jobs for the pool, and command-line ranks with injected faults."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from executor.app.pool import RankPool, rank_context
from executor.data.batch import Feature, MicroBatch
from executor.data.sources import SyntheticSource
from executor.data.tables import TableSpec
from executor.models.dlrm import Model
from executor.models.lookups import Lookups
from executor.models.optimizers import OptimizerKind
from executor.process import die_with_parent, reserved_port
from executor.runtime.groups import ProcessGroups
from executor.runtime.lanes import Cost, Implementation, OpTable
from executor.runtime.trainer import Settings, Trainer
from executor.runtime.worker import Worker
from executor.runtime.wraps import Delay, Wrap, delayed
from nestpipe.ir import Data, Loop, Op, OpKind, OpRef, Program, map_ops


@cache
def _pools() -> dict[int, RankPool]:
    found: dict[int, RankPool] = {}
    atexit.register(lambda: [ranks.close() for ranks in found.values() if not ranks.closed])
    return found


def pool(world_size: int) -> RankPool:
    """A pool that all tests of this process share; a new one if a job has broken the last."""
    ranks = _pools().get(world_size)
    if ranks is None or ranks.closed:
        ranks = _pools()[world_size] = RankPool(world_size, timeout_s=600)
    return ranks


class Probe(Model):
    """A model whose row gradients are 1 for every lookup, whatever the rows: so only versions differ, not updates."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = (TableSpec(name="t", num_rows=120, dim=2, hashed=False),)
        self.features = (Feature(name="f", table="t"),)
        self.bias = nn.Parameter(torch.zeros(1))

    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        total = lookups.rows(0).sum() + self.bias.sum()
        return total, total.view(1)


@dataclass(frozen=True, slots=True)
class Reads:
    """What an owner sent to the ranks in each batch: ids, their rows and their moments."""

    batches: Mapping[int, tuple[Tensor, Tensor, Tensor]]


def probe_source() -> SyntheticSource:
    """Batches that share some keys with the one before, and some with the one before that."""
    return SyntheticSource(
        features=("f",), batch_size=24, num_keys=120, exponent=0.6, mean_length=2.0, num_dense=1, seed=3
    )


@dataclass(frozen=True, slots=True)
class Hold:
    """Adversarial timing: `kind` of batch b starts only when `until` of batch b + `distance` has finished."""

    kind: OpKind
    until: OpKind
    distance: int

    def wrap(self, table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG002
        """The table with both kinds replaced."""
        finished = [threading.Event() for _ in range(program.steps + self.distance)]
        for event in finished[program.steps :]:
            event.set()
        held, release = table[self.kind], table[self.until]

        def wait_first(op: Op) -> Cost:
            assert finished[op.batch + self.distance].wait(20), f"{self} never came"
            return held(op)

        def tell(op: Op) -> Cost:
            cost = release(op)
            finished[op.batch].set()
            return cost

        return {**table, self.kind: wait_first, self.until: tell}


def observe_reads(
    world: ProcessGroups,
    loop: Loop,
    optimizer: OptimizerKind = OptimizerKind.SGD,
    hold: Hold | None = None,
    delays: tuple[Delay, ...] = (),
    steps: int = 6,
) -> Reads:
    """Train the probe and note what every batch's first row exchange reads."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def observed(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        inner = table[OpKind.ALL_TO_ALL_ROWS]

        def exchange(op: Op) -> Cost:
            if op.micro_batch == 0:
                owned = worker.buffers.get(Data.OWNED, op)
                rows = worker.buffers.get(Data.ROWS, op)[0].clone()
                has_moments = worker.buffers.declares(Data.MOMENTS)
                moments = worker.buffers.get(Data.MOMENTS, op)[0].clone() if has_moments else rows[:, :0]
                seen[op.batch] = (owned.ids.clone(), rows, moments)
            return inner(op)

        return {**table, OpKind.ALL_TO_ALL_ROWS: exchange}

    wraps = (observed, delayed(delays), *(() if hold is None else (hold.wrap,)))
    trainer = Trainer(world, loop, Probe(), probe_source(), Settings(optimizer=optimizer, lr=8.0), wraps=wraps)
    trainer.run(steps)
    return Reads(batches=seen)


def requested_keys(world_size: int, steps: int = 6) -> list[list[set[int]]]:
    """The keys that each rank looks up, [batch][rank]."""
    source = probe_source()
    return [
        [set(source.read(batch, rank, world_size).features["f"].values.tolist()) for rank in range(world_size)]
        for batch in range(steps)
    ]


def change_op(loop: Loop, kind: OpKind, change: Callable[[Op], Op]) -> Loop:
    """The loop with every op of a kind changed."""
    return map_ops(loop, lambda op: change(op) if op.kind == kind else op)


def without_wait(op: Op, kind: OpKind) -> Op:
    """The op without its waits for a kind."""
    return replace(op, after=tuple(ref for ref in op.after if ref.kind != kind))


def with_wait(op: Op, kind: OpKind, batch: int) -> Op:
    """The op with one more wait, for a whole-batch op."""
    return replace(op, after=(*op.after, OpRef(kind=kind, batch=batch)))


Fault = Callable[[Op], None]


def killed(op: Op) -> None:
    """Die without a word."""
    del op
    os.kill(os.getpid(), signal.SIGKILL)


def hung(op: Op) -> None:
    """Never come back."""
    del op
    time.sleep(600)


def stopped(op: Op) -> None:
    """Stop as a debugger or a batch system stops a process: every connection stays open."""
    del op
    os.kill(os.getpid(), signal.SIGSTOP)


def raising(op: Op) -> None:
    """Raise what a bug would."""
    raise ValueError(f"a bug in {op.kind}")


def slow(op: Op) -> None:
    """Come back late, but come back."""
    del op
    time.sleep(1.0)


def _faulty(fault: Fault, rank: int, kind: OpKind, batch: int) -> Wrap:
    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        def run(inner: Implementation, op: Op) -> Cost:
            if worker.rank == rank and op.batch == batch:
                fault(op)
            return inner(op)

        return {k: (lambda op, inner=inner: run(inner, op)) if k == kind else inner for k, inner in table.items()}

    return wrap


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a command-line rank ended."""

    code: int | None
    stdout: str
    stderr: str


def run_ranks(
    arguments: Sequence[str],
    *,
    world_size: int = 2,
    fault: tuple[Fault, int, OpKind, int] | None = None,
    port: int | None = None,
    timeout_s: float = 240.0,
    only: Sequence[int] | None = None,
    before: Callable[[], None] | None = None,
    own: Mapping[int, Sequence[str]] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> list[RankEnd]:
    """Run the executor's command line on forked ranks and wait for all; those left after the timeout are killed.

    Args:
        arguments: of the command line, the same on every rank.
        world_size: number of ranks.
        fault: what happens, on which rank, before which op of which batch.
        port: where they meet; a free one if not given.
        timeout_s: of all of them.
        only: the ranks to start; all if not given.
        before: called on each rank before the command line.
        own: more arguments of some ranks.
        sizes: the WORLD_SIZE that some ranks are told instead.
    """
    context, ranks = rank_context(), range(world_size) if only is None else only
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port()) if port is None else port
        outputs, processes = [], []
        for rank in ranks:
            # not files: a limit on the size of files must not cut what a rank says about it
            pipes = [context.Pipe(duplex=False) for _ in range(2)]
            writers = tuple(writer for _, writer in pipes)
            size, mine = (sizes or {}).get(rank, world_size), [*arguments, *(own or {}).get(rank, ())]
            process = context.Process(target=_command_line, args=(rank, size, port, writers, mine, fault, before))
            process.start()
            processes.append(process)
            for writer in writers:
                writer.close()
            outputs.append([stack.enter_context(_Output(reader)) for reader, _ in pipes])
        deadline = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(deadline - time.monotonic(), 0))
        ends = []
        for process, texts in zip(processes, outputs, strict=True):
            code = process.exitcode
            if code is None:
                process.kill()
                process.join()
            ends.append(RankEnd(code, *(each.text() for each in texts)))
            process.close()
        return ends


class _Output:
    """Reads what a rank writes while it runs, so that it never waits for a reader."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._parts = pipe, list[bytes]()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while part := os.read(self._pipe.fileno(), 1 << 16):
            self._parts.append(part)

    def text(self) -> str:
        """Everything, once the rank has ended."""
        self._thread.join()
        return b"".join(self._parts).decode()

    def __enter__(self) -> _Output:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()


def _command_line(
    rank: int,
    world_size: int,
    port: int,
    outputs: tuple[Connection, Connection],
    arguments: list[str],
    fault: tuple[Fault, int, OpKind, int] | None,
    before: Callable[[], None] | None,
) -> None:
    die_with_parent()
    for number, output in enumerate(outputs, start=1):
        os.dup2(output.fileno(), number)
        output.close()
    for name in ("stdout", "stderr"):
        getattr(sys, name).flush()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from executor.app import cli

    if fault is not None:
        make_trainer = cli.make_trainer

        def faulty(*args: object, **kwargs: object) -> Trainer:
            trainer = make_trainer(*args, **kwargs)  # type: ignore[arg-type]
            trainer.wraps = (*trainer.wraps, _faulty(*fault))
            return trainer

        cli.make_trainer = faulty  # type: ignore[assignment]
    if before is not None:
        before()
    sys.argv = ["executor", *arguments]
    cli.main()
