"""The class model: collective traffic between classes of ranks that are alike, for any number of ranks.

Traffic is a product, rank i sends `send[i] * recv[j]` bytes to rank j (even splits, uneven senders, hot owners),
possibly only between ranks with the same label (inside a node, along a rail). Ranks are put into classes by what they
send and receive and by who sits on the same switches; a flow class is a pair of rank classes and the tier that joins
them, and its size, number and share of each kind of link follow by counting, without a list of pairs. The few classes
then go through the exact solver. Where position makes too many classes, only the traffic counts, in steps
(`quantised`), and links are taken to carry the average of their kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.base import TopologyError, s_to_ns
from nestpipe.base.refine import Edges, equal_rows, refine
from sim.network.problem import Floats, Ints
from sim.network.solve import flow_problem, run_rows
from topologies.cluster import TierKind
from topologies.fabric import Fabric

__all__ = ["LinkLoad", "PairTraffic", "Transfer", "transfer"]

_MAX_CLASSES = 24
_STEPS_OF_ONE, _STEPS_OF_TWO = 12, 4
_MAX_TORUS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTraffic:
    """Bytes between the ranks of a group: `send[i] * recv[j]` from `ranks[i]` to `ranks[j]` if their labels agree."""

    ranks: Ints
    send: Floats
    recv: Floats
    label: Ints

    @staticmethod
    def even(ranks: Ints, bytes_per_pair: float) -> PairTraffic:
        """The same number of bytes from everybody to everybody else."""
        ones = np.ones(len(ranks))
        return PairTraffic(
            ranks=ranks, send=ones * bytes_per_pair, recv=ones, label=np.zeros(len(ranks), dtype=np.int64)
        )


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """A kind of link: how many there are, the bytes that each carries, and how long these keep it busy at full rate."""

    name: str
    num_links: int
    bytes_per_link: float
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What a collective, or moving some traffic, takes.

    Attributes:
        time_s: from start to end
        latency_s: of it what does not grow with the bytes; what remains is enough for the busiest link
        loads: of every kind of link that carries something
        basis: what the time rests on: `described` hardware, `fitted` protocols, or a curve that was `measured` at that
            size, between sizes (`interpolated`) or beyond its sizes or ranks (`extrapolated`)
        num_classes, quantised: flow classes of the class model, and whether it took the traffic in steps
    """

    time_s: float
    latency_s: float
    loads: tuple[LinkLoad, ...]
    basis: str = "described"
    num_classes: int = 0
    quantised: bool = False

    @property
    def time_ns(self) -> int:
        """The time in whole nanoseconds."""
        return s_to_ns(self.time_s)

    @property
    def busiest(self) -> LinkLoad | None:
        """The kind of link that is busy longest."""
        return max(self.loads, key=lambda load: load.busy_s, default=None)


def _steps(values: Floats, most: int) -> Floats:
    """Values in at most `most` logarithmic steps, each at its mean, the greatest alone on its step."""
    distinct = np.unique(values)
    if len(distinct) <= most:
        return values
    positive = np.maximum(values, distinct[distinct > 0].min() / 2)
    edges = np.geomspace(positive.min(), distinct[-2], most - 1)
    step = np.where(values == distinct[-1], most, np.searchsorted(edges, positive))
    sums, counts = np.bincount(step, weights=values), np.bincount(step)
    return np.asarray((sums / np.maximum(counts, 1))[step])


class _Layout:
    """Where the ranks of a group sit: who is joined by each tier, and the switch below each trunk."""

    def __init__(self, fabric: Fabric, traffic: PairTraffic) -> None:
        self.fabric, ranks = fabric, traffic.ranks
        self.joined = []
        own = [each for each in fabric.layers if each.tier.kind in (TierKind.SWITCH, TierKind.RAIL)]
        # of each rank the rates of its own links, where not all are alike
        self.rates = [each.capacity[::2][ranks] for each in own] if fabric.cluster.degraded else []
        self.lower: list[Ints | None] = []
        for number, layer in enumerate(fabric.layers):
            at = layer.switch if layer.tier.kind is TierKind.RAIL else layer.group
            self.joined.append(equal_rows(at[ranks], traffic.label))
            trunk = layer.tier.kind is TierKind.TRUNK
            self.lower.append(equal_rows(fabric.layers[number - 1].switch[ranks]) if trunk else None)

    def classes(self, traffic: PairTraffic) -> Ints | None:
        """Coarsest classes of ranks with equal traffic and equal surroundings; None if there are too many."""
        parts = [traffic.label, *self.joined, *(low for low in self.lower if low is not None)]
        found = refine(
            {"rank": equal_rows(traffic.send, traffic.recv, *self.rates)}
            | {str(n): np.zeros(int(part.max()) + 1, dtype=np.int64) for n, part in enumerate(parts)},
            [Edges("rank", str(n), part[:, None]) for n, part in enumerate(parts)],
            most={"rank": _MAX_CLASSES},
        )
        return None if found is None else found["rank"]


