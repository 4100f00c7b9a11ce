"""Perfetto export: slices open and close on their track in time order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.traces.formats.samples import timeline
from traces.formats.export_perfetto import write_perfetto
from traces.formats.protobuf import fields
from traces.table import make_table


def packets(path: Path) -> list[dict[int, Any]]:
    """The packets of a Perfetto trace as field number to last value."""
    return [{part.number: part.value for part in fields(bytes(one.value))} for one in fields(path.read_bytes())]  # type: ignore[arg-type]


def test_perfetto_slices_open_and_close_on_their_track_in_time_order(tmp_path: Path) -> None:
    frame = timeline(ranks=2, steps=2)
    found = packets(write_perfetto(frame, tmp_path / "t.pftrace"))
    assert found[0][13] == 1
    assert all(one[10] == 1 for one in found)
    tracks = {}
    for one in found:
        if 60 in one:
            parts = {part.number: part.value for part in fields(one[60])}
            tracks[parts[1]] = parts
    times = [one[8] for one in found if 11 in one]
    assert times == sorted(times)
    open_slices: dict[Any, int] = {}
    counter: list[int] = []
    for one in found:
        if 11 not in one:
            continue
        event = {part.number: part.value for part in fields(one[11])}
        assert event[11] in tracks
        if event[9] == 4:
            counter.append(event[30])
            continue
        open_slices[event[11]] = open_slices.get(event[11], 0) + (1 if event[9] == 1 else -1)
        assert open_slices[event[11]] in (0, 1)
    assert sum(one.get(8) is not None and 11 in one for one in found) == 2 * len(frame) + len(counter)
    assert set(open_slices.values()) == {0}
    assert counter[-1] == 0
    assert max(counter) == 4096
    names = {bytes(parts[2]).decode() for parts in tracks.values()}
    assert {"rank 0", "rank 1", "compute", "collective bytes in flight"} <= names


def test_perfetto_slices_without_length_close_after_they_open(tmp_path: Path) -> None:
    row = {"source": "assumed: x", "rank": 0, "kind": "wait", "stream": "a", "op": "w"}
    spans = [(0, 5), (5, 5), (5, 5), (5, 9)]
    frame = make_table([{**row, "start_ns": start, "end_ns": end} for start, end in spans]).frame
    kinds = []
    for one in packets(write_perfetto(frame, tmp_path / "t.pftrace")):
        if 11 in one:
            kinds.append({part.number: part.value for part in fields(one[11])}[9])
    assert kinds == [1, 2, 1, 2, 1, 2, 1, 2]
