"""The runtime: a lane per stream, each an in-order queue of ops, and as many threads as there are lanes.

Order is the program's alone: a lane's next op starts when the lanes it waits for have finished what it needs. On CPU
ops overlap because torch releases the interpreter lock. A thread that finishes an op goes on with whatever is ready,
its own lane first, and wakes others only for what is left; so a program without overlap runs on one thread, and handing
over costs no switch, as it would with a thread bound to each lane. On CUDA every lane also has a stream of its own: a
wait becomes `wait_event` on the device, and a `synchronize` where the waiting lane works on host memory.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from executor.cursor import LanePlan, Plan, Task
from nestpipe.errors import ExecutorError, NestPipeError
from nestpipe.ir import GROUPS, Op, OpKind, Resource, op_name
from nestpipe.text import show_op
from nestpipe.units import ms_to_ns

__all__ = ["Cost", "Implementation", "Lane", "OpTable", "RunError", "Runtime", "Span"]


class Cost(NamedTuple):
    """What an op moved: bytes it sent or copied, keys it handled, and how many of them were distinct."""

    bytes: int = 0
    keys: int = 0
    unique_keys: int = 0


class Span(NamedTuple):
    """One op as it ran: times in nanoseconds of this rank's monotonic clock."""

    op: Op
    lane: int
    start_ns: int
    end_ns: int
    cost: Cost


Implementation: TypeAlias = Callable[[Op], Cost]
OpTable: TypeAlias = Mapping[OpKind, Implementation]

_NOTHING = nullcontext()
_HOST: frozenset[Resource] = frozenset({Resource.HOST_IO, Resource.HOST_MEMORY})


class RunError(ExecutorError):
    """An op failed: names rank, stream, op, and shows the schedule around it."""


@dataclass(slots=True)
class Lane:
    """Where one stream stands. `status` is waiting, running or done; read by the watchdog from another thread."""

    plan: LanePlan
    finished: int = 0
    status: str = "waiting"
    since_ns: int = 0

    @property
    def current(self) -> Op | None:
        """The op that is waiting or running, None when the stream is through."""
        return self.plan.tasks[self.finished].op if self.finished < len(self.plan.tasks) else None

    @property
    def last(self) -> Op | None:
        """The op that finished last, None when none has."""
        return self.plan.tasks[self.finished - 1].op if self.finished else None


class Runtime:
    """Runs a plan with an op table. One use: make it, `run` it, read its `spans`.

    Args:
        plan: what to run.
        table: the implementation of every kind that the plan uses.
        device: where the buffers live; CUDA gives every lane a stream.
        rank: for messages.
        after_op: called when an op has finished, in its lane, for example to release buffers.
    """

    def __init__(
        self,
        plan: Plan,
        table: OpTable,
        *,
        device: torch.device,
        rank: int = 0,
        after_op: Callable[[Op], None] | None = None,
    ) -> None:
        self.plan = plan
        self.table = table
        self.rank = rank
        self.device = device
        self.after_op = after_op
        self.lanes = [Lane(plan=lane) for lane in plan.lanes]
        self.spans: list[list[Span]] = [[] for _ in plan.lanes]
        self.failure: BaseException | None = None
        lock = threading.Lock()
        # two conditions on one lock: a wake-up meant for a lane must not go to the thread that waits for the end
        self._changed, self._over = threading.Condition(lock), threading.Condition(lock)
        self._left = sum(len(lane.tasks) for lane in plan.lanes)
        self._followers = _followers(plan)
        self._queues = [_queue(device, lane.resource) for lane in plan.lanes]

    def run(self) -> None:
        """Run every lane to its end.

        Raises:
            RunError: if an op raises; lanes that hang in a collective with it are left to the process's end.
        """
        threads = [threading.Thread(target=self._work, name=f"lane-{n}", daemon=True) for n in range(len(self.lanes))]
        for thread in threads:
            thread.start()
        with self._over:
            self._over.wait_for(lambda: not self._left or self.failure is not None)
        if self.failure is not None:
            raise self.failure
        for thread in threads:
            thread.join()
        for queue in self._queues:
            queue.drain()
        self.spans = [queue.resolve(spans) for queue, spans in zip(self._queues, self.spans, strict=True)]

    def _work(self) -> None:
        """One thread: run ready ops until none are left."""
        mine: int | None = None
        with torch.no_grad():
            while True:
                mine = self._next(mine)
                if mine is None:
                    return
                lane = self.lanes[mine]
                try:
                    self._run(mine, lane.plan.tasks[lane.finished])
                except BaseException as error:
                    with self._changed:
                        self.failure = self.failure or self._explain(lane, error)
                        self._end()
                    return

    def _next(self, done: int | None) -> int | None:
        """Note that a lane's op is done, and take the next lane that is ready; None when nothing is left."""
        with self._changed:
            if done is not None:
                lane = self.lanes[done]
                lane.finished += 1
                lane.status = "waiting" if lane.finished < len(lane.plan.tasks) else "done"
                lane.since_ns = time.monotonic_ns()
                self._left -= 1
                if not self._left:
                    self._end()
            # a finished op can only have made its own lane and those that follow it ready
            candidates: Sequence[int] = range(len(self.lanes)) if done is None else self._followers[done]
            while self._left and self.failure is None:
                ready = [index for index in candidates if self._is_ready(self.lanes[index])]
                if ready:
                    chosen = done if done in ready else ready[0]
                    self.lanes[chosen].status = "running"
                    self.lanes[chosen].since_ns = time.monotonic_ns()
                    if len(ready) > 1:
                        self._changed.notify(len(ready) - 1)
                    return chosen
                if len(candidates) < len(self.lanes):
                    candidates = range(len(self.lanes))
                else:
                    self._changed.wait()
            return None

    def _end(self) -> None:
        """Wake everybody, with the lock held: all ops are done, or one has failed."""
        self._changed.notify_all()
        self._over.notify_all()

    def _is_ready(self, lane: Lane) -> bool:
        if lane.status != "waiting":
            return False
        if lane.finished == len(lane.plan.tasks):
            lane.status = "done"
            return False
        return all(self.lanes[other].finished >= count for other, count in lane.plan.tasks[lane.finished].waits)

    def _run(self, index: int, task: Task) -> None:
        queue = self._queues[index]
        with queue.context():
            for other, count in task.waits:
                queue.follow(self._queues[other], count)
            start_ns = time.monotonic_ns()
            queue.begin()
            cost = self.table[task.op.kind](task.op)
            queue.end()
            self.spans[index].append(Span(task.op, index, start_ns, time.monotonic_ns(), cost))
            if self.after_op is not None:
                self.after_op(task.op)

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


