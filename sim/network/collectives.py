"""What a collective takes on a described cluster: its schedule's flows on the cluster's links, summed up by class.

Each algorithm is a few transfers or rounds; a round is as long as the longest route plus its busiest link. All2All goes
through `sim.network.classes`; rings, trees and exchanges move one flow per rank and round, which is counted link by
link. Times are those of the hardware as described. What software makes of it is the business of measured curves
(`sim.network.curves`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from nestpipe.base import TopologyError, s_to_ns, unknown_name
from sim.network.classes import LinkLoad, PairTraffic, Transfer, transfer
from sim.network.problem import Floats, Ints
from sim.network.solve import flow_problem, run_rows
from topologies.fabric import Fabric

__all__ = ["Algorithm", "CollectiveCost", "Collectives", "Split"]


class Algorithm(StrEnum):
    """How a collective is carried out."""

    DIRECT = "direct"
    PAIRWISE = "pairwise"
    HIERARCHICAL = "hierarchical"
    RING = "ring"
    TREE = "tree"


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
    def even(size_bytes: float, num_ranks: int) -> Split:
        """Every rank sends the same amount to every owner."""
        return Split(send_bytes=np.full(num_ranks, float(size_bytes)), owner_share=np.full(num_ranks, 1 / num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Time of a collective, the bytes it puts on each kind of link, and which one is the busiest."""

    time_ns: int
    loads: tuple[LinkLoad, ...]

    @property
    def busiest(self) -> LinkLoad | None:
        """The kind of link with the highest utilisation."""
        return max(self.loads, key=lambda load: load.utilisation, default=None)


def _cost(time_s: float, parts: Sequence[tuple[float, Sequence[LinkLoad]]]) -> CollectiveCost:
    """Joins phases, each with its own time: of links of one kind the busiest counts, over phases bytes add up."""
    joined: dict[str, LinkLoad] = {}
    for part_s, loads in parts:
        busiest: dict[str, LinkLoad] = {}
        for load in loads:
            if load.name not in busiest or load.utilisation > busiest[load.name].utilisation:
                busiest[load.name] = load
        for name, load in busiest.items():
            before = joined.get(name, LinkLoad(name, 0, 0.0, 0.0))
            share = load.utilisation * part_s / time_s if time_s else 0.0
            count = max(before.num_links, load.num_links)
            joined[name] = LinkLoad(
                name, count, before.bytes_per_link + load.bytes_per_link, before.utilisation + share
            )
    return CollectiveCost(time_ns=s_to_ns(time_s), loads=tuple(joined.values()))


