"""Kernel, launch and host range tied together: which collective a kernel is, which stage launched it, in which step.

A kernel's `correlation` names the runtime call that launched it; the ranges open on that thread at that moment say what
it was for. Names decide only where the trace holds nothing better, and the coverage says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe.ir import OpKind
from traces.formats.dtypes import is_integer
from traces.formats.json_stream import whole
from traces.formats.kineto_checks import check_events
from traces.formats.kineto_events import RANKS_MAX, DeviceClass, HostRange, KinetoEvents, argument_bytes
from traces.formats.phases import Phase, collective_of, is_backend_range, kernel_collective, kind_of_collective

__all__ = ["DeviceOp", "Joined", "join"]

CHUNK = 65536
#: By how much the device's clock may be behind the host's, so that an event seems to start before its launch.
CLOCK_SKEW_NS_MAX = 100_000
# CUDA and HIP, and the name that older ROCm gives the copy
_TO_DEVICE = re.compile(r"HtoD|HostToDevice")
_NO_COLLECTIVES = ("wait", "barrier", "init", "")


@dataclass(frozen=True, slots=True)
class DeviceOp:
    """What is known of a device event beyond its times; events of which the same is known share one."""

    kind: OpKind | None = None
    reason: str = ""
    collective: str | None = None
    host: HostRange | None = None
    batch_offset: int = 0


@dataclass(slots=True)
class Joined:
    """A trace with its joins made; parallel to the device columns of `events`."""

    events: KinetoEvents
    ops: list[DeviceOp]
    step: npt.NDArray[np.int64]
    launch_start_ns: npt.NDArray[np.int64]
    launch_end_ns: npt.NDArray[np.int64]
    launch_thread: npt.NDArray[np.int64]
    collectives: list[HostRange]
    notes: list[str] = field(default_factory=list)


def containing(
    ranges: Sequence[HostRange], moments: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, list[HostRange]]]:
    """For each moment, in time order: its position in `moments`, itself, and the ranges open then, outermost first.

    Ranges nest; neither they nor the moments need be sorted.
    """
    ordered = sorted(ranges, key=lambda r: (r.start_ns, -r.end_ns))
    open_ranges: list[HostRange] = []
    position = 0
    order = np.argsort(moments, kind="stable")
    for first in range(0, order.size, CHUNK):
        part = order[first : first + CHUNK]
        for index, moment in zip(part.tolist(), moments[part].tolist(), strict=True):
            while position < len(ordered) and ordered[position].start_ns <= moment:
                opened = ordered[position]
                while open_ranges and open_ranges[-1].end_ns < opened.start_ns:
                    open_ranges.pop()
                open_ranges.append(opened)
                position += 1
            while open_ranges and open_ranges[-1].end_ns < moment:
                open_ranges.pop()
            yield index, moment, open_ranges


def _by_thread(ranges: Sequence[HostRange]) -> dict[int, list[HostRange]]:
    threads: dict[int, list[HostRange]] = {}
    for found in ranges:
        threads.setdefault(found.thread, []).append(found)
    return threads


def _launches(events: KinetoEvents) -> npt.NDArray[np.int64]:
    """Index of the launch of each device event, -1 where the trace has none.

    A profiler that ran several times reuses its correlations; of several launches it is the last before the event.
    """
    correlation = np.asarray(events.launch_correlation, dtype=np.int64)
    wanted = np.asarray(events.device_correlation, dtype=np.int64)
    if correlation.size == 0:
        return np.full(wanted.size, -1, dtype=np.int64)
    start = np.asarray(events.launch_start_ns, dtype=np.int64)
    order = np.lexsort((start, correlation))
    ordered = correlation[order]
    at = np.minimum(np.searchsorted(ordered, wanted), ordered.size - 1)
    end = np.searchsorted(ordered, wanted, side="right")
    for several in np.flatnonzero(end - at > 1):
        begun = start[order[at[several] : end[several]]]
        latest = events.device_start_ns[several] + CLOCK_SKEW_NS_MAX
        at[several] += max(int(np.searchsorted(begun, latest, side="right")) - 1, 0)
    found = order[at]
    return np.where((correlation[found] == wanted) & (wanted >= 0), found, -1)


def _starts(ranges: Sequence[HostRange]) -> npt.NDArray[np.int64]:
    return np.array([r.start_ns for r in ranges], dtype=np.int64)


def _complete_collectives(ranges: list[HostRange]) -> list[HostRange]:
    """The ranges that stand for one collective each, with sizes and arguments of the ops around them filled in."""
    backend = [found for found in ranges if is_backend_range(found.name)]
    for thread, members in _by_thread(ranges).items():
        own = [r for r in backend if r.thread == thread]
        others = [r for r in members if not is_backend_range(r.name)]
        for index, _, around in containing(others, _starts(own)):
            target = own[index]
            for parent in reversed(around):
                target.args = {**parent.args, **target.args}
                if target.phase is None:
                    target.phase = parent.phase
                if target.bytes_in is None and parent.phase is None:
                    target.bytes_in, target.integers = parent.bytes_in, parent.integers
                if target.bytes_out is None:
                    target.bytes_out = parent.bytes_out
    stages = _stages(ranges)
    orphans = [r for r in backend if r.phase is None]
    for index, _, around in containing(stages, _starts(orphans)):
        orphans[index].phase = around[-1].phase if around else None
    if not backend:
        # newer traces without backend ranges carry the arguments on the op itself
        backend = [r for r in ranges if r.name == "record_param_comms" and _named(r) is not None]
        for found in backend:
            found.collective = _named(found)
    return sorted(backend, key=lambda r: r.start_ns)


def _named(found: HostRange) -> str | None:
    name = str(found.args.get("Collective name", "")).lower()
    return None if name in _NO_COLLECTIVES else collective_of(name)


def fill_from_arguments(found: HostRange, args: dict[str, Any]) -> None:
    """Sizes from the element counts that newer traces attach to kernel or op, where the shapes are missing."""
    merged = {**args, **found.args}
    found.args = merged
    if found.bytes_in is None:
        found.bytes_in = argument_bytes(merged, "In")
    if found.bytes_out is None:
        found.bytes_out = argument_bytes(merged, "Out")
    if found.bytes_out is None and found.collective in ("all_reduce", "broadcast"):
        found.bytes_out = found.bytes_in
    if found.integers is None and isinstance(merged.get("dtype"), str):
        found.integers = is_integer(str(merged["dtype"]))


def _lookahead(steps: list[HostRange], stages: list[HostRange]) -> None:
    """Sets how many batches ahead of its step a stage works, as the order of the annotations shows it.

    Key routing after the step's forward is for the next batch; a copy before the forward of such a pipeline is for the
    one after that (TorchRec's `TrainPipelineSparseDist`), after the forward for the next. Where a forward itself waits
    for keys, these were routed by an earlier step, so that all routing outside of it is for the next batch.
    """
    forwards = sorted((s.start_ns, s.end_ns) for s in stages if s.phase is not None and s.phase.stage == "forward")
    for step in steps:
        inside = [s for s in stages if step.start_ns <= s.start_ns < step.end_ns and s.phase is not None]
        end = next((e for b, e in forwards if step.start_ns <= b < step.end_ns), None)
        if end is None:
            continue
        routing = [s for s in inside if s.phase is not None and s.phase.stage == "dedup"]
        own = [s for s in routing if any(b <= s.start_ns < e for b, e in forwards)]
        waits = any("wait_" in s.name for s in own)
        late = [s for s in routing if s.start_ns >= end or (waits and s not in own)]
        for stage in late:
            stage.batch_offset = 1
        for stage in inside:
            if stage.phase is not None and stage.phase.stage == "copy_h2d":
                stage.batch_offset = 1 if stage.start_ns >= end else 2 if late else 0


def _stages(ranges: list[HostRange]) -> list[HostRange]:
    return [r for r in ranges if r.phase is not None and r.phase.stage is not None]


class _Classifier:
    """Says what each device event is, from the phase and the collective's range that its launch lies in."""

    def __init__(self, events: KinetoEvents) -> None:
        self._events = events
        self._known: dict[tuple[Any, ...], DeviceOp] = {}

    def op(self, index: int, phase: Phase | None, host: HostRange | None, offset: int, launched: bool) -> DeviceOp:
        """What is known of the event with this index."""
        one = self._events.device_class[index]
        if one == DeviceClass.COMM:
            return self._comm(index, phase, host, offset)
        if phase is not None:
            return self._shared(phase.kind, phase.reason, offset)
        if one == DeviceClass.MEM and _TO_DEVICE.search(self._events.names[self._events.device_name[index]]):
            return self._shared(OpKind.COPY_H2D, "", offset)
        outside, unknown = "launched outside any annotated stage", "no launch with this correlation in the trace"
        return self._shared(None, outside if launched else unknown, offset)

    def _shared(self, kind: OpKind | None, reason: str, offset: int) -> DeviceOp:
        key = (kind, reason, offset)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = DeviceOp(kind, reason, None, None, offset)
        return found

    def _comm(self, index: int, phase: Phase | None, host: HostRange | None, offset: int) -> DeviceOp:
        args = self._events.comm_args.get(index, {})
        named = str(args.get("Collective name", "")).lower()
        if host is not None and host.collective is not None:
            collective = host.collective
            fill_from_arguments(host, args)
        elif named not in _NO_COLLECTIVES:
            collective = collective_of(named)
        else:
            collective = kernel_collective(self._events.names[self._events.device_name[index]]) or "unknown"
        kind, reason = kind_of_collective(collective, phase, host.integers if host is not None else None)
        return DeviceOp(kind, reason, collective, host, offset)


def _nearest(around: list[HostRange], moment: int) -> tuple[Phase | None, HostRange | None, int | None]:
    """Innermost phase, innermost collective and innermost stage's batch offset among the open ranges."""
    phase: Phase | None = None
    host: HostRange | None = None
    offset: int | None = None
    for found in reversed(around):
        if found.end_ns < moment:
            continue
        if phase is None and found.phase is not None:
            phase = found.phase
        if host is None and found.collective is not None:
            host = found
        is_stage = found.collective is None and found.phase is not None and found.phase.stage is not None
        if offset is None and is_stage:
            offset = found.batch_offset
    return phase, host, offset


def _in_step(steps: list[HostRange], moments: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Index of the step range that holds each moment, -1 where none does."""
    if not steps:
        return np.full(moments.size, -1, dtype=np.int64)
    starts = np.array([s.start_ns for s in steps], dtype=np.int64)
    ends = np.array([s.end_ns for s in steps], dtype=np.int64)
    at = np.searchsorted(starts, moments, side="right") - 1
    return np.where((at >= 0) & (moments < ends[np.maximum(at, 0)]), at, -1)


def _communicating(events: KinetoEvents, hosts: dict[int, HostRange]) -> None:
    """Leaves the kernels that communicate, and calls so those of other libraries, whatever their name.

    A collective's range also launches the kernels that pack and unpack its tensors; so where one of its kernels has
    the name of a communication kernel, that is the one, and otherwise all are.
    """
    named = {id(host) for index, host in hosts.items() if events.device_class[index] == DeviceClass.COMM}
    for index, host in list(hosts.items()):
        if events.device_class[index] == DeviceClass.COMM:
            continue
        if id(host) in named:
            del hosts[index]
        else:
            events.device_class[index] = DeviceClass.COMM


def _place(
    events: KinetoEvents,
    stages: list[HostRange],
    launch_start: npt.NDArray[np.int64],
    thread: npt.NDArray[np.int64],
    known: npt.NDArray[np.bool_],
    placed: npt.NDArray[np.bool_],
) -> list[DeviceOp]:
    """What each device event is, by the ranges open when it was launched."""
    count = launch_start.size
    phases: list[Phase | None] = [None] * count
    hosts: dict[int, HostRange] = {}
    offsets = np.zeros(count, dtype=np.int8)
    by_thread = _by_thread(events.ranges)
    for owner in np.unique(thread[known]):
        chosen = np.flatnonzero(thread == owner)
        for at, moment, around in containing(by_thread.get(int(owner), []), launch_start[chosen]):
            index = int(chosen[at])
            phases[index], host, offset = _nearest(around, moment)
            offsets[index] = offset or 0
            if host is not None and events.device_class[index] != DeviceClass.MEM:
                hosts[index] = host
    _communicating(events, hosts)
    # what other threads launch belongs to the stage that the main thread is in
    orphans = np.flatnonzero(placed & np.array([phase is None for phase in phases], dtype=np.bool_))
    for at, moment, around in containing(stages, launch_start[orphans]):
        index = int(orphans[at])
        phases[index], _, offset = _nearest(around, moment)
        offsets[index] = offset or 0
    classifier = _Classifier(events)
    return [
        classifier.op(index, phase, hosts.get(index), int(offsets[index]), bool(known[index]))
        for index, phase in enumerate(phases)
    ]


def join(events: KinetoEvents) -> Joined:
    """Ties the device events of a trace to their launches and to the host ranges around these.

    Raises:
        TraceError: the events are those of no rank (`traces.formats.kineto_checks`).
    """
    noticed = check_events(events)
    events.steps.sort(key=lambda s: s.start_ns)
    stages = _stages(events.ranges)
    _lookahead(events.steps, stages)
    collectives = _complete_collectives(events.ranges)
    launch = _launches(events)
    count = launch.size
    known = launch >= 0
    start = np.asarray(events.device_start_ns, dtype=np.int64)
    launch_start, launch_end, thread = start.copy(), start.copy(), np.full(count, -1, dtype=np.int64)
    if events.launch_start_ns:
        begin = np.asarray(events.launch_start_ns, dtype=np.int64)
        length = np.asarray(events.launch_duration_ns, dtype=np.int64)
        launch_start[known] = begin[launch[known]]
        launch_end[known] = (begin + length)[launch[known]]
        thread[known] = np.asarray(events.launch_thread, dtype=np.int64)[launch[known]]
        del begin, length  # views of columns that are emptied now
    del launch
    events.forget_launches()
    placed = known if known.any() else np.ones(count, dtype=np.bool_)
    ops = _place(events, stages, launch_start, thread, known, placed)
    for found in collectives:
        fill_from_arguments(found, {})
    at = _in_step(events.steps, launch_start)
    numbers = np.array([_step_number(s) for s in events.steps] or [-1], dtype=np.int64)
    step = np.where((at >= 0) & placed, numbers[np.maximum(at, 0)], -1)
    return Joined(
        events,
        ops,
        step,
        launch_start,
        launch_end,
        thread,
        collectives,
        noticed + _notes(events, ops, known, collectives),
    )


def _step_number(found: HostRange) -> int:
    return int(found.name.split("#", 1)[1])


def _notes(
    events: KinetoEvents, ops: list[DeviceOp], known: npt.NDArray[np.bool_], collectives: list[HostRange]
) -> list[str]:
    notes: list[str] = []
    launched = {id(op.host) for op in ops if op.host is not None}
    if idle := sum(id(found) not in launched for found in collectives):
        notes.append(f"{idle} collectives have no kernel in the trace; their sizes are known, their times are not")
    if unsized := sum(found.bytes_in is None for found in collectives):
        notes.append(f"{unsized} collectives record neither shapes nor element counts; their bytes count as 0")
    if missing := int((~known).sum()):
        notes.append(f"{missing} device events have no launch in the trace; they belong to no step")
    by_name = sum(op.collective is not None and op.host is None for op in ops)
    if by_name:
        notes.append(f"{by_name} communication kernels have no host range; classified by arguments or kernel name")
    if events.cut_short:
        notes.append("the file is cut short; numbers cover the part that is there")
    return notes


def group_of(found: HostRange) -> tuple[str, int | None]:
    """Name and size of the process group of a collective, where the trace records them."""
    name = found.args.get("Process Group Name")
    size = whole(found.args.get("Group size"))
    return (str(name) if name is not None else "", size if size is not None and 0 < size < RANKS_MAX else None)
