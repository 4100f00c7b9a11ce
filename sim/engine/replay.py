"""Replays a recording: the host queues work, streams run it in order, collectives wait for the last rank.

What is kept of the recording is what each part did by itself: the work of device ops, the host's own time between two
calls, transfers once all ranks have arrived, and four constants of the machine. When everything happens is worked out
anew from who waits for whom, so that a change (faster compute, a slower link, less host work) moves what depends on it
and nothing else, and so that a wrong understanding of the recording shows: nothing is left over to make it right.

The time of a step is then taken apart along its critical path on that rank: what the host waited for, and what that
waited for, back to the beginning of the step. The parts sum to the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from nestpipe.base import DeadlockError, TraceError
from traces.recording import Activity, Call, DeviceOp, RankRecording, Recording, recording

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Cause", "Replay", "Scales", "replay", "replay_recording"]


class Cause(StrEnum):
    """What a part of a step was spent on.

    Device and transfer: the host waits for them. Waiting for others: in a collective, until the last rank arrived. Host
    and gaps: the host's own time, with and without recorded work. Allocation: of memory. Input: the next batch of the
    data loader. Latency: from a launch to its start, between ops of a stream, back from a blocking call.
    """

    DEVICE = "device"
    TRANSFER = "transfer"
    WAITING = "waiting_for_others"
    HOST = "host"
    GAPS = "gaps"
    ALLOCATION = "allocation"
    INPUT = "input"
    LATENCY = "latency"


_OWN: Final = {
    Activity.LAUNCH: Cause.HOST,
    Activity.WAIT: Cause.HOST,
    Activity.ALLOCATION: Cause.ALLOCATION,
    Activity.INPUT: Cause.INPUT,
    Activity.MARK: Cause.HOST,
}


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
            step took 0 ns), and for each `Cause` the nanoseconds of the replayed step (`<cause>_ns`).
        pace: one row per rank and step but the first: rank, step, recorded_ns and replayed_ns from the end of the last
            device op of the step before to that of this one.
        late: one row per rank: how long others waited for it in collectives, waited_ns, and in how many, meetings.
        spans: the replayed device ops: rank, stream, kind, op, step, start_ns, end_ns, wait_ns.
        notes: what was left out, in words.
    """

    steps: pd.DataFrame
    pace: pd.DataFrame
    late: pd.DataFrame
    spans: pd.DataFrame
    notes: tuple[str, ...] = ()


def replay(frame: pd.DataFrame, scales: Scales | None = None) -> Replay:
    """Runs the recorded ops of every rank of a trace table again.

    Args:
        frame: a trace table with host launches (from a profiler trace), all ranks on one clock.
        scales: what to change; by default nothing.

    Raises:
        TraceError: if the table has no launches or no steps, and so cannot be replayed op by op.
        DeadlockError: if ranks wait for each other in a circle.
    """
    found = recording(frame)
    return replay_recording(found, scales or Scales())


@dataclass(slots=True)
class _Graph:
    """Moments and what they come after: each not before its floor, nor before another moment plus a delay."""

    floor: list[int | None] = field(default_factory=list)
    edges: list[list[tuple[int, int]]] = field(default_factory=list)
    time: list[int] = field(default_factory=list)
    binding: list[int | None] = field(default_factory=list)

    def add(self, floor: int | None = None) -> int:
        self.floor.append(floor)
        self.edges.append([])
        return len(self.floor) - 1

    def after(self, node: int, earlier: int, delay_ns: int) -> None:
        self.edges[node].append((earlier, delay_ns))

    def solve(self) -> list[int]:
        """Sets the time of every moment; returns those that wait for each other in a circle."""
        following: list[list[int]] = [[] for _ in self.floor]
        for node, earlier in enumerate(self.edges):
            for other, _ in earlier:
                following[other].append(node)
        open_edges = [len(earlier) for earlier in self.edges]
        ready = deque(node for node, count in enumerate(open_edges) if not count)
        self.time = [-1] * len(self.floor)
        self.binding = [None] * len(self.floor)
        left = set(range(len(self.floor)))
        while ready:
            node = ready.popleft()
            left.discard(node)
            floor = self.floor[node]
            best: tuple[int, int | None] = (-(2**62) if floor is None else floor, None)
            for other, delay in self.edges[node]:
                if self.time[other] + delay > best[0]:
                    best = self.time[other] + delay, other
            self.time[node], self.binding[node] = best
            for later in following[node]:
                open_edges[later] -= 1
                if not open_edges[later]:
                    ready.append(later)
        return sorted(left)


