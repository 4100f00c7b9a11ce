"""Sets of updates for all keys there can be, at once.

A key is described by its *history*: the set of batches that touch it. Of n batches there are 2^n histories; history h
contains batch b if bit b of h is set. A set of histories is an int with one bit per history, and a `Version` of a row
says for each update in which histories it is contained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

__all__ = ["Version", "all_histories", "blank", "containing", "most_missing"]


@dataclass(frozen=True, slots=True)
class Version:
    """`undefined`: histories in which there is no defined value; `has[u]`: histories in which update u is contained.

    `local[u]`: histories in which update u has been applied on this replica but not yet averaged over the replicas.
    """

    undefined: int
    has: tuple[int, ...]
    local: tuple[int, ...]

    def where(self, mask: int, new: Version) -> Version:
        """`new` in the histories of `mask`, this version elsewhere."""
        if self is new:
            return self
        keep = ~mask
        return Version(
            self.undefined & keep | new.undefined & mask,
            tuple([a if a == b else a & keep | b & mask for a, b in zip(self.has, new.has, strict=True)]),
            tuple([a if a == b else a & keep | b & mask for a, b in zip(self.local, new.local, strict=True)]),
        )

    def undefined_in(self, mask: int) -> Version:
        """This version, undefined in the histories of `mask`."""
        return replace(self, undefined=self.undefined | mask) if mask else self

    def without(self, update: int, mask: int) -> Version:
        """This version as it may be before an update, in the histories of `mask`."""
        has = list(self.has)
        has[update] &= ~mask
        return replace(self, has=tuple(has))

    def applied(self, update: int, mask: int, *, averaged: bool) -> Version:
        """With an update applied; on this replica only if it is still to be averaged."""
        target = list(self.local if averaged else self.has)
        target[update] |= mask
        return replace(self, local=tuple(target)) if averaged else replace(self, has=tuple(target))

    def merged(self, update: int, mask: int) -> Version:
        """With an update that has been applied on this replica averaged over all."""
        has, local = list(self.has), list(self.local)
        has[update] |= local[update] & mask
        local[update] &= ~mask
        return Version(self.undefined, tuple(has), tuple(local))


def blank(num_updates: int) -> Version:
    """The version before any update.

    >>> blank(1).applied(0, containing(0, 2), averaged=False).has
    (10,)
    """
    nothing = (0,) * num_updates
    return Version(0, nothing, nothing)


def all_histories(num_batches: int) -> int:
    """The set of all histories of `num_batches` batches."""
    return (1 << (1 << num_batches)) - 1


@lru_cache(maxsize=256)
def containing(batch: int, num_batches: int) -> int:
    """The set of all histories of `num_batches` batches that contain `batch`.

    >>> bin(containing(0, 2)), bin(containing(1, 2))
    ('0b1010', '0b1100')
    """
    block = 1 << batch
    mask, width = ((1 << block) - 1) << block, 2 * block
    while width < 1 << num_batches:
        mask, width = mask | mask << width, 2 * width
    return mask


def most_missing(histories: int, missing: Iterable[int]) -> tuple[int, int]:
    """The largest number of updates that any of the histories misses, and the histories that miss so many.

    `missing` has for each update the histories that miss it.

    >>> most_missing(0b1111, [0b0110, 0b0100])
    (2, 4)
    """
    at_least = [histories]
    for update in missing:
        more = [m & update for m in at_least]
        at_least = [a | b for a, b in zip([*at_least, 0], [0, *more], strict=True)]
        while not at_least[-1] and len(at_least) > 1:
            at_least.pop()
    return len(at_least) - 1, at_least[-1]
