"""The checks against the brute-force oracle: the catalogue and every small damage to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.base.errors import ScheduleError
from nestpipe.checks.check import check, check_programs, num_batches_to_check, num_micro_batches_to_check
from nestpipe.checks.report import Report, Verdict
from nestpipe.ir import Loop, Program, unroll, with_micro_batches
from nestpipe.schedules import load, names
from tests.nestpipe.checks.interleavings import Outcome, explore
from tests.nestpipe.checks.mutants import damaged_buffers, damaged_collectives, mutants, shifted_micro_batches

SAFE = (Verdict.SYNCHRONOUS, Verdict.STALE)
SAMPLE_STRIDE = 6


def small(name: str) -> Loop:
    """The schedule with two micro-batches, if it is about micro-batches at all."""
    loop = load(name)
    return with_micro_batches(loop, min(2, loop.micro_batches))


def every_damage(loop: Loop) -> list[tuple[str, Loop]]:
    return [*mutants(loop), *damaged_buffers(loop), *damaged_collectives(loop), *shifted_micro_batches(loop)]


def stale_distances(found: Outcome | Report) -> dict[int, int]:
    return {distance: stale for distance, stale in found.staleness.items() if stale}


def disagreement(program: Program, truth: Outcome) -> str | None:
    """How the verdict on one program differs from what its interleavings show."""
    report = check_programs((program,))
    if {finding.rule for finding in report.findings} == {"inputs"}:
        return None  # what an op uses without saying so is refused, safe or not
    if report.verdict is Verdict.MALFORMED:
        return None if truth.verdict in ("race", "deadlock") else f"malformed, but {truth.verdict}"
    if report.verdict.value != truth.verdict:
        return f"{report.verdict}, but {truth.verdict}: {truth.why}"
    if report.verdict in SAFE and stale_distances(report) != stale_distances(truth):
        return f"stale {stale_distances(report)}, but {stale_distances(truth)}"
    if report.verdict in SAFE and report.dense_staleness != truth.dense_staleness:
        return f"dense stale {report.dense_staleness}, but {truth.dense_staleness}"
    return None


def disagreements(loop: Loop, max_batches: int, *, complete: bool) -> Iterator[str]:
    """Differences for programs of 1 to `max_batches` batches, until one is unsafe, and for the loop itself.

    `complete`: these batches suffice to show what is unsafe, so that a loop judged unsafe must have been seen to be.
    """
    report = check(loop)
    stale: dict[int, int] = {}
    for num_batches in range(1, max_batches + 1):
        try:
            program = unroll(loop, num_batches)
        except ScheduleError:
            if report.verdict is not Verdict.MALFORMED:
                yield f"{report.verdict}, but cannot be unrolled"
            return
        truth = explore(program)
        if (difference := disagreement(program, truth)) is not None:
            yield f"{num_batches} batches: {difference}"
        if truth.verdict not in SAFE:
            if report.verdict in SAFE:
                yield f"loop judged {report.verdict}, but {num_batches} batches are a {truth.verdict}: {truth.why}"
            return
        stale |= {d: max(k, stale.get(d, 0)) for d, k in stale_distances(truth).items()}
    if complete and (report.verdict not in SAFE or stale_distances(report) != stale):
        yield f"loop judged {report.verdict} {stale_distances(report)}, but all programs are safe, stale {stale}"


def all_disagreements(damaged: list[tuple[str, Loop]], max_batches: int, *, complete: bool) -> list[str]:
    return [
        f"{loop.name}, {name}: {difference}"
        for name, loop in damaged
        for difference in disagreements(loop, max_batches, complete=complete)
    ]


@pytest.mark.parametrize("name", names())
def test_catalogue_verdicts_are_what_all_interleavings_show(name: str) -> None:
    assert not all_disagreements([("as it is", small(name))], 4, complete=False)


@pytest.mark.parametrize("name", names())
def test_sample_of_damaged_schedules_is_judged_as_all_interleavings_show(name: str) -> None:
    sample = list(mutants(small(name)))[::SAMPLE_STRIDE]
    assert len(sample) >= 5
    assert not all_disagreements(sample, 4, complete=False)


def test_damages_are_many_and_different() -> None:
    for name in names():
        damaged = [loop for _, loop in mutants(load(name))]
        assert len(damaged) > 60
        assert load(name) not in damaged


@pytest.mark.parametrize("name", ["sync", "dbp", "2d_sp"])
def test_oracle_sees_the_same_if_it_explores_both_ranks_together(name: str) -> None:
    damaged = every_damage(small(name))[::50]
    outcomes = []
    for _, loop in [("as it is", small(name)), *damaged]:
        try:
            program = unroll(loop, 2)
        except ScheduleError:
            continue
        one, both = explore(program), explore(program, both_ranks=True)
        assert (one.verdict, one.staleness) == (both.verdict, both.staleness)
        outcomes.append(one.verdict)
    assert len(set(outcomes)) > 1


def test_oracle_runs_ranks_at_different_speeds_and_sees_overlap() -> None:
    assert explore(unroll(small("nestpipe"), 3)).num_states > 1000
    assert explore(unroll(small("sync"), 3)).num_states < 100


@settings(max_examples=40)
@given(name=st.sampled_from(names()), first=st.integers(min_value=0), second=st.integers(min_value=0))
def test_schedules_damaged_twice_are_judged_as_all_interleavings_show(name: str, first: int, second: int) -> None:
    once = every_damage(small(name))
    _, damaged = once[first % len(once)]
    twice = every_damage(damaged)
    assert not all_disagreements([twice[second % len(twice)]], 3, complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_damaged_schedule_is_judged_as_all_interleavings_show(name: str) -> None:
    assert not all_disagreements(list(mutants(small(name))), 6, complete=True)


@pytest.mark.parametrize("name", ["fwp", "2d_sp"])
def test_damaged_collectives_are_judged_as_all_interleavings_show(name: str) -> None:
    damaged = list(damaged_collectives(small(name)))
    assert not all_disagreements(damaged, 2, complete=False)
    assert {check(loop).verdict for _, loop in damaged} > {Verdict.SYNCHRONOUS, Verdict.DRIFT}


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_damaged_collective_is_judged_as_all_interleavings_show(name: str) -> None:
    assert not all_disagreements(list(damaged_collectives(small(name))), 4, complete=False)


PARTED = [
    ("examples/pec.txt", 12),
    ("examples/mixed.txt", 24),
    ("examples/rails.txt", 9),
    ("examples/persia.txt", 9),
    ("examples/hits.txt", 9),
]


@pytest.mark.parametrize(("name", "stride"), PARTED)
def test_damaged_schedules_with_parts_are_judged_as_all_interleavings_show(name: str, stride: int) -> None:
    assert not all_disagreements([("as it is", small(name))], 2, complete=False)
    assert not all_disagreements(every_damage(small(name))[::stride], 2, complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in PARTED])
def test_every_damaged_schedule_with_parts_is_judged_as_all_interleavings_show(name: str) -> None:
    assert not all_disagreements(every_damage(small(name)), 3, complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_other_damage_is_judged_as_all_interleavings_show(name: str) -> None:
    damaged = [*damaged_buffers(small(name)), *shifted_micro_batches(small(name))]
    assert not all_disagreements(damaged, 5, complete=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_longer_programs_of_damaged_schedules_show_nothing_new(name: str) -> None:
    for what, loop in mutants(small(name)):
        report = check(loop)
        for more in (1, 2, 5) if report.verdict in SAFE else ():
            longer = check_programs((unroll(loop, num_batches_to_check(loop) + more),))
            assert (longer.verdict, stale_distances(longer)) == (report.verdict, stale_distances(report)), what


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [7, 8])
@pytest.mark.parametrize("name", ["fwp", "nestpipe"])
def test_more_micro_batches_than_are_checked_show_nothing_new(name: str, micro_batches: int) -> None:
    for what, loop in every_damage(with_micro_batches(load(name), micro_batches)):
        if check(loop).verdict is not Verdict.MALFORMED:
            reduced = with_micro_batches(loop, num_micro_batches_to_check(loop))
            report, full = (check_programs((unroll(of, 6),)) for of in (reduced, loop))
            assert (full.verdict, full.staleness) == (report.verdict, report.staleness), what
