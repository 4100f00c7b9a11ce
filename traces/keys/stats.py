"""A key stream on a cluster: keys per rank, rows per owner, hot shards, splits, overlap of batches.

A global batch is `batch * world_size` samples, of which rank r holds the r-th run of `batch`. A key's owner is
`owner_of(key, world_size)`. A rank dedups its batch before routing; an owner dedups again what it receives from all
ranks. Ratios are means over batches, as `traces.keys.sets` defines them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TraceError
from traces.keys.sets import CodedStream, KeySets, MicroBatchDuplication, mean_ratio
from traces.keys.stream import KeyStream, owner_of

__all__ = [
    "EXTRAPOLATED_FROM",
    "KeyStatistics",
    "extrapolated_statistics",
    "key_statistics",
    "largest_world_size",
    "resample",
    "split_matrix",
]

#: Fewest batches of one rank from which statistics are extrapolated.
EXTRAPOLATED_FROM: Final = 4

_RESAMPLED_LOOKUPS_MAX: Final = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStatistics:
    """What sizes the All2Alls, lookups and buffer copies of a step; counts of keys are means over global batches.

    Attributes:
        batch: samples a rank takes per step.
        world_size: number of ranks.
        num_batches: global batches that the means are over.
        lookups_per_rank: keys of a rank's batch before any dedup.
        unique_keys_per_rank: keys a rank sends after its own dedup; also the mean number that an owner receives.
        unique_ratio_per_rank: unique keys / lookups of a rank's batch: dedup before routing.
        received_keys_per_owner_max: keys received by the busiest owner.
        owner_skew: that over the mean: how hot the hottest shard is.
        lookup_skew: the same if ranks did not dedup.
        rows_per_owner: distinct keys an owner reads, after its second dedup.
        rows_per_owner_max: the same for the owner with most.
        unique_ratio_at_owner: rows read / keys received, over all owners: dedup after routing.
        split_skew: largest entry of the rank-to-owner split matrix over its mean; None where not known.
        shared_keys_per_rank: keys of a rank's batch that its own previous batch had too; None with one global batch,
            as are the ones below.
        overlap_per_rank: those / the unique keys of the rank's batch.
        shared_rows_per_owner: rows of an owner that the previous global batch touched too, on any rank: what the
            dual-buffer synchronisation copies.
        shared_rows_per_owner_max: the same for the owner with most.
        overlap_at_owner: those / the rows of the global batch.
        shared_lookups: share of a global batch's lookups whose key was in the previous one.
        duplication: row traffic of micro-batches, for each number of them that was asked for.
        origin: measured, resampled or extrapolated.
        source: the stream.
    """

    batch: int
    world_size: int
    num_batches: int
    lookups_per_rank: float
    unique_keys_per_rank: float
    unique_ratio_per_rank: float
    received_keys_per_owner_max: float
    owner_skew: float
    lookup_skew: float
    rows_per_owner: float
    rows_per_owner_max: float
    unique_ratio_at_owner: float
    split_skew: float | None
    shared_keys_per_rank: float | None
    overlap_per_rank: float | None
    shared_rows_per_owner: float | None
    shared_rows_per_owner_max: float | None
    overlap_at_owner: float | None
    shared_lookups: float | None
    duplication: tuple[MicroBatchDuplication, ...] = ()
    origin: str
    source: str


def largest_world_size(stream: KeyStream | CodedStream, batch: int, num_batches: int = 2) -> int:
    """Most ranks for which the stream fills `num_batches` global batches; 0 where it cannot fill one rank's."""
    return stream.num_samples // (batch * num_batches)


def resample(stream: KeyStream | CodedStream, num_samples: int, rng: np.random.Generator) -> CodedStream:
    """`num_samples` samples drawn with replacement: no key that the stream lacks, so unique counts are low bounds.

    Raises:
        TraceError: if they would hold more than 100 million lookups, which need some 2 GB.
    """
    lookups = num_samples * max(1.0, stream.num_lookups / max(1, stream.num_samples))
    if lookups > _RESAMPLED_LOOKUPS_MAX:
        fits = int(num_samples * _RESAMPLED_LOOKUPS_MAX / lookups)
        raise TraceError(
            f"{stream.source}: {num_samples:,} samples drawn with replacement hold {lookups:,.0f} lookups, more than "
            f"the {_RESAMPLED_LOOKUPS_MAX:,} that are kept in memory; draw at most {fits:,} samples (a smaller "
            "batch or world size), or extrapolate"
        )
    drawn = CodedStream.of(stream).take(rng.integers(0, stream.num_samples, num_samples))
    return replace(drawn, source=f"{stream.source} (resampled with replacement to {num_samples} samples)")


