"""From a trace table to a recording.

Rules, after Lumos (arXiv 2504.09307): a device op starts after its launch, after the op before it on its stream and
after the op of another stream that it waited for; a blocking host call returns after the device work that it awaited.
The threads of a host take turns: a call begins after the one that ended last before it, on whichever thread.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from nestpipe.base import TraceError
from traces.formats.intervals import merge
from traces.recording.model import Activity, Call, DeviceOp, Latencies, Meeting, RankRecording, Recording
from traces.recording.schedule import own_routing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["recording"]

_Ints = npt.NDArray[np.int64]
_STEP: Final = "step"
#: An op that starts within this long after an op of another stream has ended is taken to have waited for it.
_EVENT_WAIT_NS: Final = 10_000
#: An op that was ready for longer than this, while other streams computed for this share of the time, waited for room.
_ROOM_NS_MIN: Final = 10_000
_FULL: Final = 0.9
_LOOK_BACK: Final = 64
_WAIT_EVENT: Final = "StreamWaitEvent"
#: Of these calls all streams have to be done.
_WHOLE_DEVICE: Final = r"DeviceSynchronize|Free"


def recording(frame: pd.DataFrame) -> Recording:
    """What the profiled ranks of a trace table did, and why when.

    Args:
        frame: a trace table with host launches (from a profiler trace), all ranks on one clock.

    Raises:
        TraceError: if the table has no launches or no steps.
    """
    frame = frame.reset_index(drop=True)
    frame = own_routing(frame if "batch" in frame else frame.assign(batch=frame["step"]))
    frame = frame.assign(rank=frame["rank"].fillna(0))  # a lone trace may not say its rank
    unnumbered = frame["kind"].eq(_STEP) & frame["step"].isna()
    frame = frame[~unnumbered].reset_index(drop=True)
    for need, why in ((_STEP, "step ranges (ProfilerStep)"), (None, "host launches")):
        there = frame["kind"].eq(need).any() if need else (frame["launch_ns"].notna() & frame["start_ns"].notna()).any()
        if not there:
            raise TraceError(
                f"the table has no {why}, so it cannot be replayed op by op; "
                "give a schedule to replay its op costs instead (--schedule)"
            )
    numbers = sorted({int(rank) for rank in frame["rank"]})
    notes = []
    if unnumbered.any():
        notes.append(f"{unnumbered.sum()} step range(s) without a step number left out: they take no time")
    ranks = tuple(_rank(rank, frame[frame["rank"] == rank]) for rank in numbers)
    meetings, unmatched = _meetings(ranks, frame)
    if unmatched:
        notes.append(f"{unmatched} collectives could not be matched over the recorded ranks; each keeps its duration")
    sizes = frame["group_size"]
    world_size = max(len(ranks), int(sizes.max()) if sizes.notna().any() else 0)
    if world_size > len(ranks):
        notes.append(
            f"{len(ranks)} of {world_size} ranks were recorded: waiting for the others counts as transfer, as it was"
        )
    latencies = _latencies(ranks)
    _explain(ranks, latencies)
    return Recording(ranks=ranks, meetings=meetings, latencies=latencies, world_size=world_size, notes=tuple(notes))


def _rank(rank: int, rows: pd.DataFrame) -> RankRecording:
    import pandas as pd

    device = rows[rows["start_ns"].notna() & rows["stream"].astype("string").notna() & _on_device(rows)]
    device = device.sort_values(["start_ns", "launch_ns"], kind="stable")
    ops = [
        DeviceOp(
            row=int(row),
            stream=str(stream),
            kind=str(kind),
            name=str(name),
            step=None if pd.isna(step) else int(step),
            batch=None if pd.isna(batch) else int(batch),
            start_ns=int(start),
            end_ns=int(end),
            collective=not pd.isna(collective),
        )
        for row, stream, kind, name, step, batch, start, end, collective in zip(
            device.index,
            *(device[name] for name in ("stream", "kind", "op", "step", "batch", "start_ns", "end_ns", "collective")),
            strict=True,
        )
    ]
    calls = _calls(device, rows, ops)
    for index, call in enumerate(calls):
        if call.launches is not None:
            ops[call.launches].call = index
    host = rows[rows["kind"] == "host_work"]
    _predecessors(calls, host["start_ns"].to_numpy(dtype=np.int64), host["end_ns"].to_numpy(dtype=np.int64))
    events = rows.loc[rows["op"].astype("string").str.contains(_WAIT_EVENT).fillna(False), "start_ns"]
    _streams(ops, calls, np.sort(events.to_numpy(dtype=np.int64)))
    steps = rows.loc[rows["kind"] == _STEP, ["step", "start_ns", "end_ns"]].astype("int64")
    numbered = sorted(steps.itertuples(index=False, name=None))
    return RankRecording(rank=rank, calls=calls, ops=ops, steps=numbered)


def _on_device(rows: pd.DataFrame) -> pd.Series[bool]:
    return ~rows["kind"].isin([_STEP, "host_wait", "host_call", "host_work"])


def _calls(device: pd.DataFrame, rows: pd.DataFrame, ops: Sequence[DeviceOp]) -> list[Call]:
    """The host's calls in order of start; step ranges are marks of no length."""
    import pandas as pd

    found: list[tuple[int, int, Call]] = []

    def add(order: int, call: Call) -> None:
        found.append((call.start_ns, order, call))

    threads = device["thread"] if "thread" in device else pd.Series("host", index=device.index)
    for index, (launch, done, thread) in enumerate(
        zip(device["launch_ns"], device["launch_end_ns"], threads, strict=True)
    ):
        if pd.isna(launch):
            continue
        start = int(launch)
        end = start if pd.isna(done) else max(int(done), start)
        own = (index,) if start < ops[index].end_ns <= end else ()
        call = Call(activity=Activity.LAUNCH, name="launch", thread=str(thread), start_ns=start, end_ns=end)
        call.launches, call.awaits = index, own
        add(1, call)
    launches = device["launch_ns"].fillna(-1).to_numpy(dtype=np.int64)
    ends = device["end_ns"].to_numpy(dtype=np.int64)
    host = rows[rows["kind"].isin(["host_wait", "host_call"])]
    for kind, name, start, end, thread in zip(
        *(host[column] for column in ("kind", "op", "start_ns", "end_ns", "stream")), strict=True
    ):
        if _WAIT_EVENT in str(name):
            continue
        call = Call(
            activity=_activity(str(kind), str(name)),
            name=str(name),
            thread=str(thread),
            start_ns=int(start),
            end_ns=int(end),
        )
        if kind == "host_wait" or "Free" in call.name:
            call.awaits = _awaited(call, launches, ends, ops)
        add(1, call)
    for step, start, end in rows.loc[rows["kind"] == _STEP, ["step", "start_ns", "end_ns"]].itertuples(index=False):
        for order, moment in ((0, int(start)), (2, int(end))):
            mark = Call(activity=Activity.MARK, name="step", thread="", start_ns=moment, end_ns=moment)
            mark.step = (int(step), order == 0)
            add(order, mark)
    found.sort(key=lambda each: each[:2])
    return [call for *_, call in found]


