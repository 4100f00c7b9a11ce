"""Loops and programs are values that cannot be made wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from nestpipe.base.errors import ScheduleError
from nestpipe.ir import Data, OpKind, unroll
from nestpipe.ir.model import Buffer, Loop, Place, Program, map_ops, with_micro_batches
from nestpipe.schedules import load


def test_a_pass_returns_a_new_loop_and_leaves_its_argument() -> None:
    loop = load("dbp")
    without = map_ops(loop, lambda op: None if op.kind is OpKind.SYNC else op)
    assert OpKind.SYNC in {op.kind for op in loop.ops}
    assert OpKind.SYNC not in {op.kind for op in without.ops}
    with pytest.raises(FrozenInstanceError):
        loop.name = "other"  # type: ignore[misc]


def test_impossible_loops_are_refused_where_they_are_made() -> None:
    loop = load("sync")
    with pytest.raises(ScheduleError, match="micro_batches must be at least 1, got 0"):
        with_micro_batches(loop, 0)
    with pytest.raises(ScheduleError, match="slots must be at least 1"):
        Buffer(data=Data.ROWS, place=Place.DEVICE, slots=0)
    with pytest.raises(ScheduleError, match="steps must be at least 1"):
        unroll(loop, 0)


def test_a_program_for_no_ranks_is_refused_where_it_is_made() -> None:
    for ranks, message in (((), "name at least one rank"), ((1, 1), "different numbers"), ((-1,), "from 0 on")):
        with pytest.raises(ScheduleError, match=message):
            Program(name="x", steps=1, micro_batches=1, buffers=(), streams=(), ranks=ranks)


def test_names_that_the_text_could_not_give_back_are_refused() -> None:
    for name in ("", "two words", "a,b", "a#b"):
        with pytest.raises(ScheduleError, match="needs a name without spaces, commas"):
            Loop(name=name, micro_batches=1, buffers=(), streams=())