def split_matrix(stream: KeyStream | CodedStream, batch: int, world_size: int) -> NDArray[np.int64]:
    """Keys each rank sends to each owner in the first global batch, after the rank's dedup: int64 (rank, owner).

    Raises:
        TraceError: the stream has less than one global batch.
    """
    _check_fill(stream, batch, world_size)
    coded = CodedStream.of(stream)
    matrix = _loads(coded.sets(batch, world_size), owner_of(coded.keys, world_size), world_size)
    return matrix.astype(np.int64)


def key_statistics(
    stream: KeyStream | CodedStream,
    *,
    batch: int,
    world_size: int,
    duplication: tuple[MicroBatchDuplication, ...] = (),
    origin: str = "measured",
) -> KeyStatistics:
    """Counts per rank and per owner over the global batches that the stream fills.

    Raises:
        TraceError: the stream has less than one global batch.
    """
    num_batches = _check_fill(stream, batch, world_size)
    coded = CodedStream.of(stream)
    owner = owner_of(coded.keys, world_size)
    ranks = coded.sets(batch, num_batches * world_size)
    whole = ranks.joined(world_size)
    received = _loads(ranks, owner, world_size, ranks_per_step=world_size)
    rows = _loads(whole, owner, world_size)
    raw = _loads(whole, owner, world_size, counted=True)
    rank_again = ranks.shared(world_size)
    again = whole.shared(1)
    shared = _loads(again, owner, world_size)[1:]
    pairs = (num_batches - 1) * world_size
    return KeyStatistics(
        batch=batch,
        world_size=world_size,
        num_batches=num_batches,
        lookups_per_rank=float(ranks.lookups().mean()),
        unique_keys_per_rank=float(received.mean()),
        unique_ratio_per_rank=mean_ratio(ranks.sizes(), ranks.lookups()) or 1.0,
        received_keys_per_owner_max=_mean_max(received),
        owner_skew=_mean_max(received) / float(received.mean()),
        lookup_skew=_mean_max(raw) / float(raw.mean()),
        rows_per_owner=float(rows.mean()),
        rows_per_owner_max=_mean_max(rows),
        unique_ratio_at_owner=mean_ratio(rows.sum(axis=1), received.sum(axis=1)) or 1.0,
        split_skew=_split_skew(ranks, owner, world_size),
        shared_keys_per_rank=len(rank_again.code) / pairs if pairs else None,
        overlap_per_rank=mean_ratio(rank_again.sizes()[world_size:], ranks.sizes()[world_size:]),
        shared_rows_per_owner=float(shared.mean()) if pairs else None,
        shared_rows_per_owner_max=_mean_max(shared) if pairs else None,
        overlap_at_owner=mean_ratio(again.sizes()[1:], whole.sizes()[1:]),
        shared_lookups=mean_ratio(again.lookups()[1:], whole.lookups()[1:]),
        duplication=duplication,
        origin=origin,
        source=stream.source,
    )


def _check_fill(stream: KeyStream | CodedStream, batch: int, world_size: int) -> int:
    """Number of global batches that the stream fills, at least one."""
    if world_size < 1 or batch < 1:
        raise TraceError(f"batch and world size must be at least 1, got {batch} and {world_size}")
    num_batches = stream.num_samples // (batch * world_size)
    if num_batches < 1:
        fits = largest_world_size(stream, batch, 1)
        raise TraceError(
            f"{stream.source}: {stream.num_samples} samples do not fill one global batch of {batch} x {world_size}; "
            f"use at most {fits} ranks, extrapolate, or resample"
            if fits
            else f"{stream.source}: {stream.num_samples} samples do not fill one batch of {batch}; use a smaller batch"
        )
    if not stream.num_lookups:
        raise TraceError(f"{stream.source}: no keys in {stream.num_samples} samples; expected at least one lookup")
    return num_batches


