"""A trace table or Timeline as a Perfetto protobuf trace: all ranks in one file, written as a stream of packets.

One process track per rank, one child track per stream, and a counter of the bytes that the rank's collectives have in
flight. Names are interned, so a long run costs some thirty bytes a slice.

Source: Perfetto, protos/perfetto/trace: TracePacket, TrackEvent, TrackDescriptor, InternedData (v45 and later).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from nestpipe.base import TraceError, atomic_file
from traces.formats.export_kineto import NO_TIMES, timed_rows
from traces.formats.protobuf import message, text_field, uint_field

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["packets", "write_perfetto"]

SEQUENCE = 1
CLEARED, NEEDS_STATE = 1, 2
SLICE_BEGIN, SLICE_END, COUNTER = 1, 2, 4
UNIT_BYTES = 3
_NOTES = ("step", "batch", "micro_batch", "bytes", "keys", "unique_keys", "wait_ns")


class _Interned:
    """Numbers for names, and the packet part that introduces new ones."""

    def __init__(self, field: int) -> None:
        self.field = field
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> tuple[int, bytes]:
        """The name's number, and its introduction if it is new."""
        known = self._numbers.get(name)
        if known is not None:
            return known, b""
        number = self._numbers[name] = len(self._numbers) + 1
        return number, message(self.field, uint_field(1, number) + text_field(2, name))


def _packet(body: bytes) -> bytes:
    return message(1, body)


def _descriptor(track: int, parent: int | None, kind: bytes, name: str, first: bool) -> bytes:
    body = uint_field(1, track) + text_field(2, name) + kind
    if parent is not None:
        body += uint_field(5, parent)
    flags = uint_field(13, CLEARED) if first else b""
    return _packet(uint_field(10, SEQUENCE) + flags + message(60, body))


def _event(time_ns: int, body: bytes, interned: bytes = b"") -> bytes:
    packet = uint_field(8, time_ns) + uint_field(10, SEQUENCE) + uint_field(13, NEEDS_STATE)
    if interned:
        packet += message(12, interned)
    return _packet(packet + message(11, body))


def _tracks(frame: pd.DataFrame) -> tuple[list[bytes], npt.NDArray[np.int64], dict[int, int]]:
    """Descriptors, the track of every row, and the counter track of every rank."""
    ranks = frame["rank"].fillna(0).astype("int64").to_numpy()
    streams = frame["stream"].astype("string").fillna("unnamed").to_numpy()
    descriptors: list[bytes] = []
    rows = np.zeros(len(frame), dtype=np.int64)
    counters: dict[int, int] = {}
    track = 0
    for rank in np.unique(ranks):
        track += 1
        process = track
        kind = message(3, uint_field(1, int(rank) + 1) + text_field(6, f"rank {rank}"))
        descriptors.append(_descriptor(process, None, kind, f"rank {rank}", not descriptors))
        mine = ranks == rank
        for stream in sorted(set(streams[mine])):
            track += 1
            rows[mine & (streams == stream)] = track
            descriptors.append(_descriptor(track, process, b"", str(stream), False))
        track += 1
        counters[int(rank)] = track
        unit = message(8, uint_field(3, UNIT_BYTES))
        descriptors.append(_descriptor(track, process, unit, "collective bytes in flight", False))
    return descriptors, rows, counters


def _order(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Row numbers of begins (0..n) and ends (n..2n) in time order.

    At one moment ends come first, but an op of no length ends right after it began.
    """
    count = len(start)
    empty = start == end
    times = np.concatenate((start, end))
    rank = np.concatenate((np.where(empty, 1, 2), np.where(empty, 1, 0)))
    pair = np.concatenate((2 * np.arange(count), 2 * np.arange(count) + 1))
    return np.lexsort((pair, rank, times))


def _integers(column: Any) -> list[int | None]:
    return [None if missing else int(value) for value, missing in zip(column, column.isna(), strict=True)]


def packets(frame: pd.DataFrame) -> Iterator[bytes]:
    """The packets of a trace, in time order; rows without times are left out.

    Raises:
        TraceError: no row has times.
    """
    timed = timed_rows(frame).reset_index(drop=True)
    if not len(timed):
        raise TraceError(NO_TIMES)
    start = np.asarray(timed["start_ns"], dtype=np.int64)
    end = np.asarray(timed["end_ns"], dtype=np.int64)
    origin = min(int(start.min()), 0)
    descriptors, track, counter = _tracks(timed)
    yield from descriptors
    names, labels = _Interned(2), _Interned(3)
    kinds = timed["kind"].astype("string").to_numpy()
    ops = timed["op"].astype("string").fillna("").to_numpy()
    ranks = timed["rank"].fillna(0).astype("int64").to_numpy()
    notes = {name: _integers(timed[name]) for name in _NOTES if name in timed}
    in_flight = dict.fromkeys(counter, 0)
    count = len(timed)
    for position in _order(start, end):
        row = int(position) % count
        begins = position < count
        moment = int(start[row] if begins else end[row]) - origin
        if begins:
            # a schedule's ops are named by kind and batch; the kind alone makes a legend, the rest are notes
            name = str(kinds[row]) if ops[row].startswith(str(kinds[row])) or not ops[row] else str(ops[row])
            number, interned = names.number(name)
            body = uint_field(9, SLICE_BEGIN) + uint_field(11, int(track[row])) + uint_field(10, number)
            for note, values in notes.items():
                if (value := values[row]) is not None:
                    label, new = labels.number(note)
                    interned += new
                    body += message(4, uint_field(1, label) + uint_field(4, value))
            yield _event(moment, body, interned)
        else:
            yield _event(moment, uint_field(9, SLICE_END) + uint_field(11, int(track[row])))
        moved = notes["bytes"][row] if "bytes" in notes else None
        if moved is not None and str(kinds[row]).startswith(("all_", "reduce_scatter")):
            rank = int(ranks[row])
            in_flight[rank] += moved if begins else -moved
            body = uint_field(9, COUNTER) + uint_field(11, counter[rank]) + uint_field(30, in_flight[rank])
            yield _event(moment, body)


def write_perfetto(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Writes a trace for ui.perfetto.dev or trace_processor; the file appears whole or not at all.

    Args:
        frame: rows of a trace table or Timeline, of any number of ranks.
        path: the file to write.

    Raises:
        TraceError: no row has times, or the file cannot be written.
    """
    with atomic_file(path, TraceError) as file:
        for packet in packets(frame):
            file.write(packet)
    return Path(path)
