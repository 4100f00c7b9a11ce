"""The runtime: a lane per stream, each an in-order queue of ops, and as many threads as there are lanes.

Order is the program's alone: a lane's next op starts when the lanes it waits for have finished what it needs. On CPU
ops overlap because torch releases the interpreter lock. A thread that finishes an op goes on with whatever is ready,
its own lane first, and wakes others only for what is left; so a program without overlap runs on one thread, and handing
over costs no switch, as it would with a thread bound to each lane. On CUDA every lane also has a stream of its own: a
wait becomes `wait_event` on the device, and a `synchronize` where the waiting lane works on host memory.

Threads that run in real time keep their core until they wait for something. There each lets the others go first before
an op; else gloo's threads, which answer the peers, would not run while ops follow one another, and transfers would
stand still behind computing.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch

from executor.process import is_realtime
from executor.runtime.cursor import LanePlan
from nestpipe.base import ExecutorError, NestPipeError, ms_to_ns
from nestpipe.ir import GROUPS, Op, OpKind, Resource, op_name, show_op

__all__ = ["Cost", "Implementation", "Lane", "OpRecord", "OpTable", "RunError", "Runtime"]


class Cost(NamedTuple):
    """What an op moved: bytes it sent or copied, keys it handled, and how many of them were distinct."""

    bytes: int = 0
    keys: int = 0
    unique_keys: int = 0


class OpRecord(NamedTuple):
    """One op as it ran: times in nanoseconds of this rank's monotonic clock."""

    op: Op
    lane: int
    start_ns: int
    end_ns: int
    cost: Cost


Implementation: TypeAlias = Callable[[Op], Cost]
OpTable: TypeAlias = Mapping[OpKind, Implementation]

# a lane that prepares batches in Python would hold up the others 5 ms at every return from torch; shorter gains no more
_SWITCH_S = 0.0005
_HOST: frozenset[Resource] = frozenset({Resource.HOST_IO, Resource.HOST_MEMORY})


class RunError(ExecutorError):
    """An op failed: names rank, stream, op, and shows the schedule around it."""


@dataclass(slots=True)
class Lane:
    """Where one stream stands; the watchdog reads it from another thread."""

    index: int
    plan: LanePlan
    finished: int = 0
    running: bool = False
    since_ns: int = 0
    records: list[OpRecord] = field(default_factory=list)

    @property
    def status(self) -> str:
        """waiting, running or done."""
        return "running" if self.running else "waiting" if self.finished < len(self.plan.tasks) else "done"

    @property
    def current(self) -> Op | None:
        """The op that is waiting or running, None when the stream is through."""
        return self.plan.tasks[self.finished].op if self.finished < len(self.plan.tasks) else None

    @property
    def last(self) -> Op | None:
        """The op that finished last, None when none has."""
        return self.plan.tasks[self.finished - 1].op if self.finished else None


