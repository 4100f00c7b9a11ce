"""From options to a trainer: the schedule, the models and the data that the command line offers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from executor.app.options import IdKind, ModelKind, RunOptions
from executor.data import (
    Feature,
    Int64,
    KeyStreamSource,
    SequenceSource,
    Source,
    SyntheticSource,
    TableSpec,
    cluster_by_keys,
    read_labeled_keys,
)
from executor.models import DLRM, FuXiBlock, HSTUBlock, Model, SequenceModel
from executor.runtime import ProcessGroups, Trainer, Wrap, delayed, emulating
from nestpipe.base import ExecutorError
from nestpipe.checks import require_safe
from nestpipe.ir import Loop, with_micro_batches
from nestpipe.schedules import load
from traces.keys import KeyStream, detect_layout, read_keys, zipf_ranks

__all__ = ["load_loop", "make_trainer", "user_sequences"]

_SEQUENCE_COLUMNS: Final = (("userId", "movieId", "timestamp"), ("user_id", "video_id", "time_ms"))


class Workload(NamedTuple):
    """What is trained on what. data: which columns of the file are used, and what is synthetic."""

    source: Source
    model: Model
    data: Mapping[str, Any]


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
    workload = _sequence_run(options) if options.model != ModelKind.DLRM else _dlrm_run(options)
    wraps: list[Wrap] = []
    if options.emulated is not None:
        wraps.append(emulating(options.emulated))
    if options.delays:
        wraps.append(delayed(options.delays))
    cluster = cluster_by_keys if options.cluster else None
    return Trainer(
        world, loop, workload.model, workload.source, options, cluster=cluster, wraps=wraps, data=workload.data
    )


def _dlrm_run(options: RunOptions) -> Workload:
    source: Source
    given: dict[str, Any]
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
        num_dense = source.num_dense
        given = {"label": None, "dense": (), "sparse": names, "synthetic": ("keys", "labels", "dense")}
    else:
        found = read_labeled_keys(
            options.data,
            label=options.label,
            dense=options.dense,
            sparse=options.sparse,
            scale=options.dense_scale,
        )
        if not hashed:
            _require_rows(found.keys, options)
        source = KeyStreamSource(
            stream=found.keys, batch_size=options.batch_size, dense=found.dense, labels=found.labels
        )
        names, num_dense = found.keys.features, source.num_dense
        given = {
            "label": found.label,
            "dense": found.dense_columns,
            "sparse": names,
            "synthetic": found.synthetic,
        }
    tables = [TableSpec(name=name, num_rows=options.num_rows, dim=options.dim, hashed=hashed) for name in names]
    features = [Feature(name=name, table=name, pooling=options.pooling, weighted=options.weighted) for name in names]
    torch.manual_seed(options.seed)
    return Workload(source, DLRM(tables, features, num_dense=num_dense, hidden=options.hidden), given)


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


def _sequence_run(options: RunOptions) -> Workload:
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
    synthetic = ("negatives",) if options.data is not None else ("items", "negatives")
    return Workload(source, model, {"label": None, "dense": (), "sparse": ("items",), "synthetic": synthetic})


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
