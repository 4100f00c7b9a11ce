"""Where batches come from: a seeded Zipf generator, key files, and user sequences with sampled negatives.

Every source is random access and depends on the world size only through how a global batch is dealt to the ranks. One
that resumes starts at a position in its data; `start` is the batch that begins there, and the position in samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from executor.data.batch import Int64, Jagged, RawBatch
from nestpipe.base import split_evenly
from traces.keys import KeyStream, mix64, zipf_ranks

__all__ = ["KeyStreamSource", "SequenceSource", "SyntheticSource", "empty_batch"]

# what stands in for columns that a key file does not have
_SYNTHETIC_DENSE: Final = 4
_SYNTHETIC_POSITIVE: Final = 0.3


def empty_batch(features: tuple[str, ...], num_dense: int) -> RawBatch:
    """A batch without samples, what a rank that has run out of data contributes."""
    none = np.empty(0, dtype=np.int64)
    return RawBatch(
        features={name: Jagged(values=none, lengths=none) for name in features},
        dense=np.empty((0, num_dense), dtype=np.float32),
        labels=np.empty(0, dtype=np.float32),
        terms=none,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSource:
    """Zipf keys in bags of random length.

    Attributes:
        features: names of the key columns.
        batch_size: samples per rank and batch at most.
        num_keys: distinct keys of each feature.
        exponent: of the Zipf law; 0 is uniform.
        mean_length: mean keys per bag; lengths are uniform in 0 to twice that. 1 means exactly one key.
        empty_share: share of bags that are emptied on top.
        weighted: give every key a weight, uniform in 0 to 1.
        num_dense: dense values per sample.
        seed: of everything.
        batches: batches that each rank has; None is no end.
        size_of: samples of (batch, rank) if not `batch_size`, for uneven ranks.
    """

    features: tuple[str, ...]
    batch_size: int
    num_keys: int
    exponent: float = 1.05
    mean_length: float = 1.0
    empty_share: float = 0.0
    weighted: bool = False
    num_dense: int = 4
    seed: int = 0
    batches: Callable[[int], int] | None = None
    size_of: Callable[[int, int], int] | None = None

    def num_batches(self, rank: int, world_size: int) -> int:  # noqa: ARG002
        return np.iinfo(np.int64).max if self.batches is None else self.batches(rank)

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:
        if batch >= self.num_batches(rank, world_size):
            return empty_batch(self.features, self.num_dense)
        rng = np.random.default_rng([self.seed, batch, rank])
        size = self.batch_size if self.size_of is None else self.size_of(batch, rank)
        features = {name: self._bags(rng, size) for name in self.features}
        first = next(iter(features.values()))
        dense = rng.standard_normal((size, self.num_dense), dtype=np.float32)
        taste = np.zeros(size, dtype=np.int64)
        filled = first.lengths > 0
        taste[filled] = first.values[(np.cumsum(first.lengths) - first.lengths)[filled]] % 3
        labels = (rng.random(size) < (0.2 + 0.3 * taste)).astype(np.float32)
        return RawBatch(features=features, dense=dense, labels=labels, terms=np.ones(size, dtype=np.int64))

    def position(self, batch: int, world_size: int) -> int:  # noqa: ARG002
        return batch

    def resumed(self, batch: int, position: int) -> SyntheticSource:  # noqa: ARG002
        return self

    def _bags(self, rng: np.random.Generator, size: int) -> Jagged:
        if self.mean_length == 1.0:
            lengths = np.ones(size, dtype=np.int64)
        else:
            lengths = rng.integers(0, round(2 * self.mean_length) + 1, size=size)
        lengths[rng.random(size) < self.empty_share] = 0
        keys = zipf_ranks(self.num_keys, self.exponent, int(lengths.sum()), rng)
        weights = rng.random(len(keys), dtype=np.float32) if self.weighted else None
        return Jagged(values=keys.astype(np.int64), lengths=lengths, weights=weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStreamSource:
    """The samples of a key file in order, dealt to the ranks in equal runs; the last batch may be uneven.

    Dense values and labels that the file does not give are made from the sample's number, so that a model can be
    trained on keys alone.

    Attributes:
        stream: the keys.
        batch_size: samples per rank and batch.
        dense: float32 (samples, values), if the file gives them.
        labels: float32 (samples,), if the file gives them.
        start: the batch that begins at a position in samples.
    """

    stream: KeyStream
    batch_size: int
    dense: npt.NDArray[np.float32] | None = None
    labels: npt.NDArray[np.float32] | None = None
    start: tuple[int, int] = (0, 0)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the key columns."""
        return self.stream.features

    @property
    def num_dense(self) -> int:
        """Dense values per sample."""
        return _SYNTHETIC_DENSE if self.dense is None else self.dense.shape[1]

    def num_batches(self, rank: int, world_size: int) -> int:  # noqa: ARG002
        return self.start[0] + -(-(self.stream.num_samples - self.start[1]) // (self.batch_size * world_size))

    def position(self, batch: int, world_size: int) -> int:
        since = (batch - self.start[0]) * self.batch_size * world_size
        return min(self.start[1] + since, self.stream.num_samples)

    def resumed(self, batch: int, position: int) -> KeyStreamSource:
        return replace(self, start=(batch, position))

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:
        begin = self.position(batch, world_size)
        first, size = _share(begin, self.stream.num_samples, self.batch_size, rank, world_size)
        if not size:
            return empty_batch(self.features, self.num_dense)
        part = self.stream.slice(first, first + size)
        width = len(part.features)
        lengths = np.diff(part.offsets)
        column = part.feature_of_lookup()
        features = {
            name: Jagged(values=part.values[column == index].view(np.int64), lengths=lengths[index::width])
            for index, name in enumerate(part.features)
        }
        unit = _made_up(first, size)
        return RawBatch(
            features=features,
            dense=unit[:, :-1] * 2 - 1 if self.dense is None else self.dense[first : first + size],
            labels=_labels(unit[:, -1]) if self.labels is None else self.labels[first : first + size],
            terms=np.ones(size, dtype=np.int64),
        )


def _made_up(first: int, size: int) -> npt.NDArray[np.float32]:
    """Numbers in 0 to 1 from the number of each sample: float32 (size, dense values and one for the label)."""
    width = _SYNTHETIC_DENSE + 1
    samples: npt.NDArray[np.uint64] = np.arange(first, first + size, dtype=np.uint64)[:, None] * np.uint64(width)
    bits = mix64((samples + np.arange(width, dtype=np.uint64)).astype(np.uint64))
    return (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def _labels(unit: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return (unit < _SYNTHETIC_POSITIVE).astype(np.float32)


def _share(begin: int, end: int, batch_size: int, rank: int, world_size: int) -> tuple[int, int]:
    """First sample and number of samples of a rank's part of the global batch that begins at a sample."""
    total = min(batch_size * world_size, end - begin)
    sizes = [split_evenly(total, world_size, other) for other in range(world_size)]
    return begin + sum(sizes[:rank]), sizes[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSource:
    """User histories for next-item prediction, shuffled per epoch, each with sampled negatives.

    A sample has the features `items` (the history, oldest first, the last being target only) and `negatives`, and as
    many loss terms as targets.

    Attributes:
        sequences: int64 item lists of at least two items, one per sample.
        num_items: items are 0 to `num_items` - 1.
        batch_size: samples per rank and batch.
        num_negatives: drawn uniformly for each sample.
        epochs: passes over the sequences.
        seed: of shuffling and negatives.
    """

    sequences: tuple[Int64, ...]
    num_items: int
    batch_size: int
    num_negatives: int
    epochs: int = 1
    seed: int = 0
    features: tuple[str, str] = ("items", "negatives")
    start: tuple[int, int] = (0, 0)
    _orders: dict[int, Any] = field(default_factory=dict)

    def num_batches(self, rank: int, world_size: int) -> int:  # noqa: ARG002
        epoch, _ = divmod(self.start[1], len(self.sequences))
        later = max(self.epochs - epoch - 1, 0) * self._batches(0, world_size)
        return self.start[0] + (self._first_batches(world_size) + later if epoch < self.epochs else 0)

    def position(self, batch: int, world_size: int) -> int:
        epoch, first = self._place(batch, world_size)
        return epoch * len(self.sequences) + first

    def resumed(self, batch: int, position: int) -> SequenceSource:
        return replace(self, start=(batch, position))

    def _batches(self, first: int, world_size: int) -> int:
        """Batches from a sample of an epoch to its end."""
        return -(-(len(self.sequences) - first) // (self.batch_size * world_size))

    def _first_batches(self, world_size: int) -> int:
        """Batches from the start to the end of its epoch."""
        return self._batches(self.start[1] % len(self.sequences), world_size)

    def _place(self, batch: int, world_size: int) -> tuple[int, int]:
        """The epoch of a batch, and its first sample in the epoch's order."""
        done, size = batch - self.start[0], self.batch_size * world_size
        epoch, first = divmod(self.start[1], len(self.sequences))
        here = self._first_batches(world_size)
        if done < here:
            return epoch, first + done * size
        more, within = divmod(done - here, self._batches(0, world_size))
        return epoch + 1 + more, within * size

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:
        epoch, begin = self._place(batch, world_size)
        first, size = _share(begin, len(self.sequences), self.batch_size, rank, world_size)
        if epoch >= self.epochs or not size:
            return empty_batch(self.features, 0)
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(len(self.sequences))
        chosen = [self.sequences[index] for index in self._orders[epoch][first : first + size]]
        lengths = np.array([len(items) for items in chosen], dtype=np.int64)
        rng = np.random.default_rng([self.seed, batch, rank, 1])
        negatives = rng.integers(0, self.num_items, size=size * self.num_negatives)
        return RawBatch(
            features={
                "items": Jagged(values=np.concatenate(chosen), lengths=lengths),
                "negatives": Jagged(values=negatives, lengths=np.full(size, self.num_negatives, dtype=np.int64)),
            },
            dense=np.empty((size, 0), dtype=np.float32),
            labels=np.zeros(size, dtype=np.float32),
            terms=lengths - 1,
        )
