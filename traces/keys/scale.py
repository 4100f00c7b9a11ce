"""Key files at the scale of a cluster: what they measure where they are long enough, what is drawn or extrapolated.

`statistics_at` decides which of the three it is; `KeyRatios` answers what a simulation asks and remembers it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from nestpipe.base import TraceError
from traces.keys.clustering import cluster_stream
from traces.keys.reader import detect_layout, read_keys
from traces.keys.sets import CodedStream, MicroBatchDuplication, micro_batch_duplication
from traces.keys.stats import (
    EXTRAPOLATED_FROM,
    KeyStatistics,
    extrapolated_statistics,
    key_statistics,
    largest_world_size,
    resample,
)
from traces.keys.stream import KeyStream, group_sequences

__all__ = ["KeyFiles", "KeyRatios", "duplication_of", "read_key_files", "statistics_at"]

#: Micro-batches are formed of so many batches of a stream at most, evenly spread.
CLUSTERED_BATCHES: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFiles:
    """Key files as they were read.

    Attributes:
        stream: the columns that were asked for.
        every: all columns of the files that may hold keys.
        facts: file names, format, columns, order.
    """

    stream: KeyStream
    every: KeyStream
    facts: dict[str, Any]


def read_key_files(
    files: Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    order_by: str | None = None,
    sequence: int | None = None,
    only: bool = False,
) -> KeyFiles:
    """The stream of key files that follow one another.

    Args:
        files: paths.
        columns: which hold the keys; the layout's own choice without.
        order_by: column to sort the samples by.
        sequence: most items of a user history, of which a sample is then made; needs two columns, user and item.
        only: leaves `every` at the chosen columns.

    Raises:
        TraceError: an unreadable file, an unknown column, or a sequence without its two columns.
    """
    layout = detect_layout(files[0])
    candidates = (*(columns or ()), *(layout.default_columns if only and not sequence else layout.key_columns))
    read = tuple(dict.fromkeys(columns if only and columns else candidates)) or None
    whole = read_keys(files, columns=read, order_by=order_by)
    wanted = list(columns or layout.default_columns or whole.features)
    if sequence is None:
        stream, every = whole.select(wanted), whole
    else:
        wanted = list(columns or layout.key_columns)
        if len(wanted) != 2:
            raise TraceError(
                f"a sequence needs two columns, the user and the item: name both, got {', '.join(wanted) or 'none'}"
            )
        stream = every = group_sequences(whole, wanted[0], wanted[1], sequence)
    facts = {
        "files": [Path(file).name for file in files],
        "file_format": str(layout.format),
        "key_columns": wanted,
        "other_columns": [name for name in layout.columns if name not in wanted],
        "order": order_by or "file",
    }
    return KeyFiles(stream=stream, every=every, facts=facts)


def duplication_of(
    stream: KeyStream | CodedStream, batch: int, micro_batches: int, seed: int
) -> tuple[MicroBatchDuplication, str | None]:
    """Rows that micro-batches send twice, in order, at random and clustered, and a note if not all batches were used.

    Raises:
        TraceError: the stream has no full batch, or the number of micro-batches is out of range.
    """
    some = CodedStream.of(stream)
    batches, note = some.num_samples // batch, None
    if batches > CLUSTERED_BATCHES:
        chosen = np.linspace(0, batches - 1, CLUSTERED_BATCHES).astype(np.int64)
        some = some.take((chosen[:, None] * batch + np.arange(batch)).ravel())
        note = f"micro-batches: from {CLUSTERED_BATCHES} of the {batches} batches, evenly spread"
    found = micro_batch_duplication(
        some,
        batch=batch,
        micro_batches=micro_batches,
        rng=np.random.default_rng(seed),
        clustering=lambda *those: cluster_stream(*those, seed=seed),
    )
    return found, note


def statistics_at(
    stream: KeyStream | CodedStream,
    *,
    batch: int,
    world_size: int,
    drawn: bool = False,
    seed: int = 0,
    duplication: tuple[MicroBatchDuplication, ...] = (),
) -> tuple[KeyStatistics, str | None]:
    """Statistics at a world size, measured if the stream fills two global batches; else a note explains the answer.

    Args:
        stream: samples in order.
        batch: samples a rank takes per step.
        world_size: number of ranks, or of owners if a domain of them shares a copy of the tables.
        drawn: where the stream is too short, draw samples with replacement instead of extrapolating.
        seed: of the draw.
        duplication: is passed on.

    Raises:
        TraceError: the stream is too short even for extrapolation, or what would be drawn too much.
    """
    need = 2 * batch * world_size
    if stream.num_samples >= need:
        return key_statistics(stream, batch=batch, world_size=world_size, duplication=duplication), None
    short = f"{stream.num_samples} samples are fewer than two global batches of {batch} x {world_size} = {need}"
    if drawn:
        longer = resample(stream, need, np.random.default_rng(seed))
        found = key_statistics(longer, batch=batch, world_size=world_size, duplication=duplication, origin="resampled")
        return found, (
            f"{short}: resampled with replacement, seed {seed}; unique keys are low bounds, overlaps high ones"
        )
    batches, fits = stream.num_samples // batch, largest_world_size(stream, batch)
    if batches < EXTRAPOLATED_FROM:
        raise TraceError(
            f"{stream.source}: {short}, and {batches} batches of one rank are too few to extrapolate from, which needs "
            f"{EXTRAPOLATED_FROM}; use a smaller batch, or resample"
        )
    found = extrapolated_statistics(stream, batch=batch, world_size=world_size, duplication=duplication)
    return found, (
        f"{short}: numbers at the owner are extrapolated from {batches} batches of one rank (measured up to "
        f"world size {fits}; resampling draws samples with replacement instead)"
    )


class KeyRatios:
    """What a simulation needs of key files, computed once each: statistics by batch, owners and micro-batches.

    A copy that is pickled, for the workers of a sweep, knows what was asked before and nothing else.
    """

    def __init__(self, files: KeyFiles, *, drawn: bool = False, seed: int = 0) -> None:
        """From files that were read; `drawn` and `seed` as in `statistics_at`, the seed also of the clustering."""
        self.facts = files.facts
        self.lookups_per_sample = files.stream.num_lookups / max(1, files.stream.num_samples)
        self.drawn, self.seed = drawn, seed
        self._coded: CodedStream | None = CodedStream.of(files.stream)
        self.digest = _digest(self._coded)
        self._scaled: dict[tuple[int, int], tuple[KeyStatistics, str | None] | str] = {}
        self._duplication: dict[tuple[int, int], tuple[MicroBatchDuplication, str | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coded": None}

    def __repr__(self) -> str:
        return f"KeyRatios({self.facts}, drawn={self.drawn}, seed={self.seed}, digest={self.digest})"

    def at(self, batch: int, owners: int, micro_batches: int) -> KeyStatistics:
        """Statistics for `batch` samples a rank, `owners` ranks that share the tables, and N micro-batches.

        Raises:
            TraceError: the files say nothing about such a configuration.
        """
        if (batch, owners) not in self._scaled:
            self._scaled[batch, owners] = self._at_scale(batch, owners)
        found = self._scaled[batch, owners]
        if isinstance(found, str):
            raise TraceError(found)
        if micro_batches == 1:
            return found[0]
        if (batch, micro_batches) not in self._duplication:
            self._duplication[batch, micro_batches] = duplication_of(self._read(), batch, micro_batches, self.seed)
        return replace(found[0], duplication=(self._duplication[batch, micro_batches][0],))

    def notes(self, batch: int, owners: int, micro_batches: int) -> tuple[str, ...]:
        """How `at` came to its answer, where it is not simply measured."""
        scaled, split = self._scaled.get((batch, owners)), self._duplication.get((batch, micro_batches))
        said = (None if scaled is None or isinstance(scaled, str) else scaled[1], None if split is None else split[1])
        return tuple(note for note in said if note is not None)

    def origins(self) -> dict[str, list[int]]:
        """For measured, extrapolated and resampled the numbers of owners that were asked for, ascending."""
        found: dict[str, set[int]] = {}
        for (_, owners), answer in sorted(self._scaled.items()):
            if not isinstance(answer, str):
                found.setdefault(answer[0].origin, set()).add(owners)
        return {origin: sorted(sizes) for origin, sizes in found.items()}

    def _at_scale(self, batch: int, owners: int) -> tuple[KeyStatistics, str | None] | str:
        try:
            return statistics_at(self._read(), batch=batch, world_size=owners, drawn=self.drawn, seed=self.seed)
        except TraceError as error:
            return str(error)

    def _read(self) -> CodedStream:
        if self._coded is None:
            raise TraceError(f"{', '.join(self.facts['files'])}: the keys stayed behind when this was pickled")
        return self._coded


def _digest(coded: CodedStream) -> str:
    """The first 12 hex digits of a hash of every lookup."""
    found = hashlib.sha256(coded.keys.data)
    found.update(coded.code.data)
    found.update(coded.sample_offsets.data)
    return found.hexdigest()[:12]
