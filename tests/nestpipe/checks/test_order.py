"""What comes before what on one rank."""

from __future__ import annotations

from nestpipe.checks.check import check
from nestpipe.checks.report import Verdict
from tests.nestpipe.checks.edits import Golden, changed, report_of


def test_waits_in_a_circle_are_a_deadlock(golden: Golden) -> None:
    loop = changed(
        "dbp",
        (
            "lookup              t+1    after all_to_all[keys] t+1, sync t",
            "lookup              t+1    after all_to_all[keys] t+1, write_back t",
        ),
    )
    assert check(loop).verdict is Verdict.DEADLOCK
    golden(report_of(loop))
