"""From plain options to a trainer: the presets of models and data that the command line offers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

import numpy as np
import torch

from executor.compute import EmulatedDevice
from executor.data import (
    Feature,
    Int64,
    KeyStreamSource,
    Pooling,
    SequenceSource,
    Source,
    SyntheticSource,
    TableSpec,
    cluster_by_keys,
)
from executor.models import DLRM, FuXiBlock, HSTUBlock, Model, OptimizerKind, SequenceModel
from executor.runtime import (
    Delay,
    NanPolicy,
    Precision,
    ProcessGroups,
    Settings,
    Trainer,
    Wrap,
    delayed,
    emulating,
)
from nestpipe.base import ExecutorError
from nestpipe.checks import require_safe
from nestpipe.ir import Loop, with_micro_batches
from nestpipe.schedules import load
from traces.keys import detect_layout, read_keys, zipf_ranks

__all__ = ["CommDtype", "ModelKind", "RunOptions", "load_loop", "make_trainer", "user_sequences"]


_SEQUENCE_COLUMNS: Final = (("userId", "movieId", "timestamp"), ("user_id", "video_id", "time_ms"))


class ModelKind(StrEnum):
    """The models that come with the executor."""

    DLRM = "dlrm"
    HSTU = "hstu"
    FUXI = "fuxi"


class CommDtype(StrEnum):
    """The dtype in which rows and gradients travel."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Everything a run is made of.

    Attributes:
        schedule: catalogue name or file.
        model: which model.
        steps: batches to train; None trains until the data end.
        batch_size: samples per rank and batch.
        micro_batches: per batch; None takes the schedule's.
        dim: row width of the tables.
        num_rows: rows of each table.
        num_tables: tables of a DLRM on synthetic data; a key file brings its own.
        layers, heads, max_length, num_negatives: of the sequence models.
        hidden: widths of the DLRM's hidden layers.
        data: key file, or MovieLens ratings or a KuaiRand log for sequences; None generates Zipf keys.
        exponent: of the Zipf law.
        mean_length: mean keys per bag of the generated data.
        pooling: of the DLRM's bags.
        weighted: generate a weight for every key of a DLRM, and multiply its row by it.
        epochs: passes over the sequences of a file.
        cluster: put samples that share keys into the same micro-batch.
        comm_dtype: of rows and gradients on the wire.
        allow_staleness: how stale rows may be.
        checked: refuse schedules that the checks reject; off only to show what goes wrong.
        delays: waits before ops.
        emulated: a device that the local ops wait for; None for a real run.
    """

    schedule: str = "nestpipe"
    model: ModelKind = ModelKind.DLRM
    steps: int | None = 20
    batch_size: int = 256
    micro_batches: int | None = None
    dim: int = 32
    num_rows: int = 100_000
    num_tables: int = 4
    layers: int = 2
    heads: int = 2
    max_length: int = 50
    num_negatives: int = 32
    hidden: tuple[int, ...] = (64,)
    data: Path | None = None
    exponent: float = 1.05
    mean_length: float = 2.0
    pooling: Pooling = Pooling.SUM
    weighted: bool = False
    epochs: int = 1
    seed: int = 0
    cluster: bool = False
    optimizer: OptimizerKind = OptimizerKind.ROWWISE_ADAGRAD
    lr: float = 0.05
    dense_lr: float = 0.01
    domain_size: int | None = None
    comm_dtype: CommDtype = CommDtype.FLOAT32
    loss_scale: float = 1.0
    nan: NanPolicy = NanPolicy.STOP
    debug: bool = False
    allow_staleness: int = 0
    checked: bool = True
    storage: Path | None = None
    delays: tuple[Delay, ...] = ()
    emulated: EmulatedDevice | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "dim", "num_rows", "num_tables", "layers", "heads", "num_negatives", "epochs"):
            if getattr(self, name) < 1:
                raise ExecutorError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ExecutorError(f"steps must be at least 1, got {self.steps}")
        if self.max_length < 2:
            raise ExecutorError(f"max_length must be at least 2 (one item and its target), got {self.max_length}")
        if self.model != ModelKind.DLRM and self.dim % self.heads:
            raise ExecutorError(f"dim {self.dim} must be a multiple of heads {self.heads}")
        if self.weighted and self.data is not None:
            raise ExecutorError("key files hold no weights; give --weighted with generated data only")
        for name in ("loss_scale", "lr", "dense_lr", "mean_length"):
            if not 0 < getattr(self, name) < math.inf:
                raise ExecutorError(f"{name} must be a positive number, got {getattr(self, name)}")
        if not 0 <= self.exponent < math.inf:
            raise ExecutorError(f"exponent must be a number that is not negative, got {self.exponent}")
        for name in ("seed", "allow_staleness"):
            if getattr(self, name) < 0:
                raise ExecutorError(f"{name} must not be negative, got {getattr(self, name)}")


def load_loop(options: RunOptions) -> Loop:
    """The schedule with its micro-batches, checked unless the options say otherwise.

    Raises:
        ScheduleError: if the schedule is unknown, malformed, or not safe at the allowed staleness.
    """
    loop = load(options.schedule)
    if options.micro_batches is not None:
        loop = with_micro_batches(loop, options.micro_batches)
    if options.checked:
        require_safe(loop, allow_staleness=options.allow_staleness)
    return loop


def make_trainer(world: ProcessGroups, options: RunOptions, loop: Loop | None = None) -> Trainer:
    """A trainer for the options on this rank.

    Args:
        world: the ranks.
        options: what to run.
        loop: instead of the named schedule, unchecked.
    """
    loop = load_loop(options) if loop is None else loop
    source, model = _sequence_run(options) if options.model != ModelKind.DLRM else _dlrm_run(options)
    dtype: torch.dtype = getattr(torch, options.comm_dtype)
    settings = Settings(
        optimizer=options.optimizer,
        lr=options.lr,
        dense_lr=options.dense_lr,
        domain_size=options.domain_size,
        seed=options.seed,
        nan=options.nan,
        debug=options.debug,
        precision=Precision(rows=dtype, grads=dtype, dense=dtype),
        loss_scale=options.loss_scale,
        storage=options.storage,
    )
    wraps: list[Wrap] = []
    if options.emulated is not None:
        wraps.append(emulating(options.emulated))
    if options.delays:
        wraps.append(delayed(options.delays))
    return Trainer(
        world, loop, model, source, settings, cluster=cluster_by_keys if options.cluster else None, wraps=wraps
    )


def _dlrm_run(options: RunOptions) -> tuple[Source, Model]:
    source: Source
    if options.data is None:
        names = tuple(f"f{index}" for index in range(options.num_tables))
        source = SyntheticSource(
            features=names,
            batch_size=options.batch_size,
            num_keys=10 * options.num_rows,
            exponent=options.exponent,
            mean_length=options.mean_length,
            weighted=options.weighted,
            seed=options.seed,
        )
    else:
        stream = read_keys(options.data)
        names, source = stream.features, KeyStreamSource(stream=stream, batch_size=options.batch_size)
    tables = [TableSpec(name=name, num_rows=options.num_rows, dim=options.dim) for name in names]
    features = [Feature(name=name, table=name, pooling=options.pooling, weighted=options.weighted) for name in names]
    torch.manual_seed(options.seed)
    return source, DLRM(tables, features, num_dense=4, hidden=options.hidden)


def _sequence_run(options: RunOptions) -> tuple[Source, Model]:
    if options.data is None:
        sequences, num_items = _zipf_sequences(options), options.num_rows
    else:
        found, num_items = user_sequences(options.data)
        sequences = tuple(items[:-1][-options.max_length :] for items in found if len(items) > 2)
    source = SequenceSource(
        sequences=sequences,
        num_items=num_items,
        batch_size=options.batch_size,
        num_negatives=options.num_negatives,
        epochs=options.epochs if options.data is not None else 1 << 30,
        seed=options.seed,
    )
    table = TableSpec(name="item", num_rows=num_items, dim=options.dim, hashed=False)
    torch.manual_seed(options.seed)
    block = HSTUBlock if options.model == ModelKind.HSTU else FuXiBlock
    model = SequenceModel(
        block,
        table,
        layers=options.layers,
        heads=options.heads,
        max_length=options.max_length,
        num_negatives=options.num_negatives,
    )
    return source, model


def _zipf_sequences(options: RunOptions) -> tuple[Int64, ...]:
    """Enough random histories of Zipf items for 64 batches of 8 ranks; later batches reshuffle them."""
    rng = np.random.default_rng([options.seed, 2])
    count = min(options.batch_size * 512, 65_536)
    lengths = rng.integers(2, options.max_length + 1, size=count)
    items = zipf_ranks(options.num_rows, options.exponent, int(lengths.sum()), rng).astype(np.int64)
    return tuple(np.split(items, np.cumsum(lengths)[:-1]))


def user_sequences(path: Path) -> tuple[tuple[Int64, ...], int]:
    """Each user's items in time order, items renumbered from 0, and the number of items.

    Args:
        path: MovieLens ratings (userId, movieId, timestamp) or a KuaiRand log (user_id, video_id, time_ms).

    Raises:
        TraceError: if the file cannot be read.
        ExecutorError: if it has neither set of columns.
    """
    columns = detect_layout(path).columns
    known = next((names for names in _SEQUENCE_COLUMNS if set(names) <= set(columns)), None)
    if known is None:
        raise ExecutorError(
            f"{path}: sequences need the columns {' or '.join(', '.join(names) for names in _SEQUENCE_COLUMNS)}; "
            f"it has {', '.join(columns) or 'none'}"
        )
    user, item, moment = known
    stream = read_keys(path, columns=(user, item), order_by=moment)
    users = stream.values[0::2]
    _, items = np.unique(stream.values[1::2], return_inverse=True)
    order = np.argsort(users, kind="stable")
    bounds = np.flatnonzero(np.diff(users[order])) + 1
    return tuple(np.split(items[order].astype(np.int64), bounds)), int(items.max()) + 1
