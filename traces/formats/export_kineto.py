"""A trace table or Timeline as Kineto JSON, one file per rank, for Chrome, Perfetto and HolisticTraceAnalysis (HTA).

What HTA 0.5.0 needs, and what is done about it (checked by running it):

- it takes every time down to whole microseconds by shrinking events, unless all are whole already: edges are rounded
  here, so that unions and overlaps keep their lengths, and the exact nanoseconds travel in `args`
- it drops the last profiler step and every kernel whose launch it does not find: each device event gets a launch inside
  its step, and an empty step follows the last one
- it tells classes by name: `nccl...Kernel...` is communication, `Memcpy` and `Memset` are copies, and any other name is
  compute unless it contains `Memcpy`, `Memset` or `Sync`
- it looks for `"rank": N` with a space after the colon, and takes stream 0 for no stream
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from nestpipe.base import NS_PER_US, TraceError, atomic_file
from nestpipe.ir import COLLECTIVES, KINDS, Cost, kinds_of
from traces.formats.kineto_events import TRAILING_STEP
from traces.table import EXTRA_KINDS

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["device_class", "kineto_events", "table_rows", "timed_rows", "write_kineto"]

NO_TIMES = "nothing to export: no row of the table has start and end times"

FIRST_STREAM = 7
HOST_PID_FIRST = 1000
_COMM = frozenset(kind.value for kind in COLLECTIVES | kinds_of(Cost.MESSAGE))
_COPIES = {
    Cost.HOST_TO_DEVICE: "Memcpy HtoD (Pinned -> Device)",
    Cost.DEVICE_COPY: "Memcpy DtoD (Device -> Device)",
    Cost.DEVICE_TO_HOST: "Memcpy DtoH (Device -> Pinned)",
    Cost.ROWS_TO_HOST: "Memcpy DtoH (Device -> Pinned)",
}
_MEM = {kind.value: _COPIES[of.cost] for kind, of in KINDS.items() if of.cost in _COPIES}
_ON_HOST = kinds_of(Cost.NOTHING, Cost.HOST_MEMORY, Cost.ROWS_TO_DEVICE)
_HOST = frozenset(kind.value for kind in _ON_HOST) | EXTRA_KINDS.keys()
_HOST_CATEGORY = {"host_wait": "cuda_runtime", "host_call": "cuda_runtime"}
_KERNEL_NAMES = {
    "all_to_all": "SendRecv",
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "broadcast": "Broadcast",
    "reduce_scatter": "ReduceScatter",
    "send": "SendRecv",
    "recv": "SendRecv",
    "reduce": "Reduce",
}
_ARGS = ("kind", "batch", "micro_batch", "bytes", "keys", "unique_keys", "wait_ns", "start_ns", "end_ns")
_TEMPTING = re.compile(r"Memcpy|Memset|Sync|^nccl")


def device_class(kind: str, stream: str | None, op: str | None, collective: str | None) -> str:
    """Where an op shows: "comm", "mem" or "compute" on the device, or "host".

    What was measured on a device stays there, by its own name; of a schedule's ops, reading and the lookup in host
    memory are the host's.

    >>> device_class("sync", "d2d", "sync 3", None), device_class("lookup", "device stream 7", "kernel", None)
    ('mem', 'compute')
    """
    if stream is not None and stream.startswith("device "):
        if collective is not None:
            return "comm"
        return "mem" if op is not None and op.startswith(("Memcpy", "Memset")) else "compute"
    if kind in _COMM:
        return "comm"
    if kind in _MEM:
        return "mem"
    return "host" if kind in _HOST else "compute"


def _plain(value: Any) -> Any:
    """A cell as JSON has it; `None` for a missing one."""
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def timed_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows with a start and an end."""
    return frame[frame["start_ns"].notna() & frame["end_ns"].notna()]