@dataclass(slots=True)
class _Nodes:
    """Where the moments of one rank are in the graph."""

    call_start: list[int] = field(default_factory=list)
    call_end: list[int] = field(default_factory=list)
    op_start: list[int] = field(default_factory=list)
    op_end: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Run:
    """A recording, its graph and its scales."""

    source: Recording
    scales: Scales
    shifts: list[int]
    graph: _Graph = field(default_factory=_Graph)
    nodes: list[_Nodes] = field(default_factory=list)
    meeting: dict[tuple[str, int], int] = field(default_factory=dict)
    arrivals: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)

    def build(self) -> None:
        graph = self.graph
        for each, shift in zip(self.source.ranks, self.shifts, strict=True):
            nodes = _Nodes()
            for _ in each.calls:
                nodes.call_start.append(graph.add())
                nodes.call_end.append(graph.add())
            for op in each.ops:
                nodes.op_start.append(graph.add(op.start_ns + shift if op.call is None else None))
                nodes.op_end.append(graph.add())
            self.nodes.append(nodes)
        self.meeting = {key: graph.add() for key in self.source.meetings}
        for position, each in enumerate(self.source.ranks):
            for index, call in enumerate(each.calls):
                self.host(each, self.nodes[position], index, call)
                if call.previous is None:
                    graph.floor[self.nodes[position].call_start[index]] = call.start_ns + self.shifts[position]
            for index, op in enumerate(each.ops):
                self.device(position, index, op)

    def host(self, each: RankRecording, nodes: _Nodes, index: int, call: Call) -> None:
        """When a call begins and returns."""
        graph, start, end = self.graph, nodes.call_start[index], nodes.call_end[index]
        if call.previous is not None:
            between = round((call.work_ns + call.gap_ns) * self.scales.host)
            graph.after(start, nodes.call_end[call.previous], between)
        if not call.awaits:
            graph.after(end, start, round(call.own_ns * self.scales.host))
            return
        graph.after(end, start, 0)
        back = self.source.latencies.return_ns
        if call.activity is not Activity.WAIT:  # freeing memory, staging a copy: what follows is work of its own
            back = call.end_ns - max(each.ops[other].end_ns for other in call.awaits)
        for other in call.awaits:
            graph.after(end, nodes.op_end[other], round(back * self.scales.host))

    def device(self, position: int, index: int, op: DeviceOp) -> None:
        """When an op begins and ends."""
        graph, nodes, latencies = self.graph, self.nodes[position], self.source.latencies
        start, end = nodes.op_start[index], nodes.op_end[index]
        if op.call is not None:
            graph.after(start, nodes.call_start[op.call], latencies.launch_ns)
            if op.previous is not None:
                graph.after(start, nodes.op_end[op.previous], latencies.stream_ns)
            if op.other is not None:
                graph.after(start, nodes.op_end[op.other], latencies.event_ns)
            if op.room is not None:
                # room is made as the other op's last blocks end: after the same share of its work as recorded
                other = self.source.ranks[position].ops[op.room]
                done = min(op.start_ns, other.end_ns) - other.start_ns
                graph.after(start, nodes.op_start[op.room], round(done * self.scales.compute))
        if op.meeting is None:
            # without its peers a collective cannot be split into waiting and transfer: all of it is scaled as transfer
            factor = self.scales.transfer if op.collective else self.scales.compute
            graph.after(end, start, round((op.end_ns - op.start_ns) * factor))
            return
        transfer = round(self.source.meetings[op.meeting].transfer_ns * self.scales.transfer)
        graph.after(self.meeting[op.meeting], start, transfer)
        graph.after(end, self.meeting[op.meeting], 0)
        self.arrivals.setdefault(op.meeting, []).append((position, start))

    def transfer_ns(self, op: DeviceOp) -> int:
        assert op.meeting is not None
        return round(self.source.meetings[op.meeting].transfer_ns * self.scales.transfer)


def replay_recording(source: Recording, scales: Scales, *, together: bool = False) -> Replay:
    """Runs a recording again; see `replay`.

    Args:
        source: the recording.
        scales: what to change.
        together: let all ranks begin the first step at once, so that nobody waits for who came late into the window.
    """
    run = _Run(source=source, scales=scales, shifts=_shifts(source) if together else [0] * len(source.ranks))
    run.build()
    stuck = set(run.graph.solve())
    if stuck:
        names = [
            f"rank {each.rank}: {op.stream}"
            for each, nodes in zip(source.ranks, run.nodes, strict=True)
            for op, end in zip(each.ops, nodes.op_end, strict=True)
            if end in stuck
        ][:8]
        raise DeadlockError("the replay cannot finish; first ops that never ended: " + ", ".join(names))
    return Replay(steps=_steps(run), pace=_pace(run), late=_late(run), spans=_spans(run), notes=source.notes)


def _shifts(source: Recording) -> list[int]:
    """How much later each rank has to begin for all to begin their first step at once."""
    begins = [min((begin for _, begin, _ in each.steps), default=0) for each in source.ranks]
    return [max(begins) - begin for begin in begins]


