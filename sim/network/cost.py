"""What a collective takes on a described cluster: the steps of its algorithm on the cluster's links, summed up.

A round is as long as a route and its busiest link, whichever takes longest; All2All traffic goes through
`sim.network.classes`. `sim.network.protocols` says what software makes of these times; without it they are those of the
hardware as described.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nestpipe.base import NS_PER_S, TopologyError, unknown_name
from nestpipe.ir import KINDS, Cost, Loop, OpKind, Resource, group_of, group_ranks
from sim.network.classes import LinkLoad, PairTraffic, Transfer, transfer
from sim.network.collectives import ALGORITHMS, Algorithm, Place, Round, Split
from sim.network.curves import Basis
from sim.network.problem import Floats, Ints
from sim.network.protocols import Software, StepOnWire, software
from sim.network.solve import flow_problem, run_rows
from topologies.cluster import Cluster, MeasuredCollective, TierKind
from topologies.fabric import Fabric

__all__ = ["Collectives", "group_size_bytes", "group_transfer", "network_costs", "work_of"]

_UNIT_BYTES = 1e9
_HALVINGS = 60


class Collectives:
    """Costs of collectives on one fabric.

    Args:
        fabric: the network
        software: protocols; None: hardware as described
        measured: curves that decide where there are some for a collective
    """

    def __init__(
        self, fabric: Fabric, software: Software | None = None, measured: Sequence[MeasuredCollective] = ()
    ) -> None:
        self.fabric, self.software, self.measured = fabric, software or Software.none(), tuple(measured)
        self._ratios: dict[MeasuredCollective, Floats] = {}
        self._basis = "described" if software is None else "fitted"
        self._latency_s = np.append(fabric.latency_s, 0.0)
        self._scales_up = fabric.layers[0].tier.ranks_per_group is not None
        self._across = fabric.layers[1 if self._scales_up else 0 :]
        self._names_across = {kind for layer in self._across for kind in layer.kinds}

    @staticmethod
    def predicting(fabric: Fabric, fit: str = "all") -> Collectives:
        """By the cluster's measured curves, and the protocols fitted for its accelerators if their generation is named.

        A description that names none is taken at its word: its rates are what software gets.
        """
        generation = fabric.cluster.accelerator.generation
        protocols = None if generation is None else software(generation, fit)
        return Collectives(fabric, protocols, fabric.cluster.measured)

    def cost(
        self,
        collective: str,
        size: float | Split,
        *,
        ranks: Sequence[int] | Ints | None = None,
        algorithm: str | None = None,
        num_rings: int | None = None,
    ) -> Transfer:
        """Time of a collective and the bytes it puts on each kind of link.

        Args:
            collective: one of `ALGORITHMS`
            size: bytes of every rank's buffer: what it sends in an All2All (or a `Split`), has before a reduction and
                after a gather
            ranks: the group; None: all
            algorithm: one of `ALGORITHMS[collective]`; None: the fastest of those that a library takes by itself
            num_rings: see `sim.network.collectives.Place`

        Raises:
            ValueError: unknown collective or algorithm, a split for another number of ranks, or a group that the
                algorithm does not fit.
            TopologyError: ranks that the fabric does not have, or All2All traffic that the class model refuses.
        """
        group = self._group(ranks)
        place = self.place(group, num_rings)
        if isinstance(size, Split) and size.num_ranks != len(group):
            raise ValueError(f"split is for {size.num_ranks} ranks, the group has {len(group)}")
        if len(group) == 1:
            return Transfer(time_s=0.0, latency_s=0.0, loads=())
        work = work_of(collective, size, place)
        found = min(
            (self._sum(each, work, place, group) for each in _choices(collective, algorithm, place)),
            key=lambda each: each.time_s,
        )
        # a curve was measured on neighbouring ranks, with whatever algorithm the library took
        if self.measured and algorithm is None and place.num_inside == min(self.fabric.domain, len(group)):
            sent = float(work.send_bytes.max()) if isinstance(work, Split) else work
            return self._as_measured(found, collective, len(group), sent)
        return found

    def _as_measured(self, found: Transfer, collective: str, num_ranks: int, size: float) -> Transfer:
        """The time by the curve of nearest world size; beyond its sizes and ranks by the model's ratio."""
        curves = [curve for curve in self.measured if curve.collective == collective]
        if not curves or size <= 0:
            return found
        curve = min(curves, key=lambda each: abs(math.log(each.world_size / num_ranks)))
        if curve.world_size == num_ranks and curve.size_bytes[0] <= size <= curve.size_bytes[-1]:
            # linear in bytes, as a start and a rate are; on half of each curve no worse than any smooth one
            time_s = float(np.interp(size, curve.size_bytes, curve.time_ns)) / NS_PER_S
            basis = Basis.MEASURED if size in curve.size_bytes else Basis.INTERPOLATED
        else:
            time_s, basis = found.time_s * self._ratio(curve, size), Basis.EXTRAPOLATED
        return replace(found, time_s=time_s, latency_s=time_s / found.time_s * found.latency_s, basis=basis)

    def _ratio(self, curve: MeasuredCollective, size: float) -> float:
        """What a curve takes over what the model says of it, at the size, else at the curve's nearest one."""
        if curve not in self._ratios:
            alone = Collectives(Fabric(self.fabric.cluster, curve.world_size), self.software)
            modelled = [alone.cost(curve.collective, float(each)).time_s * NS_PER_S for each in curve.size_bytes]
            self._ratios[curve] = np.array(curve.time_ns) / np.array(modelled)
        return float(np.interp(math.log(size), np.log(curve.size_bytes), self._ratios[curve]))

    def size_bytes(self, collective: str, time_s: float, *, ranks: Sequence[int] | Ints | None = None) -> float:
        """The size that takes `time_s` with the fastest algorithm; 0 if that is less than any size takes.

        With each protocol an algorithm takes a latency and then grows with the size, so the fastest reaches `time_s`
        last.
        """
        group = self._group(ranks)
        place = self.place(group)
        if self.measured:
            return self._size_by_halving(collective, time_s, ranks)
        found = [0.0]
        for row in ALGORITHMS[collective].values():
            if place.num_ranks > 1 and row.taken(place):
                steps, _ = self.on_wire(row, work_of(collective, _UNIT_BYTES, place), place, group)
                options = self.software.options(steps, row.pattern, place.num_inside)
                found += [_UNIT_BYTES * (time_s - waiting_s) / moving_s for waiting_s, moving_s in options]
        return max(found)

    def _size_by_halving(self, collective: str, time_s: float, ranks: Sequence[int] | Ints | None) -> float:
        low, high = 1.0, 2.0**50
        if self.cost(collective, low, ranks=ranks).time_s >= time_s:
            return 0.0
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            if self.cost(collective, middle, ranks=ranks).time_s < time_s:
                low = middle
            else:
                high = middle
        return low

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

    def place(self, group: Ints, num_rings: int | None = None) -> Place:
        """Where the ranks of a group sit."""
        domain, inner = self.fabric.domain, self.fabric.layers[0].tier
        table = None
        if len(group) % domain == 0:
            rows = group.reshape(-1, domain)
            if (rows == rows[:, :1] + np.arange(domain)).all() and (rows[:, 0] % domain == 0).all():
                table = np.arange(len(group)).reshape(-1, domain)
        sizes = [tier.ranks_per_group for tier in self.fabric.cluster.tiers if tier.ranks_per_group]
        return Place(
            node=np.unique(group // domain, return_inverse=True)[1].astype(np.int64),
            local=group % domain,
            table=table,
            meshed=inner.kind is TierKind.MESH,
            switched=inner.kind is not TierKind.TORUS,
            reduces=self._scales_up and inner.in_switch_reduction is not None,
            reduces_across=any(layer.tier.in_switch_reduction is not None for layer in self._across),
            railed=any(layer.tier.kind is TierKind.RAIL for layer in self._across),
            regular_above=2 * max([size for size in sizes if size < self.fabric.world_size], default=1),
            num_rings=num_rings,
        )

    def _sum(self, algorithm: Algorithm, work: Any, place: Place, group: Ints) -> Transfer:
        steps, loads = self.on_wire(algorithm, work, place, group)
        time_s, latency_s = self.software.time_s(steps, algorithm.pattern, place.num_inside)
        return Transfer(time_s=time_s, latency_s=latency_s, loads=loads, basis=self._basis)

    def on_wire(
        self, algorithm: Algorithm, work: Any, place: Place, group: Ints
    ) -> tuple[list[StepOnWire], tuple[LinkLoad, ...]]:
        """The steps as hardware alone takes them, one after the other, and the bytes that they put on links."""
        carried, found, loads = np.zeros(self.fabric.num_links), [], []
        for step in algorithm.steps(work, place):
            if isinstance(step, PairTraffic):
                at = PairTraffic(ranks=group[step.ranks], send=step.send, recv=step.recv, label=step.label)
                moved = transfer(self.fabric, at)
                loads.append(moved.loads)
                busy = {load.name: load.busy_s for load in moved.loads}
                outside = float(bool(busy.keys() & self._names_across))
                found.append(self._step(busy, moved.time_s, moved.latency_s, 1, 1, outside))
            else:
                round_s, hop_s, outside, bytes_on = self._round(step, group)
                busy_s = self._busy_s(bytes_on)
                latency_s = min(hop_s, round_s - busy_s.max(initial=0.0))
                busy = {load.name: load.busy_s for load in self._loads(bytes_on)}
                found.append(self._step(busy, round_s, latency_s, step.times, 1, outside))
                if step.hops > 1:
                    found.append(self._step({}, hop_s, hop_s, step.times, step.hops - 1, outside))
                carried += step.times * bytes_on
        return found, _joined([self._loads(carried), *loads])

    def _step(
        self, busy: dict[str, float], round_s: float, latency_s: float, times: float, hops: int, outside: float
    ) -> StepOnWire:
        inside = [each for name, each in busy.items() if name not in self._names_across]
        return StepOnWire(
            times=times,
            hops=hops,
            latency_s=latency_s,
            moving_s=round_s - latency_s,
            inside_s=max(inside, default=0.0),
            across_s=max((each for name, each in busy.items() if name in self._names_across), default=0.0),
            share_across=outside,
        )

    def _round(self, step: Round, group: Ints) -> tuple[float, float, float, Floats]:
        """One round: seconds in all and of the longest route, share of flows leaving their domain, bytes on links.

        Flows of equal size on a busy link end together, so the busiest link of each route and its latency give the
        time; flows of different sizes are simulated.
        """
        moving = np.flatnonzero((step.size > 0) & (step.src != step.dst))
        if not len(moving):
            return 0.0, 0.0, 0.0, np.zeros(self.fabric.num_links)
        size = step.size[moving].astype(np.float64)
        src, dst = group[step.src[moving]], group[step.dst[moving]]
        routes = self.fabric.routes(src, dst)
        outside = 1.0 if not self._scales_up else float((src // self.fabric.domain != dst // self.fabric.domain).mean())
        amount = np.broadcast_to(size[:, None], routes.shape)
        counted = np.bincount(routes.ravel(), weights=amount.ravel(), minlength=self.fabric.num_links + 1)
        carried = counted.astype(np.float64)[:-1]
        latency = self._latency_s[routes].sum(axis=1)
        hop_s = float(latency.max())
        if size.min() == size.max():
            busy_s = np.append(self._busy_s(carried), 0.0)[routes].max(axis=1)
            return float((latency + busy_s).max()), hop_s, outside, carried
        problem = flow_problem(routes=routes, capacity=self.fabric.capacity, size=size, delay=latency)
        return float(run_rows(problem).max()), hop_s, outside, carried

    def _busy_s(self, carried: Floats) -> Floats:
        """Seconds that its bytes keep each link busy."""
        return carried / self.fabric.capacity

    def _loads(self, carried: Floats) -> list[LinkLoad]:
        """Of every kind of link the busiest stands for all."""
        loads = []
        for layer in self.fabric.layers:
            kinds = layer.kinds
            for way, name in enumerate(kinds):
                part = carried[layer.first : layer.first + len(layer.capacity)][way :: len(kinds)]
                if len(part) and part.max() > 0:
                    busy_s = part / layer.capacity[way :: len(kinds)]
                    worst = int(busy_s.argmax())
                    loads.append(LinkLoad(name, int((part > 0).sum()), float(part[worst]), float(busy_s[worst])))
        return loads


def work_of(collective: str, size: float | Split, place: Place) -> float | Split:
    """What an algorithm takes: a split for an All2All, else bytes."""
    return Split.equal(size, place.num_ranks) if collective == "all_to_all" and not isinstance(size, Split) else size


def _choices(collective: str, algorithm: str | None, place: Place) -> list[Algorithm]:
    """The algorithm named, or those that are taken unasked and fit the group."""
    if collective not in ALGORITHMS:
        raise ValueError(unknown_name("collective", collective, ALGORITHMS))
    rows = ALGORITHMS[collective]
    if algorithm is None:
        return [row for row in rows.values() if row.taken(place)]
    if algorithm not in rows:
        raise ValueError(unknown_name("algorithm", algorithm, rows))
    if (lacking := rows[algorithm].lacks(place)) is not None:
        raise ValueError(f"algorithm {algorithm!r} of {collective} needs {lacking}")
    return [rows[algorithm]]


def _joined(parts: Sequence[Sequence[LinkLoad]]) -> tuple[LinkLoad, ...]:
    """Loads of phases that follow each other: of links of one kind the busiest counts, over phases bytes add up."""
    joined: dict[str, LinkLoad] = {}
    for loads in parts:
        busiest: dict[str, LinkLoad] = {}
        for load in loads:
            if load.name not in busiest or load.busy_s > busiest[load.name].busy_s:
                busiest[load.name] = load
        for name, load in busiest.items():
            before = joined.get(name, LinkLoad(name, 0, 0.0, 0.0))
            joined[name] = LinkLoad(
                name,
                max(before.num_links, load.num_links),
                before.bytes_per_link + load.bytes_per_link,
                before.busy_s + load.busy_s,
            )
    return tuple(joined.values())


def _group_of(fabric: Fabric, resource: Resource, domain_size: int | None) -> Ints:
    """Ranks of the first group of a kind, or of the one with the slowest link: all wait for it."""
    size = domain_size or fabric.world_size
    slowest = fabric.degraded_ranks()
    group = int(group_of(resource, int(slowest[0]), size)) if len(slowest) else 0
    ranks = group_ranks(resource, group, fabric.world_size, size)
    return np.array(ranks, dtype=np.int64)


def group_transfer(
    fabric: Fabric, kind: OpKind, resource: Resource, domain_size: int | None, sent_bytes: float
) -> Transfer:
    """Time and link loads of one group's collective, evenly split, when nothing else uses the network.

    Args:
        fabric: the network.
        kind: the collective.
        resource: the kind of group.
        domain_size: ranks per domain; None for one domain.
        sent_bytes: what each rank puts in.
    """
    ranks = _group_of(fabric, resource, domain_size)
    gathered = len(ranks) if KINDS[kind].cost is Cost.ALL_GATHER else 1
    return Collectives.predicting(fabric).cost(KINDS[kind].cost, gathered * sent_bytes, ranks=ranks)


def group_size_bytes(fabric: Fabric, kind: OpKind, resource: Resource, domain_size: int | None, time_s: float) -> float:
    """What each rank puts in for `group_transfer` to take `time_s`; 0 if nothing takes that little."""
    ranks = _group_of(fabric, resource, domain_size)
    gathered = len(ranks) if KINDS[kind].cost is Cost.ALL_GATHER else 1
    return Collectives.predicting(fabric).size_bytes(KINDS[kind].cost, time_s, ranks=ranks) / gathered


def network_costs(cluster: Cluster, loop: Loop, domain_size: int | None) -> Callable[[OpKind, float, int], float]:
    """Nanoseconds of a collective of `loop` on `cluster`, by kind, bytes per rank and number of ranks.

    To scale recorded transfers to another number of ranks (`sim.costs.trace`).
    """
    resources = {op.kind: stream.resource for stream in loop.streams for op in stream.ops}

    def cost_ns(kind: OpKind, sent_bytes: float, world_size: int) -> float:
        domain = None if domain_size is None else min(domain_size, world_size)
        found = group_transfer(Fabric(cluster, world_size), kind, resources[kind], domain, sent_bytes)
        return found.time_s * NS_PER_S

    return cost_ns
