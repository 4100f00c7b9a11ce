"""The table of collective algorithms: the steps that each takes, and where it can run.

An algorithm turns what is to be moved and where the ranks sit (`Place`) into steps: rounds of flows between ranks, or
traffic between all pairs of a group at once. `sim.network.cost` sums the steps up by link, `sim.network.oracle` lists
their flows one by one; both take any algorithm of the table, so a new one is a function and a row here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from sim.network.classes import PairTraffic
from sim.network.problem import Floats, Ints
from sim.network.protocols import Pattern

__all__ = ["ALGORITHMS", "Algorithm", "Place", "Round", "Split", "Step", "Traffic"]

_FEW_RANKS = 256  # up to here every shift of a pairwise exchange is a round of its own
_SAMPLED_SHIFTS = 61


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One flow per entry, all started together; ranks are positions in the group.

    Attributes:
        src, dst, size: of each flow; sizes in bytes
        times: how often the round is repeated
        hops: messages in a chain of which each waits for the one before; the bytes are pipelined along it
    """

    src: Ints
    dst: Ints
    size: Floats | Ints
    times: float = 1
    hops: int = 1


Step: TypeAlias = Round | PairTraffic


class Traffic(Protocol):
    """What the ranks of an All2All send each other."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""

    @property
    def even(self) -> bool:
        """Whether all pairs exchange the same."""

    def between(self, src: Ints, dst: Ints) -> Floats | Ints:
        """Bytes from each `src` to each `dst`."""

    def all_pairs(self) -> Step:
        """Everybody to everybody."""

    def inside(self, place: Place) -> Step:
        """In every node: to each local rank what its counterparts in all nodes are to get."""

    def across(self, place: Place) -> Step:
        """Between ranks of equal number: what the whole node has for the other's node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Who sends how much to whom: rank i of the group sends `send_bytes[i]`, of it `owner_share[j]` to rank j.

    `send_bytes` counts a rank's share to itself, which stays where it is. Shares sum to 1.
    """

    send_bytes: Floats
    owner_share: Floats

    def __post_init__(self) -> None:
        if len(self.send_bytes) != len(self.owner_share) or not len(self.send_bytes):
            raise ValueError(
                f"send_bytes and owner_share must have an entry per rank, got {len(self.send_bytes)} and "
                f"{len(self.owner_share)}"
            )
        if not (np.isfinite(self.send_bytes).all() and (self.send_bytes >= 0).all()):
            raise ValueError("send_bytes must be finite and 0 or more")
        if not (self.owner_share >= 0).all() or abs(float(self.owner_share.sum()) - 1) > 1e-6:
            raise ValueError(f"owner_share must be 0 or more and sum to 1, got a sum of {self.owner_share.sum():g}")

    @staticmethod
    def equal(size_bytes: float, num_ranks: int) -> Split:
        """Every rank sends the same amount to every owner."""
        return Split(send_bytes=np.full(num_ranks, float(size_bytes)), owner_share=np.full(num_ranks, 1 / num_ranks))

    @property
    def num_ranks(self) -> int:
        return len(self.send_bytes)

    @property
    def even(self) -> bool:
        return len(np.unique(self.send_bytes)) == len(np.unique(self.owner_share)) == 1

    def between(self, src: Ints, dst: Ints) -> Floats:
        return self.send_bytes[src] * self.owner_share[dst]

    def all_pairs(self) -> PairTraffic:
        return self._pairs(self.send_bytes, self.owner_share, np.zeros(self.num_ranks, dtype=np.int64))

    def inside(self, place: Place) -> PairTraffic:
        owned: Floats = np.bincount(place.local, weights=self.owner_share).astype(np.float64)[place.local]
        return self._pairs(self.send_bytes, owned, place.node)

    def across(self, place: Place) -> PairTraffic:
        sent: Floats = np.bincount(place.node, weights=self.send_bytes).astype(np.float64)[place.node]
        return self._pairs(sent, self.owner_share, place.local)

    def _pairs(self, send: Floats, recv: Floats, label: Ints) -> PairTraffic:
        return PairTraffic(ranks=np.arange(self.num_ranks), send=send, recv=recv, label=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the ranks of a group sit.

    Attributes:
        node, local: of each rank, the scale-up domain and its number in it
        table: positions in the group with a domain per row, None unless the group is made of whole domains in order
        meshed: a domain joins each two of its ranks by a link of their own
        switched: a domain has a tier of its own through which all pairs can talk at once
        regular_above: from this shift on partners are in different groups of every tier but the outermost, so that a
            few shifts stand for all of a large group; None: list every shift
        reduces, reduces_across: switches of a domain, and those outside, add up what they forward
        railed: outside, ranks of equal number in their domains are on one switch
        num_rings: rings that share the bytes; None: one per rank of a domain, as NCCL does; 1: the textbook's
    """

    node: Ints
    local: Ints
    table: Ints | None
    meshed: bool = False
    switched: bool = True
    regular_above: int | None = None
    reduces: bool = False
    reduces_across: bool = False
    railed: bool = False
    num_rings: int | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.node)

    @property
    def num_nodes(self) -> int:
        return int(self.node.max()) + 1

    @property
    def num_inside(self) -> int:
        """Ranks in the domain that has most of them."""
        return int(np.bincount(self.node).max())


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row of the table.

    Attributes:
        steps: of a `Traffic` (All2All) or a size in bytes, whole numbers staying whole; and a place
        needs: what it asks of the place that the place lacks, in words, or None; None: runs anywhere
        automatic: on which places it is among those of which the fastest is taken where none is named
        pattern: how it sends, which is what the protocols of software go by
    """

    steps: Callable[[Any, Place], Iterator[Step]]
    needs: Callable[[Place], str | None] | None = None
    automatic: Callable[[Place], bool] = lambda _: True
    pattern: Pattern = Pattern.CHAIN

    def lacks(self, place: Place) -> str | None:
        """What the place lacks for it, in words; None if it runs there."""
        return None if self.needs is None else self.needs(place)

    def taken(self, place: Place) -> bool:
        """Whether libraries take it by themselves there."""
        return self.automatic(place) and self.lacks(place) is None


# All2All -------------------------------------------------------------------------------------------------------------


def _direct(traffic: Traffic, _: Place) -> Iterator[Step]:
    """All flows at once."""
    yield traffic.all_pairs()


def _pairwise(traffic: Traffic, place: Place) -> Iterator[Step]:
    """A round per shift: rank i sends to i + shift."""
    rank = np.arange(traffic.num_ranks)
    for shift, times in _shifts(place, traffic.even):
        other = (rank + shift) % len(rank)
        yield Round(src=rank, dst=other, size=traffic.between(rank, other), times=times)


def _pairwise_xor(traffic: Traffic, _: Place) -> Iterator[Step]:
    """A round per mask: rank i exchanges with i xor mask."""
    rank = np.arange(traffic.num_ranks)
    for mask in range(1, len(rank)):
        yield Round(src=rank, dst=rank ^ mask, size=traffic.between(rank, rank ^ mask))


def _two_level(traffic: Traffic, place: Place) -> Iterator[Step]:
    """Inside nodes, then between ranks of equal number in different nodes."""
    yield traffic.inside(place)
    yield traffic.across(place)


def _shifts(place: Place, even: bool) -> list[tuple[int, float]]:
    """Shifts to evaluate and how many rounds each stands for: all of a small group, else the irregular and a sample."""
    count = place.num_ranks
    edge = min(place.regular_above or 0, count // 2) if even else 0
    if place.regular_above is None or count <= _FEW_RANKS or count - 1 <= 2 * edge + _SAMPLED_SHIFTS + 3:
        return [(shift, 1.0) for shift in range(1, count)]
    outer = [*range(1, edge + 1), *range(count - edge, count)]
    sample = np.unique(np.linspace(edge + 1, count - edge - 1, _SAMPLED_SHIFTS).astype(int))
    weight = (count - 1 - len(outer)) / len(sample)
    return [(shift, 1.0) for shift in outer] + [(int(shift), weight) for shift in sample]


# reductions and gathers ----------------------------------------------------------------------------------------------


def _part(size: float, parts: int) -> float:
    """Equal parts; whole bytes stay whole, rounded down."""
    return size // parts if isinstance(size, int) else size / parts


def _around(rings: Sequence[Ints], size: float, times: int) -> Round:
    """Every rank sends `size` to its neighbour on every ring."""
    src = np.concatenate(rings)
    return Round(
        src=src, dst=np.concatenate([np.roll(ring, -1) for ring in rings]), size=np.full(len(src), size), times=times
    )


def _rings(place: Place) -> list[Ints]:
    """Orders of the ranks, one per ring; ring c enters the first domain at its local rank c."""
    if place.table is None or len(place.table) == 1 or place.num_rings == 1:
        return [np.arange(place.num_ranks)]
    width, rings = place.table.shape[1], []
    step = np.arange(width)
    # in a mesh, paths c, c+1, c-1, c+2, ... (Walecki): of all ports together they use every link once
    path = np.where(step % 2, (step + 1) // 2, -(step // 2)) if place.meshed else step
    for port in range(width if place.num_rings is None else place.num_rings):
        there = (port + path) % width
        rings.append(np.concatenate([row[there if n % 2 == 0 else there[::-1]] for n, row in enumerate(place.table)]))
    return rings


def _ring_gather(size: float, place: Place, passes: int = 1) -> Iterator[Step]:
    """A pass around the rings: n - 1 rounds of 1/n of the size."""
    rings = _rings(place)
    piece = _part(size, place.num_ranks)
    yield _around(rings, piece if len(rings) == 1 else piece / len(rings), passes * (place.num_ranks - 1))


def _ring(size: float, place: Place) -> Iterator[Step]:
    """Reduce-scatter and all-gather, a pass around the rings each."""
    return _ring_gather(size, place, passes=2)


def _tree(size: float, place: Place) -> Iterator[Step]:
    """Two binary trees with half of the bytes each, both ways at once; between domains a pair per local rank.

    Source: two-tree algorithms for full bandwidth broadcast, reduction and scan, Sanders, Speck, Traeff, 2009; NCCL's
    double binary trees, with chains in a node taken as rings.
    """
    if place.table is None or len(place.table) == 1:
        yield from _trees(np.arange(place.num_ranks)[:, None], size)
    else:
        yield from _in_nodes(size, place, _trees(place.table, _part(size, place.table.shape[1])))


def _trees(table: Ints, size: float) -> Iterator[Step]:
    """A pair of trees down every column of the table, all at the same time."""
    child = np.arange(1, len(table))
    parent = (child - 1) // 2
    flipped = table[::-1]  # leaves of one tree are inner ranks of the other
    low = np.concatenate([table[child].ravel(), flipped[child].ravel()])
    high = np.concatenate([table[parent].ravel(), flipped[parent].ravel()])
    src, dst = np.concatenate([low, high]), np.concatenate([high, low])
    hops = 2 * math.ceil(math.log2(len(table)))
    yield Round(src=src, dst=dst, size=np.full(len(src), _part(size, 2)), hops=hops)


def _hierarchical(size: float, place: Place) -> Iterator[Step]:
    """Reduce-scatter in every node, rings between ranks of equal number, all-gather in every node."""
    assert place.table is not None
    nodes, width = place.table.shape
    columns = Round(
        src=place.table.ravel(),
        dst=np.roll(place.table, -1, axis=0).ravel(),
        size=np.full(place.num_ranks, _part(_part(size, width), nodes)),
        times=2 * (nodes - 1),
    )
    return _in_nodes(size, place, iter([columns]))


def _in_nodes(size: float, place: Place, across: Iterator[Step]) -> Iterator[Step]:
    """Reduce-scatter in every node, `across`, all-gather in every node; over all links of a mesh, else in a ring."""
    assert place.table is not None
    width = place.table.shape[1]
    shifts = range(1, width) if place.meshed else (1,)
    inside = Round(
        src=np.tile(place.table.ravel(), len(shifts)),
        dst=np.concatenate([np.roll(place.table, -shift, axis=1).ravel() for shift in shifts]),
        size=np.full(place.num_ranks * len(shifts), _part(size, width)),
        times=1 if place.meshed else width - 1,
    )
    yield inside
    yield from across
    yield inside


def _direct_gather(size: float, place: Place) -> Iterator[Step]:
    """Every rank's part to and from every other at once."""
    yield Split.equal(size, place.num_ranks).all_pairs()


