"""What the report page's interactive timeline draws: the ranks and steps worth shipping, as compact JSON values.

A run of a thousand ranks has millions of spans; the page holds a few ranks, chosen from the one that others wait for to
the one that waits longest, and says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from nestpipe.base import TraceError
from nestpipe.timeline import Timeline, Window, partition, step_ends
from reports.figures import KINDS, choose_ranks, stream_order, text_colour

__all__ = ["Choice", "choose", "kinds_payload", "timeline_payload"]

_WAITING: Final = "waiting for a peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which ranks and which batches' ops the page shows, and the sentence that says so."""

    ranks: tuple[int, ...]
    first_step: int
    last_step: int
    words: str


def choose(
    timeline: Timeline,
    window: Window,
    *,
    ranks: Sequence[int] | None = None,
    num_ranks: int = 8,
    num_spans: int = 20000,
) -> Choice:
    """Ranks and steps to ship.

    Args:
        timeline: the run.
        window: its steady steps; these are kept first.
        ranks: ranks that the user asked for; None to choose.
        num_ranks: how many to choose.
        num_spans: the most spans to ship; steps outside the window are dropped first, then the window's last.

    Raises:
        TraceError: if a rank that was asked for is not in the Timeline.
    """
    shown = [int(rank) for rank in timeline.ranks]
    if ranks is not None:
        unknown = sorted(set(ranks) - set(shown))
        if unknown:
            raise TraceError(f"rank {unknown[0]} is not in the run; it holds {_ranks_text(shown)}")
        chosen = tuple(sorted(set(ranks)))
        how = "as asked for"
    elif len(shown) <= num_ranks:
        chosen, how = tuple(shown), "all that the run holds"
    else:
        chosen = choose_ranks(partition(timeline, window)[_WAITING], num_ranks)
        how = "from the one that its peers wait for to the one that waits longest for them"
    first, last = _steps(timeline, window, max(num_spans // max(len(chosen), 1), 1))
    steps = np.unique(timeline.ops["step"])
    world_size = int(timeline.weights.sum())
    stands_for = "" if world_size == len(shown) else f" that stand for {world_size:,}"
    words = f"Shown: rank{'s' if len(chosen) > 1 else ''} {_ranks_text(chosen)} of {len(shown):,}{stands_for} ({how})"
    if len(shown) == 1 and stands_for:
        words = f"Shown: rank {shown[0]}, which stands for all {world_size:,} ranks, as they are alike"
    if len(steps) and (first > steps.min() or last < steps.max()):
        words += f"; iterations {first} to {last} of {int(steps.min())} to {int(steps.max())}"
    return Choice(ranks=chosen, first_step=first, last_step=last, words=words)


def _ranks_text(ranks: Sequence[int]) -> str:
    """A short list of ranks.

    >>> _ranks_text([0, 1, 2, 3, 9])
    '0 to 3, 9'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words[:12]) + (", ..." if len(words) > 12 else "")


def _steps(timeline: Timeline, window: Window, num_ops: int) -> tuple[int, int]:
    """The range of iterations whose ops number at most `num_ops`, around the first steady ones."""
    steps, counts = np.unique(timeline.ops["step"], return_counts=True)
    first = last = int(np.searchsorted(steps, window.first + 1).clip(0, len(steps) - 1))
    total = int(counts[first])
    while True:
        room = num_ops - total
        if last + 1 < len(steps) and steps[last + 1] <= window.last and counts[last + 1] <= room:
            last += 1
            total += int(counts[last])
        elif first > 0 and counts[first - 1] <= room:
            first -= 1
            total += int(counts[first])
        elif last + 1 < len(steps) and counts[last + 1] <= room:
            last += 1
            total += int(counts[last])
        else:
            return int(steps[first]), int(steps[last])


def kinds_payload() -> list[dict[str, str]]:
    """Name, short name, fill and text colour of every op kind, in the order in which payloads number them."""
    return [
        {"name": kind.value, "short": mark.short, "fill": mark.colour, "text": text_colour(mark.colour)}
        for kind, mark in KINDS.items()
    ]


def timeline_payload(timeline: Timeline, window: Window, choice: Choice, name: str) -> dict[str, Any]:
    """One run for the page's script: streams, ops, and for each rank the start, duration and wait of each op.

    Times are whole nanoseconds since `origin`; a duration of -1 marks an op that the rank did not run. `view` is the
    first two steady steps.
    """
    steps = timeline.ops["step"].to_numpy()
    kept = np.flatnonzero((steps >= choice.first_step) & (steps <= choice.last_step))
    place_of = {int(rank): row for row, rank in enumerate(timeline.ranks)}
    rows = np.array([place_of[rank] for rank in choice.ranks])
    start, end, wait = (each[np.ix_(rows, kept)] for each in (timeline.start_ns, timeline.end_ns, timeline.wait_ns))
    ran = end >= 0
    origin = int(start[ran].min()) if ran.any() else 0
    streams = stream_order([str(stream) for stream in timeline.ops["stream"].unique()])
    place = {stream: i for i, stream in enumerate(streams)}
    number = {kind.value: i for i, kind in enumerate(KINDS)}
    ops = timeline.ops.iloc[kept]
    numbers, of_ranks = step_ends(timeline)
    ends = {int(step): int(end) - origin for step, end in zip(numbers, of_ranks[rows[0]], strict=True)}
    first = ends.get(window.first, 0)
    second = ends.get(min(window.first + 2, window.last), int((end[ran] - origin).max()) if ran.any() else 1)
    return {
        "name": name,
        "streams": list(streams),
        "origin": origin,
        "view": [first, second],
        "steps": [[batch, at] for batch, at in ends.items()],
        "k": [number[str(kind)] for kind in ops["kind"]],
        "s": [place[str(stream)] for stream in ops["stream"]],
        "b": ops["batch"].astype(int).tolist(),
        "m": _micro_batches(ops),
        "ranks": [
            {
                "rank": int(timeline.ranks[row]),
                "weight": int(timeline.weights[row]),
                "t": _ints(np.where(ran[i], start[i] - origin, 0)),
                "d": _ints(np.where(ran[i], end[i] - start[i], -1)),
                "w": _ints(wait[i]) if wait[i].any() else [],
            }
            for i, row in enumerate(rows)
        ],
    }


def _micro_batches(ops: pd.DataFrame) -> list[int]:
    """The micro-batch of each op; -1 for ops of whole batches, and for all of them if there is but one per batch."""
    numbers = ops["micro_batch"].fillna(-1).astype(int)
    return [-1] * len(numbers) if numbers.max() <= 0 else numbers.tolist()


def _ints(values: npt.NDArray[np.int64]) -> list[int]:
    return [int(value) for value in values]
