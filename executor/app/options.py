"""From plain options to a trainer: the presets of models and data that the command line offers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
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
from executor.models import DLRM, FuXiBlock, HSTUBlock, Model, SequenceModel
from executor.options import Scope, option
from executor.runtime import (
    Delay,
    ProcessGroups,
    Settings,
    Trainer,
    Wrap,
    delayed,
    emulating,
)
from nestpipe.base import ExecutorError
from nestpipe.checks import require_safe
from nestpipe.ir import Loop, show, with_micro_batches
from nestpipe.schedules import load
from traces.keys import KeyStream, detect_layout, read_keys, zipf_ranks

__all__ = ["ModelKind", "RunOptions", "load_loop", "make_trainer", "user_sequences"]


_SEQUENCE_COLUMNS: Final = (("userId", "movieId", "timestamp"), ("user_id", "video_id", "time_ms"))


class ModelKind(StrEnum):
    """The models that come with the executor."""

    DLRM = "dlrm"
    HSTU = "hstu"
    FUXI = "fuxi"


class IdKind(StrEnum):
    """How keys become rows: hashed, or as they are, all of them below the number of rows."""

    HASH = "hash"
    STRICT = "strict"


_SCHEDULE: Final = "Schedule"
_MODEL: Final = "Model"
_DATA: Final = "Data"
_DEVICE: Final = "Emulation"


def _steps(text: str) -> int | None:
    return int(text) or None


def _widths(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise ExecutorError(f"--hidden must be positive widths such as 64 or 256,64, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _delays(texts: Sequence[str]) -> tuple[Delay, ...]:
    return tuple(map(Delay.parse, texts))


def _schedule_identity(schedule: str) -> str:
    """The schedule by its text: a name may stand for different files on different machines."""
    return f"{schedule} (SHA-256 {hashlib.sha256(show(load(schedule)).encode()).hexdigest()[:16]})"


def _content(path: Path | None) -> str:
    """A file by its content, wherever it lies."""
    if path is None:
        return "none"
    try:
        stat = path.stat()
        return _content_of(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        return f"{path} ({error.strerror})"


@cache
def _content_of(path: Path, size_bytes: int, mtime_ns: int) -> str:  # noqa: ARG001 - of a changed file it is another
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{size_bytes} bytes (SHA-256 {digest[:16]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Settings):
    """Everything that a run is made of. Command line, tests and benchmarks make trainers of it."""

    schedule: str = option(
        "nestpipe", "Catalogue name or file of schedule text.", group=_SCHEDULE, identity=_schedule_identity
    )
    micro_batches: int | None = option(None, "Per batch; the schedule's if not given.", group=_SCHEDULE)
    allow_staleness: int = option(0, "Steps by which rows may be stale.", group=_SCHEDULE, scope=Scope.RUN)
    unchecked: bool = option(
        False, "Run a schedule that the checks reject, to see what happens.", group=_SCHEDULE, scope=Scope.RUN
    )
    steps: int | None = option(
        20, "Batches to train; 0 trains until the data end.", group=_SCHEDULE, parse=_steps, scope=Scope.RUN
    )
    model: ModelKind = option(ModelKind.DLRM, "Which model.", group=_MODEL)
    dim: int = option(32, "Width of embedding rows.", group=_MODEL)
    num_rows: int = option(100_000, "Rows of each table.", group=_MODEL)
    num_tables: int = option(4, "Tables of a DLRM on generated data; a key file brings its own.", group=_MODEL)
    hidden: tuple[int, ...] = option(
        (64,), "Widths of the DLRM's hidden layers, comma-separated.", group=_MODEL, parse=_widths
    )
    pooling: Pooling = option(Pooling.SUM, "Of the DLRM's bags.", group=_MODEL)
    layers: int = option(2, "Blocks of a sequence model.", group=_MODEL)
    heads: int = option(2, "Attention heads.", group=_MODEL)
    max_length: int = option(50, "Longest sequence, target included.", group=_MODEL)
    num_negatives: int = option(32, "Sampled negatives of a sequence.", group=_MODEL)
    data: Path | None = option(
        None, "Key file, MovieLens ratings or KuaiRand log; generated if none.", group=_DATA, identity=_content
    )
    ids: IdKind | None = option(
        None, "How a DLRM's keys become rows; strict for a file and hash for generated keys if not given.", group=_DATA
    )
    batch_size: int = option(256, "Samples per rank and batch.", group=_DATA, flag="--batch")
    epochs: int = option(1, "Passes over the sequences of a file.", group=_DATA, scope=Scope.RUN)
    exponent: float = option(1.05, "Zipf exponent of generated keys.", group=_DATA)
    mean_length: float = option(2.0, "Mean keys per bag of generated data.", group=_DATA)
    weighted: bool = option(False, "Generate a weight for every key of a DLRM.", group=_DATA)
    cluster: bool = option(False, "Put samples that share keys into one micro-batch.", group=_DATA)
    delays: tuple[Delay, ...] = option(
        (),
        "KIND:RANK:MS before each such op; RANK may be *.",
        group=_DEVICE,
        flag="--delay",
        collect=_delays,
        scope=Scope.RUN,
    )
    emulated: EmulatedDevice | None = option(
        None,
        "NAME=VALUE of a device that local ops wait for, such as forward_us_per_sample=80.",
        group=_DEVICE,
        flag="--emulate",
        collect=EmulatedDevice.parse,
        scope=Scope.RUN,
    )

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
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
        if not 0 < self.mean_length < math.inf:
            raise ExecutorError(f"mean_length must be a positive number, got {self.mean_length}")
        if not 0 <= self.exponent < math.inf:
            raise ExecutorError(f"exponent must be a number that is not negative, got {self.exponent}")
        if self.allow_staleness < 0:
            raise ExecutorError(f"allow_staleness must not be negative, got {self.allow_staleness}")


def load_loop(options: RunOptions) -> Loop:
    """The schedule with its micro-batches, checked unless the options say otherwise.

    Raises:
        ScheduleError: if the schedule is unknown, malformed, or not safe at the allowed staleness.
    """
    loop = load(options.schedule)
    if options.micro_batches is not None:
        loop = with_micro_batches(loop, options.micro_batches)
    if not options.unchecked:
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
    wraps: list[Wrap] = []
    if options.emulated is not None:
        wraps.append(emulating(options.emulated))
    if options.delays:
        wraps.append(delayed(options.delays))
    return Trainer(
        world, loop, model, source, options, cluster=cluster_by_keys if options.cluster else None, wraps=wraps
    )


def _dlrm_run(options: RunOptions) -> tuple[Source, Model]:
    source: Source
    hashed = (options.ids or (IdKind.HASH if options.data is None else IdKind.STRICT)) == IdKind.HASH
    if options.data is None:
        names = tuple(f"f{index}" for index in range(options.num_tables))
        source = SyntheticSource(
            features=names,
            batch_size=options.batch_size,
            num_keys=10 * options.num_rows if hashed else options.num_rows,
            exponent=options.exponent,
            mean_length=options.mean_length,
            weighted=options.weighted,
            seed=options.seed,
        )
    else:
        stream = read_keys(options.data)
        names, source = stream.features, KeyStreamSource(stream=stream, batch_size=options.batch_size)
        if not hashed:
            _require_rows(stream, options)
    tables = [TableSpec(name=name, num_rows=options.num_rows, dim=options.dim, hashed=hashed) for name in names]
    features = [Feature(name=name, table=name, pooling=options.pooling, weighted=options.weighted) for name in names]
    torch.manual_seed(options.seed)
    return source, DLRM(tables, features, num_dense=4, hidden=options.hidden)


def _require_rows(stream: KeyStream, options: RunOptions) -> None:
    """Refuse a file with a key that is not a row: it would have to share the row of another."""
    # keys are unsigned: a negative one is a very large one here
    outside = np.flatnonzero(stream.values >= np.uint64(options.num_rows))
    if len(outside):
        bag = int(np.searchsorted(stream.offsets, outside[0], side="right")) - 1
        sample, feature = divmod(bag, len(stream.features))
        raise ExecutorError(
            f"{options.data}: sample {sample}, feature {stream.features[feature]}: key "
            f"{stream.values.view(np.int64)[outside[0]]} is not a row of a table of {options.num_rows}, nor are "
            f"{len(outside) - 1} others of {len(stream.values)}; give more --num-rows, or --ids hash"
        )


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
        TraceError: if the file is missing or invalid.
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
