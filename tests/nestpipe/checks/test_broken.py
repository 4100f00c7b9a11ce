"""Broken schedules that people write, a file each in `broken/`, and the verdict that each must get."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.base.errors import DeadlockError, ScheduleError
from nestpipe.checks.check import check, require_safe
from nestpipe.checks.report import Verdict
from nestpipe.schedules import load

BROKEN = Path(__file__).parent / "broken"
EXPECTED = {
    "all_reduce_per_m": (Verdict.RACE, "unordered"),
    "batch_undeclared": (Verdict.MALFORMED, "inputs"),
    "far": (Verdict.RACE, "undefined"),
    "fwd_bwd_overlap": (Verdict.MALFORMED, "one-device"),
    "keys_world_rows_domain": (Verdict.MALFORMED, "groups"),
    "lone_recv_loop": (Verdict.DEADLOCK, "deadlock"),
    "no_all_reduce": (Verdict.DRIFT, "unreduced"),
    "rows_per_micro_batch": (Verdict.WRONG, "not-frozen"),
    "reduce_scatter": (Verdict.DRIFT, "sharded"),
    "tables_world": (Verdict.MALFORMED, "groups"),
}


def test_every_file_is_expected_to_be_something() -> None:
    assert {path.stem for path in BROKEN.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_broken_schedule_is_refused_for_what_is_wrong_with_it(name: str) -> None:
    verdict, rule = EXPECTED[name]
    loop = load(str(BROKEN / f"{name}.txt"))
    report = check(loop)
    assert (report.verdict, report.findings[0].rule) == (verdict, rule)
    assert report.findings[0].witness
    with pytest.raises(DeadlockError if verdict is Verdict.DEADLOCK else ScheduleError):
        require_safe(loop, allow_staleness=100)
