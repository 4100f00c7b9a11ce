"""What a timeline shows: one rank's ops over a few steady steps, in lanes by stream; for figure and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from nestpipe.base import TraceError
from nestpipe.timeline import Timeline, steady_window, step_ends

__all__ = ["Lanes", "choose_ranks", "lanes", "stream_order"]

#: The streams of the catalogue from the outside of the pipeline to its middle, the order in which a batch meets them.
_PIPELINE: Final = ("data", "h2d", "route", "replica_keys", "host", "d2d", "replicas", "comm", "dense", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """One rank's spans that overlap [start_ns, end_ns).

    Attributes:
        rank: the rank shown.
        streams: lane names from top to bottom.
        spans: rows of `Timeline.frame()` clipped to the window; spans without duration are left out.
        start_ns, end_ns: the window.
        step_ends_ns: for each batch of the window, when its step ended.
        micro_batches: whether batches are split into more than one micro-batch.
    """

    rank: int
    streams: tuple[str, ...]
    spans: pd.DataFrame
    start_ns: int
    end_ns: int
    step_ends_ns: dict[int, int]
    micro_batches: bool


def stream_order(streams: Sequence[str]) -> tuple[str, ...]:
    """The streams in pipeline order; those that the catalogue does not know come first, sorted.

    >>> stream_order(["compute", "mine", "comm", "data"])
    ('mine', 'data', 'comm', 'compute')
    """
    known = {name: place for place, name in enumerate(_PIPELINE)}
    return tuple(sorted(set(streams), key=lambda name: (known.get(name, -1), name)))


def lanes(timeline: Timeline, *, rank: int | None = None, steps: int = 2) -> Lanes:
    """One rank's lanes over the first `steps` steady steps.

    Args:
        timeline: simulated or measured.
        rank: one of the ranks that the Timeline shows; by default the first.
        steps: how many steady steps, at least 1; fewer if the Timeline has fewer.

    Raises:
        TraceError: if the rank is not shown or the Timeline has no steady state.
    """
    shown = [int(each) for each in timeline.ranks]
    if rank is None:
        rank = shown[0]
    if rank not in shown:
        near = ", ".join(map(str, shown[:8])) + (", ..." if len(shown) > 8 else "")
        raise TraceError(f"timeline: rank {rank} is not shown; expected one of {near}")
    window = steady_window(timeline)
    frame = timeline.frame([rank])
    last = min(window.first + steps, window.last)
    numbers, of_ranks = step_ends(timeline)
    ends = {int(step): int(end) for step, end in zip(numbers, of_ranks[shown.index(rank)], strict=True)}
    start_ns, end_ns = ends[window.first], ends[last]
    inside = (frame["end_ns"] > start_ns) & (frame["start_ns"] < end_ns) & (frame["end_ns"] > frame["start_ns"])
    spans = frame[inside].copy()
    ready = (spans["start_ns"] + spans["wait_ns"]).clip(start_ns, end_ns)
    spans["start_ns"] = spans["start_ns"].clip(lower=start_ns)
    spans["end_ns"] = spans["end_ns"].clip(upper=end_ns)
    spans["wait_ns"] = ready - spans["start_ns"]
    return Lanes(
        rank=rank,
        streams=stream_order([str(name) for name in spans["stream"]]),
        spans=spans.reset_index(drop=True),
        start_ns=start_ns,
        end_ns=end_ns,
        step_ends_ns={step: end for step, end in ends.items() if start_ns < end <= end_ns},
        micro_batches=bool((timeline.ops["micro_batch"].fillna(0) > 0).any()),
    )


def choose_ranks(waiting_ns: pd.Series[float], limit: int) -> tuple[int, ...]:
    """Ranks worth looking at: from the one that others wait for to the one that waits longest, evenly between.

    Args:
        waiting_ns: for each rank (the index) the time it waits for peers.
        limit: how many to choose, at least 1.

    >>> choose_ranks(pd.Series({0: 5.0, 1: 0.0, 2: 9.0, 3: 7.0}), 3)
    (1, 3, 2)
    """
    order = [int(str(rank)) for rank in waiting_ns.sort_values(kind="stable").index]
    if len(order) <= limit:
        return tuple(sorted(order))
    places = np.unique(np.rint(np.linspace(0, len(order) - 1, max(limit, 1))).astype(int))
    return tuple(order[place] for place in places)