def _direct_reduce(size: float, place: Place) -> Iterator[Step]:
    """Reduce-scatter and all-gather, direct each."""
    yield from _direct_gather(size, place)
    yield from _direct_gather(size, place)


def _in_switch(size: float, place: Place) -> Iterator[Step]:
    """Every rank's buffer goes up to the switches once, and the sum comes down once.

    Between domains rings of ranks with equal number, or switches again. Half of the bytes of a ring.
    Source: Graham et al., Scalable Hierarchical Aggregation Protocol (SHArP), COMHPC 2016.
    """
    assert place.table is not None
    nodes, width = place.table.shape
    yield Round(
        src=place.table.ravel(),
        dst=np.roll(place.table, -1, axis=1).ravel(),
        size=np.full(place.num_ranks, size),
    )
    if nodes > 1:
        yield Round(
            src=place.table.ravel(),
            dst=np.roll(place.table, -1, axis=0).ravel(),
            size=np.full(place.num_ranks, _part(size, width) if place.reduces_across else size / width / nodes),
            times=1 if place.reduces_across else 2 * (nodes - 1),
        )


def _reducing_nodes(place: Place) -> str | None:
    if not place.reduces:
        return "a scale-up domain whose switches reduce (in_switch_reduction)"
    return (
        "domains of two ranks or more" if place.table is not None and place.table.shape[1] < 2 else _whole_nodes(place)
    )