def _loads(
    sets: KeySets, owner: NDArray[np.int64], world_size: int, *, ranks_per_step: int = 1, counted: bool = False
) -> NDArray[np.float64]:
    """Keys per owner and step: float64 (steps, owners); a step is one group or `ranks_per_step`."""
    loads = np.zeros((sets.num_groups // ranks_per_step, world_size))
    flat = loads.reshape(-1)
    for part, cells in sets.cells(owner, world_size):
        if ranks_per_step > 1:
            group, own = np.divmod(cells, world_size)
            cells = group // ranks_per_step * world_size + own
        if len(cells):
            low = int(cells.min())
            found = np.bincount(cells - low, weights=sets.count[part] if counted else None)
            flat[low : low + len(found)] += found
    return loads


def _mean_max(loads: NDArray[np.float64]) -> float:
    """Load of the busiest owner, mean over steps."""
    return float(loads.max(axis=1).mean())


def _split_skew(ranks: KeySets, owner: NDArray[np.int64], world_size: int) -> float:
    """Largest split over the mean split, mean over the global batches."""
    largest = np.zeros(ranks.num_groups // world_size)
    for _, cells in ranks.cells(owner, world_size):
        found, counts = np.unique(cells, return_counts=True)
        np.maximum.at(largest, found // world_size**2, counts)
    total = np.diff(ranks.bounds[::world_size])
    return mean_ratio((largest * world_size**2).astype(np.int64), total) or 1.0


def extrapolated_statistics(
    stream: KeyStream | CodedStream, *, batch: int, world_size: int, duplication: tuple[MicroBatchDuplication, ...] = ()
) -> KeyStatistics:
    """The same counts at a world size that the stream is too short for, from how they grow inside the stream.

    - Rows of n samples: U(n) = a n^b through the largest three doublings that the stream holds (Heaps' law, local
      exponent). Rows that neighbouring global batches of n share: 2 U(n) - U(2n), inclusion and exclusion for a
      stationary stream.
    - Keys received by an owner: world_size times the sum over its keys of the share of rank batches that hold the key.
    - Most rows of an owner: mean m plus sqrt(2 m ln(world_size)), the largest of world_size Poisson counts.

    What a rank sees of its own batch stays measured. `origin` says extrapolated.

    Raises:
        TraceError: the stream has fewer than four batches.
    """
    batches = stream.num_samples // batch if batch > 0 else 0
    if batches < EXTRAPOLATED_FROM:
        raise TraceError(
            f"{stream.source}: {batches} batches of {batch} samples are too few to extrapolate; "
            f"needs {EXTRAPOLATED_FROM}"
        )
    coded = CodedStream.of(stream)
    owner = owner_of(coded.keys, world_size)
    present = np.bincount(coded.sets(batch).code, minlength=len(coded.keys)) / batches
    received = world_size * np.bincount(owner, weights=present, minlength=world_size)
    lookups = np.bincount(owner, weights=coded.frequency(), minlength=world_size)
    total, double = _heaps(coded, batch, np.array([1, 2]) * batch * world_size)
    rows, shared = total / world_size, max(0.0, 2 * total - double) / world_size
    log_ranks = 2 * float(np.log(world_size))
    return replace(
        key_statistics(coded, batch=batch, world_size=1, duplication=duplication, origin="extrapolated"),
        world_size=world_size,
        received_keys_per_owner_max=float(received.max()),
        owner_skew=float(received.max() / received.mean()),
        lookup_skew=float(lookups.max() / lookups.mean()),
        rows_per_owner=rows,
        rows_per_owner_max=rows + float(np.sqrt(rows * log_ranks)),
        unique_ratio_at_owner=rows / float(received.mean()),
        split_skew=None,
        shared_rows_per_owner=shared,
        shared_rows_per_owner_max=shared + float(np.sqrt(shared * log_ranks)),
        overlap_at_owner=shared / rows,
        shared_lookups=None,
    )


def _heaps(coded: CodedStream, batch: int, samples: NDArray[np.int64]) -> tuple[float, ...]:
    """Distinct keys of runs of so many samples, by the power law through the largest three doublings in the stream."""
    largest = batch << ((coded.num_samples // batch).bit_length() - 1)
    sizes = np.array([largest // 4, largest // 2, largest])
    unique = [coded.sets(int(size)).sizes().mean() for size in sizes]
    exponent, log_scale = np.polyfit(np.log(sizes), np.log(unique), 1)
    return tuple(float(value) for value in np.exp(log_scale + exponent * np.log(samples)))
