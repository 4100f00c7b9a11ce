"""A key stream: the embedding rows each sample looks up, as jagged arrays; the hash that gives a row its owner."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TraceError, unknown_name

__all__ = [
    "KeyStream",
    "group_sequences",
    "join_streams",
    "mix64",
    "offsets_of",
    "owner_of",
    "row_keys",
    "text_key",
]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_KEYED_SAMPLES = 1 << 16
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix64(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 step of each key: a bijection of 64-bit words whose output bits look independent of each other.

    Args:
        keys: uint64, any shape.

    Returns:
        uint64, the same shape.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (SplittableRandom).

    >>> mix64(np.array([0, 1], dtype=np.uint64)).tolist()
    [16294208416658607535, 10451216379200822465]
    """
    word = np.asarray(keys, dtype=np.uint64) + _GOLDEN
    word = (word ^ (word >> _S30)) * _MIX_1
    word = (word ^ (word >> _S27)) * _MIX_2
    mixed: NDArray[np.uint64] = word ^ (word >> _S31)
    return mixed


def text_key(text: str) -> int:
    """A 64-bit key for a name or an id that is not a number: BLAKE2b of its UTF-8 text, 8 bytes, little endian.

    >>> text_key("05db9164")
    4582638078171527438
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def row_keys(values: NDArray[np.uint64], feature: str) -> NDArray[np.uint64]:
    """The table-wide key of each value of one feature, so that equal values of two features are two rows.

    Within a feature the map is a bijection, so nothing is merged; between features two of n rows coincide with
    probability n^2 / 2^65 (3e-10 for 10^5 rows).
    """
    return mix64(np.asarray(values, dtype=np.uint64) ^ np.uint64(text_key(feature)))


def owner_of(keys: NDArray[np.uint64], world_size: int) -> NDArray[np.int64]:
    """The rank that stores each row under row-wise hash sharding: `mix64(key) % world_size`.

    Args:
        keys: uint64 row keys (`KeyStream.row_keys`), any shape; int64 keys are taken as their two's complement.
        world_size: number of ranks, at least 1.

    Returns:
        int64 ranks in [0, world_size), the same shape.

    >>> owner_of(np.arange(6, dtype=np.uint64), 4).tolist()
    [3, 1, 2, 1, 2, 2]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    words = np.asarray(keys)
    if words.dtype != np.uint64:
        words = words.astype(np.int64).view(np.uint64)
    owners: NDArray[np.int64] = (mix64(words) % np.uint64(world_size)).astype(np.int64)
    return owners


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyStream:
    """Samples in order, each with a bag of values per feature.

    Attributes:
        features: name of each feature (column, slot); a feature is a table.
        values: uint64 (lookups,), sample by sample and within a sample feature by feature.
        offsets: int64 (samples * features + 1,); the bag of feature f of sample s is
            `values[offsets[s * features + f] : offsets[s * features + f + 1]]`.
        source: where the keys come from, for the provenance of what is computed from them.
    """

    features: tuple[str, ...]
    values: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    source: str

    def __post_init__(self) -> None:
        if not self.features:
            raise ValueError("a key stream needs at least one feature")
        if len(set(self.features)) != len(self.features):
            raise ValueError(f"feature names must differ, got {', '.join(self.features)}")
        if self.values.dtype != np.uint64 or self.offsets.dtype != np.int64:
            raise TypeError(
                f"values must be uint64 and offsets int64, got {self.values.dtype} and {self.offsets.dtype}"
            )
        if len(self.offsets) % len(self.features) != 1 % len(self.features):
            raise ValueError(f"{len(self.offsets)} offsets do not fit samples x {len(self.features)} features + 1")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values) or np.any(self.offsets[1:] < self.offsets[:-1]):
            raise ValueError("offsets must rise from 0 to the number of lookups")

    @property
    def num_samples(self) -> int:
        return (len(self.offsets) - 1) // len(self.features)

    @property
    def num_lookups(self) -> int:
        return len(self.values)

    @property
    def sample_offsets(self) -> NDArray[np.int64]:
        """Where each sample's lookups start: int64 (samples + 1,)."""
        return self.offsets[:: len(self.features)]

    def sample_of_lookup(self) -> NDArray[np.int64]:
        """The sample of each lookup: int64 (lookups,)."""
        return np.repeat(np.arange(self.num_samples, dtype=np.int64), np.diff(self.sample_offsets))

    def feature_of_lookup(self) -> NDArray[np.int64]:
        """The index of the feature of each lookup: int64 (lookups,)."""
        features = np.tile(np.arange(len(self.features), dtype=np.int64), self.num_samples)
        return np.repeat(features, np.diff(self.offsets))

    def row_keys(self) -> NDArray[np.uint64]:
        """The key of each lookup as the pair (feature, value) in one word: uint64 (lookups,). See `row_keys`."""
        salts = np.array([text_key(name) for name in self.features], dtype=np.uint64)
        keys, width = np.empty_like(self.values), len(self.features)
        for start in range(0, self.num_samples, _KEYED_SAMPLES):
            offsets = self.offsets[start * width : (start + _KEYED_SAMPLES) * width + 1]
            part = slice(offsets[0], offsets[-1])
            salt = np.repeat(np.tile(salts, (len(offsets) - 1) // width), np.diff(offsets))
            keys[part] = mix64(self.values[part] ^ salt)
        return keys

    def slice(self, start: int, stop: int) -> KeyStream:
        """Samples start to stop; the values are a view."""
        width = len(self.features)
        stop = min(stop, self.num_samples)
        offsets = self.offsets[start * width : stop * width + 1]
        return replace(self, values=self.values[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])

    def batches(self, batch: int, *, drop_last: bool = True) -> Iterator[KeyStream]:
        """Consecutive runs of `batch` samples; the last partial one only with `drop_last=False`."""
        if batch < 1:
            raise ValueError(f"batch must be at least 1 sample, got {batch}")
        for start in range(0, self.num_samples, batch):
            if start + batch <= self.num_samples or not drop_last:
                yield self.slice(start, start + batch)

    def take(self, samples: NDArray[np.int64]) -> KeyStream:
        """The given samples in the given order; a sample may appear more than once."""
        return self._gather(np.asarray(samples, dtype=np.int64), np.arange(len(self.features)))

    def select(self, features: Sequence[str]) -> KeyStream:
        """The same samples with only these features, in this order."""
        for name in features:
            if name not in self.features:
                raise TraceError(f"{self.source}: {unknown_name('feature', name, self.features)}")
        if tuple(features) == self.features:
            return self
        columns = np.array([self.features.index(name) for name in features], dtype=np.int64)
        return self._gather(np.arange(self.num_samples, dtype=np.int64), columns)

    def _gather(self, samples: NDArray[np.int64], columns: NDArray[np.int64]) -> KeyStream:
        """The bags of these samples and features, in this order."""
        bags = (samples[:, None] * len(self.features) + columns).ravel()
        lengths = np.diff(self.offsets)[bags]
        offsets = offsets_of(lengths)
        pick = np.repeat(self.offsets[:-1][bags] - offsets[:-1], lengths) + np.arange(offsets[-1])
        features = tuple(self.features[column] for column in columns)
        return replace(self, features=features, values=self.values[pick], offsets=offsets)


def offsets_of(lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Where runs of these lengths start and the last one ends: int64 (runs + 1,).

    >>> offsets_of(np.array([2, 0, 3])).tolist()
    [0, 2, 2, 5]
    """
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def join_streams(streams: list[KeyStream]) -> KeyStream:
    """One stream after the other; features are united in order of first appearance, missing ones are empty bags.

    Empties the list meanwhile, so that it takes little more memory than the result.
    """
    if not streams:
        raise ValueError("need at least one stream to join")
    features = tuple(dict.fromkeys(name for stream in streams for name in stream.features))
    source = " + ".join(dict.fromkeys(stream.source for stream in streams))
    values = np.empty(sum(stream.num_lookups for stream in streams), dtype=np.uint64)
    offsets = np.zeros(len(features) * sum(stream.num_samples for stream in streams) + 1, dtype=np.int64)
    bag = lookup = 0
    streams.reverse()
    while streams:
        stream = streams.pop()
        part = stream if stream.features == features else _widen(stream, features)
        bags = len(part.offsets) - 1
        values[lookup : lookup + part.num_lookups] = part.values
        offsets[bag + 1 : bag + bags + 1] = part.offsets[1:]
        offsets[bag + 1 : bag + bags + 1] += lookup
        bag, lookup = bag + bags, lookup + part.num_lookups
    return KeyStream(features=features, values=values, offsets=offsets, source=source)


def _widen(stream: KeyStream, features: tuple[str, ...]) -> KeyStream:
    position = np.array([features.index(name) for name in stream.features], dtype=np.int64)
    lengths = np.zeros((stream.num_samples, len(features)), dtype=np.int64)
    lengths[:, position] = np.diff(stream.offsets).reshape(stream.num_samples, -1)
    order = np.lexsort((position[stream.feature_of_lookup()], stream.sample_of_lookup()))
    offsets = offsets_of(lengths.ravel())
    return replace(stream, features=features, values=stream.values[order], offsets=offsets)


def group_sequences(stream: KeyStream, user: str, item: str, length: int) -> KeyStream:
    """User histories as samples: each user's items in stream order, cut into runs of `length`.

    Args:
        stream: one interaction per sample, with one value of `user` and of `item` each, in time order.
        user: feature that names the user.
        item: feature that names the item.
        length: most items of a sample, at least 1; the last run of a user may be shorter.

    Returns:
        Samples with one `user` value and a bag of up to `length` `item` values, in order of their last interaction.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1 item, got {length}")
    pairs = stream.select((user, item))
    if np.any(np.diff(pairs.offsets) != 1):
        raise TraceError(f"{stream.source}: every row needs one {user} and one {item} to be grouped into sequences")
    users, items = pairs.values[0::2], pairs.values[1::2]
    order = np.argsort(users, kind="stable")
    fresh = np.concatenate([[True], users[order][1:] != users[order][:-1]]) if len(order) else np.zeros(0, dtype=bool)
    begin = np.flatnonzero(fresh)
    position = np.arange(len(order)) - np.repeat(begin, np.diff(np.append(begin, len(order))))
    first = np.flatnonzero(position % length == 0)
    counts = np.diff(np.append(first, len(order)))
    by_end = np.argsort(order[first + counts - 1], kind="stable")
    first, counts = first[by_end], counts[by_end]
    pick = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(order))
    lengths = np.stack([np.ones_like(counts), counts], axis=1).ravel()
    is_item = np.repeat(np.tile([False, True], len(counts)), lengths)
    values = np.empty(len(is_item), dtype=np.uint64)
    values[is_item] = items[order][pick]
    values[~is_item] = users[order][first]
    offsets = offsets_of(lengths)
    return KeyStream(
        features=(user, item), values=values, offsets=offsets, source=f"{stream.source} (sequences of {length})"
    )
