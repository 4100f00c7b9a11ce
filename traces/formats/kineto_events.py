"""PyTorch profiler traces (Kineto, Chrome JSON): what the device did, joined to what the host launched and why.

One pass over the file keeps compact columns only: device events, launches, and the few host ranges that say something
(steps, collectives, pipeline stages). `traces.formats.kineto_join` then ties kernel, launch and host range together.

Source: Kineto output format (categories, `correlation`, collective arguments), PyTorch 1.8 to 2.7.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from nestpipe.base import TraceError, ns_to_us
from traces.formats.dtypes import element_bytes, is_integer
from traces.formats.json_stream import EventStream, exact_ns, whole
from traces.formats.phases import Phase, collective_of, is_backend_range, kernel_collective, phase_of, step_of
from traces.formats.reading import rank_in_name

__all__ = ["TRAILING_STEP", "DeviceClass", "HostRange", "KinetoEvents", "argument_bytes", "read_events"]

TIME_NS_MAX = 2**62
RANKS_MAX = 2**31
# an empty step that `traces.formats.export_kineto` appends for tools that drop the last one
TRAILING_STEP = "nestpipe_trailing_step"
_HOST_PARENTS = ("record_param_comms", "c10d::")
_SKIPPED = {
    *("python_function", "gpu_user_annotation", "trace", "overhead", "cuda_sync", "cuda_event", "cuda_profiler_range"),
    *("collective_comm", "mtia_ccp_events", "mtia_insight"),
}
_LAUNCHING = {
    *("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "xpu_runtime", "xpu_driver", "mtia_runtime"),
    *("privateuse1_runtime", "privateuse1_driver"),
}
_MEMORY = {"gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_OPERATORS = {"cpu_op", "operator"}
# runtime calls that stall the host by themselves, or that order streams
_STALLING = re.compile(r"Malloc|Free|HostAlloc|HostRegister|StreamWaitEvent")
# of Ascend's tasks: the processes' names and the arguments
_HARDWARE = re.compile(r"^(Ascend Hardware|HCCL|Communication)")
_TASK_ARGS = frozenset({"Task Type", "notify_id", "Physic Stream Id"})
_INPUT = re.compile(r"DataLoader.*__next__")
#: Host work with shorter interruptions counts as one stretch: Python between two ops is part of issuing them.
BUSY_GAP_NS_MAX = 20_000


class DeviceClass(IntEnum):
    """What a device event is, by the usual definitions: copies and fills belong to neither of the others."""

    COMPUTE = 0
    COMM = 1
    MEM = 2


@dataclass(slots=True)
class HostRange:
    """A host range with a meaning; sizes in bytes, `None` where not recorded."""

    name: str
    start_ns: int
    end_ns: int
    thread: int
    phase: Phase | None = None
    collective: str | None = None
    bytes_in: int | None = None
    bytes_out: int | None = None
    integers: bool | None = None
    batch_offset: int = 0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class KinetoEvents:
    """The contents of one file, unjoined. Device events and launches are parallel columns, times in ns.

    `processes` are those that launched device work or ran steps.
    """

    path: str
    rank: int | None = None
    rank_source: str = "unknown"
    world_size: int | None = None
    base_ns: int = 0
    num_events: int = 0
    cut_short: bool = False
    names: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)
    device_class: array[int] = field(default_factory=lambda: array("b"))
    device_name: array[int] = field(default_factory=lambda: array("i"))
    device_stream: array[int] = field(default_factory=lambda: array("i"))
    device_start_ns: array[int] = field(default_factory=lambda: array("q"))
    device_duration_ns: array[int] = field(default_factory=lambda: array("q"))
    device_correlation: array[int] = field(default_factory=lambda: array("q"))
    device_bytes: array[int] = field(default_factory=lambda: array("q"))
    streams: list[str] = field(default_factory=list)
    launch_correlation: array[int] = field(default_factory=lambda: array("q"))
    launch_thread: array[int] = field(default_factory=lambda: array("i"))
    launch_start_ns: array[int] = field(default_factory=lambda: array("q"))
    launch_duration_ns: array[int] = field(default_factory=lambda: array("q"))
    comm_args: dict[int, dict[str, Any]] = field(default_factory=dict)
    steps: list[HostRange] = field(default_factory=list)
    ranges: list[HostRange] = field(default_factory=list)
    waits: list[HostRange] = field(default_factory=list)
    calls: list[HostRange] = field(default_factory=list)
    busy_start_ns: array[int] = field(default_factory=lambda: array("q"))
    busy_end_ns: array[int] = field(default_factory=lambda: array("q"))
    processes: set[str] = field(default_factory=set)

    def forget_launches(self) -> None:
        """Frees the launches, once each is tied to its device event."""
        for column in (
            self.launch_correlation,
            self.launch_thread,
            self.launch_start_ns,
            self.launch_duration_ns,
            self.device_correlation,
        ):
            del column[:]


def _dims_product(dims: object) -> int | None:
    if not isinstance(dims, list):
        return None
    total = 1
    for dim in dims:
        number = whole(dim)
        if number is None or number < 0:
            return None
        total *= number
    return total


def tensor_bytes(dims: object, types: object) -> tuple[int | None, bool | None]:
    """Bytes of the tensors in `Input Dims` and `Input type`, and whether they hold integers; `None` where unusable."""
    if not isinstance(dims, list) or not isinstance(types, list):
        return None, None
    total, found, integers = 0, False, True
    for shape, dtype in zip(dims, types, strict=False):
        width = element_bytes(dtype) if isinstance(dtype, str) else None
        count = _dims_product(shape)
        if width is not None and count is not None:
            total, found = total + width * count, True
            integers = integers and is_integer(str(dtype))
    return (total, integers) if found and total < TIME_NS_MAX else (None, None)


def argument_bytes(args: Mapping[str, Any], which: str) -> int | None:
    """Bytes from `In msg nelems` or `Out msg nelems` (`which` is "In" or "Out") and `dtype`."""
    count, dtype = whole(args.get(f"{which} msg nelems")), args.get("dtype")
    width = element_bytes(dtype) if isinstance(dtype, str) else None
    return count * width if count is not None and width is not None and 0 <= count < 2**58 else None


class _Collector:
    """Fills a `KinetoEvents`, one event at a time."""

    def __init__(self, events: KinetoEvents) -> None:
        self.events = events
        self._names: dict[str, int] = {}
        self._streams: dict[tuple[Any, Any], int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._kernels: dict[str, tuple[int, bool]] = {}
        self._meaning: dict[str, tuple[int | None, Phase | None, bool]] = {}
        self._categories: dict[object, str] = {}
        self._busy: dict[int, list[int]] = {}
        self._device_processes: set[str] = set()
        self._unread: list[tuple[str, int]] = []

    def add(self, event: object) -> None:
        """Takes what matters from an event; the rest is dropped."""
        if not isinstance(event, dict):
            raise self._error(f"must be an object, got {str(event)[:40]!r}")
        if event.get("ph") != "X":
            self._process(event)
            return
        category = event.get("cat")
        if category is None and self._is_unread_task(event):
            self._unread.append((str(event.get("name")), exact_ns(event.get("dur", 0)) or 0))
            return
        kind = self._categories.get(category) if isinstance(category, str) else "host"
        if kind is None:
            kind = self._categories[category] = _category(str(category))
        if kind == "skip":
            return
        name = event.get("name")
        if kind in ("kernel", "memory"):
            if not isinstance(name, str):
                raise self._error(f"name must be a string, got {name!r}")
            self._device(event, name, kind)
        elif isinstance(name, str):
            if kind == "operator":
                start, duration = self._times(event)
                self._work(self._thread(event), start, start + duration)
            (self._launch if kind == "launch" else self._host)(event, name)

    def _process(self, event: Mapping[str, Any]) -> None:
        """Notes which processes stand for hardware in a trace whose device tasks have no category (Ascend)."""
        args = event.get("args")
        named = event.get("ph") == "M" and event.get("name") == "process_name" and isinstance(args, dict)
        if named and _HARDWARE.search(str(event["args"].get("name"))):
            self._device_processes.add(str(event.get("pid")))

    def _is_unread_task(self, event: Mapping[str, Any]) -> bool:
        args = event.get("args")
        known = isinstance(args, dict) and not _TASK_ARGS.isdisjoint(args)
        return known or str(event.get("pid")) in self._device_processes

    def refuse_unread(self) -> None:
        """Refuses a trace with device tasks that are not in Kineto's form.

        Raises:
            TraceError: there are some.
        """
        if not self._unread:
            return
        name, length = max(self._unread, key=lambda task: task[1])
        total = sum(duration for _, duration in self._unread)
        raise TraceError(
            f"{self.events.path}: {len(self._unread)} device tasks without a category, {ns_to_us(total)} us together, "
            f"such as {name[:60]!r} of {ns_to_us(length)} us: Ascend's trace_view.json ties tasks to launches by flow "
            "events, which are not read; export the trace with the categories and correlations of Kineto"
        )

    def _error(self, problem: str) -> TraceError:
        return TraceError(f"{self.events.path}: traceEvents[{self.events.num_events}]: {problem}")

    def _times(self, event: Mapping[str, Any]) -> tuple[int, int]:
        start, duration = exact_ns(event.get("ts")), exact_ns(event.get("dur", 0))
        if start is None or abs(start) >= TIME_NS_MAX:
            raise self._error(f"ts must be a time in us, got {event.get('ts')!r}")
        if duration is None or not 0 <= duration < TIME_NS_MAX:
            raise self._error(f"dur must be a time in us from 0 up, got {event.get('dur')!r}")
        return start, duration

    def _index(self, table: dict[Any, int], key: Any, names: list[str], label: str) -> int:
        index = table.get(key)
        if index is None:
            index = table[key] = len(names)
            names.append(label)
        return index

    def _device(self, event: Mapping[str, Any], name: str, kind: str) -> None:
        columns = self.events
        known = self._kernels.get(name)
        if known is None:
            known = self._index(self._names, name, columns.names, name), kernel_collective(name) is not None
            self._kernels[name] = known
        start, duration = self._times(event)
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        if "end_ns" in args and "start_ns" in args:
            # our own export rounds to whole us for other tools and keeps the exact times here
            first, last = whole(args["start_ns"]), whole(args["end_ns"])
            if first is not None and last is not None and abs(first) < TIME_NS_MAX and 0 <= last - first < TIME_NS_MAX:
                start, duration = first, last - first
        is_comm = kind == "kernel" and (known[1] or "Collective name" in args)
        device, stream = event.get("pid"), str(event.get("tid")).removeprefix("stream ")
        key = (str(device), stream)
        columns.device_class.append(DeviceClass.MEM if kind == "memory" else DeviceClass(int(is_comm)))
        columns.device_name.append(known[0])
        columns.device_stream.append(
            self._index(self._streams, key, columns.streams, f"device {device} stream {stream}")
        )
        columns.device_start_ns.append(start)
        columns.device_duration_ns.append(duration)
        columns.device_correlation.append(_small(args.get("correlation")))
        columns.device_bytes.append(_small(args.get("bytes")))
        if is_comm:
            columns.comm_args[len(columns.device_name) - 1] = _collective_args(args)

    def _thread(self, event: Mapping[str, Any]) -> int:
        key = (str(event.get("pid")), str(event.get("tid")))
        return self._index(self._threads, key, self.events.threads, f"host {event.get('tid')}")

    def _launch(self, event: Mapping[str, Any], name: str) -> None:
        columns = self.events
        start, duration = self._times(event)
        thread = self._thread(event)
        self._work(thread, start, start + duration)
        if name.endswith("Synchronize"):
            columns.waits.append(HostRange(name, start, start + duration, thread))
        elif _STALLING.search(name):
            columns.calls.append(HostRange(name, start, start + duration, thread))
        args = event.get("args")
        correlation = _small(args.get("correlation")) if isinstance(args, dict) else -1
        if correlation >= 0:
            columns.processes.add(str(event.get("pid")))
            columns.launch_correlation.append(correlation)
            columns.launch_thread.append(thread)
            columns.launch_start_ns.append(start)
            columns.launch_duration_ns.append(duration)

    def _work(self, thread: int, start: int, end: int) -> None:
        """Notes that a thread had recorded work open; stretches that nearly touch become one as they come."""
        last = self._busy.get(thread)
        if last is None:
            self._busy[thread] = [start, end]
        elif last[0] <= start <= last[1] + BUSY_GAP_NS_MAX:
            last[1] = max(last[1], end)
        else:
            self.events.busy_start_ns.append(last[0])
            self.events.busy_end_ns.append(last[1])
            last[:] = start, end

    def finish(self) -> None:
        """Hands over what is still open."""
        for start, end in self._busy.values():
            self.events.busy_start_ns.append(start)
            self.events.busy_end_ns.append(end)
        self._busy.clear()

    def _host(self, event: Mapping[str, Any], name: str) -> None:
        if _INPUT.search(name):
            start, duration = self._times(event)
            self.events.calls.append(HostRange(name, start, start + duration, self._thread(event)))
            return
        known = self._meaning.get(name)
        if known is None:
            is_parent = name.startswith(_HOST_PARENTS)
            known = step_of(name), phase_of(name), is_parent or is_backend_range(name)
            if len(self._meaning) < 1_000_000:
                self._meaning[name] = known
        step, phase, is_comm = known
        if step is None and phase is None and not is_comm:
            return
        start, duration = self._times(event)
        found = HostRange(name, start, start + duration, self._thread(event), phase)
        if step is not None:
            if isinstance(event.get("args"), dict) and TRAILING_STEP in event["args"]:
                return
            self.events.steps.append(found)
            self.events.processes.add(str(event.get("pid")))
        elif is_comm:
            args = event.get("args")
            self._collective(found, args if isinstance(args, dict) else {})
        else:
            self.events.ranges.append(found)

    def _collective(self, found: HostRange, args: Mapping[str, Any]) -> None:
        dims, types = args.get("Input Dims"), args.get("Input type")
        found.args = _collective_args(args)
        if is_backend_range(found.name):
            found.collective = collective_of(found.name)
            found.bytes_in, found.integers = tensor_bytes(dims, types)
        elif found.name.startswith("c10d::alltoall_base") and isinstance(dims, list) and isinstance(types, list):
            # this op takes (output, input, ...)
            found.bytes_out, _ = tensor_bytes(dims[:1], types[:1])
            found.bytes_in, found.integers = tensor_bytes(dims[1:2], types[1:2])
        self.events.ranges.append(found)


def _category(category: str) -> str:
    lowered = category.lower()
    if lowered == "kernel":
        return "kernel"
    if lowered in _MEMORY:
        return "memory"
    if lowered in _LAUNCHING:
        return "launch"
    if lowered in _OPERATORS:
        return "operator"
    return "skip" if lowered in _SKIPPED else "host"


def _small(value: object) -> int:
    number = whole(value)
    return number if number is not None and 0 <= number < TIME_NS_MAX else -1


_KEPT_ARGS = (
    "Collective name",
    "dtype",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "In split size",
    "Out split size",
    "Process Group Name",
    "Process Group Ranks",
    "Seq",
)


def _collective_args(args: Mapping[str, Any]) -> dict[str, Any]:
    return {key: args[key] for key in _KEPT_ARGS if key in args}


def _describe(events: KinetoEvents, meta: Mapping[str, Any]) -> None:
    """Rank, world size and base time from the top level, else from the file name."""
    info = meta.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    rank, world = whole(info.get("rank")), whole(info.get("world_size"))
    if rank is not None and 0 <= rank < RANKS_MAX:
        events.rank, events.rank_source = rank, "distributedInfo"
    else:
        for label, text in (("file name", events.path), ("traceName", str(meta.get("traceName", "")))):
            if (named := rank_in_name(text)) is not None:
                events.rank, events.rank_source = named, label
                break
    events.world_size = world if world is not None and 0 < world < RANKS_MAX else None
    base = whole(meta.get("baseTimeNanoseconds"))
    events.base_ns = base if base is not None and abs(base) < TIME_NS_MAX else 0


def read_events(
    path: str | os.PathLike[str], *, partial: bool = False, on_progress: Callable[[int], None] | None = None
) -> KinetoEvents:
    """What a Kineto trace of one rank holds.

    Args:
        path: Chrome JSON, plain or gzip, of any size.
        partial: take the whole events of a file that is cut short instead of refusing it.
        on_progress: called with the number of unpacked bytes read so far.

    Raises:
        TraceError: not such a file, cut short, or an event with invalid times.
    """
    events = KinetoEvents(os.fspath(path))
    stream = EventStream(path, partial=partial, on_progress=on_progress)
    collector = _Collector(events)
    for event in stream:
        collector.add(event)
        events.num_events += 1
    collector.finish()
    collector.refuse_unread()
    events.cut_short = stream.cut_short
    _describe(events, stream.meta)
    if events.world_size is None:
        # the world is a group, too; of the others none is larger
        arguments = [*events.comm_args.values(), *(found.args for found in events.ranges)]
        sizes = [whole(args.get("Group size")) or 0 for args in arguments]
        sizes = [size for size in sizes if size < RANKS_MAX]
        events.world_size = max(sizes, default=0) or None
    if not (events.device_name or events.steps or events.ranges):
        raise TraceError(
            f"{events.path}: {events.num_events} events, but no device kernel, profiler step or collective among them; "
            "expected a PyTorch profiler (Kineto) trace with categories such as kernel, cuda_runtime and cpu_op"
        )
    return events