class Collectives:
    """Costs of collectives on one fabric."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def _group(self, ranks: Sequence[int] | Ints | None) -> Ints:
        found = np.arange(self.fabric.world_size) if ranks is None else np.asarray(ranks, dtype=np.int64)
        if not len(found):
            raise ValueError("a group must have one rank or more")
        if found.min() < 0 or found.max() >= self.fabric.world_size:
            raise TopologyError(
                f"a group has ranks {found.min()} to {found.max()}, but {self.fabric.cluster.name} has "
                f"{self.fabric.world_size} ranks here; give a larger world_size"
            )
        if len(np.unique(found)) != len(found):
            raise ValueError("a group must not name a rank twice")
        return found

    # All2All -----------------------------------------------------------------------------------------------------

    def all_to_all(
        self, split: Split, *, ranks: Sequence[int] | Ints | None = None, algorithm: Algorithm = Algorithm.DIRECT
    ) -> CollectiveCost:
        """All2All with even or uneven splits.

        Args:
            split: who sends how much to whom, one entry per rank of the group
            ranks: the group; None: everybody
            algorithm: direct (all at once), pairwise (rounds with a barrier), hierarchical (inside the nodes, then
                between ranks of equal number in different nodes)
        """
        group = self._group(ranks)
        if len(split.send_bytes) != len(group):
            raise ValueError(f"split is for {len(split.send_bytes)} ranks, the group has {len(group)}")
        if algorithm is Algorithm.DIRECT:
            traffic = PairTraffic(
                ranks=group, send=split.send_bytes, recv=split.owner_share, label=np.zeros(len(group), dtype=np.int64)
            )
            return self._joined([transfer(self.fabric, traffic)])
        if algorithm is Algorithm.HIERARCHICAL:
            return self._joined(self._two_level(split, group))
        if algorithm is Algorithm.PAIRWISE:
            return self._pairwise(split, group)
        raise ValueError(unknown_name("algorithm", algorithm, ["direct", "pairwise", "hierarchical"]))

    @staticmethod
    def _joined(found: Sequence[Transfer]) -> CollectiveCost:
        return _cost(sum(f.time_s for f in found), [(f.time_s, f.loads) for f in found])

    def _two_level(self, split: Split, group: Ints) -> list[Transfer]:
        per_node = self.fabric.domain
        node, local = group // per_node, group % per_node
        node = np.unique(node, return_inverse=True)[1]
        sent_by_node: Floats = np.bincount(node, weights=split.send_bytes).astype(np.float64)[node]
        owned_by_local: Floats = np.bincount(local, weights=split.owner_share, minlength=per_node).astype(np.float64)[
            local
        ]
        inside = PairTraffic(ranks=group, send=split.send_bytes, recv=owned_by_local, label=node)
        across = PairTraffic(ranks=group, send=sent_by_node, recv=split.owner_share, label=local)
        return [transfer(self.fabric, inside), transfer(self.fabric, across)]

    def _pairwise(self, split: Split, group: Ints) -> CollectiveCost:
        count = len(group)
        total, links = 0.0, np.zeros(self.fabric.num_links)
        index = np.arange(count)
        even = len(np.unique(split.send_bytes)) == len(np.unique(split.owner_share)) == 1
        for shift, times in _shifts(count, self._regular_above() if even else 0):
            other = (index + shift) % count
            size = split.send_bytes * split.owner_share[other]
            time_s, carried = self._round(group, group[other], size, even=even)
            total += times * time_s
            links += times * carried
        return self._counted(total, links)

    def _regular_above(self) -> int:
        """From this shift on, ranks and partners are in different groups of every tier but the outermost."""
        sizes = [t.ranks_per_group for t in self.fabric.cluster.tiers if t.ranks_per_group]
        return 2 * max([s for s in sizes if s < self.fabric.world_size], default=1)

    # rounds ------------------------------------------------------------------------------------------------------

    def _round(self, src: Ints, dst: Ints, size: Floats, *, even: bool = True) -> tuple[float, Floats]:
        """One round: seconds, and bytes on each link.

        Flows of equal size on the busiest link end together, so it and the longest route give the time; flows of
        different sizes (`even` is False) are simulated.
        """
        moving = np.flatnonzero((size > 0) & (src != dst))
        if not len(moving):
            return 0.0, np.zeros(self.fabric.num_links)
        routes = self.fabric.routes(src[moving], dst[moving])
        amount = np.broadcast_to(size[moving][:, None], routes.shape)
        counted = np.bincount(routes.ravel(), weights=amount.ravel(), minlength=self.fabric.num_links + 1)
        carried = counted.astype(np.float64)[:-1]
        latency = np.append(self.fabric.latency_s, 0.0)[routes].sum(axis=1)
        if even:
            return float(latency.max() + (carried / self.fabric.capacity).max()), carried
        problem = flow_problem(routes=routes, capacity=self.fabric.capacity, size=size[moving], delay=latency)
        return float(run_rows(problem).max()), carried

    def _counted(self, time_s: float, carried: Floats) -> CollectiveCost:
        """A cost from the bytes of every link: per tier the busiest link stands for its kind."""
        loads = []
        for layer in self.fabric.layers:
            part = carried[layer.first : layer.first + len(layer.capacity)]
            if len(part) and part.max() > 0:
                worst = int((part / layer.capacity).argmax())
                use = float(part[worst] / layer.capacity[worst] / time_s) if time_s else 0.0
                loads.append(LinkLoad(layer.tier.name, int((part > 0).sum()), float(part[worst]), use))
        return CollectiveCost(time_ns=s_to_ns(time_s), loads=tuple(loads))

    def _rings(self, group: Ints, num_rings: int | None) -> list[Ints]:
        """Orders of the ranks, one per ring; ring c enters a domain at its local rank c."""
        table = self._domains(group)
        width = self.fabric.domain
        wanted = num_rings if num_rings is not None else (1 if table is None else width)
        if wanted == 1 or table is None:
            return [group]
        rings = []
        for port in range(wanted):
            there = (port + np.arange(width)) % width
            rings.append(np.concatenate([row[there if n % 2 == 0 else there[::-1]] for n, row in enumerate(table)]))
        return rings

    def _ring(self, group: Ints, size_bytes: float, rounds: int, num_rings: int | None) -> tuple[float, Floats]:
        """`rounds` rounds in which every rank sends 1/n of the size to its neighbour, spread over the rings."""
        if len(group) == 1:
            return 0.0, np.zeros(self.fabric.num_links)
        rings = self._rings(group, num_rings)
        src = np.concatenate(rings)
        dst = np.concatenate([np.roll(ring, -1) for ring in rings])
        piece = size_bytes / len(group) / len(rings)
        time_s, carried = self._round(src, dst, np.full(len(src), piece))
        return rounds * time_s, rounds * carried

    # reductions and gathers --------------------------------------------------------------------------------------

    def all_reduce(
        self,
        size_bytes: float,
        *,
        ranks: Sequence[int] | Ints | None = None,
        algorithm: Algorithm = Algorithm.RING,
        num_rings: int | None = None,
    ) -> CollectiveCost:
        """All-reduce of `size_bytes` on every rank.

        Args:
            algorithm: ring; tree (double binary tree, pipelined); hierarchical (reduce-scatter in the node, rings
                between ranks of equal number, all-gather in the node)
            num_rings: rings that share the bytes; None: one per port of a node, as NCCL does, 1: the textbook's
        """
        group = self._group(ranks)
        if algorithm is Algorithm.RING:
            return self._counted(*self._ring(group, size_bytes, 2 * (len(group) - 1), num_rings))
        if algorithm is Algorithm.TREE:
            return self._counted(*self._tree(group, size_bytes))
        if algorithm is Algorithm.HIERARCHICAL:
            return self._counted(*self._hierarchical(group, size_bytes))
        raise ValueError(unknown_name("algorithm", algorithm, ["ring", "tree", "hierarchical"]))

    def all_gather(
        self, size_bytes: float, *, ranks: Sequence[int] | Ints | None = None, num_rings: int | None = None
    ) -> CollectiveCost:
        """Ring all-gather; `size_bytes` is what every rank has in the end."""
        group = self._group(ranks)
        return self._counted(*self._ring(group, size_bytes, len(group) - 1, num_rings))

    def reduce_scatter(
        self, size_bytes: float, *, ranks: Sequence[int] | Ints | None = None, num_rings: int | None = None
    ) -> CollectiveCost:
        """Ring reduce-scatter; `size_bytes` is what every rank has in the beginning."""
        return self.all_gather(size_bytes, ranks=ranks, num_rings=num_rings)

    def barrier(self, *, ranks: Sequence[int] | Ints | None = None) -> CollectiveCost:
        """Everybody waits for everybody: up and down a binary tree, one byte an edge."""
        return self._counted(*self._tree(self._group(ranks), 1.0))

    def _tree(self, group: Ints, size_bytes: float) -> tuple[float, Floats]:
        """Two binary trees with half of the bytes each, both ways at once; between domains a pair per local rank."""
        if (table := self._domains(group)) is not None:
            return self._hierarchical(group, size_bytes, across=self._trees(table, size_bytes / table.shape[1]))
        return self._trees(group[:, None], size_bytes)

    def _trees(self, table: Ints, size_bytes: float) -> tuple[float, Floats]:
        """A pair of trees down every column of the table, all at the same time."""
        count = len(table)
        if count == 1:
            return 0.0, np.zeros(self.fabric.num_links)
        child = np.arange(1, count)
        parent = (child - 1) // 2
        flipped = table[::-1]  # leaves of one tree are inner ranks of the other
        low = np.concatenate([table[child].ravel(), flipped[child].ravel()])
        high = np.concatenate([table[parent].ravel(), flipped[parent].ravel()])
        src, dst = np.concatenate([low, high]), np.concatenate([high, low])
        time_s, carried = self._round(src, dst, np.full(len(src), size_bytes / 2))
        routes = self.fabric.routes(low, high)
        hop = float(np.append(self.fabric.latency_s, 0.0)[routes].sum(axis=1).max())
        return time_s + hop * (2 * math.ceil(math.log2(count)) - 1), carried

    def _domains(self, group: Ints) -> Ints | None:
        """The group as a table with a scale-up domain per row, if it is made of several whole ones in order."""
        domain = self.fabric.domain
        if len(group) % domain or len(group) == domain:
            return None
        table = group.reshape(-1, domain)
        return table if (table % domain == np.arange(domain)).all() else None

    def _hierarchical(
        self, group: Ints, size_bytes: float, across: tuple[float, Floats] | None = None
    ) -> tuple[float, Floats]:
        """Ring reduce-scatter and all-gather in every domain; between them rings, or what `across` took."""
        table = group[None, :] if len(group) == self.fabric.domain else self._domains(group)
        if table is None:
            raise ValueError(f"hierarchical all_reduce needs whole domains of {self.fabric.domain} ranks in order")
        domains, width = table.shape
        piece = size_bytes / width
        inner_s, inner = self._round(table.ravel(), np.roll(table, -1, axis=1).ravel(), np.full(len(group), piece))
        rounds = 2 * (width - 1)
        total, links = rounds * inner_s, rounds * inner
        if across is None and domains > 1:
            other = np.roll(table, -1, axis=0).ravel()
            outer_s, outer = self._round(table.ravel(), other, np.full(len(group), piece / domains))
            across = 2 * (domains - 1) * outer_s, 2 * (domains - 1) * outer
        if across is not None:
            total, links = total + across[0], links + across[1]
        return total, links


def _shifts(count: int, regular_above: int) -> list[tuple[int, float]]:
    """Shifts to evaluate and how many rounds each stands for: all of a small group, else the irregular and a sample."""
    edge = min(regular_above, count // 2)
    if count <= 256 or count - 1 <= 2 * edge + 64:
        return [(shift, 1.0) for shift in range(1, count)]
    outer = [*range(1, edge + 1), *range(count - edge, count)]
    sample = np.unique(np.linspace(edge + 1, count - edge - 1, 61).astype(int))
    weight = (count - 1 - len(outer)) / len(sample)
    return [(shift, 1.0) for shift in outer] + [(int(shift), weight) for shift in sample]
