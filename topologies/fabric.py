"""A cluster laid out for a number of ranks: every directed link, who uses it, and the one route between any two ranks.

Ranks are joined by the innermost tier they share. Links are numbered tier by tier; nothing is built per pair of
ranks, so that 100,000 ranks take milliseconds. `graph` gives the same as a networkx graph for machines that can still
be drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import NS_PER_S, TopologyError
from topologies.cluster import Cluster, Tier, TierKind

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Fabric"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
MAX_GRAPH_RANKS = 8192
MAX_RANKS = 1_000_000
_MAX_MESH_LINKS = 100_000_000


@dataclass(frozen=True, slots=True)
class _Layer:
    """The links of one tier: `capacity` per link, numbered from `first`; `switch` of each rank and `switches` in
    all."""

    tier: Tier
    first: int
    capacity: Floats
    group: Ints
    switch: Ints
    switches: int
    dimensions: tuple[int, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of its kinds of link, which take turns in the numbering."""
        name = self.tier.name
        match self.tier.kind:
            case TierKind.MESH:
                return (name,)
            case TierKind.TORUS:
                return tuple(f"{name} axis {axis} {way}" for axis in range(len(self.dimensions)) for way in "+-")
            case TierKind.TRUNK:
                return f"{name} up trunk", f"{name} down trunk"
        return f"{name} up", f"{name} down"


def _square(ranks: int) -> tuple[int, int]:
    side = next(n for n in range(math.isqrt(ranks), 0, -1) if ranks % n == 0)
    return ranks // side, side


