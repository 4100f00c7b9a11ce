"""The anchor: what a recording's own step comes out as, before anything else is predicted from it.

The step is predicted as every other one is, from the host's calls, the work of device ops, transfers and who waits for
whom; what that leaves of the recorded step is unexplained and printed as such. Beyond `TOLERANCE` nothing predicted
from the recording is trusted, and every output says "unanchored".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from nestpipe.base import NS_PER_MS
from sim.engine.replay import Cause, Replay, Scales, replay_recording
from traces.recording import Recording, classified_share, recorded_schedule, recording

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TOLERANCE", "Anchor", "Stall", "Unexplained", "anchor"]

#: The largest relative error of an anchored prediction, and the classified share below which times are not "measured".
TOLERANCE: Final = 0.1
CLASSIFIED_MIN: Final = 0.9
#: A step of which this share more than of the best step goes into stalls of its own is told apart.
_STALL: Final = 0.1
_STALLS: Final = (Cause.ALLOCATION, Cause.INPUT)
#: Ranks that make the others wait for more than this share of the step are named.
_LATE: Final = 0.02
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A step with a stall of its own: its number, recorded and predicted time, and what stalled it."""

    step: int
    recorded_ms: float
    predicted_ms: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unexplained:
    """Ops of a kind that started later than everything that they are known to have waited for."""

    kind: str
    ops: int
    late_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The recorded step and what it is predicted as.

    Attributes:
        schedule: the catalogue's schedule that the recording shows, or what it is instead.
        recorded_ms, predicted_ms: mean over ranks and the steps without a stall of their own.
        causes_ms: what the recorded step was spent on; `unexplained` is what is left of it, and may be negative.
        pace_ms: mean from the end of one step on the device to the next, recorded and predicted; None for one step.
        late_ms: for each rank that others wait for, how long they do together, per step.
        steady_ms: the recorded pace free of who came late into the window: that of the device, or for one step the
            slowest rank's when all begin together.
        as_schedule_ms: the steady step as predicted from the text of `schedule`; None where that is not a schedule.
        steps: how many steps the mean is over.
        stalls: the steps left out.
        unexplained: by kind, the longest first.
        room_ms: how long ops waited for room on a device full of other work, per rank and step.
        classified_share: of the device time; None if there is none.
        notes: what had to be left out or taken for granted, in words.
    """

    schedule: str
    recorded_ms: float
    predicted_ms: float
    causes_ms: Mapping[str, float]
    pace_ms: tuple[float, float] | None
    late_ms: Mapping[int, float]
    steady_ms: float
    as_schedule_ms: float | None = None
    steps: int
    stalls: tuple[Stall, ...]
    unexplained: tuple[Unexplained, ...]
    room_ms: float
    classified_share: float | None
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def relative_error(self) -> float | None:
        """Predicted over recorded, less 1; None where the recorded step took no time."""
        return self.predicted_ms / self.recorded_ms - 1 if self.recorded_ms else None

    @property
    def as_schedule_error(self) -> float | None:
        """Of the steady step as predicted from the schedule's text."""
        if self.as_schedule_ms is None or not self.steady_ms:
            return None
        return self.as_schedule_ms / self.steady_ms - 1

    @property
    def anchored(self) -> bool:
        """Whether the prediction is within `TOLERANCE`, of the step and of the device's pace."""
        pairs = [(self.recorded_ms, self.predicted_ms), *([] if self.pace_ms is None else [self.pace_ms])]
        return all(recorded and abs(predicted / recorded - 1) <= TOLERANCE for recorded, predicted in pairs)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What whoever reads a prediction has to know first."""
        found = []
        if not self.anchored:
            found.append(
                f"unanchored: the recorded step or pace comes out with an error beyond {TOLERANCE:.0%}; "
                "nothing predicted from this recording can be trusted"
            )
        error = self.as_schedule_error
        if error is not None and abs(error) > TOLERANCE:
            found.append(
                f"unanchored as a schedule: from the text of {self.schedule} the steady step comes out off by "
                f"{error:+.1%}; predictions under other schedules may be off by as much"
            )
        share = self.classified_share
        if share is not None and share < CLASSIFIED_MIN:
            found.append(f"only {share:.1%} of the device time is classified; what is predicted leaves out the rest")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        pace = self.pace_ms
        return {
            "schedule": self.schedule,
            "recorded_ms": self.recorded_ms,
            "predicted_ms": self.predicted_ms,
            "relative_error": self.relative_error,
            "anchored": self.anchored,
            "status": "anchored" if self.anchored else "unanchored",
            "causes_ms": dict(self.causes_ms),
            "device_pace": None if pace is None else {"recorded_ms": pace[0], "predicted_ms": pace[1]},
            "steady_ms": self.steady_ms,
            "as_schedule_ms": self.as_schedule_ms,
            "as_schedule_relative_error": self.as_schedule_error,
            "steps": self.steps,
            "stalls": [
                {name: getattr(each, name) for name in ("step", "recorded_ms", "predicted_ms", "cause")}
                for each in self.stalls
            ],
            "late_ranks": [{"rank": rank, "others_wait_ms": ms} for rank, ms in self.late_ms.items()],
            "waiting_for_room_ms": self.room_ms,
            "unexplained_starts": [
                {"kind": each.kind, "ops": each.ops, "late_ms": each.late_ms} for each in self.unexplained
            ],
            "classified_share": self.classified_share,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """As text."""
        error = "" if self.relative_error is None else f" ({self.relative_error:+.2%})"
        word = "Anchor" if self.anchored else "Unanchored"
        found = [
            f"{word}: recorded step {self.recorded_ms:.3f} ms, predicted {self.predicted_ms:.3f} ms{error} under the "
            f"schedule it was recorded with ({self.schedule}), mean of {self.steps} step(s)"
        ]
        if self.pace_ms is not None:
            found.append(f"  pace of the device: recorded {self.pace_ms[0]:.3f} ms, predicted {self.pace_ms[1]:.3f} ms")
        if self.as_schedule_error is not None:
            found.append(
                f"  from the schedule's text with the host as a lane: steady step {self.steady_ms:.3f} ms recorded, "
                f"{self.as_schedule_ms:.3f} ms predicted ({self.as_schedule_error:+.2%})"
            )
        whole = self.recorded_ms or 1
        parts = [f"{name} {ms:.3f} ms ({ms / whole:.0%})" for name, ms in self.causes_ms.items() if round(ms, 3)]
        found.append(f"  where it goes: {', '.join(parts)}")
        for rank, ms in self.late_ms.items():
            found.append(f"  late: rank {rank}; the others wait {ms:.3f} ms for it, all together, a step")
        for each in self.stalls:
            found.append(
                f"  step {each.step} left out, it stalls by itself ({each.cause}): recorded {each.recorded_ms:.3f} ms, "
                f"predicted {each.predicted_ms:.3f} ms"
            )
        if round(self.room_ms, 3):
            found.append(f"  ops waited {self.room_ms:.3f} ms for room on a device full of other work, a rank and step")
        for one in self.unexplained[:_SHOWN]:
            found.append(f"  unexplained: {one.ops} ops of {one.kind} started {one.late_ms:.3f} ms late in all")
        found.extend(f"  note: {note}" for note in self.notes)
        found.extend(f"WARNING: {each}" for each in self.warnings)
        return found


def anchor(frame: pd.DataFrame) -> Anchor:
    """The anchor of a trace table.

    Raises:
        TraceError, DeadlockError: as `replay`.
    """
    import pandas as pd

    source = recording(frame)
    found = replay_recording(source, Scales())
    steps = found.steps
    stalled = _stalled(found)
    steady = steps[~steps["step"].isin(list(stalled))]
    recorded, predicted = (float(steady[name].mean()) / NS_PER_MS for name in ("recorded_ns", "replayed_ns"))
    causes = {cause.value: float(steady[f"{cause}_ns"].mean()) / NS_PER_MS for cause in Cause}
    rank_steps = max(1, len(steps))
    ops = [op for each in source.ranks for op in each.ops]
    late = pd.DataFrame([(op.kind, op.unexplained_ns) for op in ops if op.unexplained_ns], columns=["kind", "ns"])
    kinds = late.groupby("kind")["ns"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    return Anchor(
        schedule=recorded_schedule(frame),
        recorded_ms=recorded,
        predicted_ms=predicted,
        causes_ms={**causes, "unexplained": recorded - predicted},
        pace_ms=_pace(found),
        late_ms=_late(found, recorded),
        steady_ms=_steady(source, found),
        steps=steady["step"].nunique(),
        stalls=tuple(_stall(steps[steps["step"] == step], step, cause) for step, cause in stalled.items()),
        unexplained=tuple(
            Unexplained(kind=str(kind), ops=int(row["size"]), late_ms=float(row["sum"]) / NS_PER_MS)
            for kind, row in kinds.iterrows()
        ),
        room_ms=sum(op.room_ns for op in ops) / NS_PER_MS / rank_steps,
        classified_share=classified_share(frame),
        notes=source.notes,
    )


def _steady(source: Recording, found: Replay) -> float:
    pace = _pace(found)
    if pace is not None:
        return pace[0]
    together = found if len(source.ranks) == 1 else replay_recording(source, Scales(), together=True)
    column = "recorded_ns" if len(source.ranks) == 1 else "replayed_ns"
    return float(together.steps[column].max()) / NS_PER_MS if len(together.steps) else 0.0


def _stalled(found: Replay) -> dict[int, str]:
    """The steps that stall by themselves, with the cause that weighs most."""
    means = found.steps.groupby("step")[["recorded_ns", *(f"{cause}_ns" for cause in _STALLS)]].mean()
    stalls = means.drop(columns="recorded_ns")
    share = stalls.sum(axis=1) / means["recorded_ns"].where(means["recorded_ns"] > 0)
    beyond = share[share > share.min() + _STALL].index
    return {int(step): str(stalls.loc[step].idxmax()).removesuffix("_ns") for step in beyond}


def _stall(rows: pd.DataFrame, step: int, cause: str) -> Stall:
    recorded, predicted = (float(rows[name].mean()) / NS_PER_MS for name in ("recorded_ns", "replayed_ns"))
    return Stall(step=step, recorded_ms=recorded, predicted_ms=predicted, cause=cause)


def _pace(found: Replay) -> tuple[float, float] | None:
    if found.pace.empty:
        return None
    recorded, predicted = (float(found.pace[name].mean()) / NS_PER_MS for name in ("recorded_ns", "replayed_ns"))
    return recorded, predicted


def _late(found: Replay, step_ms: float) -> dict[int, float]:
    num_steps = max(1, found.steps["step"].nunique())
    ns = dict(zip(found.late["rank"].tolist(), found.late["waited_ns"].tolist(), strict=True))
    waited = {int(rank): float(each) / NS_PER_MS / num_steps for rank, each in ns.items()}
    most = sorted(waited.items(), key=lambda item: -item[1])
    return {rank: ms for rank, ms in most if ms > _LATE * step_ms * (len(waited) - 1)}