class Runtime:
    """Runs planned lanes with an op table. One use: make it, `run` it, read its `records`.

    Args:
        plans: what to run, as `plan_lanes` makes it.
        table: the implementation of every kind that they use.
        device: where the buffers live; CUDA gives every lane a stream.
        rank: for messages.
        after_op: called when an op has finished, in its lane, for example to release buffers.
    """

    def __init__(
        self,
        plans: Sequence[LanePlan],
        table: OpTable,
        *,
        device: torch.device,
        rank: int = 0,
        after_op: Callable[[Op], None] | None = None,
    ) -> None:
        self.table = table
        self.rank = rank
        self.after_op = after_op
        self.lanes = [Lane(index=index, plan=plan) for index, plan in enumerate(plans)]
        self._queues = [_CudaQueue(device, plan.resource) for plan in plans if device.type == "cuda"]
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        # two conditions on one lock: a wake-up meant for a lane must not go to the thread that waits for the end
        self._changed, self._over = threading.Condition(self._lock), threading.Condition(self._lock)
        self._left = sum(len(plan.tasks) for plan in plans)
        self._all = range(len(self.lanes))
        self._realtime = is_realtime()

    @property
    def records(self) -> list[list[OpRecord]]:
        """The ops of each lane that have run so far, in order."""
        return [lane.records for lane in self.lanes]

    def run(self) -> None:
        """Run every lane to its end.

        Raises:
            RunError: if an op raises; lanes that hang in a collective with it are left to the process's end.
        """
        threads = [threading.Thread(target=self._work, name=f"lane-{n}", daemon=True) for n in self._all]
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            for thread in threads:
                thread.start()
            with self._over:
                self._over.wait_for(lambda: not self._left or self.failure is not None)
            if self.failure is not None:
                raise self.failure
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(usual_s)
        for lane, queue in zip(self.lanes, self._queues, strict=False):
            lane.records = queue.resolve(lane.records)

    def _work(self) -> None:
        """One thread: run ready ops until none are left."""
        with torch.no_grad():
            lane = self._next(None)
            while lane is not None:
                try:
                    self._run(lane)
                except BaseException as error:
                    with self._lock:
                        self.failure = self.failure or self._explain(lane, error)
                        self._end()
                    return
                lane = self._next(lane)

    def _next(self, done: Lane | None) -> Lane | None:
        """Note that a lane's op is done, and take the next lane that is ready; None when nothing is left."""
        with self._lock:
            candidates: Sequence[int] = self._all
            if done is not None:
                candidates = done.plan.tasks[done.finished].wakes
                done.finished += 1
                done.running = False
                self._left -= 1
                if not self._left:
                    self._end()
            while self._left and self.failure is None:
                ready = self._ready(candidates)
                if ready:
                    if len(ready) > 1:
                        self._changed.notify(len(ready) - 1)
                    ready[0].running = True
                    return ready[0]
                if candidates is self._all:
                    self._changed.wait()
                # what this op did not wake may have been left by a thread that woke more than it could take
                candidates = self._all
            return None

    def _ready(self, candidates: Sequence[int]) -> list[Lane]:
        """Those lanes whose next op can start, in the given order."""
        lanes, found = self.lanes, []
        for index in candidates:
            lane = lanes[index]
            if lane.running or lane.finished == len(lane.plan.tasks):
                continue
            for other, count in lane.plan.tasks[lane.finished].waits:
                if lanes[other].finished < count:
                    break
            else:
                found.append(lane)
        return found

    def _end(self) -> None:
        """Wake everybody, with the lock held: all ops are done, or one has failed."""
        self._changed.notify_all()
        self._over.notify_all()

    def _run(self, lane: Lane) -> None:
        task = lane.plan.tasks[lane.finished]
        if not self._queues:
            self._call(lane, task.op)
        else:
            with self._queues[lane.index].after([(self._queues[other], count) for other, count in task.waits]):
                self._call(lane, task.op)

    def _call(self, lane: Lane, op: Op) -> None:
        if self._realtime:
            os.sched_yield()
        lane.since_ns = start_ns = time.monotonic_ns()
        cost = self.table[op.kind](op)
        lane.records.append(OpRecord(op, lane.index, start_ns, time.monotonic_ns(), cost))
        if self.after_op is not None:
            self.after_op(op)

    def _explain(self, lane: Lane, error: BaseException) -> RunError:
        op = lane.current
        assert op is not None, "only an op can fail"
        around = lane.plan.tasks[max(lane.finished - 2, 0) : lane.finished + 2]
        lines = "\n".join(f"  {'>' if task.op is op else ' '} {show_op(task.op, loop=False)}" for task in around)
        group = f", group {lane.plan.resource}" if lane.plan.resource in GROUPS else ""
        reason = str(error) if isinstance(error, NestPipeError) else f"{type(error).__name__}: {_short(error)}"
        failure = RunError(
            f"rank {self.rank}: {op_name(op)} (batch {op.batch}"
            + ("" if op.micro_batch is None else f", micro-batch {op.micro_batch}")
            + f") on stream {lane.plan.name}{group} failed: {reason}\n{lines}"
        )
        failure.__cause__ = error
        return failure


def _short(error: BaseException) -> str:
    """The first line of a message, without gloo's source path and advice."""
    line = next(iter(str(error).splitlines()), "")
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]


class _CudaQueue:
    """A lane's CUDA stream; every op is bracketed by two timed events.

    Host lanes read and write host memory, so they wait on the host for what they follow.
    """

    def __init__(self, device: torch.device, resource: Resource) -> None:
        priority = -1 if resource in GROUPS else 0
        self.stream = torch.cuda.Stream(device=device, priority=priority)  # type: ignore[no-untyped-call]
        # what the caller has queued, such as initial parameters, comes first
        self.stream.wait_stream(torch.cuda.current_stream(device))
        self.on_host = resource in _HOST
        self.starts: list[torch.cuda.Event] = []
        self.ends: list[torch.cuda.Event] = []
        self.origin = self._mark()
        self.origin.synchronize()
        self.origin_ns = time.monotonic_ns()

    @contextmanager
    def after(self, waits: Sequence[tuple[_CudaQueue, int]]) -> Iterator[None]:
        """Run an op on this stream, after the first `count` ops of each of the other lanes."""
        with torch.cuda.stream(self.stream):
            for other, count in waits:
                event = other.ends[count - 1]
                if self.on_host:
                    event.synchronize()
                else:
                    self.stream.wait_event(event)
            self.starts.append(self._mark())
            yield
            self.ends.append(self._mark())

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def resolve(self, records: list[OpRecord]) -> list[OpRecord]:
        """Wait until all work has been done; the records with the times at which the device did it."""
        self.stream.synchronize()
        if self.on_host:
            return records
        return [
            record._replace(start_ns=self._at(start), end_ns=self._at(end))
            for record, start, end in zip(records, self.starts, self.ends, strict=True)
        ]

    def _at(self, event: torch.cuda.Event) -> int:
        return self.origin_ns + ms_to_ns(float(self.origin.elapsed_time(event)))
