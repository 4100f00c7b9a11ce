"""Longer loops and more micro-batches show nothing new."""

from __future__ import annotations

import pytest

from nestpipe.checks.check import check, check_programs
from nestpipe.checks.report import Verdict
from nestpipe.checks.window import num_batches_to_check, window_of_loop
from nestpipe.ir import parse, show, unroll, with_micro_batches
from nestpipe.schedules import load, names
from tests.nestpipe.checks.edits import checked
from tests.nestpipe.checks.test_broken import BROKEN


def test_keys_are_followed_as_far_as_a_lookup_may_run_ahead_of_the_write_back() -> None:
    far = load(str(BROKEN / "far.txt"))
    assert window_of_loop(far) == 13
    assert check(far).verdict is Verdict.RACE
    covered = show(far).replace("after read t, write_back t-14 ", "after read t, write_back t-12 ")
    assert check(parse(covered)).verdict is Verdict.SYNCHRONOUS


def test_a_chain_of_waits_reaches_further_back_than_any_of_them() -> None:
    text = show(load("dbp"))
    write_back = (
        "    write_back          t-1    after update t-1  reads owned, rows, moments  writes table, optimizer\n"
    )
    assert write_back in text
    alone = text.replace(write_back, "").replace(
        "  stream d2d", f"  stream back on host_memory\n{write_back}  stream d2d"
    )
    late = alone.replace("after copy_h2d t+2  writes samples", "after copy_h2d t+2, write_back t-1  writes samples")
    assert late != alone
    assert window_of_loop(parse(late)) > window_of_loop(load("dbp"))


@pytest.mark.parametrize("micro_batches", [1, 3, 64])
@pytest.mark.parametrize("name", names())
def test_number_of_micro_batches_does_not_change_the_verdict(name: str, micro_batches: int) -> None:
    assert check(with_micro_batches(load(name), micro_batches)).verdict is checked(name).verdict


@pytest.mark.parametrize("name", names())
def test_a_program_of_any_length_has_the_verdict_of_its_loop(name: str) -> None:
    loop = with_micro_batches(load(name), 2)
    expected = check(loop)
    report = check_programs((unroll(loop, num_batches_to_check(loop) + 3),))
    assert report.verdict is expected.verdict
    assert dict(report.staleness) == dict(expected.staleness)
    assert dict(report.peak_buffers) == dict(expected.peak_buffers)
