"""What a check answers: a verdict, findings with witnesses, key classes and buffers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nestpipe.ir import Data, Op, Place

__all__ = ["Finding", "KeyClass", "Report", "Verdict", "WitnessStep"]


class Verdict(StrEnum):
    """What a schedule is, from best to worst; the value is what text and JSON print."""

    SYNCHRONOUS = "synchronous"
    STALE = "stale"
    DRIFT = "drift"
    WRONG = "wrong"
    RACE = "race"
    DEADLOCK = "deadlock"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessStep:
    """One op of a witness, with absolute batch, and what it does there."""

    op: Op
    stream: str
    note: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something found: the name of the rule, how bad it is, what is wrong and the way out, and how to see it.

    Witness steps are a possible run in order, or, for a race or a deadlock, say themselves what is not in order.
    """

    rule: str
    verdict: Verdict
    message: str
    witness: tuple[WitnessStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyClass:
    """Keys of batch t last touched by batch t - `distance` (None: by none), and what is missing from what is read.

    `rows` and `optimizer` count the updates that a sequential run has applied at that point and this one has not.
    """

    distance: int | None
    through: str
    rows: int
    optimizer: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The answer of a check.

    `staleness` maps the distance d to the number of updates that keys last touched d batches ago may be behind. A race,
    deadlock or broken rule ends the examination: `staleness` then holds what the shortest program that shows it has, or
    nothing where versions are not defined, and `peak_buffers` is empty. `num_batches` is the size of the largest
    program examined, `bytes_per_rank` what the declared slots take.
    """

    schedule: str
    verdict: Verdict
    staleness: Mapping[int, int]
    dense_staleness: int
    key_classes: tuple[KeyClass, ...]
    findings: tuple[Finding, ...]
    peak_buffers: Mapping[Data, int]
    bytes_per_rank: Mapping[Place, int] | None
    notes: tuple[str, ...]
    num_batches: int

    @property
    def witness(self) -> tuple[WitnessStep, ...]:
        """The witness of the worst finding, empty for a synchronous schedule."""
        return next((f.witness for f in self.findings if f.verdict is self.verdict), ())

    @property
    def worst_staleness(self) -> int:
        """The largest staleness of any row or of the dense parameters."""
        return max([self.dense_staleness, *self.staleness.values()])

    def allowed(self, allow_staleness: int = 0) -> bool:
        """Whether the schedule may run: synchronous, or stale by no more than `allow_staleness` updates."""
        if self.verdict is Verdict.STALE:
            return self.worst_staleness <= allow_staleness
        return self.verdict is Verdict.SYNCHRONOUS
