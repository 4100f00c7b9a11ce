"""The programs that loops unroll to."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.errors import ScheduleError
from nestpipe.ir import ALL, Loop, Op, OpKind, OpRef, map_ops, unroll, with_micro_batches
from nestpipe.schedules import load, names
from tests.strategies import loops


@given(loops(), st.integers(1, 6))
def test_every_op_runs_once_per_batch_and_micro_batch(loop: Loop, steps: int) -> None:
    counts = Counter(op.ref for op in unroll(loop, steps).ops)
    assert set(counts.values()) <= {1}
    per_batch = sum(1 if op.micro_batch is None else loop.micro_batches for op in loop.ops)
    assert len(counts) == per_batch * steps


@given(loops(), st.integers(1, 6))
def test_a_program_waits_only_for_ops_it_has(loop: Loop, steps: int) -> None:
    program = unroll(loop, steps)
    have = {op.ref for op in program.ops}
    assert all(ref in have for op in program.ops for ref in op.after)


@pytest.mark.parametrize("name", names())
def test_more_steps_only_add_ops(name: str) -> None:
    short, long = unroll(load(name), 4), unroll(load(name), 6)
    assert {op.ref for op in short.ops} < {op.ref for op in long.ops}


def test_nested_pipeline_starts_the_next_row_exchange_before_this_gradient_exchange() -> None:
    program = unroll(with_micro_batches(load("fwp"), 3), 1)
    comm = next(stream for stream in program.streams if stream.name == "comm")
    order = [(op.kind.value.split("[")[1][:-1], op.micro_batch) for op in comm.ops]
    assert order == [("rows", 0), ("rows", 1), ("grads", 0), ("rows", 2), ("grads", 1), ("grads", 2)]


def test_waiting_for_all_micro_batches_becomes_one_wait_each() -> None:
    program = unroll(with_micro_batches(load("fwp"), 3), 1)
    reduce = next(op for op in program.ops if op.kind is OpKind.ALL_REDUCE)
    assert [ref.micro_batch for ref in reduce.after] == [0, 1, 2]


def test_the_first_batch_has_no_batch_before_it_to_synchronise_with() -> None:
    first = next(op for op in unroll(load("dbp"), 2).ops if op.kind is OpKind.SYNC)
    assert first.batch == 0
    assert all(access.batch == 0 for access in (*first.reads, *first.writes))
    assert [ref.kind for ref in first.after] == [OpKind.LOOKUP]


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (OpRef(kind=OpKind.SEND, batch=0), "no op of kind send to wait for"),
        (OpRef(kind=OpKind.LOOKUP, batch=0, micro_batch=ALL), "runs once per batch"),
        (OpRef(kind=OpKind.BACKWARD, batch=0), "runs per micro-batch"),
        (OpRef(kind=OpKind.BACKWARD, batch=0, micro_batch=0), "write \\* or m"),
    ],
)
def test_a_wait_for_what_does_not_exist_is_refused(ref: OpRef, message: str) -> None:
    def change(op: Op) -> Op:
        return replace(op, after=(ref,)) if op.kind is OpKind.UPDATE else op

    with pytest.raises(ScheduleError, match=message):
        unroll(map_ops(load("sync"), change), 2)
