"""Programs that differ by rank, run together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nestpipe.base.errors import DeadlockError, ScheduleError
from nestpipe.checks.check import check_programs, require_safe
from nestpipe.checks.report import Verdict
from nestpipe.checks.report_text import report_text
from nestpipe.ir import Loop, Program, parse_programs, show, unroll
from nestpipe.schedules import load
from tests.nestpipe.checks.edits import Golden


def two_ranks(loop: Loop, change: Callable[[str], str], steps: int = 2) -> tuple[Program, ...]:
    """Rank 0 runs the loop, rank 1 the same with a changed text."""
    text = show(unroll(loop, steps))
    head = f"steps={steps} micro_batches={loop.micro_batches}"
    other = change(text)
    assert other != text
    return parse_programs(text.replace(head, f"{head} ranks=0") + other.replace(head, f"{head} ranks=1"))


def test_collectives_swapped_on_one_rank_are_a_deadlock(golden: Golden) -> None:
    def swap(text: str) -> str:
        start, end = text.index("      all_to_all[rows]    1.0"), text.index("  stream dense")
        lines = text[start:end].splitlines(keepends=True)
        return text[:start] + "".join(reversed(lines)) + text[end:]

    programs = two_ranks(load("sync"), swap)
    report = check_programs(programs)
    assert report.verdict is Verdict.DEADLOCK
    golden(report_text(report, programs))
    with pytest.raises(DeadlockError, match="meets all_to_all"):
        require_safe(programs)


def test_waits_through_two_communicators_can_be_cyclic(golden: Golden) -> None:
    text = "".join(
        f"program v1 crossed steps=1 micro_batches=1 ranks={rank}\n"
        "  buffer dense_grads device slots=1\n"
        "  stream dense on world\n    step 0\n"
        f"      all_reduce          0    {first}\n"
        "  stream scatter on world\n    step 0\n"
        f"      reduce_scatter      0    {second}\n"
        for rank, first, second in ((0, " after reduce_scatter 0", ""), (1, "", " after all_reduce 0"))
    )
    programs = parse_programs(text)
    assert all(check_programs((replace(program, ranks=None),)).verdict is Verdict.SYNCHRONOUS for program in programs)
    report = check_programs(programs)
    assert report.verdict is Verdict.DEADLOCK
    golden(report_text(report, programs))


def test_ranks_that_run_the_same_in_other_words_finish() -> None:
    programs = two_ranks(load("nestpipe"), lambda text: text.replace("after sync 1", "after sync 1, lookup 1"))
    assert check_programs(programs).verdict is Verdict.SYNCHRONOUS


def test_domains_meet_only_their_own_ranks() -> None:
    program = unroll(load("2d_sp"), 2)
    programs = (replace(program, ranks=(0, 1)), replace(program, ranks=(2, 3), name="again"))
    assert check_programs(programs, domain_size=2).verdict is Verdict.SYNCHRONOUS
    with pytest.raises(ScheduleError, match="domain_size must divide the number of ranks, 4, got 3"):
        check_programs(programs, domain_size=3)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((None, (1,)), "needs its ranks"),
        (((0, 1), (1,)), "rank 1 is given two"),
        (((0,), (2,)), "rank 1 has no program"),
    ],
)
def test_ranks_must_be_complete(ranks: tuple[tuple[int, ...] | None, ...], message: str) -> None:
    program = unroll(load("sync"), 1)
    with pytest.raises(ScheduleError, match=message):
        check_programs([replace(program, ranks=of, name=f"p{i}") for i, of in enumerate(ranks)])