def _steps(run: _Run) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for position, each in enumerate(run.source.ranks):
        nodes, time = run.nodes[position], run.graph.time
        marks = {call.step: nodes.call_start[i] for i, call in enumerate(each.calls) if call.step is not None}
        causes = _Causes(run, position)
        for step, start, end in each.steps:
            was = end - start
            begin, finish = time[marks[step, True]], time[marks[step, False]]
            parts = causes.between(begin, marks[step, False])
            now = finish - begin
            rows.append((each.rank, step, was, now, now / was - 1 if was else np.nan, *parts.values()))
    columns = ["rank", "step", "recorded_ns", "replayed_ns", "relative_error", *(f"{cause}_ns" for cause in Cause)]
    return pd.DataFrame(rows, columns=columns)


class _Causes:
    """What the time before a moment of one rank was spent on, back along what bound it."""

    def __init__(self, run: _Run, position: int) -> None:
        self._run = run
        each, nodes = run.source.ranks[position], run.nodes[position]
        self._begins = dict(zip(nodes.call_start, each.calls, strict=True))
        self._returns = dict(zip(nodes.call_end, each.calls, strict=True))
        self._starts = set(nodes.op_start)
        self._ends = {end: (op, start) for end, start, op in zip(nodes.op_end, nodes.op_start, each.ops, strict=True)}

    def between(self, begin_ns: int, node: int) -> dict[Cause, int]:
        """Nanoseconds by cause from a moment to a node."""
        parts = dict.fromkeys(Cause, 0)
        time, binding = self._run.graph.time, self._run.graph.binding
        while time[node] > begin_ns:
            if node in self._ends and self._ends[node][0].meeting is not None:
                earlier: int | None = self._ends[node][1]
            else:
                earlier = binding[node]
            since = begin_ns if earlier is None else max(begin_ns, time[earlier])
            for cause, ns in self._spent(node, earlier, time[node] - since):
                parts[cause] += ns
            if earlier is None:
                break
            node = earlier
        return parts

    def _spent(self, node: int, earlier: int | None, length: int) -> Iterator[tuple[Cause, int]]:
        """What the last `length` nanoseconds before a node were."""
        if node in self._begins:
            call = self._begins[node]
            whole = call.work_ns + call.gap_ns
            work = length * call.work_ns // whole if whole else length
            yield Cause.HOST, work
            yield Cause.GAPS, length - work
        elif node in self._returns:
            call = self._returns[node]
            waited = call.activity is Activity.WAIT and earlier in self._ends
            yield (Cause.LATENCY if waited else _OWN[call.activity]), length
        elif node in self._starts:
            yield (Cause.DEVICE if earlier in self._starts else Cause.LATENCY), length
        else:
            op, _ = self._ends[node]
            if op.meeting is None:
                yield (Cause.TRANSFER if op.collective else Cause.DEVICE), length
                return
            transfer = min(length, self._run.transfer_ns(op))
            yield Cause.TRANSFER, transfer
            yield Cause.WAITING, length - transfer


def _pace(run: _Run) -> pd.DataFrame:
    import pandas as pd

    rows = []
    for position, each in enumerate(run.source.ranks):
        recorded: dict[int, int] = {}
        replayed: dict[int, int] = {}
        for op, end in zip(each.ops, run.nodes[position].op_end, strict=True):
            if op.step is not None:
                recorded[op.step] = max(recorded.get(op.step, op.end_ns), op.end_ns)
                replayed[op.step] = max(replayed.get(op.step, run.graph.time[end]), run.graph.time[end])
        steps = sorted(recorded)
        for before, step in pairwise(steps):
            was, now = recorded[step] - recorded[before], replayed[step] - replayed[before]
            rows.append((each.rank, step, was, now))
    return pd.DataFrame(rows, columns=["rank", "step", "recorded_ns", "replayed_ns"])


def _late(run: _Run) -> pd.DataFrame:
    import pandas as pd

    waited = dict.fromkeys(range(len(run.source.ranks)), 0)
    meetings = dict.fromkeys(waited, 0)
    time = run.graph.time
    for arrivals in run.arrivals.values():
        last, at = max(arrivals, key=lambda each: time[each[1]])
        waited[last] += sum(time[at] - time[start] for _, start in arrivals)
        meetings[last] += 1
    rows = [(each.rank, waited[i], meetings[i]) for i, each in enumerate(run.source.ranks)]
    return pd.DataFrame(rows, columns=["rank", "waited_ns", "meetings"])


def _spans(run: _Run) -> pd.DataFrame:
    import pandas as pd

    time, rows = run.graph.time, []
    for each, nodes in zip(run.source.ranks, run.nodes, strict=True):
        for op, start, end in zip(each.ops, nodes.op_start, nodes.op_end, strict=True):
            wait = 0 if op.meeting is None else time[end] - time[start] - run.transfer_ns(op)
            rows.append((each.rank, op.step, op.stream, op.kind, op.name, time[start], time[end], wait))
    return pd.DataFrame(rows, columns=["rank", "step", "stream", "kind", "op", "start_ns", "end_ns", "wait_ns"])
