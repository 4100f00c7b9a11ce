"""Training a model with a schedule on this rank: builds the worker, runs programs, keeps what was measured."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from executor.data import Clustering, HostStore, Source, make_layout
from executor.models import DenseOptimizer, Model, OptimizerKind, sparse_optimizer
from executor.options import Scope, option
from executor.runtime.buffers import Buffers
from executor.runtime.cursor import plan_lanes, uses_of
from executor.runtime.groups import ProcessGroups
from executor.runtime.lanes import OpRecord, OpTable, Runtime
from executor.runtime.numerics import NanPolicy, Numerics
from executor.runtime.ops_lookup import op_table, require_implemented
from executor.runtime.tally import Tally
from executor.runtime.worker import Worker, communicator_streams
from executor.runtime.wraps import Wrap
from nestpipe.base import ExecutorError, ScheduleError
from nestpipe.ir import COLLECTIVES, Data, Loop, Op, OpKind, Program, Resource, unroll

__all__ = ["CommDtype", "Settings", "Trainer"]


class CommDtype(StrEnum):
    """The dtype in which rows and gradients travel; computation and states are float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def dtype(self) -> torch.dtype:
        """As torch has it."""
        found: torch.dtype = getattr(torch, self.value)
        return found


_TRAINING: Final = "Training"
_CHECKS: Final = "Numerics and checks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to train, apart from model, data and schedule."""

    optimizer: OptimizerKind = option(OptimizerKind.ROWWISE_ADAGRAD, "Of rows and parameters.", group=_TRAINING)
    lr: float = option(0.05, "Learning rate of the rows.", group=_TRAINING)
    dense_lr: float = option(0.01, "Learning rate of the dense parameters.", group=_TRAINING)
    seed: int = option(0, "Seed of data, tables and parameters.", group=_TRAINING)
    domain_size: int | None = option(None, "Ranks per domain, for 2D schedules.", group=_TRAINING)
    storage: Path | None = option(
        None, "Keep tables in memory-mapped files in this folder.", group=_TRAINING, scope=Scope.RANK
    )
    comm_dtype: CommDtype = option(CommDtype.FLOAT32, "Of rows and gradients on the wire.", group=_CHECKS)
    loss_scale: float = option(1.0, "Multiplies the loss before backward, for float16.", group=_CHECKS)
    nan: NanPolicy = option(NanPolicy.STOP, "What to do about NaN and infinity.", group=_CHECKS)
    debug: bool = option(False, "Fingerprint collectives, check reads, poison buffers.", group=_CHECKS, scope=Scope.RUN)

    def __post_init__(self) -> None:
        for name in ("loss_scale", "lr", "dense_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ExecutorError(f"{name} must be a positive number, got {getattr(self, name)}")
        if self.seed < 0:
            raise ExecutorError(f"seed must not be negative, got {self.seed}")


class Trainer:
    """One rank's training run.

    With `keeps_records` every op stays in `records`, of which a Timeline is made; without, memory does not grow by ops.

    Args:
        world: the ranks.
        loop: the schedule; it must have passed the checks, or be run on purpose without.
        model: the same on every rank, made under the same seed.
        source: the data.
        settings: the rest.
        cluster: assigns samples to micro-batches; None for input order.
        wraps: wrappers of the op table, innermost first, such as injected delays.
        data: what is to be said about the data in the result.

    Raises:
        ScheduleError: if the schedule has a kind of op without an implementation, or cuts the ranks in no known way.
        ExecutorError: if the settings do not fit the schedule or the ranks.
    """

    def __init__(
        self,
        world: ProcessGroups,
        loop: Loop,
        model: Model,
        source: Source,
        settings: Settings,
        *,
        cluster: Clustering | None = None,
        wraps: Sequence[Wrap] = (),
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self.world, self.loop, self.settings, self.wraps = world, loop, settings, tuple(wraps)
        require_implemented(loop)
        self.domain_size = _domain_size(loop, world.world_size, settings.domain_size)
        layout = make_layout(model.tables, self.domain_size)
        sparse = sparse_optimizer(settings.optimizer, lr=settings.lr)
        storage = None if settings.storage is None else settings.storage / f"rank-{world.rank}"
        shard = world.rank % self.domain_size
        widths = tuple(sparse.width(group.dim) for group in layout.groups)
        if settings.nan == NanPolicy.SKIP and _applies_to_states(loop):
            raise ExecutorError(
                f"{loop.name} applies row gradients before all ranks know of a NaN, so it cannot skip the batch; "
                "use --nan stop or count"
            )
        model.to(world.device)
        self.worker = Worker(
            rank=world.rank,
            world_size=world.world_size,
            num_domains=world.world_size // self.domain_size,
            device=world.device,
            layout=layout,
            store=HostStore(layout, shard, widths, seed=settings.seed, directory=storage),
            model=model,
            sparse=sparse,
            dense=DenseOptimizer(settings.optimizer, model.parameters(), lr=settings.dense_lr),
            source=source,
            numerics=Numerics(policy=settings.nan, rank=world.rank),
            micro_batches=loop.micro_batches,
            cluster=cluster,
            comm_dtype=settings.comm_dtype.dtype,
            loss_scale=settings.loss_scale,
        )
        self.next_batch = 0
        self.data = dict(data or {})
        self.tally = Tally()
        self.keeps_records, self.records = True, list[OpRecord]()
        self.runtime: Runtime | None = None
        self.on_runtime: Callable[[Runtime], None] | None = None
        self.wall_ns = 0

    def run(self, steps: int) -> None:
        """Train `steps` more batches and drain the pipeline.

        Raises:
            RunError: if an op fails.
            ScheduleError: if the program is invalid.
        """
        with _no_collection():
            program, table = self.prepare(steps)
            plans = plan_lanes(program)
        self.runtime = Runtime(
            plans,
            table,
            device=self.worker.device,
            rank=self.worker.rank,
            after_op=self.worker.buffers.release if self.settings.debug else None,
        )
        if self.on_runtime is not None:
            self.on_runtime(self.runtime)
        self.world.barrier()
        start_ns = time.monotonic_ns()
        self.runtime.run()
        self.wall_ns += time.monotonic_ns() - start_ns
        self._keep(steps)
        self.next_batch += steps

    def prepare(self, steps: int) -> tuple[Program, OpTable]:
        """The program of the next `steps` batches and its op table, on fresh buffers. A collective call.

        Raises:
            ScheduleError: if the program is invalid.
        """
        program = unroll(self.loop, steps)
        worker = self.worker
        worker.first_batch = worker.numerics.first_batch = self.next_batch
        uses = uses_of(program) if self.settings.debug else None
        worker.buffers = Buffers(program.buffers, program.micro_batches, worker.device, uses)
        streams = communicator_streams(program, COLLECTIVES)
        groups = {
            index: self.world.communicator(
                program.streams[index].name,
                program.streams[index].resource,
                self.domain_size,
                debug=self.settings.debug,
            )
            for index in sorted(set(streams.values()))
        }
        worker.communicators = {kind: groups[index] for kind, index in streams.items()}
        table = op_table(worker, program)
        for wrap in self.wraps:
            table = wrap(table, worker, program)
        return program, table

    def _keep(self, steps: int) -> None:
        """Note what the last runtime did, and its records numbered from the first batch of the run."""
        assert self.runtime is not None, "only after a run"
        base, worker = self.next_batch, self.worker
        for batch in range(base, base + steps):
            parts = worker.losses.pop(batch, ())
            self.tally.add_batch(batch, float(sum(float(part) for part in parts)), worker.terms.pop(batch, 0))
        self.tally.add_ops(itertools.chain.from_iterable(self.runtime.records), steps)
        if not self.keeps_records:
            for lane in self.runtime.lanes:
                lane.records.clear()
        for record in itertools.chain.from_iterable(self.runtime.records):
            op = record.op
            kept = Op(kind=op.kind, batch=op.batch + base, micro_batch=op.micro_batch, step=op.step + base)
            self.records.append(record._replace(op=kept))

    def losses(self) -> list[float]:
        """The mean loss of every batch so far over all ranks, NaN without loss terms. A collective call."""
        mine = torch.tensor(self.tally.losses, dtype=torch.float64)
        total = torch.stack(self.world.gather(mine)).sum(dim=0)
        means: list[float] = (total / torch.tensor(self.tally.terms, dtype=torch.float64)).tolist()
        return means

    def state(self) -> dict[str, Tensor]:
        """Tables and optimiser rows in id order and the dense parameters, on every rank. A collective call."""
        worker = self.worker
        found: dict[str, Tensor] = {}
        for name, data in (("table", Data.TABLE), ("optimizer", Data.OPTIMIZER)):
            for group, spec in enumerate(worker.layout.groups):
                shards = self.world.gather(worker.store.state(data)[group])
                whole = torch.zeros(spec.num_rows, shards[0].shape[1])
                for shard in range(self.domain_size):
                    ids = torch.tensor(list(worker.layout.shard_ids(group, shard)), dtype=torch.int64)
                    whole[ids - spec.first] = shards[shard]
                found[f"{name}.{group}"] = whole
        for key, value in worker.model.named_parameters():
            found[f"dense.{key}"] = value.detach().cpu().clone()
        return found


@contextmanager
def _no_collection() -> Iterator[None]:
    """While many objects are made that stay, collecting garbage looks at them again and again: half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _domain_size(loop: Loop, world_size: int, domain_size: int | None) -> int:
    """Ranks that share one set of shards: the domain if rows travel in domains, else the world."""
    resources = {stream.resource for stream in loop.streams for op in stream.ops if op.kind == OpKind.ALL_TO_ALL_ROWS}
    if resources <= {Resource.WORLD}:
        return world_size
    if resources != {Resource.DOMAIN}:
        raise ScheduleError(f"{loop.name}: rows must travel in the world or in domains, not in {', '.join(resources)}")
    chosen = world_size if domain_size is None else domain_size
    if chosen < 1 or world_size % chosen:
        raise ExecutorError(f"domain_size must divide the world size {world_size}, got {chosen}")
    if chosen < world_size and not any(op.kind == OpKind.ALL_GATHER for op in loop.ops):
        raise ScheduleError(f"{loop.name}: several domains need an all_gather of the owned keys over the replicas")
    return chosen


def _applies_to_states(loop: Loop) -> bool:
    return any(
        op.kind == OpKind.WRITE_BACK and any(access.data == Data.OWNED_GRADS for access in op.reads) for op in loop.ops
    )
