"""Which ranks are alike: the classes of ranks that one representative each can stand for.

Ranks start with a colour for what they are (their costs) and are refined by the groups they take part in
(`nestpipe.base.refine`), so the folded run equals the unfolded one: every member of a class sees the same peers, hence
the same times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from nestpipe.base import TopologyError
from nestpipe.base.refine import Edges, equal_rows, refine
from nestpipe.ir import GROUPS, RANKS_MAX, Resource, group_of, group_ranks

__all__ = ["Actors", "World", "fold", "unfolded"]

Int64: TypeAlias = npt.NDArray[np.int64]

_RANK = "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks, and how many of them form a domain; their groups are those of `nestpipe.ir.group_of`.

    Raises:
        TopologyError: if a size is less than 1 or the domains do not divide the world.
    """

    world_size: int
    domain_size: int | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise TopologyError(f"world_size must be at least 1, got {self.world_size}")
        if self.world_size > RANKS_MAX:
            raise TopologyError(f"world_size must be at most {RANKS_MAX:,}, got {self.world_size:,}")
        if self.domain_size is not None and (self.domain_size < 1 or self.world_size % self.domain_size):
            raise TopologyError(
                f"world_size {self.world_size} is not divisible by domain_size {self.domain_size}; "
                f"choose a divisor of {self.world_size}"
            )

    def group_of(self, resource: Resource) -> Int64:
        """int64 (world_size,): the number of each rank's group.

        Raises:
            TopologyError: for a domain or replica group without a `domain_size`.
        """
        if resource in GROUPS - {Resource.WORLD} and self.domain_size is None:
            raise TopologyError(f"the schedule has a stream on {resource}; give a domain size (--domain-size)")
        return group_of(resource, np.arange(self.world_size, dtype=np.int64), self.domain_size or 1)

    def group_size(self, resource: Resource) -> int:
        """Number of ranks in each group of this kind."""
        return len(group_ranks(resource, 0, self.world_size, self.domain_size or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The representatives that are simulated.

    Attributes:
        ranks: int64 (actors,), the lowest rank of each class.
        weights: int64 (actors,), how many ranks the class has.
        groups: for each group resource in use, int64 (actors,), the number of the class of groups it belongs to; also
            for each further partition given to `fold`, under its name.
        alike: for each further partition, int64 (actors,), how many ranks of its class share its part.
        world: the ranks they stand for.
    """

    ranks: Int64
    weights: Int64
    groups: dict[str, Int64]
    alike: dict[str, Int64]
    world: World


def fold(
    world: World,
    resources: frozenset[Resource],
    colours: Int64 | None = None,
    partitions: Mapping[str, Int64] | None = None,
) -> Actors:
    """One actor per class of ranks that are alike.

    Args:
        world: the ranks and their groups.
        resources: the kinds of groups that the program's streams are bound to.
        colours: int64 (world_size,), equal for ranks whose costs are equal; None if all are.
        partitions: further ways in which ranks share something, by name: int64 (world_size,), the number of each rank's
            part, for example its host.
    """
    group_of = _groups(world, resources, partitions)
    found = refine(
        {_RANK: np.zeros(world.world_size, dtype=np.int64) if colours is None else np.asarray(colours)}
        | {name: np.zeros(int(number.max()) + 1, dtype=np.int64) for name, number in group_of.items()},
        [Edges(_RANK, name, number[:, None]) for name, number in group_of.items()],
    )
    assert found is not None
    colour = found[_RANK]
    ranks = np.unique(colour, return_index=True)[1].astype(np.int64)
    together = {name: equal_rows(group_of[name], colour) for name in partitions or {}}
    return Actors(
        ranks=ranks,
        weights=np.bincount(colour).astype(np.int64),
        groups={name: found[name][number[ranks]] for name, number in group_of.items()},
        alike={name: np.bincount(number)[number][ranks] for name, number in together.items()},
        world=world,
    )


def unfolded(world: World, resources: frozenset[Resource], partitions: Mapping[str, Int64] | None = None) -> Actors:
    """Every rank as an actor of its own."""
    ones = np.ones(world.world_size, dtype=np.int64)
    return Actors(
        ranks=np.arange(world.world_size, dtype=np.int64),
        weights=ones,
        groups=_groups(world, resources, partitions),
        alike=dict.fromkeys(partitions or {}, ones),
        world=world,
    )


def _groups(world: World, resources: frozenset[Resource], partitions: Mapping[str, Int64] | None) -> dict[str, Int64]:
    found: dict[str, Int64] = {resource.value: world.group_of(resource) for resource in sorted(resources & GROUPS)}
    return found | {name: equal_rows(np.asarray(number, dtype=np.int64)) for name, number in (partitions or {}).items()}