class Fabric:
    """The network of a cluster with `world_size` ranks.

    Raises:
        TopologyError: more ranks than the cluster may have, or ranks that no tier joins.
    """

    def __init__(self, cluster: Cluster, world_size: int) -> None:
        if not 1 <= world_size <= cluster.ranks_max:
            raise TopologyError(
                f"{cluster.name}: world_size must be 1 to {cluster.ranks_max:,} (ranks_max), got {world_size:,}"
            )
        if world_size > MAX_RANKS:
            raise TopologyError(f"{cluster.name}: world_size must be at most {MAX_RANKS:,} ranks, got {world_size:,}")
        last = cluster.tiers[-1]
        if last.ranks_per_group is not None and last.ranks_per_group < world_size:
            raise TopologyError(
                f"{cluster.name}: tier {last.name!r} joins only {last.ranks_per_group} ranks and no tier is above it, "
                f"so {world_size} ranks fall apart; add a tier without ranks_per_group"
            )
        self.cluster, self.world_size = cluster, world_size
        self.num_hosts = -(-world_size // cluster.ranks_per_node)
        self.layers: list[_Layer] = []
        first = 0
        for tier in cluster.tiers:
            layer = self._layer(tier, first)
            self.layers.append(layer)
            first += len(layer.capacity)
        self.num_links = first
        self._degrade()

    def _degrade(self) -> None:
        """Takes rate off the links of degraded ranks; those beyond the world take no part."""
        names = [layer.tier.name for layer in self.layers]
        for each in self.cluster.degraded:
            first = each.node * self.cluster.ranks_per_node
            locals_ = range(self.cluster.ranks_per_node) if each.local_rank is None else [each.local_rank]
            ranks = [first + local for local in locals_ if first + local < self.world_size]
            capacity = self.layers[names.index(each.tier)].capacity
            for rank in ranks:
                capacity[2 * rank : 2 * rank + 2] *= each.share

    def degraded_ranks(self) -> Ints:
        """Ranks with a link that gives less than described, the slowest first."""
        if not self.cluster.degraded:
            return np.zeros(0, dtype=np.int64)
        health = np.ones(self.world_size)
        for layer in self.layers:
            if layer.tier.kind in (TierKind.SWITCH, TierKind.RAIL) and layer.tier.bandwidth_bytes_per_s is not None:
                health = np.minimum(health, layer.capacity[::2] / layer.tier.bandwidth_bytes_per_s.value)
        order = np.argsort(health, kind="stable")
        return order[health[order] < 1].astype(np.int64)

    @property
    def domain(self) -> int:
        """Ranks of a scale-up domain: those the innermost tier joins, or a host if that joins all."""
        inner = self.cluster.tiers[0].ranks_per_group
        return min(inner if inner is not None else self.cluster.ranks_per_node, self.world_size)

    def _layer(self, tier: Tier, first: int) -> _Layer:
        rank = np.arange(self.world_size)
        size = min(tier.ranks_per_group or self.world_size, self.world_size)
        group = rank // size
        groups = int(group[-1]) + 1
        rate = tier.bandwidth_bytes_per_s.value if tier.bandwidth_bytes_per_s else 0.0
        dimensions: tuple[int, ...] = ()
        switch, switches = group, groups
        if tier.kind is TierKind.RAIL:
            rails = self.cluster.ranks_per_node
            switch, switches = group * rails + rank % rails, groups * rails
        if tier.kind is TierKind.TRUNK:
            capacity = np.repeat(self._trunks(tier), 2)
        elif tier.kind is TierKind.MESH:
            if groups * size * size > _MAX_MESH_LINKS:
                raise TopologyError(
                    f"{self.cluster.name}: tiers.{tier.name} is a mesh of {size:,} ranks, a link for each two; "
                    f"join them by kind switch, or give a smaller ranks_per_group"
                )
            capacity = np.full(groups * size * size, rate)
        elif tier.kind is TierKind.TORUS:
            dimensions = tier.dimensions or _square(size)
            if math.prod(dimensions) != size:
                raise TopologyError(
                    f"{self.cluster.name}: tiers.{tier.name}.dimensions multiply to {math.prod(dimensions)}, "
                    f"but the group has {size} ranks"
                )
            capacity = np.full(self.world_size * 2 * len(dimensions), rate)
        else:
            capacity = np.full(2 * self.world_size, rate)
        return _Layer(tier, first, capacity, group, switch, switches, dimensions)

    def _trunks(self, tier: Tier) -> Floats:
        """Capacity up from each switch of the layer before, one direction."""
        below = self.layers[-1]
        per_rank = below.capacity[0] if below.tier.kind is not TierKind.TRUNK else None
        assert tier.oversubscription is not None
        if per_rank is not None:
            total = np.bincount(below.switch, minlength=below.switches) * per_rank
        else:
            under = self.layers[-2]
            owner = np.zeros(under.switches, dtype=np.int64)
            owner[under.switch] = below.switch
            total = np.bincount(owner, weights=below.capacity[::2], minlength=below.switches)
        trunks: Floats = np.maximum(total, 1.0) / tier.oversubscription.value
        return trunks

    @cached_property
    def capacity(self) -> Floats:
        """Bytes per second of every directed link."""
        return np.concatenate([layer.capacity for layer in self.layers])

    @cached_property
    def latency_s(self) -> Floats:
        """Seconds to cross every link."""
        return np.concatenate(
            [np.full(len(layer.capacity), layer.tier.latency_ns.value / NS_PER_S) for layer in self.layers]
        )

    def shared_tier(self, src: Ints, dst: Ints) -> Ints:
        """For each pair of ranks the number of the innermost tier that joins them."""
        found = np.full(len(src), -1, dtype=np.int64)
        for number, layer in enumerate(self.layers):
            joined = layer.switch if layer.tier.kind is TierKind.RAIL else layer.group
            found[(found < 0) & (joined[src] == joined[dst])] = number
        return found

    def chain(self, tier: int) -> list[int]:
        """The tiers whose links a route takes that turns around in `tier`: the attaching one, then trunks."""
        base = tier
        while self.layers[base].tier.kind is TierKind.TRUNK:
            base -= 1
        return list(range(base, tier + 1))

    def routes(self, src: Ints, dst: Ints) -> NDArray[np.int32]:
        """Links from each `src` to each `dst`, one row a pair, padded with `num_links`."""
        src, dst = np.asarray(src, dtype=np.int64), np.asarray(dst, dtype=np.int64)
        for ranks in (src, dst):
            if len(ranks) and not (ranks.min() >= 0 and ranks.max() < self.world_size):
                raise TopologyError(f"ranks must be 0 to {self.world_size - 1}, got {ranks.min()} to {ranks.max()}")
        shared = self.shared_tier(src, dst)
        parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for tier in range(len(self.layers)):
            rows = np.flatnonzero((shared == tier) & (src != dst))
            if len(rows):
                parts.append((rows, self._through(tier, src[rows], dst[rows])))
        width = max((links.shape[1] for _, links in parts), default=1)
        table = np.full((len(src), width), self.num_links, dtype=np.int32)
        for rows, links in parts:
            table[rows, : links.shape[1]] = links
        return table

    def _through(self, tier: int, src: Ints, dst: Ints) -> Ints:
        layer = self.layers[tier]
        if layer.tier.kind is TierKind.MESH:
            size = min(layer.tier.ranks_per_group or self.world_size, self.world_size)
            pair = (layer.group[src] * size + src % size) * size + dst % size
            return (layer.first + pair)[:, None]
        if layer.tier.kind is TierKind.TORUS:
            return self._torus(layer, src, dst)
        up, down = [], []
        at_src, at_dst = src, dst
        for number in self.chain(tier):
            part = self.layers[number]
            up.append(part.first + 2 * at_src)
            down.append(part.first + 2 * at_dst + 1)
            at_src, at_dst = part.switch[src], part.switch[dst]
        return np.stack(up + down[::-1], axis=1)

    def _torus(self, layer: _Layer, src: Ints, dst: Ints) -> Ints:
        sizes = layer.dimensions
        count = math.prod(sizes)
        base = src // count * count
        here, goal = src % count, dst % count
        table = np.full((len(src), max(sum(n // 2 for n in sizes), 1)), self.num_links, dtype=np.int64)
        hop = np.zeros(len(src), dtype=np.int64)
        stride = 1
        for axis, size in enumerate(sizes):
            at, to = here // stride % size, goal // stride % size
            ahead = (to - at) % size
            forward = 2 * ahead <= size
            todo = np.where(forward, ahead, (-ahead) % size)
            step = np.where(forward, 1, -1)
            while (go := np.flatnonzero(todo > 0)).size:
                node = base[go] + here[go]
                table[go, hop[go]] = layer.first + (node * len(sizes) + axis) * 2 + (~forward[go]).astype(np.int64)
                moved = (at[go] + step[go]) % size
                here[go] += (moved - at[go]) * stride
                at[go] = moved
                hop[go] += 1
                todo[go] -= 1
            stride *= size
        return table

    def bisection_bytes_per_s(self) -> float:
        """Bytes per second, one direction, from the first half of the ranks to the second over the outermost tier."""
        half = self.world_size // 2
        if not half:
            return 0.0
        tier = int(self.shared_tier(np.array([0]), np.array([self.world_size - 1]))[0])
        layer = self.layers[tier]
        if layer.tier.kind is TierKind.MESH:
            return float(half * (self.world_size - half) * layer.capacity[0])
        if layer.tier.kind is TierKind.TORUS:
            longest = max(layer.dimensions)
            cuts = 2 if longest > 2 else 1
            return float(cuts * self.world_size / longest * layer.capacity[0])
        limits = []
        ranks = np.arange(half)
        for number in self.chain(tier):
            part = self.layers[number]
            if part.tier.kind is TierKind.TRUNK:
                below = self.layers[number - 1]
                share = np.bincount(below.switch[ranks], minlength=below.switches) / np.maximum(
                    np.bincount(below.switch, minlength=below.switches), 1
                )
                limits.append(float((share * part.capacity[::2]).sum()))
            else:
                limits.append(half * float(part.capacity[0]))
        return min(limits)

    def graph(self) -> nx.DiGraph[str]:
        """Ranks, hosts and switches as nodes; links with `bandwidth_bytes_per_s`, `latency_ns`, `tier` as edges."""
        import networkx as nx

        if self.world_size > MAX_GRAPH_RANKS:
            raise TopologyError(f"a graph of {self.world_size:,} ranks is too large; draw up to {MAX_GRAPH_RANKS:,}")
        graph: nx.DiGraph[str] = nx.DiGraph(name=self.cluster.name, world_size=self.world_size)
        per_node = self.cluster.ranks_per_node
        for host in range(self.num_hosts):
            graph.add_node(f"host{host}", kind="host", tier=-1)
        pcie = self.cluster.host.pcie_bandwidth_bytes_per_s.value
        for rank in range(self.world_size):
            graph.add_node(f"rank{rank}", kind="rank", tier=0, host=rank // per_node)
            for ends in ((f"rank{rank}", f"host{rank // per_node}"), (f"host{rank // per_node}", f"rank{rank}")):
                graph.add_edge(*ends, bandwidth_bytes_per_s=pcie, latency_ns=0.0, tier="pcie")
        for number in range(len(self.layers)):
            self._add_layer(graph, number)
        return graph

    def _add_layer(self, graph: nx.DiGraph[str], number: int) -> None:
        layer = self.layers[number]
        kind, name, latency = layer.tier.kind, layer.tier.name, layer.tier.latency_ns.value

        def edge(src: str, dst: str, link: int) -> None:
            graph.add_edge(
                src, dst, bandwidth_bytes_per_s=float(layer.capacity[link]), latency_ns=latency, tier=name,
                link=layer.first + link,
            )  # fmt: skip

        if kind in (TierKind.MESH, TierKind.TORUS):
            src, dst = np.divmod(np.arange(self.world_size**2), self.world_size)
            near = np.flatnonzero((layer.group[src] == layer.group[dst]) & (src != dst))
            table = self.routes(src[near], dst[near])
            single = (table < self.num_links).sum(axis=1) == 1
            for row, link in zip(near[single], table[single, 0], strict=True):
                if layer.first <= link < layer.first + len(layer.capacity):
                    edge(f"rank{src[row]}", f"rank{dst[row]}", int(link) - layer.first)
            return
        below = self.layers[number - 1] if kind is TierKind.TRUNK else None
        for switch in range(layer.switches):
            graph.add_node(f"{name}{switch}", kind="switch", tier=number + 1)
        lower = np.arange(self.world_size) if below is None else below.switch
        seen = dict(zip(lower.tolist(), layer.switch.tolist(), strict=True))
        for port, switch in seen.items():
            end = f"rank{port}" if below is None else f"{below.tier.name}{port}"
            edge(end, f"{name}{switch}", 2 * port)
            edge(f"{name}{switch}", end, 2 * port + 1)
