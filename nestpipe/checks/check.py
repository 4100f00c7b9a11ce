"""Proves a schedule before it runs: well-formed, free of deadlock and races, its staleness known.

`check` answers for a loop, whatever the number of batches and ranks; `check_programs` for programs, which may differ
from rank to rank; `require_safe` raises where a schedule must not run. The rules of the IR are the table `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from nestpipe.base import DeadlockError, ScheduleError, unknown_name
from nestpipe.checks.buffers import buffer_bytes
from nestpipe.checks.follow import Facts, deadlock, follow, follow_program
from nestpipe.checks.rendezvous import run_together
from nestpipe.checks.report import KeyClass, Report, Verdict
from nestpipe.checks.report_text import excerpt, finding_text
from nestpipe.checks.rules import RULES, Rule, broken_rules
from nestpipe.checks.versions import means
from nestpipe.checks.window import num_batches_to_check, num_micro_batches_to_check
from nestpipe.ir import KINDS, Data, Loop, Meaning, Place, Program

__all__ = [
    "RULES",
    "Report",
    "Rule",
    "Verdict",
    "check",
    "check_programs",
    "num_batches_to_check",
    "num_micro_batches_to_check",
    "require_safe",
]

_SEVERITY = tuple(Verdict)


def check(loop: Loop, *, size_bytes: Mapping[Data, int] | None = None) -> Report:
    """What holds for a loop, whatever the number of batches and ranks.

    Args:
        loop: any loop; one that breaks the rules is reported as malformed, not raised.
        size_bytes: bytes of one instance of each buffer on one rank, to know the memory.

    Raises:
        ScheduleError: if `size_bytes` misses a buffer or names one that the loop does not have.
    """
    facts = Facts(findings=broken_rules(loop))
    bytes_per_rank = None if size_bytes is None else _memory(loop, size_bytes)
    num_batches = 0
    if not facts.findings:
        facts, num_batches = follow(loop)
    return _report(loop, facts, bytes_per_rank, num_batches)


def check_programs(
    programs: Sequence[Program], *, domain_size: int | None = None, size_bytes: Mapping[Data, int] | None = None
) -> Report:
    """The same for programs: one for all ranks, or several, each with its `ranks`.

    Deadlock is decided for all ranks together. Races and versions are then decided for each program by its own streams
    and waits: an order that only holds because another rank runs a different program does not count.

    Args:
        programs: what the ranks run.
        domain_size: ranks per domain; replicas of a shard are `domain_size` ranks apart. One domain if None.
        size_bytes: bytes of one instance of each buffer on one rank, to know the memory.

    Raises:
        ScheduleError: if ranks are missing or given twice, or if sizes and buffers do not match.
    """
    if not programs:
        raise ScheduleError("no program to check; give at least one")
    facts = Facts(findings=[finding for program in programs for finding in broken_rules(program)])
    bytes_per_rank = None if size_bytes is None else _memory(programs[0], size_bytes)
    if not facts.findings and len(programs) > 1:
        stuck = run_together(programs, domain_size)
        if stuck is not None:
            facts.findings.append(deadlock(stuck))
    if not facts.findings:
        alone = len(programs) == 1
        for program in programs if alone else dict.fromkeys(replace(program, ranks=(0,)) for program in programs):
            facts.merge(follow_program(program))
    return _report(programs[0], facts, bytes_per_rank, programs[0].steps)


def require_safe(schedule: Loop | Program | Sequence[Program], *, allow_staleness: int = 0) -> Report:
    """The report of a schedule that is safe to run.

    Args:
        schedule: a loop, a program for all ranks, or programs with their ranks.
        allow_staleness: how many updates a read may be behind.

    Raises:
        DeadlockError: if it cannot finish.
        ScheduleError: if it is malformed, has a race, loses updates or is staler than allowed.
    """
    if isinstance(schedule, Loop):
        report = _check_once(schedule)
    else:
        report = check_programs((schedule,) if isinstance(schedule, Program) else schedule)
    if report.allowed(allow_staleness):
        return report
    finding = next(f for f in report.findings if f.verdict is report.verdict)
    shown = (schedule,) if isinstance(schedule, Program) else schedule
    allowed = f", {allow_staleness} allowed" if report.verdict is Verdict.STALE else ""
    text = f"schedule {report.schedule} must not run ({report.verdict}{allowed}): {finding_text(finding)}"
    text += "\n" + excerpt(shown, finding.witness)
    raise (DeadlockError if report.verdict is Verdict.DEADLOCK else ScheduleError)(text.rstrip())


@lru_cache(maxsize=128)
def _check_once(loop: Loop) -> Report:
    """The report of a loop that is run again and again, as in a sweep."""
    return check(loop)


def _memory(schedule: Loop | Program, size_bytes: Mapping[Data, int]) -> dict[Place, int]:
    declared = {buffer.data for buffer in schedule.buffers}
    if missing := sorted(declared - set(size_bytes)):
        raise ScheduleError(
            f"{schedule.name}: no size for buffer {missing[0]}; give bytes per instance for each buffer"
        )
    if unknown := sorted(set(size_bytes) - declared):
        raise ScheduleError(unknown_name("buffer", unknown[0].value, [data.value for data in declared]))
    if wrong := [data for data in sorted(declared) if size_bytes[data] < 0]:
        raise ScheduleError(f"size of buffer {wrong[0]} must not be negative, got {size_bytes[wrong[0]]}")
    return buffer_bytes(schedule.buffers, size_bytes)


def _report(
    schedule: Loop | Program, facts: Facts, bytes_per_rank: Mapping[Place, int] | None, num_batches: int
) -> Report:
    verdict = max((f.verdict for f in facts.findings), key=_SEVERITY.index, default=Verdict.SYNCHRONOUS)
    classes = _key_classes(schedule, facts)
    return Report(
        schedule=schedule.name,
        verdict=verdict,
        staleness={c.distance: c.rows for c in classes if c.distance is not None},
        dense_staleness=facts.dense,
        key_classes=classes,
        findings=tuple(sorted(facts.findings, key=lambda f: -_SEVERITY.index(f.verdict))),
        peak_buffers={} if facts.undecided else facts.peaks,
        bytes_per_rank=bytes_per_rank,
        notes=_notes(schedule, facts),
        num_batches=num_batches,
    )


def _key_classes(schedule: Loop | Program, facts: Facts) -> tuple[KeyClass, ...]:
    """One class per distance while a row can be in flight, one for all older touches, one for first touches."""
    batches = {KINDS[op.kind].meaning: op.batch - op.step for op in schedule.ops}
    synced = {
        op.batch - access.batch
        for op in schedule.ops
        if means(op, Meaning.SYNC)
        for access in op.reads
        if access.data is Data.ROWS and access.batch is not None and access.batch != op.batch
    }
    in_flight = batches.get(Meaning.COPY, 0) - batches.get(Meaning.STORE, 0) + 1
    stale = [d for d, k in (*facts.rows.items(), *facts.optimizer.items()) if d is not None and k]
    deepest = max([1, in_flight, *synced, *stale])
    seen = [d for d in facts.rows if d is not None and d <= deepest]
    return tuple(
        KeyClass(
            distance=distance,
            through="lookup, then sync" if distance in synced else "lookup",
            rows=facts.rows[distance],
            optimizer=facts.optimizer.get(distance),
        )
        for distance in (*sorted(seen), *([None] if None in facts.rows else []))
    )


def _notes(schedule: Loop | Program, facts: Facts) -> tuple[str, ...]:
    found = []
    if any(means(op, Meaning.AVERAGE) for op in schedule.ops):
        found.append(
            "replicas of a shard train apart during a batch and are averaged after it, rows and optimiser rows; every "
            "read sees the averaged version, which is a step of data-parallel training on the union of the domains' "
            "batches only for optimisers that are linear in the gradient"
        )
    if facts.rows and not facts.optimizer:
        found.append("no optimiser state is kept: exact for plain SGD only")
    if not facts.rows and not facts.findings:
        found.append("no forward reads rows: there are no versions to prove, only order and buffers")
    return tuple(found)