def transfer(fabric: Fabric, traffic: PairTraffic) -> Transfer:
    """Time to move the traffic, all of it released at once.

    Raises:
        TopologyError: uneven traffic, or a part of the ranks, on a torus too large to go through pair by pair.
    """
    if fabric.layers[0].tier.kind is TierKind.TORUS:
        return _torus(fabric, traffic)
    layout = _Layout(fabric, traffic)
    colour = layout.classes(traffic)
    quantised = colour is None
    if colour is None:
        both = len(np.unique(traffic.send)) > 1 and len(np.unique(traffic.recv)) > 1
        most = _STEPS_OF_TWO if both else _STEPS_OF_ONE
        colour = equal_rows(_steps(traffic.send, most), _steps(traffic.recv, most), *layout.rates)
    return _Classes(layout, traffic, colour).solve(quantised)


class _Classes:
    """Flow classes and link classes of one transfer, by counting."""

    def __init__(self, layout: _Layout, traffic: PairTraffic, colour: Ints) -> None:
        self.layout, self.fabric, self.colour = layout, layout.fabric, colour
        self.count = int(colour.max()) + 1
        self.one_rank = traffic.ranks[np.unique(colour, return_index=True)[1]]  # of each class
        self.members = np.bincount(colour, minlength=self.count).astype(np.float64)
        self.send = np.bincount(colour, weights=traffic.send, minlength=self.count) / self.members
        self.recv = np.bincount(colour, weights=traffic.recv, minlength=self.count) / self.members
        self.links: dict[tuple[object, ...], int] = {}
        self.names: list[str] = []
        self.capacity: list[float] = []
        self.num_links: list[float] = []

    def _table(self, part: Ints) -> Floats:
        """Ranks of each class in each part."""
        parts = int(part.max()) + 1
        flat = np.bincount(part * self.count + self.colour, minlength=parts * self.count)
        return flat.reshape(parts, self.count).astype(np.float64)

    def _pairs(self) -> list[Floats]:
        """For every tier, ordered pairs of each two classes that it is the innermost to join."""
        own = np.diag(self.members)
        matched, found = own.copy(), []
        for number, layer in enumerate(self.fabric.layers):
            table = self._table(self.layout.joined[number])
            together = table.T @ table
            new = together - (own if layer.tier.kind is TierKind.RAIL else matched)
            found.append(np.maximum(new, 0.0))
            matched = matched + found[-1]
        return found

    def _link(self, key: tuple[object, ...], name: str, capacity: float, number: float) -> int:
        if key not in self.links:
            self.links[key] = len(self.names)
            self.names.append(name)
            self.capacity.append(capacity)
            self.num_links.append(number)
        return self.links[key]

    def _trunk_class(self, number: int, rank_class: int) -> tuple[Floats, int]:
        """The switches below a tier that hold a class: their ranks per class, and how many switches there are."""
        lower = self.layout.lower[number]
        assert lower is not None
        table = self._table(lower)
        mine = table[table[:, rank_class] > 0]
        if len(np.unique(mine, axis=0)) == 1:
            return mine[0], len(mine)
        return table.mean(axis=0), len(table)

    def _through(self, tier: int, a: int, b: int, pairs: float) -> list[tuple[int, float]]:
        """Link classes of the flows from class a to class b turning around in a tier, and their flows per link."""
        layers, uses = self.fabric.layers, []
        if layers[tier].tier.kind is TierKind.MESH:
            name = layers[tier].kinds[0]
            return [(self._link((tier, a, b), name, float(layers[tier].capacity[0]), pairs), 1.0)]
        for number in self.fabric.chain(tier):
            layer = layers[number]
            for name, end in zip(layer.kinds, (a, b), strict=True):
                if layer.tier.kind is TierKind.TRUNK:
                    per_switch, switches = self._trunk_class(number, end)
                    key: tuple[object, ...] = (name, *per_switch.tolist())
                    capacity = float(layer.capacity.mean())
                    amount = per_switch[end] * pairs / self.members[end]
                    uses.append((self._link(key, name, capacity, switches), float(amount)))
                else:
                    key = (name, end)
                    rate = float(layer.capacity[2 * self.one_rank[end]])
                    link = self._link(key, name, rate, float(self.members[end]))
                    uses.append((link, pairs / float(self.members[end])))
        return uses

    def solve(self, quantised: bool) -> Transfer:
        """Runs the flow classes through the exact solver."""
        rows, sizes, delays = [], [], []
        for tier, pairs in enumerate(self._pairs()):
            latency = sum(self.fabric.layers[n].tier.latency_ns.value for n in self.fabric.chain(tier)) / 1e9
            once = self.fabric.layers[tier].tier.kind is TierKind.MESH
            for a, b in zip(*np.nonzero(pairs > 0.5), strict=True):
                size = self.send[a] * self.recv[b]
                if size > 0:
                    rows.append(self._through(tier, int(a), int(b), float(pairs[a, b])))
                    sizes.append(size)
                    delays.append(latency if once else 2 * latency)
        if not rows:
            return Transfer(time_s=0.0, latency_s=0.0, loads=())
        return _solve(rows, np.array(sizes), np.array(delays), self.names, self.capacity, self.num_links, quantised)


