"""What no device does, found in a profiler trace: copies of events, lost times, overlaps within an in-order stream.

What can be put right is (copies are dropped), what cannot is noted, and what would make every number wrong is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe.base import TraceError, ns_to_us
from traces.formats.kineto_events import DeviceClass, KinetoEvents

__all__ = ["check_events"]

# start and duration are rounded to whole us each by older profilers
_OVERLAP_NS_MAX = 1_000


def check_events(events: KinetoEvents) -> list[str]:
    """Drops copies of device events and returns what has to be known of the rest.

    Raises:
        TraceError: the file holds several ranks, or device events have lost their time stamps.
    """
    devices = _devices(events)
    if len(events.processes) > 1:
        raise TraceError(
            f"{events.path}: holds {len(events.processes)} processes with device work or steps (pid "
            f"{', '.join(sorted(events.processes)[:4])}); a file must be of one rank: split it by pid"
        )
    notes = []
    if len(devices) > 1:
        notes.append(f"kernels ran on {len(devices)} devices ({', '.join(devices[:4])}); counted as one rank's")
    if copies := _drop_copies(events):
        notes.append(f"{copies} device events are in the file twice or more; the copies were left out")
    _lost_times(events)
    return notes + _overlaps(events)


def _devices(events: KinetoEvents) -> list[str]:
    used = {
        stream for stream, one in zip(events.device_stream, events.device_class, strict=True) if one != DeviceClass.MEM
    }
    return sorted({events.streams[stream].partition(" stream ")[0] for stream in used})


def _drop_copies(events: KinetoEvents) -> int:
    """Leaves one of the device events that agree in everything and take time; returns how many went."""
    names = ("correlation", "name", "duration_ns", "start_ns", "stream")
    columns = [np.asarray(getattr(events, f"device_{name}")) for name in names]
    order = np.lexsort(columns)
    alike = np.ones(max(order.size - 1, 0), dtype=np.bool_)
    for column in columns:
        alike &= column[order][1:] == column[order][:-1]
    copies = order[1:][alike & (columns[2][order][1:] > 0)]
    del columns, column  # views of what is emptied now
    if not copies.size:
        return 0
    kept = np.ones(order.size, dtype=np.bool_)
    kept[copies] = False
    place = np.cumsum(kept) - 1
    events.comm_args = {int(place[at]): args for at, args in events.comm_args.items() if kept[at]}
    for name in ("class", "name", "stream", "start_ns", "duration_ns", "correlation", "bytes"):
        values: Any = getattr(events, f"device_{name}")
        left = np.asarray(values)[kept].tobytes()
        del values[:]
        values.frombytes(left)
    return int(copies.size)


def _by_stream(events: KinetoEvents) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Starts and ends of the device events that take time, stream by stream; whether the next is on the same stream."""
    stream = np.asarray(events.device_stream, dtype=np.int64)
    start = np.asarray(events.device_start_ns, dtype=np.int64)
    duration = np.asarray(events.device_duration_ns, dtype=np.int64)
    order = np.lexsort((start, stream))
    order = order[duration[order] > 0]
    return start[order], (start + duration)[order], stream[order][1:] == stream[order][:-1]


def _lost_times(events: KinetoEvents) -> None:
    start, _, same = _by_stream(events)
    lost = int((same & (start[1:] == 0) & (start[:-1] == 0)).sum())
    if lost and start.max() > 0:
        zero = int((start == 0).sum())
        raise TraceError(
            f"{events.path}: {zero} of {start.size} device events have the time stamp 0, several of them on one "
            "stream; the profiler lost their times, so record again"
        )


def _overlaps(events: KinetoEvents) -> list[str]:
    start, end, same = _by_stream(events)
    if not same.any():
        return []
    over = np.where(same, end[:-1] - start[1:], 0)
    late = int((over > _OVERLAP_NS_MAX).sum())
    if not late:
        return []
    return [
        f"{late} device events last beyond the start of the next one on their stream, by up to "
        f"{ns_to_us(int(over.max()))} us; a stream runs in order, so these durations and all sums of them are wrong"
    ]