def table_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as dicts of plain values, `None` for what is missing."""
    columns = {name: [_plain(value) for value in frame[name].tolist()] for name in frame.columns}
    names = list(columns)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _us(time_ns: int) -> int:
    """The whole microsecond nearest to a time; the same edge always goes to the same one."""
    return (time_ns + NS_PER_US // 2) // NS_PER_US


def _collective_word(row: dict[str, Any]) -> str:
    return str(row.get("collective") or str(row["kind"]).partition("[")[0])


def _name(row: dict[str, Any], one: str) -> str:
    op = str(row.get("op") or row["kind"])
    if one == "comm":
        if re.match(r"nccl.*Kernel", op):
            return op
        return f"ncclDevKernel_{_KERNEL_NAMES.get(_collective_word(row), 'Generic')}({op})"
    if one == "mem":
        return op if op.startswith(("Memcpy", "Memset")) else _MEM[str(row["kind"])]
    return _TEMPTING.sub(lambda found: found[0].lower() if found[0] != "nccl" else "NCCL", op)


def _steps(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """(step, start, end) in us, disjoint and in order: as recorded, else from the first start of each step's ops."""
    recorded = sorted(
        (row["start_ns"], row["end_ns"], int(str(row["op"]).rpartition("#")[2]))
        for row in rows
        if row["kind"] == "step" and re.search(r"#\d{1,17}$", str(row["op"]))
    )
    if recorded:
        return [(step, _us(start), _us(end)) for start, end, step in recorded]
    first: dict[int, int] = {}
    for row in rows:
        if row.get("step") is not None:
            first[row["step"]] = min(first.get(row["step"], row["start_ns"]), row["start_ns"])
    last = max((_us(row["end_ns"]) for row in rows), default=0)
    steps: list[tuple[int, int, int]] = []
    floor = None
    for step in sorted(first):
        start = _us(first[step]) if floor is None else max(_us(first[step]), floor)
        floor = start + 1
        steps.append((step, start, 0))
    ends = [start for _, start, _ in steps[1:]] + [max(last, steps[-1][1] + 1)] if steps else []
    return [(step, start, end) for (step, start, _), end in zip(steps, ends, strict=True)]


