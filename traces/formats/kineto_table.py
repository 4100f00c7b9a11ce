"""Rows of the trace table from joined profiler traces: device work, the host's steps and its blocking calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.formats.intervals import merge
from traces.formats.json_stream import whole
from traces.formats.kineto_events import BUSY_GAP_NS_MAX, DeviceClass, HostRange, KinetoEvents, argument_bytes
from traces.formats.kineto_join import Joined, group_of
from traces.formats.phases import kind_name, kind_of_collective
from traces.formats.skew import Matched
from traces.table import Origin, provenance

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["kineto_frames", "splits_text", "waits_by_event"]

_ROWS = 1 << 15


def splits_text(value: object) -> str | None:
    """Elements to each peer as a JSON list; `None` where none are recorded.

    >>> splits_text("[768, 768]"), splits_text("[]"), splits_text([1, 2])
    ('[768, 768]', None, '[1, 2]')
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value:
        return None
    numbers = [whole(item) for item in value]
    return None if any(number is None for number in numbers) else json.dumps(numbers)


def _optional(values: Sequence[int | None]) -> Any:
    import pandas as pd

    return pd.array(values, dtype="Int64")


def _known(values: Any, missing: Any) -> Any:
    import pandas as pd

    return pd.arrays.IntegerArray(np.asarray(values, dtype=np.int64).copy(), np.asarray(missing, dtype=np.bool_).copy())


def _exchange_columns(joined: Joined, waits: Mapping[int, int], part: range, seen: set[int]) -> dict[str, Any]:
    """Columns that only collectives and copies fill; of several kernels of one collective the first has its bytes."""
    events = joined.events
    columns: dict[str, list[Any]] = {
        name: [None] * len(part)
        for name in ("bytes", "bytes_out", "group", "group_size", "splits", "splits_out", "wait_ns")
    }
    for row, index in enumerate(part):
        op = joined.ops[index]
        if events.device_class[index] == DeviceClass.MEM and events.device_bytes[index] >= 0:
            columns["bytes"][row] = events.device_bytes[index]
        if op.collective is None:
            continue
        columns["wait_ns"][row] = waits.get(index)
        host = op.host
        if host is None:
            host = HostRange("", 0, 0, -1, args=events.comm_args.get(index, {}))
            host.bytes_in, host.bytes_out = argument_bytes(host.args, "In"), argument_bytes(host.args, "Out")
        elif id(host) in seen:
            continue
        else:
            seen.add(id(host))
        group, size = group_of(host)
        columns["bytes"][row], columns["bytes_out"][row] = host.bytes_in, host.bytes_out
        columns["group"][row] = group or None
        columns["group_size"][row] = size or events.world_size
        columns["splits"][row] = splits_text(host.args.get("In split size"))
        columns["splits_out"][row] = splits_text(host.args.get("Out split size"))
    return columns


def _device_rows(joined: Joined, waits: Mapping[int, int], shift_ns: int, part: range, seen: set[int]) -> pd.DataFrame:
    import pandas as pd

    events, chosen = joined.events, slice(part.start, part.stop)
    start = np.asarray(events.device_start_ns, dtype=np.int64)[chosen] + shift_ns
    duration = np.asarray(events.device_duration_ns, dtype=np.int64)[chosen]
    thread, step, ops = joined.launch_thread[chosen], joined.step[chosen], joined.ops[chosen]
    unlaunched = thread < 0
    no_step = step < 0
    offsets = np.array([op.batch_offset for op in ops], dtype=np.int64)
    text = np.array([*events.threads, None], dtype=object)
    streams = np.array([*events.streams, ""], dtype=object)
    names = np.array([*events.names, ""], dtype=object)
    frame = pd.DataFrame(
        {
            "step": _known(step, no_step),
            "batch": _known(step + offsets, no_step),
            "stream": streams[np.asarray(events.device_stream)[chosen]],
            "kind": [kind_name(op.kind) for op in ops],
            "op": names[np.asarray(events.device_name)[chosen]],
            "start_ns": start,
            "end_ns": start + duration,
            "duration_ns": duration,
            "collective": [op.collective for op in ops],
            "launch_ns": _known(joined.launch_start_ns[chosen] + shift_ns, unlaunched),
            "launch_end_ns": _known(joined.launch_end_ns[chosen] + shift_ns, unlaunched),
            "thread": text[thread],
        },
        index=range(len(part)),
    )
    for name, values in _exchange_columns(joined, waits, part, seen).items():
        is_text = name in ("group", "splits", "splits_out")
        frame[name] = pd.array(values, dtype="string") if is_text else _optional(values)
    return frame


