"""What each stream waits for, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.runtime.cursor import plan_lanes, uses_of
from nestpipe.base.errors import ScheduleError
from nestpipe.ir import Data, Op, OpKind, OpRef, Program, Resource, Stream, unroll, with_micro_batches
from nestpipe.schedules import load, names


@pytest.mark.parametrize("name", names())
def test_following_a_plan_one_ready_op_at_a_time_runs_everything_in_order(name: str) -> None:
    program = unroll(with_micro_batches(load(name), 2), 6)
    lanes = plan_lanes(program)
    finished = [0] * len(lanes)
    order: dict[OpRef, int] = {}
    while any(done < len(lane.tasks) for done, lane in zip(finished, lanes, strict=True)):
        before = len(order)
        for index, lane in enumerate(lanes):
            if finished[index] < len(lane.tasks):
                task = lane.tasks[finished[index]]
                if all(finished[other] >= count for other, count in task.waits):
                    order[task.op.ref] = len(order)
                    finished[index] += 1
        assert len(order) > before, "no op is ready"
    for op in program.ops:
        assert all(order[ref] < order[op.ref] for ref in op.after)


def _program(*ops: Op) -> Program:
    stream = Stream(name="compute", resource=Resource.COMPUTE, body=ops)
    return Program(name="test", steps=1, micro_batches=1, buffers=(), streams=(stream,))


def test_plans_refuse_double_unknown_and_backward_waits() -> None:
    first = Op(kind=OpKind.READ, batch=0)
    with pytest.raises(ScheduleError, match="read 0 appears twice"):
        plan_lanes(_program(first, first))
    with pytest.raises(ScheduleError, match="waits for update 0, which the program does not have"):
        plan_lanes(_program(replace(first, after=(OpRef(kind=OpKind.UPDATE, batch=0),))))
    late = Op(kind=OpKind.UPDATE, batch=0)
    with pytest.raises(ScheduleError, match="its own stream compute runs later"):
        plan_lanes(_program(replace(first, after=(late.ref,)), late))


def test_every_use_of_a_buffer_is_counted_once_per_op() -> None:
    uses = uses_of(unroll(load("sync"), 1))
    assert uses[Data.ROWS, 0] == 4
    assert uses[Data.SAMPLES, 0] == 2