class _Launches:
    """When and on which host thread each device event was queued: as recorded, else early in its step."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        self._windows = {step: (start, end) for step, start, end in steps}
        self._count: dict[tuple[str, int], int] = {}

    def of(self, row: dict[str, Any]) -> tuple[int, int, str] | None:
        if row.get("launch_ns") is not None:
            start = _us(row["launch_ns"])
            end = _us(row["launch_end_ns"]) if row.get("launch_end_ns") is not None else start
            return start, max(end - start, 0), str(row.get("thread") or "launch")
        window = self._windows.get(row["step"]) if row.get("step") is not None else None
        if window is None:
            return None
        key = (str(row["stream"]), row["step"])
        position = self._count[key] = self._count.get(key, -1) + 1
        # a queue is filled ahead of the device, one call after the other
        return min(window[0] + position, window[1] - 1), 0, f"launch {row['stream']}"


def _numbered(names: list[str], first: int) -> dict[str, int]:
    """Track numbers; names that hold one already, such as `device stream 84` or `host 59811`, keep it."""
    numbers: dict[str, int] = {}
    taken: set[int] = set()
    for name in names:
        found = re.search(r"(\d{1,9})$", name)
        number = int(found[1]) if found and name.startswith(("device ", "host ")) else 0
        if number <= 0 or number in taken:
            number = next(n for n in range(first, first + len(names) + len(taken) + 1) if n not in taken)
        taken.add(number)
        numbers[name] = number
    return numbers


def _metadata(kind: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}}


def _slice(category: str, name: str, pid: int, tid: int, ts: int, dur: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def _device_events(
    row: dict[str, Any],
    one: str,
    correlation: int,
    stream: int,
    launch: tuple[int, int, str] | None,
    host: tuple[int, int],
) -> Iterator[dict[str, Any]]:
    """The device event, its launch, and the annotation around the launch that says what it is for."""
    start = _us(row["start_ns"])
    args = {name: row[name] for name in _ARGS if row.get(name) is not None}
    args.update({"device": 0, "stream": stream, "correlation": correlation, "External id": correlation})
    if one == "comm":
        args["Collective name"] = _collective_word(row)
        if row.get("group_size") is not None:
            args["Group size"] = row["group_size"]
    name = _name(row, one)
    if name != row.get("op"):
        args["op"] = row.get("op")
    yield _slice("gpu_memcpy" if one == "mem" else "kernel", name, 0, stream, start, _us(row["end_ns"]) - start, args)
    if launch is None:
        return
    pid, tid = host
    at, length, _ = launch
    call = "cudaMemcpyAsync" if one == "mem" else "cudaLaunchKernel"
    yield _slice("cuda_runtime", call, pid, tid, at, length, {"correlation": correlation, "External id": correlation})
    yield _slice("user_annotation", f"## nestpipe:{row['kind']} ##", pid, tid, at, length, {})
    if one == "comm":
        # bytes count as elements of one byte; `unsigned char` is PyTorch's name for that
        shape = (
            {"Input Dims": [[row["bytes"]]], "Input type": ["unsigned char"]} if row.get("bytes") is not None else {}
        )
        yield _slice("user_annotation", f"nccl:{_collective_word(row)}", pid, tid, at, length, shape)


def kineto_events(frame: pd.DataFrame, rank: int) -> Iterator[dict[str, Any]]:
    """The trace events of one rank, given the rows of that rank; rows without times are left out."""
    rows = table_rows(timed_rows(frame).sort_values("start_ns", kind="stable"))
    steps = _steps(rows)
    launches = _Launches(steps)
    classes = [device_class(r["kind"], r.get("stream"), r.get("op"), r.get("collective")) for r in rows]
    queued = [launches.of(row) if one != "host" else None for row, one in zip(rows, classes, strict=True)]
    pid = HOST_PID_FIRST + rank
    on_device = {str(r["stream"]) for r, c in zip(rows, classes, strict=True) if c != "host"}
    on_host = {str(r.get("thread") or r.get("stream")) for r, c in zip(rows, classes, strict=True) if c == "host"}
    streams = _numbered(sorted(on_device), FIRST_STREAM)
    threads = _numbered(sorted(on_host | {launch[2] for launch in queued if launch is not None}), pid + 1)
    yield _metadata("process_name", 0, 0, f"rank {rank} device")
    yield _metadata("process_name", pid, 0, f"rank {rank} host")
    for tracks, process in ((streams, 0), (threads, pid)):
        for name, number in tracks.items():
            yield _metadata("thread_name", process, number, name)
    for step, start, end in steps:
        yield _slice("user_annotation", f"ProfilerStep#{step}", pid, pid, start, max(end - start, 1), {})
    end = max((_us(row["end_ns"]) for row in rows), default=0)
    if len(steps) > 1:
        args = {TRAILING_STEP: "empty, for tools that drop the last step"}
        yield _slice(
            "user_annotation", f"ProfilerStep#{steps[-1][0] + 1}", pid, pid, max(end, steps[-1][2]) + 1, 1, args
        )
    for index, (row, one, launch) in enumerate(zip(rows, classes, queued, strict=True)):
        if one != "host":
            thread = threads[launch[2]] if launch is not None else 0
            yield from _device_events(row, one, index + 1, streams[str(row["stream"])], launch, (pid, thread))
        elif row["kind"] != "step":
            tid = threads[str(row.get("thread") or row.get("stream"))]
            start = _us(row["start_ns"])
            args = {name: row[name] for name in _ARGS if row.get(name) is not None}
            category = _HOST_CATEGORY.get(row["kind"], "cpu_op")
            yield _slice(category, str(row.get("op") or row["kind"]), pid, tid, start, _us(row["end_ns"]) - start, args)


def _write(file: IO[str], frame: pd.DataFrame, rank: int, world_size: int) -> None:
    head = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "device"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "displayTimeUnit": "ms",
    }
    file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
    separator = ""
    for event in kineto_events(frame, rank):
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def write_kineto(frame: pd.DataFrame, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes `rank<N>.json.gz` for each rank of a trace table or Timeline; each file appears whole or not at all.

    Args:
        frame: rows with at least the columns of a Timeline; `launch_ns`, `thread`, `collective` are used where present.
        folder: where to; made if need be.

    Returns:
        The files written.

    Raises:
        TraceError: no row has times, or the folder cannot be written to.
    """
    import pandas as pd

    if not len(timed_rows(frame)):
        raise TraceError(NO_TIMES)
    ranks = frame["rank"].fillna(0).astype("int64")
    sizes = frame["group_size"].dropna() if "group_size" in frame else pd.Series(dtype="int64")
    world_size = max(int(ranks.max()) + 1, int(sizes.max()) if len(sizes) else 0)
    written: list[Path] = []
    for rank in sorted(int(value) for value in ranks.unique()):
        target = Path(folder) / f"rank{rank}.json.gz"
        with (
            atomic_file(target, TraceError) as raw,
            gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, compresslevel=5) as packed,
        ):
            text = io.TextIOWrapper(cast("IO[bytes]", packed), encoding="utf-8", write_through=True)
            _write(text, frame[(ranks == rank).to_numpy()], rank, world_size)
            text.detach()
        written.append(target)
    return written
