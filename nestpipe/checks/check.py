"""Proves a schedule before it runs: well-formed, free of deadlock and races, its staleness known.

`check` answers for a loop, whatever the number of batches and ranks; `check_programs` for programs, which may differ
from rank to rank; `require_safe` raises where a schedule must not run. The rules of the IR are the table `RULES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from nestpipe.base import DeadlockError, ScheduleError, unknown_name
from nestpipe.checks.buffers import buffer_bytes, buffer_findings, peak_buffers
from nestpipe.checks.order import Stuck, order_of
from nestpipe.checks.rendezvous import run_together
from nestpipe.checks.report import Finding, KeyClass, Report, Verdict, WitnessStep
from nestpipe.checks.report_text import excerpt, finding_text
from nestpipe.checks.rules import RULES, Rule, broken_rules
from nestpipe.checks.staleness import FOLLOWED, scenarios, versions
from nestpipe.checks.versions import means
from nestpipe.checks.window import lengths_to_check, num_batches_to_check, num_micro_batches_to_check
from nestpipe.ir import KINDS, Data, Loop, Meaning, Place, Program, unroll, with_micro_batches

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
    facts = _Facts(findings=broken_rules(loop))
    bytes_per_rank = None if size_bytes is None else _memory(loop, size_bytes)
    num_batches = 0
    if not facts.findings:
        small = with_micro_batches(loop, num_micro_batches_to_check(loop))
        for num_batches in lengths_to_check(loop):
            _examine(unroll(small, num_batches), facts, [max(0, num_batches - FOLLOWED)])
            if facts.undecided:
                break
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
    facts = _Facts(findings=[finding for program in programs for finding in broken_rules(program)])
    bytes_per_rank = None if size_bytes is None else _memory(programs[0], size_bytes)
    if not facts.findings and len(programs) > 1:
        stuck = run_together(programs, domain_size)
        if stuck is not None:
            facts.findings.append(_deadlock(stuck))
    if not facts.findings:
        for program in dict.fromkeys(replace(program, ranks=None) for program in programs):
            last = max(0, program.steps - FOLLOWED)
            _examine(program, facts, sorted({*range(0, last, FOLLOWED // 2), last}))
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


@dataclass(slots=True)
class _Facts:
    """What has been found so far; `undecided` once a finding leaves the versions undefined."""

    findings: list[Finding] = field(default_factory=list)
    rows: dict[int | None, int] = field(default_factory=dict)
    optimizer: dict[int | None, int] = field(default_factory=dict)
    dense: int = 0
    peaks: dict[Data, int] = field(default_factory=dict)

    @property
    def undecided(self) -> bool:
        return any(f.verdict not in (Verdict.SYNCHRONOUS, Verdict.STALE) for f in self.findings)

    def add(self, findings: Iterable[Finding]) -> None:
        known = {finding.rule for finding in self.findings}
        self.findings += [finding for finding in findings if finding.rule not in known]


def _examine(program: Program, facts: _Facts, first_batches: Sequence[int]) -> None:
    """Adds what one program shows; follows the keys first touched from `first_batches` on."""
    order = order_of(program)
    undefined = [_deadlock(order)] if isinstance(order, Stuck) else buffer_findings(program, order)
    if isinstance(order, Stuck) or undefined:
        facts.add(undefined)
        for known in (facts.rows, facts.optimizer, facts.peaks):
            known.clear()
        return
    for data, peak in peak_buffers(program, order).items():
        facts.peaks[data] = max(peak, facts.peaks.get(data, 0))
    for scenario in scenarios(program.ops):
        for first_batch in first_batches:
            found = versions(program, order, scenario, first_batch)
            facts.add(found.findings)
            facts.dense = max(facts.dense, found.dense)
            for mine, theirs in ((facts.rows, found.rows), (facts.optimizer, found.optimizer)):
                for distance, stale in theirs.items():
                    mine[distance] = max(stale, mine.get(distance, 0))


def _deadlock(stuck: Stuck) -> Finding:
    steps = tuple(WitnessStep(op=h.op, stream=h.stream, note=h.reason, rank=h.rank) for h in stuck.heads)
    message = (
        f"{len(steps)} streams are stuck after {stuck.num_done} of {stuck.num_ops} ops, each waiting for another; "
        "drop one of these waits, or move the op that is waited for up in its stream"
    )
    return Finding(rule="deadlock", verdict=Verdict.DEADLOCK, message=message, witness=steps)


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
    schedule: Loop | Program, facts: _Facts, bytes_per_rank: Mapping[Place, int] | None, num_batches: int
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


def _key_classes(schedule: Loop | Program, facts: _Facts) -> tuple[KeyClass, ...]:
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


def _notes(schedule: Loop | Program, facts: _Facts) -> tuple[str, ...]:
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
