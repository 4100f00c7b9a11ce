"""Which version every read sees: the classic ways to break a pipeline."""

from __future__ import annotations

import pytest

from nestpipe.checks.check import check
from nestpipe.checks.report import Verdict
from nestpipe.checks.report_text import report_text
from nestpipe.ir import OpKind, parse
from nestpipe.schedules import load
from tests.nestpipe.checks.edits import Golden, changed, checked, report_of, rules_of


def test_asynchronous_prefetch_is_stale_by_one_on_the_keys_of_the_batch_before_only(golden: Golden) -> None:
    loop = load("async_prefetch")
    report = check(loop)
    assert report.verdict is Verdict.STALE
    assert {distance: stale for distance, stale in report.staleness.items() if stale} == {1: 1}
    assert report.dense_staleness == 0
    golden(report_text(report, loop))


def test_replicas_are_stated_as_what_they_are() -> None:
    report = checked("nestpipe_2d_sp")
    assert any("linear in the gradient" in note for note in report.notes)
    assert not checked("nestpipe").notes


def test_sync_that_does_not_wait_for_the_update_is_a_race(golden: Golden) -> None:
    loop = changed(
        "dbp", ("sync                t      after lookup t, update t-1 ", "sync                t      after lookup t ")
    )
    assert check(loop).verdict is Verdict.RACE
    golden(report_of(loop))


def test_sync_before_the_update_loses_updates(golden: Golden) -> None:
    loop = changed(
        "dbp",
        ("after lookup t, update t-1 ", "after lookup t "),
        ("update              t      after ", "update              t      after sync t+1, "),
        ("after all_to_all[keys] t+1, sync t ", "after all_to_all[keys] t+1, sync t, update t-1 "),
    )
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert report.staleness[1] >= 1
    assert not report.allowed(allow_staleness=100)
    assert "lost-update" in rules_of(loop)
    golden(report_of(loop))


def test_sync_after_the_first_read_is_stale_by_one(golden: Golden) -> None:
    loop = changed(
        "dbp",
        ("after sync t, backward t m-1", "after lookup t, backward t m-1"),
        (
            "sync                t      after lookup t, update t-1 ",
            "sync                t      after all_to_all[rows] t *, update t-1 ",
        ),
        ("update              t      after ", "update              t      after sync t, "),
    )
    report = check(loop)
    assert report.verdict is Verdict.STALE
    assert report.staleness[1] == 1
    golden(report_of(loop))


def test_intersection_per_rank_misses_keys_that_different_ranks_ask_for(golden: Golden) -> None:
    loop = changed(
        "dbp",
        ("reads owned, owned t-1, rows t-1", "reads keys, keys t-1, rows t-1"),
        ("buffer keys device slots=3", "buffer keys device slots=4"),
    )
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert {d: stale for d, stale in report.staleness.items() if stale} == {1: 1}
    assert any("different ranks" in finding.message for finding in report.findings)
    golden(report_of(loop))


def test_optimiser_state_left_behind_by_sync_is_found(golden: Golden) -> None:
    loop = changed("dbp", ("rows t-1, moments t-1  writes rows, moments", "rows t-1  writes rows"))
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert set(report.staleness.values()) == {0}
    assert {c.distance: c.optimizer for c in report.key_classes} == {1: 1, None: 0}
    golden(report_of(loop))


@pytest.mark.parametrize(
    "change",
    [
        ("reads owned, table, optimizer  writes rows, moments", "reads owned, table  writes rows, moments"),
        ("reads owned, rows, moments  writes table, optimizer", "reads owned, rows  writes table"),
    ],
)
def test_optimiser_state_left_behind_by_lookup_or_write_back_is_found(change: tuple[str, str]) -> None:
    report = check(changed("dbp", change))
    assert report.verdict is Verdict.RACE
    assert any("optimiser" in finding.message for finding in report.findings)


def test_write_back_racing_with_the_lookup_of_the_batch_after_next(golden: Golden) -> None:
    back = "    write_back          t-1    after update t-1  reads owned, rows, moments  writes table, optimizer\n"
    loop = changed(
        "dbp", (back, ""), ("  stream d2d on d2d\n", f"  stream back on host_memory\n{back}  stream d2d on d2d\n")
    )
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert {step.op.kind for step in report.witness} >= {OpKind.WRITE_BACK, OpKind.LOOKUP}
    golden(report_of(loop))


def test_update_before_the_last_gradients_breaks_the_frozen_window(golden: Golden) -> None:
    loop = changed("nestpipe", ("after all_to_all[grads] t *, all_reduce t ", "after all_reduce t "))
    assert check(loop).verdict is Verdict.RACE
    golden(report_of(loop))


def test_dense_update_deferred_to_the_next_batch_is_stale() -> None:
    late = changed(
        "async_prefetch",
        (
            "update              t      after all_to_all[grads] t *, all_reduce t",
            "update              t-1    after all_reduce t-1",
        ),
        ("buffer dense_grads device slots=1", "buffer dense_grads device slots=2"),
    )
    report = check(late)
    assert report.verdict is Verdict.STALE
    assert report.dense_staleness == 1
    assert not report.allowed(0)
    assert report.allowed(1)


def test_forward_that_sees_its_own_update_breaks_the_frozen_window() -> None:
    loop = parse(
        "loop v1 late micro_batches=1\n  buffer activations device slots=1\n  buffer dense_grads device slots=1\n"
        "  stream w on world\n    all_reduce t  after backward t *  reads dense_grads  writes dense_grads\n"
        "  stream p on world\n    for m\n      send t m\n"
        "  stream c on compute\n    for m\n      recv t m  writes activations\n"
        "      backward t m  reads activations, dense  writes dense_grads\n"
        "    update t  after all_reduce t  reads dense_grads, dense  writes dense\n"
        "    for m\n      forward t m  reads dense\n"
    )
    assert rules_of(loop) == ["frozen-window"]
    assert check(loop).verdict is Verdict.RACE


def test_replicas_must_be_averaged_before_rows_travel_on() -> None:
    early = changed("nestpipe_2d_sp", ("after lookup t, all_reduce[tables] t-1 ", "after lookup t, update t-1 "))
    assert check(early).verdict is Verdict.RACE
    without_keys = changed("2d_sp", ("after all_gather t  reads", "after all_to_all[keys] t  reads"))
    assert check(without_keys).verdict is Verdict.RACE
    gather = "    all_gather          t      after all_to_all[keys] t  reads owned  writes owned\n"
    never = changed(
        "2d_sp",
        (f"  stream replica_keys on replica\n{gather}", ""),
        ("after all_gather t ", "after all_to_all[keys] t "),
    )
    report = check(never)
    assert report.verdict is Verdict.RACE
    assert any("different replicas" in finding.message for finding in report.findings)


def test_dense_gradients_must_be_summed_over_ranks() -> None:
    loop = changed(
        "sync",
        ("after all_to_all[grads] t *, all_reduce t ", "after all_to_all[grads] t * "),
        ("all_reduce          t      after all_to_all[grads] t *", "all_reduce          t      after update t"),
    )
    report = check(loop)
    assert report.verdict is Verdict.DRIFT
    assert report.findings[0].rule == "unreduced"


def test_schedule_without_rows_is_checked_for_order_only() -> None:
    loop = parse("loop v1 x micro_batches=2\n  stream c on compute\n    for m\n      forward t m\n      backward t m\n")
    report = check(loop)
    assert report.verdict is Verdict.SYNCHRONOUS
    assert any("no versions to prove" in note for note in report.notes)