def _whole_nodes(place: Place) -> str | None:
    return None if place.table is not None else "whole scale-up domains with their ranks in order"


def _one_node(place: Place) -> str | None:
    return None if place.switched and place.num_nodes == 1 else "all ranks in one scale-up domain"


def _power_of_two(place: Place) -> str | None:
    count = place.num_ranks
    return f"a power of two of ranks, got {count}; use pairwise shifts" if count & (count - 1) else None


def _never(_: Place) -> bool:
    return False


def _meshed(place: Place) -> bool:
    return place.meshed


def _over_rails(place: Place) -> bool:
    return place.railed and place.num_nodes > 1


_EXCHANGE = Pattern.EXCHANGE
_GATHERS = {
    "ring": Algorithm(_ring_gather),
    "direct": Algorithm(_direct_gather, _one_node, _meshed, _EXCHANGE),
}

#: By collective and name. All2Alls are sent directly, and where rails join equal ranks of domains also by way of the
#: rank with the receiver's number (NCCL's PXN); a mesh is used directly, whose links a ring would leave idle.
ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_to_all": {
        "direct": Algorithm(_direct, pattern=_EXCHANGE),
        "pairwise": Algorithm(_pairwise, None, _never, _EXCHANGE),
        "pairwise_xor": Algorithm(_pairwise_xor, _power_of_two, _never, _EXCHANGE),
        "hierarchical": Algorithm(_two_level, None, _over_rails, _EXCHANGE),
    },
    "all_reduce": {
        "ring": Algorithm(_ring),
        "tree": Algorithm(_tree),
        "hierarchical": Algorithm(_hierarchical, _whole_nodes),
        "in_switch": Algorithm(_in_switch, _reducing_nodes, pattern=Pattern.IN_SWITCH),
        "direct": Algorithm(_direct_reduce, _one_node, _meshed, _EXCHANGE),
    },
    "all_gather": _GATHERS,
    "reduce_scatter": _GATHERS,
    "barrier": {"tree": Algorithm(_tree)},
}
