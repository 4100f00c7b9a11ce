"""Slots that are written over, and how many are live."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nestpipe.base.errors import ScheduleError
from nestpipe.checks.check import check
from nestpipe.checks.report import Verdict
from nestpipe.ir import Buffer, Data, Place, parse
from nestpipe.schedules import load
from tests.nestpipe.checks.edits import BROKEN_RULES, Golden, changed, report_of


def test_dual_buffers_alternate_and_the_report_says_what_was_proven(golden: Golden) -> None:
    loop = load("dbp")
    assert check(loop).peak_buffers[Data.ROWS] == 2
    golden(report_of(loop))


def test_sync_unordered_with_the_first_read_is_a_race(golden: Golden) -> None:
    loop = changed("dbp", ("after sync t, backward t m-1", "after lookup t, backward t m-1"))
    assert check(loop).verdict is Verdict.RACE
    golden(report_of(loop))


def test_three_batches_do_not_fit_two_buffers(golden: Golden) -> None:
    loop = changed(
        "dbp",
        (
            "lookup              t+1    after all_to_all[keys] t+1, sync t ",
            "lookup              t+2    after all_to_all[keys] t+2 ",
        ),
        ("dedup               t+2 m      after copy_h2d t+2", "dedup               t+3 m      after copy_h2d t+3"),
        ("all_to_all[keys]    t+2    after dedup t+2 *", "all_to_all[keys]    t+3    after dedup t+3 *"),
        (
            "copy_h2d            t+3    after read t+3, backward t-1 *",
            "copy_h2d            t+4    after read t+4, backward t *",
        ),
        ("read                t+4    after copy_h2d t+2", "read                t+5    after copy_h2d t+3"),
    )
    assert check(loop).verdict is Verdict.RACE
    golden(report_of(loop))


def test_missing_wait_before_a_buffer_is_reused(golden: Golden) -> None:
    loop = changed("nestpipe", ("after read t+3, backward t-1 *", "after read t+3"))
    assert check(loop).verdict is Verdict.RACE
    golden(report_of(loop))


def test_gradient_exchange_in_flight_keeps_its_input() -> None:
    loop = changed("fwp", ("buffer row_grads device slots=2", "buffer row_grads device slots=1"))
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert "row_grads" in report.findings[0].message


def test_memory_is_slots_times_size() -> None:
    loop = load("nestpipe")
    sizes = {buffer.data: 10 for buffer in loop.buffers}
    report = check(loop, size_bytes=sizes)
    assert report.bytes_per_rank == {Place.HOST: 20, Place.DEVICE: 10 * (sum(b.slots for b in loop.buffers) - 2)}
    with pytest.raises(ScheduleError, match="no size for buffer activations"):
        check(loop, size_bytes={Data.SAMPLES: 1})
    with pytest.raises(ScheduleError, match="unknown buffer 'activations'"):
        check(parse(BROKEN_RULES["own-instance"]), size_bytes=sizes)


def test_peak_counts_what_is_live_not_what_is_allocated() -> None:
    loop = load("dbp")
    wide = replace(loop, buffers=tuple(Buffer(data=b.data, place=b.place, slots=b.slots + 3) for b in loop.buffers))
    report = check(wide)
    assert report.verdict is Verdict.SYNCHRONOUS
    assert report.peak_buffers[Data.ROWS] < 5