def _followers(plan: Plan) -> list[list[int]]:
    """For each lane itself, and then the lanes that ever wait for it."""
    waits = [{other for task in lane.tasks for other, _ in task.waits} for lane in plan.lanes]
    lanes = range(len(plan.lanes))
    return [[lane, *(other for other in lanes if lane in waits[other] and other != lane)] for lane in lanes]


def _short(error: BaseException) -> str:
    """The first line of a message, without gloo's source path and advice."""
    line = next(iter(str(error).splitlines()), "")
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". This is typically")[0]


class _HostQueue:
    """A lane without a device stream: work is done when the call returns."""

    def context(self) -> AbstractContextManager[object]:
        """What the ops of the lane run in."""
        return _NOTHING

    def follow(self, other: _HostQueue, count: int) -> None:
        """Make later work of this lane wait for the first `count` ops of the other lane."""

    def begin(self) -> None:
        """Mark the start of an op."""

    def end(self) -> None:
        """Mark the end of an op."""

    def drain(self) -> None:
        """Wait until all work has been done."""

    def resolve(self, spans: list[Span]) -> list[Span]:
        """Spans with the times at which the device did the work."""
        return spans


class _CudaQueue(_HostQueue):
    """A lane with a CUDA stream; every op is bracketed by two timed events.

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
        self.origin = _event()
        self.origin.record(self.stream)
        self.origin.synchronize()
        self.origin_ns = time.monotonic_ns()

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def follow(self, other: _HostQueue, count: int) -> None:
        assert isinstance(other, _CudaQueue)
        event = other.ends[count - 1]
        if self.on_host:
            event.synchronize()
        else:
            self.stream.wait_event(event)

    def _mark(self) -> torch.cuda.Event:
        event = _event()
        event.record(self.stream)
        return event

    def begin(self) -> None:
        self.starts.append(self._mark())

    def end(self) -> None:
        self.ends.append(self._mark())

    def drain(self) -> None:
        self.stream.synchronize()

    def resolve(self, spans: list[Span]) -> list[Span]:
        if self.on_host:
            return spans
        return [
            span._replace(start_ns=self._at(start), end_ns=self._at(end))
            for span, start, end in zip(spans, self.starts, self.ends, strict=True)
        ]

    def _at(self, event: torch.cuda.Event) -> int:
        return self.origin_ns + ms_to_ns(float(self.origin.elapsed_time(event)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _queue(device: torch.device, resource: Resource) -> _HostQueue:
    return _CudaQueue(device, resource) if device.type == "cuda" else _HostQueue()
