"""Where a schedule stops paying: its gain over a baseline on a map of one or two swept keys, and the edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import pandas as pd

from nestpipe.base import CaseError, unknown_name

__all__ = ["break_even", "edges"]

_COORDINATES: Final = ("cluster", "domain_size", "world_size", "batch_per_worker")


def break_even(results: pd.DataFrame, x: str, y: str | None = None, *, baseline: str = "sync") -> pd.DataFrame:
    """The gain of each schedule at each point of the map: step time of the baseline over its own, in the same place.

    Of several numbers of micro-batches the best one counts, unless they are an axis of the map.

    Args:
        results: rows of a sweep.
        x: a swept key or another coordinate, such as `micro_batches` or `world_size`.
        y: a second one, if the map has two.
        baseline: the schedule to compare with.

    Returns:
        Columns schedule, x, y (if given), micro_batches, step_ms, baseline_ms, gain.

    Raises:
        CaseError: if a name is unknown, the baseline is missing, or something else varies too.
    """
    swept = [str(name) for name in results.columns if "." in str(name)]
    known = [*swept, *_COORDINATES, "micro_batches"]
    axes = [x] if y is None else [x, y]
    for axis in axes:
        if axis not in known:
            raise CaseError("map: " + unknown_name("key", axis, known))
    if x == y:
        raise CaseError(f"map: {x} is given twice")
    schedules = sorted(set(results["schedule"]))
    if baseline not in schedules:
        raise CaseError("baseline: " + unknown_name("schedule", baseline, schedules))
    rows = results[results["status"] == "ok"]
    for name in [*swept, *(each for each in _COORDINATES if each != "domain_size")]:
        if name not in axes and rows[name].nunique(dropna=False) > 1:
            raise CaseError(f"map: {name} has {rows[name].nunique()} values and is on neither axis; fix it in the file")
    own = [axis for axis in axes if axis != "micro_batches"]
    best = rows.sort_values(["step_ms", "micro_batches"], kind="stable").drop_duplicates(["schedule", *axes])
    base = rows[rows["schedule"] == baseline].sort_values("step_ms")
    if own:
        base = base.drop_duplicates(own)
        found = best.merge(base[[*own, "step_ms"]].rename(columns={"step_ms": "baseline_ms"}), on=own)
    else:
        found = best.assign(baseline_ms=float(base["step_ms"].iloc[0]))
    found = found[found["schedule"] != baseline]
    found = found.assign(gain=found["baseline_ms"] / found["step_ms"])
    columns = list(dict.fromkeys(["schedule", *axes, "micro_batches", "step_ms", "baseline_ms", "gain"]))
    return found[columns].sort_values(["schedule", *reversed(axes)], kind="stable").reset_index(drop=True)


def edges(gains: pd.DataFrame, x: str, y: str | None = None, *, pays_at: float = 1.0) -> pd.DataFrame:
    """Where along `x` each schedule's gain crosses `pays_at`, for every `y`, interpolated between neighbours.

    Args:
        gains: as `break_even` gives them.
        x: the axis to walk along; numeric.
        y: the other axis.
        pays_at: the gain from which a schedule pays.

    Returns:
        Columns schedule, y (if given), x at the crossing (NaN if there is none), pays ("above" or "below" that,
        "always" or "never"), and the smallest and largest gain of the row; a line for every crossing.
    """
    lines = []
    for key, group in gains.groupby(["schedule"] if y is None else ["schedule", y], sort=True, dropna=False):
        group = group.sort_values(x)
        places, values = group[x].astype(float).tolist(), group["gain"].tolist()
        crossings = _crossings(places, values, pays_at) or [(math.nan, "always" if values[0] >= pays_at else "never")]
        for crossing, word in crossings:
            lines.append(
                {
                    "schedule": key[0],
                    **({} if y is None else {y: key[1]}),
                    x: crossing,
                    "pays": word,
                    "gain_min": min(values),
                    "gain_max": max(values),
                }
            )
    return pd.DataFrame(lines)


def _crossings(places: Sequence[float], values: Sequence[float], level: float) -> list[tuple[float, str]]:
    """Where the line through the points crosses a level, and on which side it lies above it.

    Between positive places the line is straight in the logarithm of the place.
    """
    found = []
    for i in range(len(places) - 1):
        a, b = values[i] - level, values[i + 1] - level
        if (a >= 0) != (b >= 0):
            share = a / (a - b)
            if places[i] > 0 and places[i + 1] > 0:
                place = places[i] * (places[i + 1] / places[i]) ** share
            else:
                place = places[i] + share * (places[i + 1] - places[i])
            found.append((place, "above" if b >= 0 else "below"))
    return found