def _activity(kind: str, name: str) -> Activity:
    if kind == "host_wait":
        return Activity.WAIT
    return Activity.INPUT if "DataLoader" in name else Activity.ALLOCATION


def _awaited(call: Call, launches: _Ints, ends: _Ints, ops: Sequence[DeviceOp]) -> tuple[int, ...]:
    """The op that ended last before the call returned; where the whole device is awaited, that of each stream."""
    inside = np.flatnonzero((launches < call.start_ns) & (ends > call.start_ns) & (ends <= call.end_ns))
    if not inside.size:
        return ()
    if not any(word in call.name for word in _WHOLE_DEVICE.split("|")):
        return (int(inside[np.argmax(ends[inside])]),)
    last: dict[str, int] = {}
    for index in inside[np.argsort(ends[inside], kind="stable")].tolist():
        last[ops[index].stream] = index
    return tuple(last.values())


def _predecessors(calls: Sequence[Call], start: _Ints, end: _Ints) -> None:
    """Ties each call to the one before it, and splits the time between them by whether work was recorded."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    before = np.concatenate(([0], np.cumsum(end - start)))

    def worked(moment: int) -> int:
        at = int(np.searchsorted(start, moment, side="right"))
        return 0 if at == 0 else int(before[at - 1] + min(moment, int(end[at - 1])) - start[at - 1])

    ended: list[tuple[int, int]] = []
    for index, call in enumerate(calls):
        place = bisect_right(ended, (call.start_ns, index)) - 1
        if place >= 0:
            last, call.previous = ended[place]
            between = call.start_ns - last
            call.work_ns = worked(call.start_ns) - worked(last) if start.size else between
            call.gap_ns = between - call.work_ns
        insort(ended, (call.end_ns, index))


def _streams(ops: Sequence[DeviceOp], calls: Sequence[Call], events: _Ints) -> None:
    """Ties each op to the one before it on its stream, and to the op of another stream that it waited for.

    Where the recording holds the host's calls that make a stream wait (`events`, when they were made), one between the
    launch of the op before and of this one says that it waited for what another stream had been given by then; which
    stream is not recorded: of those whose op had ended, the one that ended last. Without such calls times alone decide.
    """
    queued = _Queued(ops, calls)
    last_of: dict[str, int] = {}
    ended: dict[str, list[tuple[int, int]]] = {}
    for index, op in enumerate(ops):
        op.previous = last_of.get(op.stream)
        launch = op.start_ns if op.call is None else calls[op.call].start_ns
        before = None if op.previous is None else ops[op.previous].call
        since = -1 if before is None else calls[before].start_ns
        if events.size:
            at = int(np.searchsorted(events, launch)) - 1
            if at >= 0 and events[at] > since:
                op.other = queued.last_ended(int(events[at]), op)
        else:
            ready = max(launch, -1 if op.previous is None else ops[op.previous].end_ns)
            op.other = _waited_for(ended, op.stream, ready, op.start_ns)
        last_of[op.stream] = index
        insort(ended.setdefault(op.stream, []), (op.end_ns, index))


class _Queued:
    """Which op each stream was given last, at any moment."""

    def __init__(self, ops: Sequence[DeviceOp], calls: Sequence[Call]) -> None:
        self._ops = ops
        self._streams: dict[str, tuple[list[int], list[int]]] = {}
        order = sorted((calls[op.call].start_ns, index) for index, op in enumerate(ops) if op.call is not None)
        for launch, index in order:
            launches, indices = self._streams.setdefault(ops[index].stream, ([], []))
            launches.append(launch)
            indices.append(index)

    def last_ended(self, moment: int, op: DeviceOp) -> int | None:
        """Of the ops that the other streams were given last before a moment, the one that ended last before `op`."""
        found: tuple[int, int] | None = None
        for stream, (launches, indices) in self._streams.items():
            place = bisect_right(launches, moment) - 1
            if stream == op.stream or place < 0:
                continue
            other = self._ops[indices[place]]
            if other.end_ns <= op.start_ns:
                found = max(found or (-1, -1), (other.end_ns, indices[place]))
        return None if found is None else found[1]


def _waited_for(ended: Mapping[str, list[tuple[int, int]]], stream: str, ready: int, start: int) -> int | None:
    """The op of another stream that ended last before `start`, if that was after `ready` and shortly before `start`."""
    found = (-1, -1)
    for other, ends in ended.items():
        place = bisect_right(ends, (start, len(ends) + start)) - 1
        if other != stream and place >= 0:
            found = max(found, ends[place])
    return found[1] if found[0] > ready and found[0] >= start - _EVENT_WAIT_NS else None


def _meetings(ranks: Sequence[RankRecording], frame: pd.DataFrame) -> tuple[dict[tuple[str, int], Meeting], int]:
    """Matches collectives over the ranks by group and order; those that did not run at one time stay alone."""
    groups = (frame["group"].fillna("") + " " + frame["collective"].fillna("")).astype(str)
    transfer = frame["duration_ns"] - frame["wait_ns"].fillna(0)
    members: dict[tuple[str, int], list[DeviceOp]] = {}
    for each in ranks:
        counts: dict[str, int] = {}
        queued = [op for op in each.ops if op.collective and op.call is not None]
        for op in sorted(queued, key=lambda op: each.calls[op.call or 0].start_ns):
            group = groups.iloc[op.row]
            counts[group] = counts.get(group, 0) + 1
            members.setdefault((group, counts[group]), []).append(op)
    found: dict[tuple[str, int], Meeting] = {}
    unmatched = 0
    for key, ops in members.items():
        if len(ops) < 2:
            continue
        if max(op.start_ns for op in ops) > min(op.end_ns for op in ops):
            unmatched += 1
            continue
        for op in ops:
            op.meeting = key
        found[key] = Meeting(transfer_ns=min(int(transfer.iloc[op.row]) for op in ops), members=len(ops))
    return found, unmatched


def _median(samples: Sequence[int]) -> int:
    return int(np.median(samples)) if samples else 0


def _latencies(ranks: Sequence[RankRecording]) -> Latencies:
    """The constants, each over the ops whose last obstacle was of that kind."""
    queued = [(each, op, each.calls[op.call].start_ns) for each in ranks for op in each.ops if op.call is not None]

    def ended(each: RankRecording, other: int | None) -> int:
        return -(2**62) if other is None else each.ops[other].end_ns

    launch_ns = _median(
        [
            op.start_ns - launch
            for each, op, launch in queued
            if max(ended(each, op.previous), ended(each, op.other)) <= launch
        ]
    )
    stream_ns = _median(
        [
            op.start_ns - ended(each, op.previous)
            for each, op, launch in queued
            if ended(each, op.previous) > max(launch + launch_ns, ended(each, op.other))
        ]
    )
    event_ns = _median(
        [
            op.start_ns - ended(each, op.other)
            for each, op, launch in queued
            if op.start_ns - _EVENT_WAIT_NS <= ended(each, op.other) > max(launch + launch_ns, ended(each, op.previous))
        ]
    )
    return_ns = _median(
        [
            call.end_ns - max(each.ops[index].end_ns for index in call.awaits)
            for each in ranks
            for call in each.calls
            if call.activity is Activity.WAIT and call.awaits
        ]
    )
    return Latencies(launch_ns=launch_ns, stream_ns=stream_ns, event_ns=event_ns, return_ns=return_ns)


def _explain(ranks: Sequence[RankRecording], latencies: Latencies) -> None:
    """Looks for what held up an op that was ready: a device full of other work, or nothing that is known."""
    for each in ranks:
        busy = _Busy(each.ops)
        for op in each.ops:
            if op.call is None:
                continue
            ready = each.calls[op.call].start_ns + latencies.launch_ns
            if op.previous is not None:
                ready = max(ready, each.ops[op.previous].end_ns + latencies.stream_ns)
            if op.other is not None:
                ready = max(ready, each.ops[op.other].end_ns + latencies.event_ns)
            late = max(0, op.start_ns - ready)
            if late > _ROOM_NS_MIN and busy.share(ready, op.start_ns) >= _FULL:
                op.room = busy.running(op)
            if op.room is None:
                op.unexplained_ns = late
            else:
                op.room_ns = late


class _Busy:
    """When the device computes, on whichever stream. Copies and collectives leave room for other work."""

    def __init__(self, ops: Sequence[DeviceOp]) -> None:
        self._ops = ops
        computes = [i for i, op in enumerate(ops) if not op.collective and not op.name.startswith(("Memcpy", "Memset"))]
        self._indices = computes
        start = np.array([ops[i].start_ns for i in computes], dtype=np.int64)
        end = np.array([ops[i].end_ns for i in computes], dtype=np.int64)
        self._all_starts = start
        self._start, self._end = merge(start, end)
        self._before = np.concatenate(([0], np.cumsum(self._end - self._start)))

    def share(self, since: int, until: int) -> float:
        """The share of a span in which something computes."""
        return (self._until(until) - self._until(since)) / (until - since)

    def _until(self, moment: int) -> int:
        at = int(np.searchsorted(self._start, moment, side="right"))
        return 0 if at == 0 else int(self._before[at - 1] + min(moment, int(self._end[at - 1])) - self._start[at - 1])

    def running(self, op: DeviceOp) -> int | None:
        """The op of another stream that began last before this one and ended after it began, or just before."""
        at = int(np.searchsorted(self._all_starts, op.start_ns))
        for index in reversed(self._indices[max(0, at - _LOOK_BACK) : at]):
            other = self._ops[index]
            if other.stream != op.stream and other.end_ns >= op.start_ns - _EVENT_WAIT_NS:
                return index
        return None
