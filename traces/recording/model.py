"""What a recording says: host calls in order, device ops on their streams, and what each of them waited for.

Everything is kept as it was recorded; nothing is worked out from a wished-for result. What an op did after all that it
visibly waited for is not kept per op: the few constants of the machine (`Latencies`) are measured over the whole
recording, and what they do not explain is counted as unexplained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Activity", "Call", "DeviceOp", "Latencies", "Meeting", "RankRecording", "Recording"]


class Activity(StrEnum):
    """What a host call does."""

    LAUNCH = "launch"
    WAIT = "wait"
    ALLOCATION = "allocation"
    INPUT = "input"
    MARK = "mark"


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of the host, in the order of their starts.

    Attributes:
        previous: the call that ended last before this one starts, on whichever thread; None for the first.
        work_ns, gap_ns: host time between the two, with and without recorded work.
        launches: the device op that it queues.
        awaits: device ops after which it returned.
        step: of a mark, the step and whether it begins there.
    """

    activity: Activity
    name: str
    thread: str
    start_ns: int
    end_ns: int
    previous: int | None = None
    work_ns: int = 0
    gap_ns: int = 0
    launches: int | None = None
    awaits: tuple[int, ...] = ()
    step: tuple[int, bool] | None = None

    @property
    def own_ns(self) -> int:
        """How long it took by itself; of a call that waited this is not known from its duration."""
        return self.end_ns - self.start_ns


@dataclass(slots=True, kw_only=True)
class DeviceOp:
    """One device op, and what it waited for.

    Attributes:
        row: its row in the trace table.
        call: the host call that queued it; None if that was not recorded.
        previous: the op before it on its stream.
        other: an op of another stream after whose end it started.
        room: the op of another stream that filled the device when this one was ready.
        room_ns: how long it waited for that room.
        meeting: the collective over ranks that it is a part of, where the other ranks were recorded too.
        unexplained_ns: how long after all of these, and the latency of the last, it started.
    """

    row: int
    stream: str
    kind: str
    name: str
    step: int | None
    batch: int | None = None
    start_ns: int
    end_ns: int
    collective: bool = False
    call: int | None = None
    previous: int | None = None
    other: int | None = None
    room: int | None = None
    room_ns: int = 0
    meeting: tuple[str, int] | None = None
    unexplained_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Constants of the machine, each the median over the recording.

    Attributes:
        launch_ns: from the start of a launch to the start of the op, on an idle stream.
        stream_ns: from the end of an op to the start of the next on the same stream, queued before.
        event_ns: from the end of an op to the start of one on another stream that waited for it.
        return_ns: from the end of the awaited op to the return of the blocking call.
    """

    launch_ns: int = 0
    stream_ns: int = 0
    event_ns: int = 0
    return_ns: int = 0


@dataclass(slots=True, kw_only=True)
class RankRecording:
    """One rank: host calls in order of start, device ops in order of start, steps as (number, start_ns, end_ns)."""

    rank: int
    calls: list[Call]
    ops: list[DeviceOp]
    steps: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A collective that several recorded ranks take part in, and its transfer once the last has arrived."""

    transfer_ns: int
    members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All recorded ranks on one clock.

    Attributes:
        ranks: in order of their number.
        meetings: by process group and collective, and number within these.
        latencies: constants of the machine.
        world_size: ranks of the run, which may be more than were recorded.
        notes: what had to be left out or taken for granted, in words.
    """

    ranks: tuple[RankRecording, ...]
    meetings: Mapping[tuple[str, int], Meeting]
    latencies: Latencies
    world_size: int
    notes: tuple[str, ...] = field(default_factory=tuple)
