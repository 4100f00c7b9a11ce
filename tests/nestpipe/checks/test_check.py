"""Verdicts on the catalogue, on the classic ways to break a pipeline, and on programs that differ by rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files

import pytest
from hypothesis import given

from nestpipe.base.errors import DeadlockError, ScheduleError
from nestpipe.checks.check import RULES, Report, Verdict, check, check_programs, num_batches_to_check, require_safe
from nestpipe.checks.report_text import report_document, report_text
from nestpipe.ir import (
    Buffer,
    Data,
    Loop,
    MicroBlock,
    Op,
    OpKind,
    Place,
    Program,
    map_ops,
    parse,
    parse_programs,
    show,
    unroll,
    with_micro_batches,
)
from nestpipe.schedules import load, names
from tests.strategies import loops

SYNCHRONOUS = ("2d_sp", "dbp", "fwp", "nestpipe", "nestpipe_2d_sp", "sparse_dist", "sync")
Golden = Callable[[str], None]


def changed(name: str, *changes: tuple[str, str]) -> Loop:
    """A catalogue schedule with parts of its text replaced; each part must be there."""
    text = (files("nestpipe.schedules") / f"{name}.txt").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text)


@cache
def checked(name: str) -> Report:
    return check(load(name))


def told(loop: Loop) -> str:
    return report_text(check(loop), loop)


def rules_of(loop: Loop) -> list[str]:
    return [finding.rule for finding in check(loop).findings]


# -- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_catalogue_schedule_has_a_known_verdict() -> None:
    assert set(names()) == {*SYNCHRONOUS, "async_prefetch"}


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_schedule_is_proven_synchronous(name: str) -> None:
    report = checked(name)
    assert report.verdict is Verdict.SYNCHRONOUS
    assert set(report.staleness.values()) == {0}
    assert not report.findings
    assert not report.witness


@pytest.mark.parametrize("micro_batches", [1, 3, 64])
@pytest.mark.parametrize("name", names())
def test_number_of_micro_batches_does_not_change_the_verdict(name: str, micro_batches: int) -> None:
    assert check(with_micro_batches(load(name), micro_batches)).verdict is checked(name).verdict


def test_asynchronous_prefetch_is_stale_by_one_on_the_keys_of_the_batch_before_only(golden: Golden) -> None:
    loop = load("async_prefetch")
    report = check(loop)
    assert report.verdict is Verdict.STALE
    assert {distance: stale for distance, stale in report.staleness.items() if stale} == {1: 1}
    assert report.dense_staleness == 0
    golden(report_text(report, loop))


def test_dual_buffers_alternate_and_the_report_says_what_was_proven(golden: Golden) -> None:
    loop = load("dbp")
    assert check(loop).peak_buffers[Data.ROWS] == 2
    golden(told(loop))


def test_replicas_are_stated_as_what_they_are() -> None:
    report = checked("nestpipe_2d_sp")
    assert any("linear in the gradient" in note for note in report.notes)
    assert not checked("nestpipe").notes


@pytest.mark.parametrize("name", names())
def test_a_program_of_any_length_has_the_verdict_of_its_loop(name: str) -> None:
    loop = with_micro_batches(load(name), 2)
    expected = check(loop)
    report = check_programs((unroll(loop, num_batches_to_check(loop) + 3),))
    assert report.verdict is expected.verdict
    assert dict(report.staleness) == dict(expected.staleness)
    assert dict(report.peak_buffers) == dict(expected.peak_buffers)


@pytest.mark.parametrize("name", names())
def test_rules_hold_after_every_pass(name: str) -> None:
    loop = load(name)
    for made in (loop, with_micro_batches(loop, 3), map_ops(loop, lambda op: op), unroll(loop, 1), unroll(loop, 3)):
        for rule in RULES:
            assert not list(rule.complaints(made)), rule.name


# -- five classic ways to break dual-buffer pipelining ----------------------------------------------------------------


def test_sync_that_does_not_wait_for_the_update_is_a_race(golden: Golden) -> None:
    loop = changed(
        "dbp", ("sync                t      after lookup t, update t-1 ", "sync                t      after lookup t ")
    )
    assert check(loop).verdict is Verdict.RACE
    golden(told(loop))


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
    golden(told(loop))


def test_sync_unordered_with_the_first_read_is_a_race(golden: Golden) -> None:
    loop = changed("dbp", ("after sync t, backward t m-1", "after lookup t, backward t m-1"))
    assert check(loop).verdict is Verdict.RACE
    golden(told(loop))


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
    golden(told(loop))


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
    golden(told(loop))


def test_optimiser_state_left_behind_by_sync_is_found(golden: Golden) -> None:
    loop = changed("dbp", ("rows t-1, moments t-1  writes rows, moments", "rows t-1  writes rows"))
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert set(report.staleness.values()) == {0}
    assert {c.distance: c.optimizer for c in report.key_classes} == {1: 1, None: 0}
    golden(told(loop))


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
    golden(told(loop))


# -- other ways to break a pipeline -----------------------------------------------------------------------------------


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
    golden(told(loop))


def test_update_before_the_last_gradients_breaks_the_frozen_window(golden: Golden) -> None:
    loop = changed("nestpipe", ("after all_to_all[grads] t *, all_reduce t ", "after all_reduce t "))
    assert check(loop).verdict is Verdict.RACE
    golden(told(loop))


def test_update_per_micro_batch_is_malformed(golden: Golden) -> None:
    loop = load("fwp")

    def body(items: tuple[Op | MicroBlock, ...]) -> tuple[Op | MicroBlock, ...]:
        *blocks, last, update = items
        assert isinstance(last, MicroBlock)
        assert isinstance(update, Op)
        return (*blocks, MicroBlock(ops=(*last.ops, replace(update, micro_batch=0, after=()))))

    streams = tuple(replace(s, body=body(s.body)) if s.name == "compute" else s for s in loop.streams)
    loop = replace(loop, streams=streams)
    assert check(loop).verdict is Verdict.MALFORMED
    golden(told(loop))


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
        "  stream c on compute\n    for m\n      recv t m  writes activations\n"
        "      backward t m  reads activations, dense  writes dense_grads\n"
        "    update t  reads dense_grads, dense  writes dense\n"
        "    for m\n      forward t m  reads dense\n"
    )
    assert rules_of(loop) == ["frozen-window"]
    assert check(loop).verdict is Verdict.RACE


def test_missing_wait_before_a_buffer_is_reused(golden: Golden) -> None:
    loop = changed("nestpipe", ("after read t+3, backward t-1 *", "after read t+3"))
    assert check(loop).verdict is Verdict.RACE
    golden(told(loop))


def test_gradient_exchange_in_flight_keeps_its_input() -> None:
    loop = changed("fwp", ("buffer row_grads device slots=2", "buffer row_grads device slots=1"))
    report = check(loop)
    assert report.verdict is Verdict.RACE
    assert "row_grads" in report.findings[0].message


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
    assert report.verdict is Verdict.RACE
    assert report.findings[0].rule == "unreduced"


def test_waits_in_a_circle_are_a_deadlock(golden: Golden) -> None:
    loop = changed(
        "dbp",
        (
            "lookup              t+1    after all_to_all[keys] t+1, sync t",
            "lookup              t+1    after all_to_all[keys] t+1, write_back t",
        ),
    )
    assert check(loop).verdict is Verdict.DEADLOCK
    golden(told(loop))


# -- programs by rank -------------------------------------------------------------------------------------------------


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


# -- rules, sizes, safety ---------------------------------------------------------------------------------------------


BROKEN_RULES = {
    "not-empty": "loop v1 x micro_batches=1\n  stream h2d on h2d\n",
    "unique-op": "loop v1 x micro_batches=1\n  stream a on h2d\n    wait t\n  stream b on h2d\n    wait t+1\n",
    "references": "loop v1 x micro_batches=1\n  stream a on h2d\n    wait t  after update t\n",
    "streams": "loop v1 x micro_batches=1\n  stream a on h2d\n    all_reduce t\n",
    "granularity": "loop v1 x micro_batches=1\n  stream a on compute\n    forward t\n",
    "accesses": "loop v1 x micro_batches=1\n  stream a on compute\n    for m\n      forward t m  writes table\n",
    "inputs": "loop v1 x micro_batches=1\n  buffer batch device slots=1\n  stream a on h2d\n"
    "    copy_h2d t  writes batch\n",
    "own-instance": "loop v1 x micro_batches=1\n  buffer batch device slots=2\n  buffer samples host slots=2\n"
    "  stream a on h2d\n    read t  writes samples\n    copy_h2d t  reads samples t-1  writes batch\n",
    "sync-keys": "loop v1 x micro_batches=1\n  buffer rows device slots=2\n  stream a on host_memory\n"
    "    lookup t  writes rows\n  stream b on d2d\n    sync t  reads rows t-1  writes rows\n",
    "depth": "loop v1 x micro_batches=1\n  stream a on h2d\n    wait t-1\n  stream b on world\n    all_reduce t+16\n",
    "buffers": "loop v1 x micro_batches=1\n  stream a on h2d\n    copy_h2d t  writes batch\n",
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_rule_is_reported_by_name(rule: str) -> None:
    loop = parse(BROKEN_RULES[rule])
    assert check(loop).verdict is Verdict.MALFORMED
    assert rule in rules_of(loop)
    with pytest.raises(ScheduleError, match="must not run"):
        require_safe(loop)


def test_every_rule_has_an_example_and_a_message_with_a_way_out(golden: Golden) -> None:
    incomplete = "program v1 x steps=2 micro_batches=1\n  stream a on h2d\n    step 0\n      wait 0\n"
    findings = {f.rule: f.message for text in BROKEN_RULES.values() for f in check(parse(text)).findings}
    findings |= {f.rule: f.message for f in check_programs(parse_programs(incomplete)).findings}
    assert set(findings) == {rule.name for rule in RULES}
    golden("".join(f"{rule}: {findings[rule]}\n" for rule in sorted(findings)))


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


def test_require_safe_lets_only_allowed_staleness_pass(golden: Golden) -> None:
    assert require_safe(load("nestpipe")).verdict is Verdict.SYNCHRONOUS
    assert require_safe(unroll(load("dbp"), 3)).verdict is Verdict.SYNCHRONOUS
    assert require_safe(load("async_prefetch"), allow_staleness=1).verdict is Verdict.STALE
    with pytest.raises(ScheduleError) as error:
        require_safe(load("async_prefetch"))
    golden(f"{error.value}\n")


def test_document_for_tools_has_the_promised_fields() -> None:
    document = report_document(check(load("async_prefetch")))
    assert document["schedule"] == "async_prefetch"
    assert document["verdict"] == "stale"
    assert document["staleness"] == {"1": 1, "2": 0, "3": 0}
    assert document["peak_buffers"]["rows"] == 2  # type: ignore[index]
    assert [step["op"] for step in document["witness"]][-1] == "forward 1.0"  # type: ignore[index]


@given(loops())
def test_any_loop_gets_a_verdict_and_one_without_circles_no_deadlock(loop: Loop) -> None:
    assert check(loop).verdict in (Verdict.SYNCHRONOUS, Verdict.MALFORMED)


def test_schedule_without_rows_is_checked_for_order_only() -> None:
    loop = parse("loop v1 x micro_batches=2\n  stream c on compute\n    for m\n      forward t m\n      backward t m\n")
    report = check(loop)
    assert report.verdict is Verdict.SYNCHRONOUS
    assert any("no versions to prove" in note for note in report.notes)
