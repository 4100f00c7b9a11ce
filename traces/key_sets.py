"""Key sets of batches, and the statistics of a stream that need no cluster: skew, unique ratio, overlap, duplication.

Definitions. Batches are consecutive, non-overlapping runs of samples in stream order; a last partial one is dropped.
S(t) is the set of keys of batch t. `unique_ratio` is unique keys / lookups of a batch, `overlap_unique` is
|S(t-1) & S(t)| / |S(t)|, `overlap_lookups` the share of the lookups of batch t whose key is in S(t-1); all are means
over batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from nestpipe.errors import TraceError
from traces.key_stream import KeyStream

__all__ = [
    "KeySets",
    "MicroBatchDuplication",
    "StreamStatistics",
    "dense_codes",
    "mean_ratio",
    "micro_batch_duplication",
    "stream_statistics",
]

_ZIPF_LS_RANKS = 1000
_TOP_SHARES = (0.001, 0.01, 0.1)

Assign = Callable[[KeyStream, int, int], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStatistics:
    """A stream and its batches, as one table on one rank would see them.

    Attributes:
        zipf_ls: minus the slope of log frequency against log rank, least squares over the top 1,000 ranks with
            frequency 2 or more; None with fewer than two such ranks.
        zipf_ls_ranks: number of ranks in that fit.
        zipf_mle: maximum likelihood s of p(r) proportional to r^-s on ranks 1..unique, ranked by observed frequency;
            None for a single key.
        top_shares: share of the lookups that go to the top 0.1 %, 1 % and 10 % of the keys (nearest whole number of
            keys, at least one).
        batches: number of full batches; `unique_ratio` is None without one, the overlaps with fewer than two.
    """

    samples: int
    lookups: int
    unique: int
    zipf_ls: float | None
    zipf_ls_ranks: int
    zipf_mle: float | None
    top_shares: tuple[float, float, float]
    batch: int
    batches: int
    unique_ratio: float | None
    overlap_unique: float | None
    overlap_lookups: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchDuplication:
    """Rows sent by all micro-batches of a batch over rows of the batch (1 = no row is sent twice), means over batches.

    Attributes:
        num_micro_batches: N.
        in_order: micro-batches are consecutive runs of the batch.
        random: samples are dealt at random.
        clustered: key-centric sample clustering; None where it was not run.
        unique_ratio: unique keys / lookups of a micro-batch, in order.
    """

    num_micro_batches: int
    in_order: float
    random: float
    clustered: float | None
    unique_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySets:
    """The key sets of groups of lookups: the distinct (group, code) pairs in order, and how often each occurs."""

    group: NDArray[np.int64]
    code: NDArray[np.int64]
    count: NDArray[np.int64]
    num_groups: int
    num_codes: int

    @classmethod
    def of(cls, group: NDArray[np.int64], code: NDArray[np.int64], num_groups: int, num_codes: int) -> KeySets:
        """The sets of `num_groups` groups; `group` and `code` are int64 (lookups,)."""
        pairs, count = np.unique(group * num_codes + code, return_counts=True)
        group, code = np.divmod(pairs, max(num_codes, 1))
        return cls(group=group, code=code, count=count, num_groups=num_groups, num_codes=num_codes)

    def sizes(self) -> NDArray[np.int64]:
        """Unique keys of each group: int64 (groups,)."""
        return np.bincount(self.group, minlength=self.num_groups)

    def lookups(self) -> NDArray[np.int64]:
        """Lookups of each group: int64 (groups,)."""
        return np.bincount(self.group, weights=self.count, minlength=self.num_groups).astype(np.int64)

    def shared(self, distance: int) -> KeySets:
        """Of each set the keys that the group `distance` before has too, with their counts here."""
        pairs = self.group * self.num_codes + self.code
        earlier = pairs - distance * self.num_codes
        spot = np.minimum(np.searchsorted(pairs, earlier), max(len(pairs) - 1, 0))
        hit = pairs[spot] == earlier
        return KeySets(
            group=self.group[hit],
            code=self.code[hit],
            count=self.count[hit],
            num_groups=self.num_groups,
            num_codes=self.num_codes,
        )


def dense_codes(stream: KeyStream) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The distinct row keys of a stream in order, and for each lookup the index of its key among them."""
    keys, codes = np.unique(stream.row_keys(), return_inverse=True)
    return keys, codes.astype(np.int64)


def mean_ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float | None:
    """Mean of part / whole over the batches where `whole` is not zero; None where there is none."""
    filled = whole > 0
    return float(np.mean(part[filled] / whole[filled])) if filled.any() else None


