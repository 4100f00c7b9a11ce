"""Follows keys through the programs of a loop, as many as it takes, and keeps what they show.

How many batches, and through how many of them a key is followed, is worked out in `nestpipe.checks.window`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from nestpipe.checks.buffers import buffer_findings, peak_buffers
from nestpipe.checks.order import Stuck, order_of
from nestpipe.checks.rendezvous import messages_meet
from nestpipe.checks.report import Finding, Verdict, WitnessStep
from nestpipe.checks.staleness import scenarios, versions
from nestpipe.checks.window import (
    FOLLOWED_MAX,
    lengths_to_check,
    num_micro_batches_to_check,
    window_of_loop,
    window_of_order,
)
from nestpipe.ir import Data, Loop, Program, unroll, with_micro_batches

__all__ = ["Facts", "deadlock", "follow", "follow_program"]

_Key = TypeVar("_Key")


@dataclass(slots=True)
class Facts:
    """What has been found so far; `undecided` once a finding leaves the versions undefined."""

    findings: list[Finding] = field(default_factory=list)
    rows: dict[int | None, int] = field(default_factory=dict)
    optimizer: dict[int | None, int] = field(default_factory=dict)
    dense: int = 0
    peaks: dict[Data, int] = field(default_factory=dict)

    @property
    def undecided(self) -> bool:
        return any(f.verdict not in (Verdict.SYNCHRONOUS, Verdict.STALE) for f in self.findings)

    @property
    def stale(self) -> dict[tuple[str, int | None], int]:
        """How many updates behind, where it is any, by what is read and distance."""
        both = (("rows", self.rows), ("optimizer", self.optimizer))
        return {(name, distance): k for name, of in both for distance, k in of.items() if k}

    def add(self, findings: Iterable[Finding]) -> None:
        known = {finding.rule for finding in self.findings}
        self.findings += [finding for finding in findings if finding.rule not in known]

    def merge(self, other: Facts) -> None:
        """Adds what another program, or other keys, have shown."""
        self.add(other.findings)
        self.dense = max(self.dense, other.dense)
        _raise_to(self.rows, other.rows)
        _raise_to(self.optimizer, other.optimizer)
        _raise_to(self.peaks, other.peaks)


def _raise_to(mine: dict[_Key, int], theirs: Mapping[_Key, int]) -> None:
    for key, value in theirs.items():
        mine[key] = max(value, mine.get(key, 0))


def _examine(program: Program, facts: Facts, followed: int, starts: Sequence[int]) -> None:
    """Adds what one program shows of the keys of so many batches in a row, from each of `starts` on."""
    stuck = messages_meet(program) if program.ranks is None else None
    order = stuck or order_of(program)
    undefined = [deadlock(order)] if isinstance(order, Stuck) else buffer_findings(program, order)
    if isinstance(order, Stuck) or undefined:
        facts.add(undefined)
        for known in (facts.rows, facts.optimizer, facts.peaks):
            known.clear()
        return
    _raise_to(facts.peaks, peak_buffers(program, order))
    for scenario in scenarios(program.ops, program.parts):
        for start in starts:
            found = versions(program, order, scenario, range(start, min(start + followed, program.steps)))
            facts.merge(
                Facts(findings=list(found.findings), rows=found.rows, optimizer=found.optimizer, dense=found.dense)
            )


def _too_deep(name: str, window: int, *, stale: bool) -> Finding:
    message = (
        f"{name}: reads are the staler the more batches are followed, at least to {FOLLOWED_MAX}; "
        "let lookup wait for write_back, or sync for update"
        if stale
        else f"{name}: a row may be in flight for {window} batches; keys are followed through {FOLLOWED_MAX - 2}; "
        "let lookup wait for the write_back of a later batch, or bring the offsets closer"
    )
    return Finding(rule="depth", verdict=Verdict.RACE if stale else Verdict.MALFORMED, message=message)


def deadlock(stuck: Stuck) -> Finding:
    steps = tuple(WitnessStep(op=h.op, stream=h.stream, note=h.reason, rank=h.rank) for h in stuck.heads)
    message = (
        f"{len(steps)} streams are stuck after {stuck.num_done} of {stuck.num_ops} ops, each waiting for another; "
        "drop one of these waits, or move the op that is waited for up in its stream"
    )
    return Finding(rule="deadlock", verdict=Verdict.DEADLOCK, message=message, witness=steps)


def follow(loop: Loop) -> tuple[Facts, int]:
    """What all lengths of a well-formed loop show, and the largest examined."""
    small = with_micro_batches(loop, num_micro_batches_to_check(loop))
    examined = 0

    def examine(followed: int) -> Facts:
        nonlocal examined
        facts = Facts()
        for examined in lengths_to_check(loop):
            _examine(unroll(small, examined), facts, followed, [max(0, examined - followed)])
            if facts.undecided:
                break
        return facts

    return _widened(loop.name, window_of_loop(loop), examine), examined


def follow_program(program: Program) -> Facts:
    """What one program shows."""
    order = order_of(program)
    window = 0 if isinstance(order, Stuck) else window_of_order(order, program)

    def examine(followed: int) -> Facts:
        facts = Facts()
        size = min(followed, program.steps)
        _examine(program, facts, size, range(program.steps - size + 1))
        return facts

    return _widened(program.name, max(0, min(window, program.steps - 2)), examine, program.steps)


def _widened(name: str, window: int, examine: Callable[[int], Facts], steps: int | None = None) -> Facts:
    """What is found with the window that suffices, or all `steps`; `examine` follows so many batches at once."""
    known = None
    for followed in range(window + 2, FOLLOWED_MAX + 1, window + 1):
        facts = examine(followed)
        if facts.undecided or not facts.stale or facts.stale == known or (steps is not None and followed >= steps):
            return facts
        known = facts.stale
    return Facts(findings=[_too_deep(name, window, stale=known is not None)])
