"""Lengths of unions and intersections of half-open intervals, in whole nanoseconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["intersection_ns", "merge", "union_ns"]

Ints = npt.NDArray[np.int64]


def merge(start_ns: Ints, end_ns: Ints) -> tuple[Ints, Ints]:
    """The disjoint, ascending intervals whose union is that of [start, end); empty ones vanish.

    >>> merge(np.array([5, 0, 1]), np.array([9, 2, 3]))
    (array([0, 5]), array([3, 9]))
    """
    kept = end_ns > start_ns
    start, end = start_ns[kept], end_ns[kept]
    if start.size == 0:
        return start, end
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def union_ns(start_ns: Ints, end_ns: Ints) -> int:
    """Length of the union of the intervals.

    >>> union_ns(np.array([0, 1, 5]), np.array([2, 3, 9]))
    7
    """
    start, end = merge(start_ns, end_ns)
    return int((end - start).sum())


def intersection_ns(first: tuple[Ints, Ints], second: tuple[Ints, Ints]) -> int:
    """Length of the intersection of two unions, each given as its intervals.

    >>> intersection_ns((np.array([0]), np.array([10])), (np.array([2, 8]), np.array([4, 20])))
    4
    """
    # |A and B| = |A| + |B| - |A or B|
    both = union_ns(np.concatenate((first[0], second[0])), np.concatenate((first[1], second[1])))
    return union_ns(*first) + union_ns(*second) - both
