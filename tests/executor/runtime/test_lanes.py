"""The runtime on its own, with ops that only note when they ran: order, overlap, failure."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest
import torch

from executor.runtime.cursor import plan_lanes
from executor.runtime.lanes import Cost, Implementation, RunError, Runtime
from nestpipe.ir import Op, OpKind, OpRef, Program, Resource, Stream, unroll, with_micro_batches
from nestpipe.schedules import load, names

CPU = torch.device("cpu")
FORKED = (OpKind.COPY_H2D, OpKind.DEDUP, OpKind.LOOKUP)


def run(program: Program, table: Mapping[OpKind, Implementation]) -> Runtime:
    runtime = Runtime(plan_lanes(program), {kind: lambda _: Cost() for kind in OpKind} | dict(table), device=CPU)
    runtime.run()
    return runtime


def fork(steps: int, width: int = 3) -> Program:
    """One stream reads; the others each wait for the read and for nothing else, and the next read for them."""

    def read(t: int) -> Op:
        return Op(kind=OpKind.READ, batch=t, after=tuple(OpRef(kind=kind, batch=t - 1) for kind in FORKED[:width] if t))

    reads = Stream(name="a", resource=Resource.HOST_IO, body=tuple(read(t) for t in range(steps)))
    others = [
        Stream(
            name=kind.value,
            resource=Resource.COMPUTE,
            body=tuple(Op(kind=kind, batch=t, after=(OpRef(kind=OpKind.READ, batch=t),)) for t in range(steps)),
        )
        for kind in FORKED[:width]
    ]
    return Program(name="fork", steps=steps, micro_batches=1, buffers=(), streams=(reads, *others))


@pytest.mark.parametrize("name", names())
def test_every_op_runs_once_after_what_it_waits_for(name: str) -> None:
    program = unroll(with_micro_batches(load(name), 3), 8)
    spans = run(program, {}).records
    assert [[span.op for span in lane] for lane in spans] == [list(stream.ops) for stream in program.streams]
    ends = {span.op.ref: span.end_ns for lane in spans for span in lane}
    for lane in spans:
        for span in lane:
            assert all(ends[ref] <= span.start_ns for ref in span.op.after)
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(lane))


@pytest.mark.parametrize("width", [2, 3])
def test_ops_that_are_ready_together_run_together(width: int) -> None:
    """Each meets the others inside its op; a wake-up that went astray would break the barrier."""
    meeting = threading.Barrier(width)

    def meet(_: Op) -> Cost:
        meeting.wait(timeout=20)
        return Cost()

    run(fork(300, width), dict.fromkeys(FORKED[:width], meet))


@pytest.mark.parametrize("policy", ["SCHED_RR", "SCHED_FIFO", "SCHED_OTHER"])
def test_in_real_time_every_op_lets_other_threads_go_first(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, policy):
        pytest.skip(f"this system has no {policy}")
    yields: list[int] = []
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: getattr(os, policy))
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(1))
    ops = sum(len(lane) for lane in run(fork(5), {}).records)
    assert len(yields) == (0 if policy == "SCHED_OTHER" else ops)


_REUSE = """
import ctypes, resource, sys, threading
import torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: with huge pages there is one fault where 512 are counted
from executor.process import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
torch.set_num_threads(1)
turns = [threading.Event() for _ in range(9)]
def work(number):
    turns[number].wait()
    # 24 MiB, freed at once; half a MiB less each time: glibc before 2.38 does not reuse it for an equal size, and what
    # a thread's first call of torch allocates for good may be cut from what the thread before has freed
    torch.full(((6 << 20) - number * (1 << 17),), 1.0)
    turns[number + 1].set()
    turns[8].wait()
threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
turns[0].set()
for thread in threads:
    thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults of glibc's malloc")
def test_what_one_lane_frees_another_gets_without_page_faults() -> None:
    def faults(arm: str) -> int:
        command = [sys.executable, "-c", _REUSE, arm]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)

    pages = 24 * 1024 // 4
    assert faults("keep") < 2 * pages
    assert faults("default") > 6 * pages  # each of the eight threads faults in its own


def test_a_failure_ends_the_run_while_another_lane_hangs() -> None:
    released, came_back = threading.Event(), []

    def hang(op: Op) -> Cost:
        if op.batch == 2:
            released.wait(60)
            came_back.append(op)
        return Cost()

    def fail(op: Op) -> Cost:
        if op.batch == 2:
            raise ValueError("first line\nsecond line")
        return Cost()

    with pytest.raises(
        RunError, match=r"rank 0: dedup 2 \(batch 2\) on stream dedup failed: ValueError: first line\n"
    ) as info:
        run(fork(5), {OpKind.LOOKUP: hang, OpKind.DEDUP: fail})
    assert not came_back, "the failure must not wait for the lane that hangs"
    released.set()
    assert "  > dedup               2" in str(info.value)
    assert "    dedup               3" in str(info.value)
    assert "second line" not in str(info.value)


def test_the_interpreter_s_switch_interval_is_shorter_during_a_run_only() -> None:
    usual, during = sys.getswitchinterval(), []

    def look(op: Op) -> Cost:
        during.append(sys.getswitchinterval())
        if op.batch == 1:
            raise ValueError("no more")
        return Cost()

    with pytest.raises(RunError):
        run(fork(2), {OpKind.READ: look})
    assert max(during) < usual
    assert sys.getswitchinterval() == usual


def test_the_messages_of_gloo_lose_their_path_and_advice() -> None:
    def fail(_: Op) -> Cost:
        raise RuntimeError(
            "[/src/pair.cc:553] Connection closed by peer [10.0.0.1]:1. This is typically caused by something"
        )

    with pytest.raises(RunError, match=r"failed: RuntimeError: Connection closed by peer \[10\.0\.0\.1\]:1\n"):
        run(fork(1), {OpKind.READ: fail})
