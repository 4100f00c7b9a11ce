"""The sample-key matrix of a run of batches, and the merging of samples tied by rare keys: what clustering works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import split_evenly
from traces.keys.stream import offsets_of

if TYPE_CHECKING:
    from scipy import sparse

__all__ = ["Nets", "Stack", "leaders", "merge"]

Int = NDArray[np.int64]

_PHI = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nets:
    """Which samples have which key, for keys of two samples or more.

    Attributes:
        size: int64 (keys,), samples of each key.
        sample: int32 (entries,), key by key.
        by_key, by_sample: the 0/1 matrix (keys, samples) and its transpose.
    """

    size: Int
    sample: NDArray[np.int32]
    by_key: sparse.csr_matrix
    by_sample: sparse.csr_matrix

    @classmethod
    def of(cls, size: Int, sample: NDArray[np.int32], num_samples: int) -> Nets:
        from scipy import sparse

        start = offsets_of(size).astype(np.int32)
        ones = np.ones(len(sample), dtype=np.float32)
        by_key = sparse.csr_matrix((ones, sample, start), shape=(len(size), num_samples))
        return cls(size=size, sample=sample, by_key=by_key, by_sample=by_key.T.tocsr())

    def only(self, keep: NDArray[np.bool_]) -> Nets:
        if keep.all():
            return self
        return Nets.of(self.size[keep], self.sample[np.repeat(keep, self.size)], self.by_key.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A run of batches that are clustered together; rows of all arrays are samples, batch by batch."""

    nets: Nets
    batches: int
    batch: int
    sizes: Int

    @property
    def num_samples(self) -> int:
        return self.batches * self.batch

    @property
    def batch_of_net(self) -> Int:
        """The batch of each key; rises."""
        return np.asarray(self.nets.sample[self.nets.by_key.indptr[:-1]] // self.batch, dtype=np.int64)

    @classmethod
    def of(cls, keys: NDArray[np.uint64], offsets: Int, batch: int, num_micro_batches: int) -> Stack:
        """Sorts (batch, key hash, sample) packed into words; equal hashes of a batch (2^-40 by chance) are one key."""
        num_samples = len(offsets) - 1
        batches = num_samples // batch
        sample = np.repeat(np.arange(num_samples, dtype=np.uint64), np.diff(offsets))
        low = np.uint64(max(num_samples - 1, 1).bit_length())
        high = np.uint64(max(batches - 1, 1).bit_length())
        packed = ((keys * _PHI) >> (high + low)) << low
        packed |= sample
        packed |= (sample // np.uint64(batch)) << (np.uint64(64) - high)
        packed.sort()
        fresh = np.ones(len(packed), dtype=bool)
        np.not_equal(packed[1:], packed[:-1], out=fresh[1:])
        if not fresh.all():
            packed = packed[fresh]
        net = packed >> low
        edge = np.ones(len(packed) + 1, dtype=bool)
        np.not_equal(net[1:], net[:-1], out=edge[1:-1])
        size = np.diff(np.flatnonzero(edge))
        shared = size > 1
        members = (packed[np.repeat(shared, size)] & ((np.uint64(1) << low) - np.uint64(1))).astype(np.int32)
        sizes = np.array([split_evenly(batch, num_micro_batches, m) for m in range(num_micro_batches)], dtype=np.int64)
        return cls(nets=Nets.of(size[shared], members, num_samples), batches=batches, batch=batch, sizes=sizes)


def leaders(nets: Nets, merge_net: int, merged_size: int) -> Int:
    """For each sample the first of the samples that it is merged with, itself where it is not."""
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    num_samples = nets.by_key.shape[1]
    own = np.arange(num_samples, dtype=np.int64)
    rare = nets.size <= merge_net
    if merge_net < 2 or not rare.any():
        return own
    few = nets.only(rare)
    key = np.repeat(np.arange(len(few.size)), few.size) + num_samples
    total = num_samples + len(few.size)
    graph = sparse.csr_matrix((np.ones(len(key), dtype=np.int8), (few.sample, key)), shape=(total, total))
    label = connected_components(graph, directed=False)[1][:num_samples]
    first = np.zeros(int(label.max()) + 1, dtype=np.int64)
    first[label[::-1]] = own[::-1]
    small = np.bincount(label) <= merged_size
    return np.where(small[label], first[label], own)


def merge(nets: Nets, leader: Int) -> Nets:
    """The nets between merged samples, each named by its leader."""
    num_samples = nets.by_key.shape[1]
    key = np.repeat(np.arange(len(nets.size)), nets.size)
    pairs = np.unique(key * num_samples + leader[nets.sample])
    key, sample = np.divmod(pairs, num_samples)
    size = np.bincount(key, minlength=len(nets.size))
    return Nets.of(size, sample.astype(np.int32), num_samples).only(size > 1)
