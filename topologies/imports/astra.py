"""ASTRA-sim networks: the YAML of version 2 and the JSON of version 1, whose GB/s are 2^30 bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nestpipe.base import GIB, TopologyError, parse_yaml, unknown_name
from topologies.cluster import Cluster, Tier, TierKind
from topologies.imports.filled import filled
from topologies.reading import Quantity

__all__ = ["read", "sniff"]

_KINDS = {"switch": TierKind.SWITCH, "fullyconnected": TierKind.MESH, "ring": TierKind.TORUS}


def sniff(path: Path, _text: str) -> bool:
    """Whether this may be such a network: YAML or JSON by its name."""
    return path.suffix in (".yml", ".yaml", ".json")


def read(path: Path, text: str, like: str) -> Cluster:
    """An ASTRA-sim network: the YAML of version 2 (analytical), or the JSON of version 1.

    Bandwidth is that of each link in GB/s of 2^30 bytes, latency that of a hop in ns. Version 2 joins an NPU to each
    neighbour by one link; version 1 says in `links-count` how many links an NPU has.

    Source: astra-network-analytical, topology/FullyConnected.cpp, Ring.cpp (a link of the full bandwidth for each
    pair) and common/Common.cpp (GB/s are 2^30 bytes).

    Raises:
        TopologyError: not such a network, or an invalid value.
    """
    try:
        data: Any = json.loads(text) if path.suffix == ".json" else parse_yaml(text, TopologyError, source=str(path))
    except json.JSONDecodeError as error:
        raise TopologyError(f"{path}: not valid: {' '.join(str(error).split())}") from None
    if not isinstance(data, Mapping):
        raise TopologyError(f"{path}: must be a mapping, got {type(data).__name__}")
    first = "topologies-per-dim" in data
    keys = (
        ("topologies-per-dim", "units-count", "link-bandwidth", "link-latency")
        if first
        else ("topology", "npus_count", "bandwidth", "latency")
    )
    if not first and "topology" not in data:
        raise TopologyError(
            f"{path}: neither a description of a cluster (format: nestpipe-topology-1) nor an ASTRA-sim network, which "
            f"has topology or topologies-per-dim, got {', '.join(map(str, data))[:60] or 'nothing'}"
        )
    columns = []
    for key in keys:
        column = data.get(key)
        if not isinstance(column, list) or not column:
            raise TopologyError(f"{path}: {key} must be a list with an entry per dimension, got {column!r}")
        columns.append(column)
    columns.append(data.get("links-count") or [None] * len(columns[0]) if first else [None] * len(columns[0]))
    if not isinstance(columns[-1], list):
        raise TopologyError(f"{path}: links-count must be a list with an entry per dimension, got {columns[-1]!r}")
    if len({len(column) for column in columns}) != 1:
        raise TopologyError(
            f"{path}: {', '.join(keys)} and links-count must have as many entries each, got {[len(c) for c in columns]}"
        )
    return _astra_cluster(path, like, columns)


def _number(value: Any) -> float:
    """A number, also one such as 5e2, which the YAML library reads as text; NaN where there is none."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _neighbours(kind: TierKind, count: int) -> int:
    """Of how many others an NPU has a link in a dimension of `count`; a switch is one."""
    if kind is TierKind.SWITCH:
        return 1
    return max(count - 1, 1) if kind is TierKind.MESH else 2 if count > 2 else 1


def _astra_cluster(path: Path, like: str, columns: list[list[Any]]) -> Cluster:
    tiers: list[Tier] = []
    ranks, rings = 1, 0
    for axis, (kind_text, count, bandwidth, latency, links) in enumerate(zip(*columns, strict=True)):
        kind = _KINDS.get(str(kind_text).lower())
        if kind is None:
            known = ["Ring", "FullyConnected", "Switch"]
            raise TopologyError(f"{path}: dimension {axis}: {unknown_name('topology', str(kind_text), known)}")
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise TopologyError(f"{path}: dimension {axis}: the number of NPUs must be 1 or more, got {count!r}")
        rate, hop_ns = _number(bandwidth), _number(latency)
        if not (math.isfinite(rate) and rate > 0):
            raise TopologyError(f"{path}: dimension {axis}: bandwidth must be a positive number, got {bandwidth!r}")
        if not (math.isfinite(hop_ns) and hop_ns >= 0):
            raise TopologyError(f"{path}: dimension {axis}: latency must be 0 ns or more, got {latency!r}")
        rings += kind is TierKind.TORUS
        neighbours = _neighbours(kind, count)
        if links is None:
            links = neighbours
        elif isinstance(links, bool) or not isinstance(links, int) or links < 1:
            raise TopologyError(f"{path}: dimension {axis}: links-count must be 1 or more, got {links!r}")
        ranks *= count
        unit = f"{path.name}: {bandwidth} GB/s of 2^30 bytes a link"
        tiers.append(
            Tier(
                name=f"dim{axis}",
                kind=kind,
                ranks_per_group=ranks,
                bandwidth_bytes_per_s=Quantity(
                    rate * GIB * links / neighbours,
                    unit if links == neighbours else f"{unit}, {links} links to {neighbours} neighbours",
                ),
                latency_ns=Quantity(hop_ns, f"{path.name}: ns a hop"),
                oversubscription=None,
                dimensions=(count,) if kind is TierKind.TORUS else None,
            )
        )
    return _dimensions(path, like, tiers, ranks, columns[1], rings)


def _dimensions(path: Path, like: str, tiers: list[Tier], ranks: int, counts: list[int], rings: int) -> Cluster:
    """All rings: one torus. Otherwise an outer dimension joins ranks of equal place, which a switch tier stands for."""
    if rings == len(tiers):
        rates = {t.bandwidth_bytes_per_s.value for t in tiers if t.bandwidth_bytes_per_s}
        note = "" if len(rates) == 1 else " (the slowest of unequal dimensions)"
        slowest = min(tiers, key=lambda t: t.bandwidth_bytes_per_s.value if t.bandwidth_bytes_per_s else 0.0)
        rate = slowest.bandwidth_bytes_per_s
        assert rate is not None
        torus = replace(
            slowest,
            name="torus",
            ranks_per_group=None,
            bandwidth_bytes_per_s=Quantity(rate.value, rate.source + note),
            dimensions=tuple(counts),
        )
        return filled(path, "imported from ASTRA-sim, a torus", like, [torus], ranks, counts[0])
    made = []
    for number, tier in enumerate(tiers):
        if number and tier.kind is not TierKind.SWITCH:
            rate = tier.bandwidth_bytes_per_s
            assert rate is not None
            tier = replace(
                tier,
                kind=TierKind.SWITCH,
                dimensions=None,
                bandwidth_bytes_per_s=Quantity(
                    rate.value * _neighbours(tier.kind, counts[number]),
                    f"{rate.source}; an outer ring or mesh is taken as a switch of as much",
                ),
            )
        elif tier.kind is TierKind.TORUS:
            tier = replace(tier, dimensions=(counts[number],))
        made.append(tier)
    made[-1] = replace(made[-1], ranks_per_group=None)
    return filled(path, "imported from ASTRA-sim", like, made, ranks, counts[0])
