"""A picture of a cluster: ranks in a row, hosts below, switches above by tier; links coloured by tier, wide where fast.

Large machines repeat themselves, so only the first ranks are drawn, and the caption says how many there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from nestpipe.base import TopologyError
from reports.figures.sheet import note, sheet, styled
from reports.figures.style import INK, MUTED, PAPER
from topologies.cluster import Cluster, Tier, TierKind
from topologies.fabric import Fabric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["rate_text", "topology_figure"]

_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9")
_HOST: Final = "#9a9a9a"
_MOST_DRAWN: Final = 64

Points = dict[str, tuple[float, float]]


def rate_text(bytes_per_s: float) -> str:
    """A rate for people, in GB/s (10^9) or TB/s.

    >>> rate_text(25e9), rate_text(3.2e12)
    ('25 GB/s', '3.2 TB/s')
    """
    return f"{bytes_per_s / 1e12:.4g} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.4g} GB/s"


def _drawn_ranks(cluster: Cluster, world_size: int) -> int:
    """Ranks to draw: two groups of the innermost tier if they fit, more if they are small."""
    if cluster.tiers[0].kind is TierKind.TORUS:
        return min(world_size, 36)
    inner = cluster.tiers[0].ranks_per_group or world_size
    groups = max(2, 32 // inner)
    return min(world_size, _MOST_DRAWN, max(inner * groups, 8)) if inner < world_size else min(world_size, _MOST_DRAWN)


def topology_figure(cluster: Cluster, world_size: int) -> Figure:
    """The cluster as a layered graph, or its first ranks where it is large.

    Raises:
        TopologyError: the cluster cannot have that many ranks.
    """
    Fabric(cluster, world_size)  # refuses what cannot be
    shown = _drawn_ranks(cluster, world_size)
    if cluster.tiers[-1].ranks_per_group is not None and shown > cluster.tiers[-1].ranks_per_group:
        raise TopologyError(f"{cluster.name}: no tier joins {shown} ranks")
    fabric = Fabric(cluster, shown)
    torus = fabric.layers[0].tier.kind is TierKind.TORUS
    with styled():
        figure, (axes,) = sheet(8.4, 6.4 if torus else 2.6 + 1.05 * len(fabric.layers))
        places = _torus_places(fabric) if torus else _layered_places(fabric)
        _edges(axes, fabric, places)
        _nodes(axes, fabric, places, torus)
        _legend(axes, fabric)
        axes.set_title(f"{cluster.name}: {world_size:,} ranks, {cluster.ranks_per_node} per host")
        axes.set_axis_off()
        drawn = f"a torus of {shown}" if torus else f"the first {shown} of {world_size:,}"
        part = "" if shown == world_size else f"Drawn: {drawn} ranks. "
        note(figure, f"{part}Bandwidths are of one link and direction; line width grows with their logarithm.")
    return figure


def _layered_places(fabric: Fabric) -> Points:
    places: Points = {f"rank{rank}": (float(rank), 0.0) for rank in range(fabric.world_size)}
    per_node = fabric.cluster.ranks_per_node
    for host in range(fabric.num_hosts):
        last = min((host + 1) * per_node, fabric.world_size) - 1
        places[f"host{host}"] = ((host * per_node + last) / 2, -0.8)
    for number, layer in enumerate(fabric.layers):
        if layer.tier.kind is TierKind.MESH:
            continue
        width = fabric.world_size - 1 or 1
        for switch in range(layer.switches):
            members = [rank for rank in range(fabric.world_size) if layer.switch[rank] == switch]
            at = sum(members) / len(members) if members else 0.0
            if layer.tier.kind is TierKind.RAIL:  # rails interleave: spread them evenly instead
                at = width * (switch + 0.5) / layer.switches
            places[f"{layer.tier.name}{switch}"] = (at, 1.0 + number)
    return places


def _torus_places(fabric: Fabric) -> Points:
    columns = fabric.layers[0].dimensions[0]
    places: Points = {}
    for rank in range(fabric.world_size):
        x, y = rank % columns, rank // columns
        places[f"rank{rank}"] = (float(x), -float(y))
    return places


def _width(bytes_per_s: float) -> float:
    return max(0.4, 0.55 * (math.log10(bytes_per_s) - 8.5))


def _edges(axes: Axes, fabric: Fabric, places: Points) -> None:
    colour = {layer.tier.name: _COLOURS[n % len(_COLOURS)] for n, layer in enumerate(fabric.layers)}
    kinds = {layer.tier.name: layer.tier.kind for layer in fabric.layers}
    thin = min(1.0, 0.4 * _MOST_DRAWN / fabric.world_size)  # many lines at one switch would run into a block
    for src, dst, data in fabric.graph().edges(data=True):
        if src > dst or src not in places or dst not in places:
            continue  # the other direction draws it
        (x0, y0), (x1, y1) = places[src], places[dst]
        tier, rate = str(data["tier"]), float(data["bandwidth_bytes_per_s"])
        to_host = src.startswith("host") or dst.startswith("host")  # a tier may well be called as the link to the host
        tint = _HOST if to_host else colour[tier]
        if kinds.get(tier) is TierKind.MESH:
            _arc(axes, x0, x1, tint, 0.3 * _width(rate))
            continue
        if kinds.get(tier) is TierKind.TORUS and abs(x0 - x1) + abs(y0 - y1) > 1.5:
            _stub(axes, (x0, y0), (x1, y1), tint, _width(rate))
            continue
        axes.plot([x0, x1], [y0, y1], color=tint, linewidth=thin * _width(rate), zorder=1, solid_capstyle="round")


def _arc(axes: Axes, x0: float, x1: float, tint: str, width: float) -> None:
    steps = [n / 16 for n in range(17)]
    height = 0.12 + 0.09 * abs(x1 - x0)
    axes.plot(
        [x0 + (x1 - x0) * s for s in steps],
        [4 * height * s * (1 - s) for s in steps],
        color=tint,
        linewidth=width,
        zorder=1,
    )


def _stub(axes: Axes, first: tuple[float, float], last: tuple[float, float], tint: str, width: float) -> None:
    """The two ends of a link around the torus, pointing outwards."""
    dx, dy = (last[0] > first[0]) - (last[0] < first[0]), (last[1] > first[1]) - (last[1] < first[1])
    for (x, y), sign in ((first, -1), (last, 1)):
        axes.plot(
            [x, x + 0.4 * sign * dx], [y, y + 0.4 * sign * dy], color=tint, linewidth=width, linestyle=":", zorder=1
        )


def _nodes(axes: Axes, fabric: Fabric, places: Points, torus: bool) -> None:
    crowded = fabric.world_size > 20 and not torus
    for name, (x, y) in places.items():
        rank = name.startswith("rank") and name[4:].isdigit() and y <= 0 and (torus or y == 0)
        size = 160 if torus else (40 if crowded else 90)
        if rank:
            axes.scatter([x], [y], s=size, color=PAPER, edgecolors=INK, linewidths=0.8, zorder=3)
            if torus or not crowded:
                axes.annotate(name[4:], (x, y), ha="center", va="center", fontsize=6.5, zorder=4)
        else:
            axes.scatter([x], [y], s=70, marker="s", color=_HOST if y < 0 else INK, zorder=3)
    if not torus:
        labels = [("ranks", 0.0), ("hosts", -0.8)]
        labels += [(la.tier.name, 1.0 + n) for n, la in enumerate(fabric.layers) if la.tier.kind is not TierKind.MESH]
        for text, y in labels:
            axes.annotate(text, (-1.2, y), ha="right", va="center", fontsize=8.5, color=MUTED)
        axes.set_xlim(-0.16 * fabric.world_size - 2, fabric.world_size)
        axes.set_ylim(-1.2, len(fabric.layers) + 0.6)


def _tier_text(fabric: Fabric, number: int, tier: Tier) -> str:
    layer = fabric.layers[number]
    if tier.kind is TierKind.TRUNK and tier.oversubscription is not None:
        return f"{tier.name}: oversubscription {tier.oversubscription.value:g}:1, {tier.latency_ns.value:g} ns"
    return f"{tier.name}: {rate_text(float(layer.capacity[0]))}, {tier.latency_ns.value:g} ns"


def _legend(axes: Axes, fabric: Fabric) -> None:
    from matplotlib.lines import Line2D

    pcie = fabric.cluster.host.pcie_bandwidth_bytes_per_s.value
    rows = [
        Line2D([], [], color=_COLOURS[n % len(_COLOURS)], linewidth=2, label=_tier_text(fabric, n, layer.tier))
        for n, layer in enumerate(fabric.layers)
    ]
    if fabric.layers[0].tier.kind is not TierKind.TORUS:
        rows.append(Line2D([], [], color=_HOST, linewidth=2, label=f"host link: {rate_text(pcie)}"))
    axes.legend(handles=rows, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2)
