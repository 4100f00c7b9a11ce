"""One rank's batches: what a source yields, how a batch is cut into micro-batches, and how it lies in memory.

A source is random access: batch `b` of rank `r` depends on nothing but the source and where it started. Samples of a
batch are cut into micro-batches in order, or in the order that a clustering gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.data.tables import Layout
from nestpipe.base import ExecutorError, split_evenly

__all__ = [
    "Batch",
    "Clustering",
    "Feature",
    "Jagged",
    "MicroBatch",
    "Pooling",
    "RawBatch",
    "Source",
    "cut",
    "to_device",
]

Int64: TypeAlias = npt.NDArray[np.int64]
Clustering: TypeAlias = Callable[["RawBatch", int], Sequence[Int64]]


class Pooling(StrEnum):
    """How the rows of a bag become one vector."""

    SUM = "sum"
    MEAN = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A column of keys: its name, the table it looks up, and, for models that pool, how.

    A weighted feature multiplies each row by the key's weight before it is summed. As in torch's `embedding_bag`,
    weights go with sums only.
    """

    name: str
    table: str
    pooling: Pooling = Pooling.SUM
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.weighted and self.pooling != Pooling.SUM:
            raise ExecutorError(f"feature {self.name}: weights go with sum pooling only, got {self.pooling}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jagged:
    """Keys of one feature: values int64 (keys,), lengths int64 (samples,), which may be 0, weights float32 (keys,)."""

    values: Int64
    lengths: Int64
    weights: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBatch:
    """One rank's samples of one batch, as a source yields them.

    features: by feature name. dense: float32 (samples, values). labels: float32 (samples,). terms: int64 (samples,),
    how many loss terms a sample has: 1, or its number of target tokens.
    """

    features: Mapping[str, Jagged]
    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    terms: Int64

    @property
    def num_samples(self) -> int:
        """Samples of this rank in this batch."""
        return len(self.labels)


class Source(Protocol):
    """Where batches come from."""

    def num_batches(self, rank: int, world_size: int) -> int:
        """How many batches the rank has before it runs out of data."""

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:
        """The rank's part of a batch; empty when it has run out."""

    def position(self, batch: int, world_size: int) -> int:
        """Where in the data a batch of all ranks begins, in samples; generated data count batches."""

    def resumed(self, batch: int, position: int) -> Source:
        """The source whose batch `batch` begins at a position, at whatever world and batch size it came about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A micro-batch: views into the tensors of its batch, lookups ordered by feature, then sample.

    ids: int64 (lookups,). totals: lookups of each feature. lengths: int64 (features, samples). dense: float32 (samples,
    values). labels: float32 (samples,). num_terms: loss terms. weights: float32 (lookups,), 1 where a feature has none;
    None if no feature is weighted.
    """

    ids: Tensor
    totals: tuple[int, ...]
    lengths: Tensor
    dense: Tensor
    labels: Tensor
    num_terms: int
    weights: Tensor | None = None

    @property
    def num_samples(self) -> int:
        """Samples in it; may be 0."""
        return len(self.labels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch in one piece of memory per kind of value, and how it splits into micro-batches."""

    tensors: Mapping[str, Tensor]
    totals: tuple[tuple[int, ...], ...]
    samples: tuple[int, ...]
    terms: tuple[int, ...]

    def micro_batch(self, index: int) -> MicroBatch:
        """The views of one micro-batch."""
        lookups = [sum(row) for row in self.totals]
        num_features = len(self.totals[index])
        first, sample = sum(lookups[:index]), sum(self.samples[:index])
        samples = slice(sample, sample + self.samples[index])
        lengths = self.tensors["lengths"][samples.start * num_features : samples.stop * num_features]
        taken = slice(first, first + lookups[index])
        return MicroBatch(
            ids=self.tensors["ids"][taken],
            totals=self.totals[index],
            lengths=lengths.view(num_features, -1) if num_features else lengths.view(0, self.samples[index]),
            dense=self.tensors["dense"][samples],
            labels=self.tensors["labels"][samples],
            num_terms=self.terms[index],
            weights=self.tensors["weights"][taken] if "weights" in self.tensors else None,
        )


def cut(
    raw: RawBatch, features: Sequence[Feature], layout: Layout, micro_batches: int, cluster: Clustering | None = None
) -> Batch:
    """A raw batch hashed to row ids and laid out by micro-batch.

    Args:
        raw: this rank's samples.
        features: columns, in the model's order.
        layout: the address space of the tables.
        micro_batches: how many parts; some may be empty.
        cluster: gives the samples of each micro-batch; None for runs of equal length in order.
    """
    if cluster is None:
        bounds = np.cumsum([0, *(split_evenly(raw.num_samples, micro_batches, m) for m in range(micro_batches))])
        parts: Sequence[Int64] = [np.arange(bounds[m], bounds[m + 1]) for m in range(micro_batches)]
    else:
        parts = cluster(raw, micro_batches)
    order = np.concatenate(parts).astype(np.int64)
    columns = [raw.features[feature.name] for feature in features]
    picks = [[_positions(column, part) for column in columns] for part in parts]
    hashed = [
        layout.ids(layout.table_index(feature.table), column.values)
        for feature, column in zip(features, columns, strict=True)
    ]
    tensors = {
        "ids": _picked(hashed, picks, np.int64),
        "lengths": _joined([column.lengths[part] for part in parts for column in columns], np.int64),
        "dense": torch.from_numpy(np.ascontiguousarray(raw.dense[order], dtype=np.float32)),
        "labels": torch.from_numpy(np.ascontiguousarray(raw.labels[order], dtype=np.float32)),
    }
    if any(feature.weighted for feature in features):
        weights = [_weights(feature, column) for feature, column in zip(features, columns, strict=True)]
        tensors["weights"] = _picked(weights, picks, np.float32)
    return Batch(
        tensors=tensors,
        totals=tuple(tuple(len(positions) for positions in row) for row in picks),
        samples=tuple(len(part) for part in parts),
        terms=tuple(int(raw.terms[part].sum()) for part in parts),
    )


def _weights(feature: Feature, column: Jagged) -> npt.NDArray[np.float32]:
    if not feature.weighted:
        return np.ones(len(column.values), dtype=np.float32)
    if column.weights is None:
        raise ExecutorError(f"feature {feature.name} is weighted, but its source gives keys without weights")
    return column.weights


def _positions(column: Jagged, samples: Int64) -> Int64:
    """Where the keys of some samples stand, in the order of the samples."""
    ends = np.cumsum(column.lengths)
    chosen = column.lengths[samples]
    starts = (ends - column.lengths)[samples]
    first = np.cumsum(chosen) - chosen
    return np.asarray(np.arange(int(chosen.sum())) + np.repeat(starts - first, chosen), dtype=np.int64)


def _picked(
    columns: Sequence[npt.NDArray[np.generic]], picks: Sequence[Sequence[Int64]], dtype: type[np.generic]
) -> Tensor:
    """Values of each column at the picked positions, by micro-batch, then column."""
    return _joined([values[at] for row in picks for values, at in zip(columns, row, strict=True)], dtype)


def _joined(parts: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.empty(0, dtype=dtype))


def to_device(batch: Batch, make: Callable[[str, tuple[int, ...], torch.dtype], Tensor]) -> Batch:
    """A copy of the batch in memory that `make(name, shape, dtype)` gives."""
    tensors = {}
    for name, tensor in batch.tensors.items():
        tensors[name] = make(name, tuple(tensor.shape), tensor.dtype)
        tensors[name].copy_(tensor, non_blocking=True)
    return Batch(tensors=tensors, totals=batch.totals, samples=batch.samples, terms=batch.terms)