def stream_statistics(stream: KeyStream, batch: int) -> StreamStatistics:
    """Skew of the whole stream, and unique ratio and overlap of its batches of `batch` samples.

    Raises:
        TraceError: `batch` is less than one sample.
    """
    if batch < 1:
        raise TraceError(f"batch must be at least 1 sample, got {batch}")
    keys, codes = dense_codes(stream)
    frequency = -np.sort(-np.bincount(codes))
    batches = stream.num_samples // batch
    part = stream.slice(0, batches * batch)
    sets = KeySets.of(part.sample_of_lookup() // batch, codes[: part.num_lookups], batches, len(keys))
    again = sets.shared(1)
    fit, ranks = _zipf_least_squares(frequency)
    total = max(stream.num_lookups, 1)
    top = [float(frequency[: max(1, round(len(keys) * share))].sum() / total) for share in _TOP_SHARES]
    return StreamStatistics(
        samples=stream.num_samples,
        lookups=stream.num_lookups,
        unique=len(keys),
        zipf_ls=fit,
        zipf_ls_ranks=ranks,
        zipf_mle=_zipf_maximum_likelihood(frequency),
        top_shares=(top[0], top[1], top[2]),
        batch=batch,
        batches=batches,
        unique_ratio=mean_ratio(sets.sizes(), sets.lookups()),
        overlap_unique=mean_ratio(again.sizes()[1:], sets.sizes()[1:]),
        overlap_lookups=mean_ratio(again.lookups()[1:], sets.lookups()[1:]),
    )


def _zipf_least_squares(frequency: NDArray[np.int64]) -> tuple[float | None, int]:
    top = frequency[:_ZIPF_LS_RANKS]
    top = top[top >= 2]
    if len(top) < 2:
        return None, len(top)
    slope = np.polyfit(np.log(np.arange(1, len(top) + 1)), np.log(top), 1)[0]
    return float(-slope), len(top)


def _zipf_maximum_likelihood(frequency: NDArray[np.int64]) -> float | None:
    """Solves sum(f ln r) / sum(f) = sum(ln r r^-s) / sum(r^-s), whose right side falls with s."""
    if len(frequency) < 2:
        return None
    log_rank = np.log(np.arange(1, len(frequency) + 1))
    observed = float((frequency * log_rank).sum() / frequency.sum())

    def excess(s: float) -> float:
        weight = np.exp(-s * log_rank)
        return float((weight * log_rank).sum() / weight.sum()) - observed

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 100.0, xtol=1e-10))


def micro_batch_duplication(
    stream: KeyStream,
    *,
    batch: int,
    micro_batches: int,
    rng: np.random.Generator,
    cluster: Assign | None = None,
) -> MicroBatchDuplication:
    """How many rows micro-batches send twice, in order, at random and clustered, over the stream's batches of `batch`.

    Args:
        stream: samples in order.
        batch: samples of a rank's batch.
        micro_batches: N, at most `batch`; micro-batch sizes differ by at most one sample.
        rng: deals the random order.
        cluster: `traces.clustering.cluster_stream`: from stream, batch and N the micro-batch of each sample.

    Raises:
        TraceError: the stream has no full batch, or N is out of range.
    """
    if not 1 <= micro_batches <= batch:
        raise TraceError(f"micro-batches must lie between 1 and the batch of {batch} samples, got {micro_batches}")
    batches = stream.num_samples // batch
    if batches < 1:
        raise TraceError(f"{stream.source}: {stream.num_samples} samples do not fill one batch of {batch}")
    part = stream.slice(0, batches * batch)
    keys, codes = dense_codes(part)
    sample = part.sample_of_lookup()
    base = KeySets.of(sample // batch, codes, batches, len(keys)).sizes()

    def sent(micro_batch: NDArray[np.int64]) -> KeySets:
        group = sample // batch * micro_batches + micro_batch[sample]
        return KeySets.of(group, codes, batches * micro_batches, len(keys))

    def factor(sets: KeySets) -> float:
        return mean_ratio(sets.sizes().reshape(batches, micro_batches).sum(axis=1), base) or 1.0

    in_order = np.tile(np.arange(batch, dtype=np.int64) * micro_batches // batch, batches)
    shuffled = rng.permuted(in_order.reshape(batches, batch), axis=1).ravel()
    plain = sent(in_order)
    return MicroBatchDuplication(
        num_micro_batches=micro_batches,
        in_order=factor(plain),
        random=factor(sent(shuffled)),
        clustered=None if cluster is None else factor(sent(cluster(part, batch, micro_batches))),
        unique_ratio=mean_ratio(plain.sizes(), plain.lookups()) or 1.0,
    )