def _busy(events: KinetoEvents) -> list[tuple[int, int]]:
    """The stretches in which any host thread had recorded work open, each apart from the next by a real gap.

    Nothing without steps: then no replay can ask for them.
    """
    if not events.steps:
        return []
    start = np.asarray(events.busy_start_ns, dtype=np.int64)
    end = np.asarray(events.busy_end_ns, dtype=np.int64)
    starts, ends = merge(start, end + BUSY_GAP_NS_MAX)
    return list(zip(starts.tolist(), (ends - BUSY_GAP_NS_MAX).tolist(), strict=True))


def _host_rows(joined: Joined, shift_ns: int) -> list[dict[str, Any]]:
    events = joined.events
    rows: list[dict[str, Any]] = []
    steps = [(found.start_ns, found.end_ns, int(found.name.split("#")[1])) for found in events.steps]

    def step_at(moment: int) -> int | None:
        return next((number for begin, end, number in steps if begin <= moment < end), None)

    def row(found: HostRange, kind: str) -> dict[str, Any]:
        return {
            "step": step_at(found.start_ns),
            "stream": events.threads[found.thread],
            "thread": events.threads[found.thread],
            "kind": kind,
            "op": found.name,
            "start_ns": found.start_ns + shift_ns,
            "end_ns": found.end_ns + shift_ns,
        }

    rows.extend(row(found, "step") for found in events.steps)
    rows.extend(row(found, "host_wait") for found in events.waits)
    rows.extend(row(found, "host_call") for found in events.calls)
    rows.extend(
        {
            "stream": "host",
            "thread": "host",
            "kind": "host_work",
            "op": "recorded host work",
            "start_ns": start + shift_ns,
            "end_ns": end + shift_ns,
        }
        for start, end in _busy(events)
    )
    launched = {id(op.host) for op in joined.ops if op.host is not None}
    for found in joined.collectives:
        if id(found) in launched:
            continue
        # the device's part was not recorded: what was asked for is known, how long it took is not
        kind, _ = kind_of_collective(found.collective or "unknown", found.phase, found.integers)
        group, size = group_of(found)
        one = row(found, kind_name(kind))
        del one["start_ns"], one["end_ns"], one["stream"]
        one.update(collective=found.collective, bytes=found.bytes_in, bytes_out=found.bytes_out, group=group or None)
        one.update(launch_ns=found.start_ns + shift_ns, launch_end_ns=found.end_ns + shift_ns)
        one["group_size"] = size or events.world_size
        rows.append(one)
    return rows


def waits_by_event(matched: Sequence[Matched], position: int) -> dict[int, int]:
    """For the rank at this position: the wait of each device event that is a matched collective."""
    waits: dict[int, int] = {}
    for one in matched:
        for exchange, wait in zip(one.exchanges, one.waits_ns, strict=True):
            if exchange.position != position:
                continue
            left = wait
            for index in exchange.events:
                # the wait lies at the beginning; where one collective is several kernels it may outlast the first
                waits[index] = min(left, exchange.duration_ns_of[index])
                left -= waits[index]
    return waits


def kineto_frames(joined: Joined, waits: Mapping[int, int], offset_ns: int, origin_ns: int) -> Iterator[pd.DataFrame]:
    """All rows of one rank, some ten thousand at a time: first those of the device, then the host's.

    Args:
        joined: the rank.
        waits: ns that a device event spent waiting for a peer, by its index.
        offset_ns: how far this rank's clock is ahead.
        origin_ns: the moment that the table calls 0.
    """
    import pandas as pd

    shift = joined.events.base_ns - offset_ns - origin_ns
    seen: set[int] = set()
    count = len(joined.ops)
    for start in range(0, count, _ROWS):
        part = range(start, min(start + _ROWS, count))
        yield _labelled(_device_rows(joined, waits, shift, part, seen), joined)
    host = _host_rows(joined, shift)
    if host or not count:
        yield _labelled(pd.DataFrame.from_records(host, columns=None if host else ["kind", "op"]), joined)


def _labelled(frame: pd.DataFrame, joined: Joined) -> pd.DataFrame:
    """The rows with their rank and source."""
    import pandas as pd

    frame["rank"] = pd.array([joined.events.rank] * len(frame), dtype="Int64")
    frame["source"] = provenance(Origin.MEASURED, Path(joined.events.path).name)
    return frame
