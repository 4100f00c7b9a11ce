"""Which things are alike: colour refinement of kinds of items joined by edges, and numbers for equal rows.

Items start with a colour for what they are. Two items of a kind stay alike only if the edges of each set lead from them
to the same number of items of each colour, and to them from the same number. Refining until nothing changes gives the
coarsest equitable partition: what is done to one item of a class is done to all, so one can stand for all. Colours are
compared by sums of 64-bit hashes, so two different neighbourhoods are taken for equal with a chance of 2^-64.

Source: colour refinement (1-dimensional Weisfeiler-Leman); for its use in programs over graphs, Grohe, Kersting,
Mladenov, Selman, *Dimension Reduction via Colour Refinement*, ESA 2014.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["Edges", "equal_rows", "refine"]

Int64: TypeAlias = NDArray[np.int64]
_Hashes: TypeAlias = NDArray[np.uint64]
_MANY = 20_000  # from here on hashing, a tenth of the time of sorting, is worth the time to import pandas
#: Sorting so many values takes a few milliseconds, less than it takes to import what hashes them.
_SORTED_UP_TO = 1 << 16


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges from every item of a kind, one a row of `table`, to items of another kind or its own.

    Attributes:
        source, target: kinds of items
        table: int (sources, width), numbers of targets; negative ones, and those past the last target, are no edge
    """

    source: str
    target: str
    table: NDArray[np.integer[Any]]


def equal_rows(*columns: NDArray[Any]) -> Int64:
    """Numbers rows that agree in all columns alike: 0, 1, ... in order of appearance; int64 (rows,)."""
    codes, _ = _numbered(columns[0])
    for column in columns[1:]:
        more, count = _numbered(column)
        if count > 1:
            codes, _ = _numbered(codes * count + more)
    return codes


def _numbered(values: NDArray[Any]) -> tuple[Int64, int]:
    """Numbers of equal values in order of appearance, and how many there are."""
    if len(values) > _MANY:
        from pandas import factorize

        codes, uniques = factorize(values)
        return codes.astype(np.int64), len(uniques)
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse], len(first)


def refine(
    colours: Mapping[str, Int64],
    edges: Sequence[Edges],
    *,
    most: Mapping[str, float] | None = None,
    most_rounds: int | None = None,
) -> dict[str, Int64] | None:
    """Colours of the coarsest equitable partition that keeps apart what `colours` keeps apart.

    Args:
        colours: of each kind the colour of each item; kinds are refined in this order, each with the newest colours of
            the others
        edges: what joins them
        most: gives up as soon as a kind has more colours than this
        most_rounds: gives up when that many rounds have not sufficed

    Returns:
        For each kind the colour of each item, numbered from 0 in order of appearance; None if given up.
    """
    found = {kind: equal_rows(colour) for kind, colour in colours.items()}
    # an item alone tells nothing: its edges only count what its neighbours are known to be
    sides = [_Sides(each, len(found[each.target])) for each in edges if min(map(len, _ends(each, found))) > 1]
    rounds = 0
    while True:
        before = {kind: _count(colour) for kind, colour in found.items()}
        if any(before[kind] > limit for kind, limit in (most or {}).items()):
            return None
        if rounds == most_rounds:
            return None
        rounds += 1
        for kind in found:
            found[kind] = _finer(kind, found, sides, rounds)
        if before == {kind: _count(colour) for kind, colour in found.items()}:
            return found


def _ends(edges: Edges, colours: Mapping[str, Int64]) -> tuple[Int64, Int64]:
    return colours[edges.source], colours[edges.target]


def _count(colour: Int64) -> int:
    return int(colour.max(initial=-1)) + 1


def _finer(kind: str, colours: Mapping[str, Int64], sides: Sequence[_Sides], salt: int) -> Int64:
    """Colours of a kind told apart by those of its neighbours."""
    total = _hash(colours[kind], salt)
    for number, side in enumerate(sides, start=1):
        if side.source == kind:
            total = total + side.at_sources(_hash(colours[side.target], salt + (2 * number << 20)))
        if side.target == kind:
            total = total + side.at_targets(_hash(colours[side.source], salt + (2 * number + 1 << 20)))
    return equal_rows(total)


class _Sides:
    """Sums over edges at either end; one sort makes those at the targets sums over runs."""

    def __init__(self, edges: Edges, num_targets: int) -> None:
        self.source, self.target, self.table = edges.source, edges.target, edges.table
        used = (edges.table >= 0) & (edges.table < num_targets)
        self.rest = np.where(used, edges.table, num_targets) if not used.all() else edges.table
        sources, _ = np.nonzero(used)
        targets = edges.table[used]
        order = np.argsort(targets, kind="stable")
        self.by_target = sources[order].astype(np.int32)
        self.starts = np.searchsorted(targets[order], np.arange(num_targets))
        self.none = np.bincount(targets, minlength=num_targets) == 0

    def at_sources(self, values: _Hashes) -> _Hashes:
        """For every source, the sum of `values` over its targets (modulo 2^64)."""
        padded = np.append(values, np.uint64(0))
        return cast("_Hashes", sum(padded[column] for column in self.rest.T))

    def at_targets(self, values: _Hashes) -> _Hashes:
        """For every target, the sum of `values` over its sources (modulo 2^64)."""
        gathered = np.append(values[self.by_target], np.uint64(0))
        sums = np.add.reduceat(gathered, np.minimum(self.starts, len(gathered) - 1))
        sums[self.none] = 0
        return cast("_Hashes", sums)


def _hash(colour: Int64, salt: int) -> _Hashes:
    """splitmix64's finaliser: a well spread 64-bit number for each colour, another one for each salt."""
    z = colour.astype(np.uint64) * np.uint64(0x2545F4914F6CDD1D) + np.uint64(salt * 0x9E3779B97F4A7C15 % (1 << 64))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
