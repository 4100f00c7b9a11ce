"""Schedules with parts of the keys and with layers: proven, and wrong in the ways that people get them wrong."""

from __future__ import annotations

import pytest

from nestpipe.checks.check import check
from nestpipe.checks.report import Report, Verdict
from nestpipe.ir import parse, show
from nestpipe.schedules import load

WORDS = ("examples/pec.txt", "examples/mixed.txt", "examples/hits.txt")


def test_gradients_may_be_summed_in_hops_that_connect_all_ranks_once() -> None:
    assert check(load("examples/rails.txt")).verdict is Verdict.SYNCHRONOUS
    again = changed("examples/rails.txt", "stream across on rail", "stream across on node")
    assert (again.verdict, again.findings[0].rule) == (Verdict.WRONG, "reduced-twice")
    other = changed("examples/rails.txt", "stream across on rail", "stream across on domain")
    assert other.verdict is not Verdict.SYNCHRONOUS


def test_rows_that_are_atomic_are_stale_by_as_many_batches_as_a_lookup_may_run_ahead() -> None:
    report = check(load("examples/persia.txt"))
    assert report.verdict is Verdict.STALE
    assert report.worst_staleness == 5
    nearer = changed(
        "examples/persia.txt", "all_to_all[keys] t+4, write_back t-2,", "all_to_all[keys] t+4, write_back t,"
    )
    assert nearer.worst_staleness == 3
    halves = changed("examples/persia.txt", "  state table host atomic\n", "  state table host\n")
    assert halves.verdict is Verdict.RACE


def changed(name: str, old: str, new: str) -> Report:
    text = show(load(name))
    assert old in text
    return check(parse(text.replace(old, new)))


@pytest.mark.parametrize("name", WORDS)
def test_schedule_with_parts_is_synchronous(name: str) -> None:
    report = check(load(name))
    assert report.verdict is Verdict.SYNCHRONOUS
    assert not report.findings


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("part old in t-1", "part old in t-2", "parts"),
        ("    lookup.old          t+1    reads owned, owned t, table  writes rows\n", "", "references"),
        (", owned t, owned_grads, table", ", owned_grads, table", "parts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(old: str, new: str, rule: str) -> None:
    report = changed("examples/pec.txt", old, new)
    assert report.verdict is Verdict.MALFORMED
    assert rule in {finding.rule for finding in report.findings}


def test_fresh_keys_looked_up_before_their_update_are_stale_or_race() -> None:
    text = show(load("examples/pec.txt")).splitlines(keepends=True)
    at = next(i for i, line in enumerate(text) if "write_back.again" in line and "reads" in line)
    text[at], text[at + 1] = text[at + 1], text[at]
    report = check(parse("".join(text)))
    assert report.verdict is Verdict.STALE
    assert {d for d, stale in report.staleness.items() if stale} == {1}


def test_keys_that_nobody_looks_up_are_named() -> None:
    report = changed("examples/mixed.txt", "part hbm static\n", "part hbm static\n  part ssd static\n")
    assert "of ssd are written by no op" in report.findings[0].message


def test_a_layer_whose_gradients_are_not_summed_drifts() -> None:
    text = "".join(
        line.replace("after all_reduce.bottom t  ", "")
        for line in show(load("examples/mixed.txt")).splitlines(keepends=True)
        if "all_reduce.bottom   t" not in line
    )
    report = check(parse(text))
    assert (report.verdict, report.findings[0].rule) == (Verdict.DRIFT, "unreduced")
