"""Verdicts on the catalogue, and what may run."""

from __future__ import annotations

import pytest
from hypothesis import given

from nestpipe.base.errors import ScheduleError
from nestpipe.checks.check import check, require_safe
from nestpipe.checks.report import Verdict
from nestpipe.ir import Loop, OpKind, unroll
from nestpipe.schedules import load, names
from tests.nestpipe.checks.edits import Golden, checked
from tests.strategies import loops

SYNCHRONOUS = ("2d_sp", "dbp", "fwp", "nestpipe", "nestpipe_2d_sp", "sparse_dist", "sync")


def test_every_catalogue_schedule_has_a_known_verdict() -> None:
    assert set(names()) == {*SYNCHRONOUS, "async_prefetch"}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_schedule_is_proven_synchronous(name: str) -> None:
    report = checked(name)
    assert report.verdict is Verdict.SYNCHRONOUS
    assert set(report.staleness.values()) == {0}
    assert not report.findings
    assert not report.witness


def test_require_safe_lets_only_allowed_staleness_pass(golden: Golden) -> None:
    assert require_safe(load("nestpipe")).verdict is Verdict.SYNCHRONOUS
    assert require_safe(unroll(load("dbp"), 3)).verdict is Verdict.SYNCHRONOUS
    assert require_safe(load("async_prefetch"), allow_staleness=1).verdict is Verdict.STALE
    with pytest.raises(ScheduleError) as error:
        require_safe(load("async_prefetch"))
    golden(f"{error.value}\n")


@given(loops())
def test_any_loop_gets_a_verdict_and_one_without_circles_no_deadlock(loop: Loop) -> None:
    known = [Verdict.SYNCHRONOUS, Verdict.MALFORMED]
    messages = {OpKind.SEND, OpKind.RECV} & {op.kind for op in loop.ops}
    assert check(loop).verdict in (known + [Verdict.DEADLOCK] * bool(messages))
