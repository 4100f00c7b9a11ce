"""Longer loops and more micro-batches show nothing new."""

from __future__ import annotations

import pytest

from nestpipe.checks.check import check, check_programs
from nestpipe.checks.window import num_batches_to_check
from nestpipe.ir import unroll, with_micro_batches
from nestpipe.schedules import load, names
from tests.nestpipe.checks.edits import checked


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