def _solve(
    rows: list[list[tuple[int, float]]],
    sizes: Floats,
    delays: Floats,
    names: list[str],
    capacity: list[float],
    num_links: list[float],
    quantised: bool,
) -> Transfer:
    width = max(len(row) for row in rows)
    routes = np.full((len(rows), width), len(names), dtype=np.int32)
    weight = np.zeros((len(rows), width))
    carried = np.zeros(len(names))
    for number, row in enumerate(rows):
        for hop, (link, amount) in enumerate(row):
            routes[number, hop], weight[number, hop] = link, amount
            carried[link] += amount * sizes[number]
    finish = run_rows(flow_problem(routes=routes, capacity=np.array(capacity), size=sizes, delay=delays, weight=weight))
    loads = tuple(
        LinkLoad(name, round(number), float(load), float(load / rate))
        for name, number, load, rate in zip(names, num_links, carried, capacity, strict=True)
    )
    time_s = float(finish.max())
    return Transfer(
        time_s=time_s,
        latency_s=min(float(delays.max()), time_s - max(load.busy_s for load in loads)),
        loads=loads,
        num_classes=len(rows),
        quantised=quantised,
    )


def _torus(fabric: Fabric, traffic: PairTraffic) -> Transfer:
    """All ranks of a torus with even traffic: a flow class per displacement, a link class per axis and direction."""
    layer, count = fabric.layers[0], fabric.world_size
    even = len(np.unique(traffic.send)) == len(np.unique(traffic.recv)) == len(np.unique(traffic.label)) == 1
    if not even or len(traffic.ranks) != count or count > _MAX_TORUS or len(fabric.layers) > 1:
        raise TopologyError(
            f"{fabric.cluster.name}: on a torus the class model does even traffic between all of up to {_MAX_TORUS:,} "
            f"ranks and no tier above it; use another algorithm, or the flow-level solver (nestpipe network)"
        )
    if count == 1:
        return Transfer(time_s=0.0, latency_s=0.0, loads=())
    table = fabric.routes(np.zeros(count - 1, dtype=np.int64), np.arange(1, count))
    ways = len(layer.kinds)
    rows, hops = [], (table < fabric.num_links).sum(axis=1)
    for row in table:
        way, times = np.unique((row[row < fabric.num_links] - layer.first) % ways, return_counts=True)
        rows.append([(int(w), float(t)) for w, t in zip(way, times, strict=True)])
    sizes = np.full(len(rows), float(traffic.send[0] * traffic.recv[0]))
    delays = hops * layer.tier.latency_ns.value / 1e9
    rate = float(layer.capacity[0])
    return _solve(rows, sizes, delays, list(layer.kinds), [rate] * ways, [float(count)] * ways, quantised=False)
