"""Replays an imported trace: the host queues work, streams run it in order, collectives wait for the last rank.

What is kept from the recording is what the hardware did by itself: how long each op took, how long the host was busy
between two calls, how long an op hesitated after everything it visibly waited for. What is worked out anew is who waits
for whom, so that a change (faster compute, a slower link, less host work) moves what depends on it and nothing else.

Rules, after Lumos (arXiv 2504.09307): a device op starts after its launch, after the op before it on its stream and
after an op on another stream that ended just before it started; a blocking host call returns after the device work it
was seen to wait for. The host threads of a rank take turns. A collective transfers for as long as it took the last rank
to arrive; the rest of its recorded duration was waiting and is worked out anew.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd
import simpy

from nestpipe.base import DeadlockError, TraceError

__all__ = ["Replay", "Scales", "replay"]

_STEP: Final = "step"
_HOST_WAIT: Final = "host_wait"
#: An op that starts within this long after an op of another stream has ended is taken to have waited for it.
_EVENT_WAIT_NS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors on what is kept from the recording; 1 replays it as it was."""

    compute: float = 1.0
    host: float = 1.0
    transfer: float = 1.0

    def __post_init__(self) -> None:
        for name in ("compute", "host", "transfer"):
            if not 0 <= getattr(self, name) < 1e6:
                raise TraceError(f"the {name} scale must be between 0 and 1e6, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Step times as recorded and as replayed, and the replayed spans.

    Attributes:
        steps: one row per rank and step: rank, step, recorded_ns, replayed_ns, relative_error (NaN where the recorded
            step took 0 ns).
        spans: the replayed device ops: rank, stream, kind, op, step, start_ns, end_ns, wait_ns.
        notes: what was left out, in words.
    """

    steps: pd.DataFrame
    spans: pd.DataFrame
    notes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _DeviceOp:
    """One device op: what it waits for (positions in its rank's list) and what it keeps of the recording."""

    row: int
    stream: str
    duration_ns: int
    lag_ns: int
    previous: int | None
    other: int | None
    meeting: tuple[Any, ...] | None
    launched: simpy.Event | None = None
    ended: simpy.Event | None = None
    start_ns: int = 0
    end_ns: int = 0
    wait_ns: int = 0


@dataclass(slots=True, kw_only=True)
class _HostEvent:
    """One call of the host: the time before it, its own duration, and the op it launches or the ops it waits for."""

    gap_ns: int
    busy_ns: int
    launches: int | None = None
    waits_for: tuple[int, ...] = ()
    mark: tuple[int, bool] | None = None


@dataclass(slots=True, kw_only=True)
class _Rank:
    rank: int
    begin_ns: int
    ops: list[_DeviceOp]
    host: list[_HostEvent]
    marks: dict[tuple[int, bool], int] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Meeting:
    size: int
    transfer_ns: int
    done: simpy.Event
    arrived: int = 0
    last_ns: int = 0


def replay(frame: pd.DataFrame, scales: Scales | None = None) -> Replay:
    """Runs the recorded ops of every rank again.

    Args:
        frame: a trace table with host launches (from a profiler trace), all ranks on one clock.
        scales: what to change; by default nothing.

    Raises:
        TraceError: if the table has no launches or no steps, and so cannot be replayed op by op.
        DeadlockError: if ranks wait for each other in a circle.
    """
    scales = scales or Scales()
    frame = frame.reset_index(drop=True)
    frame = frame.assign(rank=frame["rank"].fillna(0))  # a lone trace may not say its rank
    unnumbered = frame["kind"].eq(_STEP) & frame["step"].isna()
    frame = frame[~unnumbered].reset_index(drop=True)
    for need, why in ((_STEP, "step ranges (ProfilerStep)"), (None, "host launches")):
        there = frame["kind"].eq(need).any() if need else frame["launch_ns"].notna().any()
        if not there:
            raise TraceError(
                f"the table has no {why}, so it cannot be replayed op by op; "
                "give a schedule to replay its op costs instead (--schedule)"
            )
    frame = frame.assign(meeting=pd.Series(_meetings(frame), index=frame.index, dtype=object))
    env = simpy.Environment()
    ranks = [_rank(rank, frame[frame["rank"] == rank]) for rank in sorted({int(rank) for rank in frame["rank"]})]
    meetings = _agree(frame, env, scales)
    processes = []
    for each in ranks:
        for op in each.ops:
            op.launched, op.ended = env.event(), env.event()
        processes.append(env.process(_host(env, each, scales)))
        by_stream: dict[str, list[_DeviceOp]] = {}
        for op in each.ops:
            by_stream.setdefault(op.stream, []).append(op)
        processes += [env.process(_stream(env, each, ops, meetings, scales)) for ops in by_stream.values()]
    try:
        env.run(until=env.all_of(processes))
    except RuntimeError as error:
        stuck = [f"rank {each.rank}: {op.stream}" for each in ranks for op in each.ops if not op.end_ns][:8]
        raise DeadlockError("the replay cannot finish; first ops that never ended: " + ", ".join(stuck)) from error
    notes = (f"{unnumbered.sum()} step range(s) without a step number left out: they take no time",)
    return Replay(steps=_steps(frame, ranks), spans=_spans(frame, ranks), notes=notes if unnumbered.any() else ())


def _host(env: simpy.Environment, rank: _Rank, scales: Scales) -> Generator[simpy.Event, Any, None]:
    """The host of one rank: works, launches, waits."""
    yield env.timeout(rank.begin_ns)
    for event in rank.host:
        gap = round(event.gap_ns * scales.host)
        if gap:
            yield env.timeout(gap)
        if event.mark is not None:
            rank.marks[event.mark] = int(env.now)
        if event.launches is not None:
            launched = rank.ops[event.launches].launched
            assert launched is not None
            launched.succeed()
        for index in event.waits_for:
            ended = rank.ops[index].ended
            assert ended is not None
            if not ended.processed:
                yield ended
        busy = round(event.busy_ns * scales.host)
        if busy:
            yield env.timeout(busy)


def _stream(
    env: simpy.Environment, rank: _Rank, ops: list[_DeviceOp], meetings: Mapping[Any, _Meeting], scales: Scales
) -> Generator[simpy.Event, Any, None]:
    """One stream of one rank: each op after its launch, its predecessor and the op of another stream it waited for."""
    for op in ops:
        assert op.launched is not None
        assert op.ended is not None
        for event in (op.launched, None if op.other is None else rank.ops[op.other].ended):
            if event is not None and not event.processed:
                yield event
        if op.lag_ns:
            yield env.timeout(op.lag_ns)
        op.start_ns = int(env.now)
        meeting = None if op.meeting is None else meetings.get(op.meeting)
        if meeting is None:
            # without its peers a collective cannot be split into waiting and transfer: all of it is scaled as transfer
            duration = round(op.duration_ns * (scales.compute if op.meeting is None else scales.transfer))
            if duration:
                yield env.timeout(duration)
        else:
            meeting.arrived += 1
            if meeting.arrived == meeting.size:
                meeting.last_ns = int(env.now)
                env.timeout(meeting.transfer_ns).callbacks.append(meeting.done.trigger)
            yield meeting.done
            op.wait_ns = meeting.last_ns - op.start_ns
        op.end_ns = int(env.now)
        op.ended.succeed()


def _meetings(frame: pd.DataFrame) -> list[tuple[Any, ...] | None]:
    """For each row of a collective, which one it is: group, and position among the rank's collectives of that group."""
    found: list[tuple[Any, ...] | None] = [None] * len(frame)
    counts: dict[tuple[Any, ...], int] = {}
    mine = frame[frame["collective"].notna() & frame["launch_ns"].notna()].sort_values(["rank", "launch_ns"])
    for index, rank, group, name in zip(
        mine.index, mine["rank"], mine["group"].fillna(""), mine["collective"], strict=True
    ):
        key = (rank, group, name)
        counts[key] = counts.get(key, 0) + 1
        found[index] = (group, name, counts[key])
    return found


def _agree(frame: pd.DataFrame, env: simpy.Environment, scales: Scales) -> dict[Any, _Meeting]:
    """The collectives that more than one rank of the table takes part in, with their transfer times."""
    transfer = (frame["duration_ns"] - frame["wait_ns"].fillna(0)).where(frame["wait_ns"].notna(), frame["duration_ns"])
    rows: dict[Any, list[int]] = {}
    for index, key in enumerate(frame["meeting"]):
        if key is not None:
            rows.setdefault(key, []).append(index)
    return {
        key: _Meeting(
            size=len(indices),
            transfer_ns=round(int(transfer.iloc[indices].min()) * scales.transfer),
            done=env.event(),
        )
        for key, indices in rows.items()
        if len(indices) > 1
    }


def _rank(rank: int, rows: pd.DataFrame) -> _Rank:
    """The ops and host calls of one rank, with what each waits for."""
    device = rows[rows["launch_ns"].notna() & rows["start_ns"].notna()].sort_values(["start_ns", "launch_ns"])
    ops = _device_ops(device)
    calls: list[tuple[int, int, int, _HostEvent]] = []
    for index, (launch, done) in enumerate(zip(device["launch_ns"], device["launch_end_ns"], strict=True)):
        end = launch if pd.isna(done) else max(int(done), int(launch))
        calls.append((int(launch), 1, int(end), _HostEvent(gap_ns=0, busy_ns=0, launches=index)))
    launches = device["launch_ns"].to_numpy(dtype=np.int64)
    ends = device["end_ns"].to_numpy(dtype=np.int64)
    for start, end in rows.loc[rows["kind"] == _HOST_WAIT, ["start_ns", "end_ns"]].itertuples(index=False):
        awaited = np.flatnonzero((launches < start) & (ends > start) & (ends <= end))
        calls.append((int(start), 1, int(end), _HostEvent(gap_ns=0, busy_ns=0, waits_for=tuple(awaited.tolist()))))
    for step, start, end in rows.loc[rows["kind"] == _STEP, ["step", "start_ns", "end_ns"]].itertuples(index=False):
        calls.append((int(start), 0, int(start), _HostEvent(gap_ns=0, busy_ns=0, mark=(int(step), True))))
        calls.append((int(end), 2, int(end), _HostEvent(gap_ns=0, busy_ns=0, mark=(int(step), False))))
    calls.sort(key=lambda call: call[:3])
    begin = calls[0][0]
    now = begin
    for start, _, end, event in calls:
        event.gap_ns = max(0, start - now)
        back = max(start, now)
        if event.waits_for:  # what is left of the call once the last awaited op has ended
            back = max(back, int(ends[list(event.waits_for)].max()))
        event.busy_ns = max(0, end - back)
        now = max(now, end)
    return _Rank(rank=rank, begin_ns=begin, ops=ops, host=[event for *_, event in calls])


def _device_ops(device: pd.DataFrame) -> list[_DeviceOp]:
    ops: list[_DeviceOp] = []
    last_of: dict[str, int] = {}
    ended: dict[str, list[tuple[int, int]]] = {}
    ends = device["end_ns"].to_numpy(dtype=np.int64)
    starts = device["start_ns"].to_numpy(dtype=np.int64)
    launches = device["launch_ns"].to_numpy(dtype=np.int64)
    streams = device["stream"].astype(str).to_numpy()
    for index, row in enumerate(device.index):
        stream = str(streams[index])
        previous = last_of.get(stream)
        ready = max(int(launches[index]), -1 if previous is None else int(ends[previous]))
        other = _waited_for(ended, stream, ready, int(starts[index]))
        if other is not None:
            ready = max(ready, int(ends[other]))
        ops.append(
            _DeviceOp(
                row=int(row),
                stream=stream,
                duration_ns=int(ends[index] - starts[index]),
                lag_ns=max(0, int(starts[index]) - ready),
                previous=previous,
                other=other,
                meeting=device["meeting"].iloc[index],
            )
        )
        last_of[stream] = index
        insort(ended.setdefault(stream, []), (int(ends[index]), index))
    return ops


def _waited_for(ended: Mapping[str, list[tuple[int, int]]], stream: str, ready: int, start: int) -> int | None:
    """The op of another stream that ended last before `start`, if that was after `ready` and shortly before `start`."""
    found = (-1, -1)
    for other, ends in ended.items():
        place = bisect_right(ends, (start, len(ends) + start)) - 1
        if other != stream and place >= 0:
            found = max(found, ends[place])
    return found[1] if found[0] > ready and found[0] >= start - _EVENT_WAIT_NS else None


def _steps(frame: pd.DataFrame, ranks: list[_Rank]) -> pd.DataFrame:
    mine = frame[frame["kind"] == _STEP]
    took = (mine["end_ns"] - mine["start_ns"]).astype(np.int64).tolist()
    recorded = dict(zip(zip(mine["rank"].astype(int), mine["step"].astype(int), strict=True), took, strict=True))
    rows = []
    for each in ranks:
        for step in sorted({step for step, _ in each.marks}):
            was, now = recorded[each.rank, step], each.marks[step, False] - each.marks[step, True]
            rows.append((each.rank, step, was, now, now / was - 1 if was else np.nan))
    return pd.DataFrame(rows, columns=["rank", "step", "recorded_ns", "replayed_ns", "relative_error"])


def _spans(frame: pd.DataFrame, ranks: list[_Rank]) -> pd.DataFrame:
    rows = [(op.row, op.start_ns, op.end_ns, op.wait_ns) for each in ranks for op in each.ops]
    times = pd.DataFrame(rows, columns=["row", "start_ns", "end_ns", "wait_ns"]).set_index("row")
    return frame.loc[times.index, ["rank", "step", "stream", "kind", "op", "bytes"]].join(times).reset_index(drop=True)
