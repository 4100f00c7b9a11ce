"""What the host spends on each kind of op, in which order it issues them, and what it waits for in between.

Each call's own time and the time before it belong to the op that the call is for; a call that queues nothing belongs to
the op that is queued next. So every nanosecond of a step in which the host is not blocked belongs to some kind, and
moves with it under another schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.ir import COLLECTIVES, OpKind
from traces.formats.intervals import intersection_ns, merge
from traces.recording.model import Call, DeviceOp, RankRecording, Recording

__all__ = ["HostUse", "host_use"]

_KINDS = {kind.value: kind for kind in OpKind}
#: A wait that happens in at least this share of the steps is part of the schedule's issue.
_USUAL = 0.5
#: The share of an op's work from which on the host is taken to wait for all of it.
_MOST = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """The host's part of a step, mean over the steady steps.

    Attributes:
        work_ns: for each recorded rank and kind the host's own time with recorded work.
        gap_ns: likewise without any.
        order: kinds in the order in which the host first issues them in a step.
        awaits: for each kind what the host waits for around its issue: kind, batch relative to its own, and whether
            for most of that op's work or only for its beginning, and the share of its own work it has done by then.
        overlap_ns: for each collective how long it transfers while the same batch computes.
    """

    work_ns: tuple[Mapping[OpKind, int], ...]
    gap_ns: tuple[Mapping[OpKind, int], ...]
    order: tuple[OpKind, ...]
    awaits: Mapping[OpKind, tuple[tuple[OpKind, int, bool, float], ...]]
    overlap_ns: Mapping[OpKind, int]


def host_use(source: Recording, without: Iterable[int] = ()) -> HostUse:
    """The host's part of the steps of a recording.

    Args:
        source: the recording.
        without: steps to leave out, which stall by themselves.
    """
    left_out = set(without)
    work: list[Mapping[OpKind, int]] = []
    gaps: list[Mapping[OpKind, int]] = []
    places: dict[OpKind, list[float]] = defaultdict(list)
    waits: dict[tuple[OpKind, OpKind, int], list[tuple[bool, float]]] = defaultdict(list)
    overlaps: dict[OpKind, list[int]] = defaultdict(list)
    num_steps = 0
    for each in source.ranks:
        steps = [step for step in each.steps if step[0] not in left_out]
        num_steps += len(steps)
        spent: Counter[OpKind] = Counter()
        idle: Counter[OpKind] = Counter()
        for number, begin, end in steps:
            issued = _issued(each, begin, end)
            seen: set[OpKind] = set()
            for call, kind, own, gap in issued:
                spent[kind] += own
                idle[kind] += gap
                if call.launches is not None and kind not in seen:
                    seen.add(kind)
                    places[kind].append((call.start_ns - begin) / max(1, end - begin))
            for key, how in _waits(each, issued, number).items():
                waits[key].append(how)
            for kind, ns in _overlaps(each, number, source).items():
                overlaps[kind].append(ns)
        work.append({kind: round(ns / max(1, len(steps))) for kind, ns in spent.items()})
        gaps.append({kind: round(ns / max(1, len(steps))) for kind, ns in idle.items()})
    awaits: dict[OpKind, list[tuple[OpKind, int, bool, float]]] = defaultdict(list)
    for (kind, awaited, ahead), each_how in sorted(waits.items()):
        if len(each_how) >= _USUAL * num_steps:
            whole = sum(whole for whole, _ in each_how) * 2 >= len(each_how)
            awaits[kind].append((awaited, ahead, whole, float(np.median([share for _, share in each_how]))))
    return HostUse(
        work_ns=tuple(work),
        gap_ns=tuple(gaps),
        order=tuple(sorted(places, key=lambda kind: float(np.median(places[kind])))),
        awaits={kind: tuple(each) for kind, each in awaits.items()},
        overlap_ns={kind: round(sum(ns) / max(1, num_steps)) for kind, ns in overlaps.items()},
    )


def _issued(each: RankRecording, begin: int, end: int) -> list[tuple[Call, OpKind, int, int]]:
    """The calls of a step with the kind that each belongs to and the host time that it took, with work and without."""
    calls = [call for call in each.calls if begin < call.start_ns <= end]
    kinds: list[OpKind | None] = []
    following: OpKind | None = None
    for call in reversed(calls):
        if call.launches is not None:
            following = _KINDS.get(each.ops[call.launches].kind, following)
        kinds.append(following)
    kinds.reverse()
    last = next((kind for kind in reversed(kinds) if kind is not None), None)
    found, until = [], begin
    for call, kind in zip(calls, kinds, strict=True):
        before = max(0, call.start_ns - until)
        gap = min(before, call.gap_ns)
        own = before - gap + _busy(each, call, until)
        until = max(until, call.end_ns)
        if (mine := kind or last) is not None:
            found.append((call, mine, own, gap))
    return found


def _busy(each: RankRecording, call: Call, until: int) -> int:
    """Host time in a call, without what it was blocked for and what calls before it account for."""
    since = max(call.start_ns, until, *(each.ops[other].end_ns for other in call.awaits))
    return max(0, call.end_ns - since)


def _waits(
    each: RankRecording, issued: Sequence[tuple[Call, OpKind, int, int]], step: int
) -> dict[tuple[OpKind, OpKind, int], tuple[bool, float]]:
    """What the host waits for around the issue of a kind, by the call that blocks longest; see `HostUse.awaits`."""
    found: dict[tuple[OpKind, OpKind, int], tuple[int, bool, float]] = {}
    ahead_of = {kind: _ahead(each, kind, step) for _, kind, *_ in issued}
    whole: Counter[OpKind] = Counter()
    for _, kind, own, gap in issued:
        whole[kind] += own + gap
    done: Counter[OpKind] = Counter()
    for call, kind, own, gap in issued:
        done[kind] += own + gap
        for other in call.awaits:
            op = each.ops[other]
            awaited = _KINDS.get(op.kind)
            if awaited is not None and op.batch is not None:
                key = kind, awaited, op.batch - step - ahead_of[kind]
                how = op.end_ns - call.start_ns, _done_by(each, op) >= _MOST, done[kind] / max(1, whole[kind])
                found[key] = max(found.get(key, how), how)
    return {key: (most, share) for key, (_, most, share) in found.items()}


def _done_by(each: RankRecording, op: DeviceOp) -> float:
    """The share of the work of an op's kind and batch that is done when it ends."""
    same = [one for one in each.ops if one.kind == op.kind and one.batch == op.batch]
    whole = sum(one.end_ns - one.start_ns for one in same)
    return sum(one.end_ns - one.start_ns for one in same if one.end_ns <= op.end_ns) / whole if whole else 1.0


def _ahead(each: RankRecording, kind: OpKind, step: int) -> int:
    """How many batches ahead of its step a kind works."""
    batches = [op.batch - step for op in each.ops if op.kind == kind.value and op.step == step and op.batch is not None]
    return int(np.median(batches)) if batches else 0


def _overlaps(each: RankRecording, step: int, source: Recording) -> dict[OpKind, int]:
    """For each collective of a step how long it transfers while its own batch computes."""
    mine = [op for op in each.ops if op.step == step]
    found: dict[OpKind, int] = {}
    for kind in COLLECTIVES:
        ops = [op for op in mine if op.kind == kind.value]
        if ops:
            computing = [op for op in mine if not op.collective and op.batch == ops[0].batch]
            found[kind] = intersection_ns(
                _union([(op.end_ns - _transfer(op, source), op.end_ns) for op in ops]),
                _union([(op.start_ns, op.end_ns) for op in computing]),
            )
    return found


def _transfer(op: DeviceOp, source: Recording) -> int:
    whole = op.end_ns - op.start_ns
    return whole if op.meeting is None else min(whole, source.meetings[op.meeting].transfer_ns)


def _union(spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return merge(table[:, 0], table[:, 1])
