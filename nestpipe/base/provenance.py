"""Where a number comes from: one vocabulary, and one way to say how much of a step rests on each origin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["ORIGINS", "STATUSES", "shares_by_origin"]

#: Where a number can come from.
ORIGINS: Final = ("measured", "fitted", "interpolated", "extrapolated", "assumed")
#: What a result can be: as the numbers it rests on, or predicted from fitted ones; the surest first.
STATUSES: Final = ("measured", "fitted", "predicted", "interpolated", "assumed", "extrapolated")


def shares_by_origin(times: Iterable[tuple[str, int]]) -> dict[str, float]:
    """The share of a critical cycle by where its times come from, by name; sums to 1 unless nothing takes time.

    Args:
        times: for each op of the cycle one of `ORIGINS` and its nanoseconds.

    >>> shares_by_origin([("measured", 30), ("assumed", 50), ("measured", 20)])
    {'assumed': 0.5, 'measured': 0.5}
    """
    times = list(times)
    total = sum(ns for _, ns in times) or 1
    shares: dict[str, float] = {}
    for origin, ns in times:
        shares[origin] = shares.get(origin, 0.0) + ns / total
    return dict(sorted(shares.items()))
