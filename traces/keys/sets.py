"""Key sets of batches, and the statistics of a stream that need no cluster: skew, unique ratio, overlap, duplication.

Definitions. Batches are consecutive, non-overlapping runs of samples in stream order; a last partial one is dropped.
S(t) is the set of keys of batch t. `unique_ratio` is unique keys / lookups of a batch, `overlap_unique` is
|S(t-1) & S(t)| / |S(t)|, `overlap_lookups` the share of the lookups of batch t whose key is in S(t-1); all are means
over batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TraceError
from traces.keys.stream import KeyStream, offsets_of

__all__ = [
    "CodedStream",
    "KeySets",
    "MicroBatchDuplication",
    "StreamStatistics",
    "dense_codes",
    "mean_ratio",
    "micro_batch_duplication",
    "pieces",
    "stream_statistics",
]

_ZIPF_LS_RANKS = 1000
_PIECE: Final = 1 << 21
_TOP_SHARES = (0.001, 0.01, 0.1)

Assign = Callable[["CodedStream", int, int], NDArray[np.int64]]


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
class CodedStream:
    """A stream whose keys are numbers of distinct keys: all that counting needs, at 4 bytes a lookup.

    Attributes:
        keys: uint64 (distinct,), the distinct row keys, ascending.
        code: int32 (lookups,), index into `keys`.
        sample_offsets: int64 (samples + 1,), where each sample's lookups start.
        source: of the stream.
    """

    keys: NDArray[np.uint64]
    code: NDArray[np.int32]
    sample_offsets: NDArray[np.int64]
    source: str

    @classmethod
    def of(cls, stream: KeyStream | CodedStream) -> CodedStream:
        """The stream coded; what is coded already is returned as it is."""
        if isinstance(stream, CodedStream):
            return stream
        keys, code = dense_codes(stream)
        return cls(
            keys=keys, code=code, sample_offsets=np.ascontiguousarray(stream.sample_offsets), source=stream.source
        )

    @property
    def num_samples(self) -> int:
        return len(self.sample_offsets) - 1

    @property
    def num_lookups(self) -> int:
        return len(self.code)

    def runs(self, samples: int, num_runs: int | None = None) -> NDArray[np.int64]:
        """Where the lookups of consecutive runs of `samples` samples start and the last one ends; full runs only."""
        most = self.num_samples // samples
        return self.sample_offsets[: (most if num_runs is None else num_runs) * samples + 1 : samples]

    def sets(self, samples: int, num_runs: int | None = None) -> KeySets:
        """The key sets of consecutive runs of `samples` samples."""
        return KeySets.of_runs(self.runs(samples, num_runs), self.code, len(self.keys))

    def micro_batch_sets(self, batch: int, micro_batch: NDArray[np.int64], micro_batches: int) -> KeySets:
        """The key sets of each batch's micro-batches, of which `micro_batch` names that of each sample."""
        sample = _numbered(self.sample_offsets, 0, self.num_samples)
        group = sample // batch * micro_batches + micro_batch[sample]
        return KeySets.of(group, self.code, self.num_samples // batch * micro_batches, len(self.keys))

    def row_keys(self) -> NDArray[np.uint64]:
        """The key of each lookup: uint64 (lookups,)."""
        return self.keys[self.code]

    def slice(self, start: int, stop: int) -> CodedStream:
        """Samples start to stop; the codes are a view."""
        offsets = self.sample_offsets[start : stop + 1]
        return replace(self, code=self.code[offsets[0] : offsets[-1]], sample_offsets=offsets - offsets[0])

    def frequency(self) -> NDArray[np.int64]:
        """How often each key is looked up: int64 (distinct,)."""
        found = np.zeros(len(self.keys), dtype=np.int64)
        for start in range(0, len(self.code), _PIECE):
            found += np.bincount(self.code[start : start + _PIECE], minlength=len(self.keys))
        return found

    def take(self, samples: NDArray[np.int64]) -> CodedStream:
        """The given samples in the given order; a sample may appear more than once."""
        lengths = np.diff(self.sample_offsets)[samples]
        first = offsets_of(lengths)
        code = np.empty(first[-1], dtype=np.int32)
        for start, stop in pieces(first):
            low, high = first[start], first[stop]
            shift = self.sample_offsets[samples[start:stop]] - first[start:stop]
            code[low:high] = self.code[np.repeat(shift, lengths[start:stop]) + np.arange(low, high)]
        return CodedStream(keys=self.keys, code=code, sample_offsets=first, source=self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySets:
    """The key sets of groups of lookups: for each group its distinct codes in order, and how often each occurs.

    Attributes:
        bounds: int64 (groups + 1,), where the codes of each group start.
        code: (pairs,), ascending within a group.
        count: (pairs,), lookups of the group that have the code.
        num_codes: number of different codes there are.
    """

    bounds: NDArray[np.int64]
    code: NDArray[np.integer[Any]]
    count: NDArray[np.integer[Any]]
    num_codes: int

    @classmethod
    def of(cls, group: NDArray[np.int64], code: NDArray[np.integer[Any]], num_groups: int, num_codes: int) -> KeySets:
        """The sets of `num_groups` groups whose lookups are in any order; `group` and `code` are (lookups,)."""
        pairs, count = np.unique(group * num_codes + code, return_counts=True)
        bounds = np.searchsorted(pairs, np.arange(num_groups + 1) * num_codes)
        return cls(bounds=bounds, code=pairs % max(num_codes, 1), count=count, num_codes=num_codes)

    @classmethod
    def of_runs(
        cls,
        bounds: NDArray[np.int64],
        code: NDArray[np.integer[Any]],
        num_codes: int,
        count: NDArray[np.integer[Any]] | None = None,
    ) -> KeySets:
        """The sets of consecutive runs of lookups, run g from bounds[g] to bounds[g + 1]; a piece at a time.

        Args:
            bounds: int64 (groups + 1,).
            code: (lookups,).
            num_codes: number of different codes.
            count: (lookups,), how often each lookup counts; once without.
        """
        codes, counts = np.empty((2, bounds[-1] - bounds[0]), dtype=np.int32)  # pages that stay empty cost nothing
        ends = np.zeros(len(bounds), dtype=np.int64)
        for start, stop in pieces(bounds):
            part = slice(bounds[start], bounds[stop])
            pairs, found = _merged(
                _numbered(bounds, start, stop) * num_codes + code[part], None if count is None else count[part]
            )
            low, high = ends[start], ends[start] + len(pairs)
            ends[start + 1 : stop + 1] = np.searchsorted(pairs, np.arange(1, stop - start + 1) * num_codes) + low
            codes[low:high] = pairs % max(num_codes, 1)
            counts[low:high] = found
        return cls(bounds=ends, code=codes[: ends[-1]], count=counts[: ends[-1]], num_codes=num_codes)

    @property
    def num_groups(self) -> int:
        return len(self.bounds) - 1

    def sizes(self) -> NDArray[np.int64]:
        """Unique keys of each group: int64 (groups,)."""
        return np.diff(self.bounds)

    def lookups(self) -> NDArray[np.int64]:
        """Lookups of each group: int64 (groups,)."""
        found = np.zeros(self.num_groups, dtype=np.int64)
        for start, stop in pieces(self.bounds):
            group = _numbered(self.bounds, start, stop)
            counts = self.count[self.bounds[start] : self.bounds[stop]]
            found[start:stop] = np.bincount(group, weights=counts, minlength=stop - start)
        return found

    def joined(self, groups: int) -> KeySets:
        """The sets of every `groups` consecutive groups together."""
        return KeySets.of_runs(self.bounds[::groups], self.code, self.num_codes, self.count)

    def shared(self, distance: int) -> KeySets:
        """Of each set the keys that the group `distance` before has too, with their counts here."""
        sizes = np.zeros(self.num_groups, dtype=np.int64)
        codes, counts = [self.code[:0]], [self.count[:0]]
        later = self.bounds[min(distance, self.num_groups) :]
        for start, stop in pieces(later):
            here = slice(later[start], later[stop])
            before = slice(self.bounds[start], self.bounds[stop])
            group = _numbered(later, start, stop)
            pairs = group * self.num_codes + self.code[here]
            earlier = _numbered(self.bounds, start, stop) * self.num_codes + self.code[before]
            spot = np.minimum(np.searchsorted(earlier, pairs), max(len(earlier) - 1, 0))
            hit = earlier[spot] == pairs if len(earlier) else np.zeros(len(pairs), dtype=bool)
            sizes[distance + start : distance + stop] = np.bincount(group[hit], minlength=stop - start)
            codes.append(self.code[here][hit])
            counts.append(self.count[here][hit])
        return KeySets(
            bounds=offsets_of(sizes),
            code=np.concatenate(codes),
            count=np.concatenate(counts),
            num_codes=self.num_codes,
        )

    def cells(self, owner: NDArray[np.int64], world_size: int) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """A piece at a time: which pairs, and for each of them `group * world_size + owner`."""
        for start, stop in pieces(self.bounds):
            part = slice(self.bounds[start], self.bounds[stop])
            yield part, (_numbered(self.bounds, start, stop) + start) * world_size + owner[self.code[part]]


def pieces(bounds: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive groups with some two million entries together, at least one group each."""
    start, num = 0, len(bounds) - 1
    while start < num:
        stop = max(start + 1, int(np.searchsorted(bounds, bounds[start] + _PIECE, side="right")) - 1)
        yield start, stop
        start = stop


def _merged(
    pairs: NDArray[np.int64], count: NDArray[np.integer[Any]] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The distinct pairs in order, and how often each occurs or the sum of its counts."""
    if count is None:
        return np.unique(pairs, return_counts=True)
    order = np.argsort(pairs)
    pairs = pairs[order]
    begin = np.flatnonzero(np.diff(pairs, prepend=-1))
    if not len(begin):
        return pairs, np.zeros(0, dtype=np.int64)
    return pairs[begin], np.add.reduceat(count[order].astype(np.int64), begin)


def _numbered(bounds: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    """For each entry of groups start to stop the number of its group, from 0."""
    return np.repeat(np.arange(stop - start, dtype=np.int64), np.diff(bounds[start : stop + 1]))


def dense_codes(stream: KeyStream) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """The distinct row keys of a stream in order, and for each lookup the index of its key among them."""
    import pyarrow as pa

    encoded = pa.array(stream.row_keys()).dictionary_encode()
    keys = encoded.dictionary.to_numpy()
    order = np.argsort(keys)
    place = np.empty(len(keys), dtype=np.int32)
    place[order] = np.arange(len(keys), dtype=np.int32)
    return keys[order], place[encoded.indices.to_numpy()]


def mean_ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> float | None:
    """Mean of part / whole over the batches where `whole` is not zero; None where there is none."""
    filled = whole > 0
    return float(np.mean(part[filled] / whole[filled])) if filled.any() else None


def stream_statistics(stream: KeyStream | CodedStream, batch: int) -> StreamStatistics:
    """Skew of the whole stream, and unique ratio and overlap of its batches of `batch` samples.

    Raises:
        TraceError: `batch` is less than one sample.
    """
    if batch < 1:
        raise TraceError(f"batch must be at least 1 sample, got {batch}")
    coded = CodedStream.of(stream)
    frequency = -np.sort(-coded.frequency())
    sets = coded.sets(batch)
    again = sets.shared(1)
    fit, ranks = _zipf_least_squares(frequency)
    total = max(coded.num_lookups, 1)
    top = [float(frequency[: max(1, round(len(coded.keys) * share))].sum() / total) for share in _TOP_SHARES]
    return StreamStatistics(
        samples=coded.num_samples,
        lookups=coded.num_lookups,
        unique=len(coded.keys),
        zipf_ls=fit,
        zipf_ls_ranks=ranks,
        zipf_mle=_zipf_maximum_likelihood(frequency),
        top_shares=(top[0], top[1], top[2]),
        batch=batch,
        batches=sets.num_groups,
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
    from scipy.optimize import brentq

    if len(frequency) < 2:
        return None
    log_rank = np.log(np.arange(1, len(frequency) + 1))
    observed = float((frequency * log_rank).sum() / frequency.sum())

    def excess(s: float) -> float:
        weight = np.exp(-s * log_rank)
        return float((weight * log_rank).sum() / weight.sum()) - observed

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, 100.0, xtol=1e-10))


def micro_batch_duplication(
    stream: KeyStream | CodedStream,
    *,
    batch: int,
    micro_batches: int,
    rng: np.random.Generator,
    clustering: Assign | None = None,
) -> MicroBatchDuplication:
    """How many rows micro-batches send twice, in order, at random and clustered, over the stream's batches of `batch`.

    Args:
        stream: samples in order.
        batch: samples of a rank's batch.
        micro_batches: N, at most `batch`; micro-batch sizes differ by at most one sample.
        rng: deals the random order.
        clustering: `traces.keys.clustering.cluster_stream`: from stream, batch and N the micro-batch of each sample.

    Raises:
        TraceError: the stream has no full batch, or N is out of range.
    """
    if not 1 <= micro_batches <= batch:
        raise TraceError(f"micro-batches must lie between 1 and the batch of {batch} samples, got {micro_batches}")
    batches = stream.num_samples // batch
    if batches < 1:
        raise TraceError(f"{stream.source}: {stream.num_samples} samples do not fill one batch of {batch}")
    coded = CodedStream.of(stream).slice(0, batches * batch)
    base = coded.sets(batch).sizes()

    def sent(micro_batch: NDArray[np.int64]) -> KeySets:
        return coded.micro_batch_sets(batch, micro_batch, micro_batches)

    def factor(sets: KeySets) -> float:
        return mean_ratio(sets.sizes().reshape(batches, micro_batches).sum(axis=1), base) or 1.0

    in_order = np.tile(np.arange(batch, dtype=np.int64) * micro_batches // batch, batches)
    shuffled = rng.permuted(in_order.reshape(batches, batch), axis=1).ravel()
    plain = sent(in_order)
    return MicroBatchDuplication(
        num_micro_batches=micro_batches,
        in_order=factor(plain),
        random=factor(sent(shuffled)),
        clustered=None if clustering is None else factor(sent(clustering(coded, batch, micro_batches))),
        unique_ratio=mean_ratio(plain.sizes(), plain.lookups()) or 1.0,
    )
