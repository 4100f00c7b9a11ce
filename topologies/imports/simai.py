"""SimAI (ns-3) topologies: a line per link, whose bandwidths are bits per second and whose numbers carry their unit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from nestpipe.base import BITS_PER_BYTE, TopologyError, ms_to_ns, s_to_ns, us_to_ns
from topologies.cluster import Cluster, Tier, TierKind
from topologies.imports.filled import filled
from topologies.reading import Quantity

__all__ = ["read", "sniff"]

_RATE = re.compile(r"^\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*([kKMGT]?)(bps|Bps)\s*$")
_TIME = re.compile(r"^\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*(ns|us|ms|s)\s*$")
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _rate(text: str, where: str) -> float:
    """Bytes per second from `400Gbps` (bits) or `50GBps` (bytes)."""
    match = _RATE.match(text)
    if match is None:
        raise TopologyError(f"{where}: bandwidth must be a number with bps or Bps, such as 400Gbps, got {text!r}")
    value = float(match[1]) * _PREFIX[match[2]] / (BITS_PER_BYTE if match[3] == "bps" else 1)
    if not value > 0:
        raise TopologyError(f"{where}: bandwidth must be positive, got {text!r}")
    return value


def _delay_ns(text: str, where: str) -> float:
    match = _TIME.match(text)
    if match is None:
        raise TopologyError(f"{where}: latency must be a number with ns, us, ms or s, got {text!r}")
    value = float(match[1])
    return {"ns": lambda v: float(v), "us": us_to_ns, "ms": ms_to_ns, "s": s_to_ns}[match[2]](value)


def sniff(_path: Path, text: str) -> bool:
    """Whether the first line is a header: five whole numbers and the GPU type."""
    first = text.lstrip().partition("\n")[0].split()
    return len(first) == 6 and all(part.isdigit() for part in first[:5])


def read(path: Path, text: str, like: str) -> Cluster:
    """A SimAI (ns-3) topology: a header, the switches, and a line per link.

    GPUs must hang on an NVSwitch of their server and on one access switch; access switches of one level above are
    joined by a trunk whose bandwidth is the sum of their uplinks.

    Raises:
        TopologyError: an invalid line, or GPUs that are not all linked alike.
    """
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) < 2 or len(lines[0]) != 6:
        raise TopologyError(f"{path}: line 1 must be: nodes gpus_per_server nvswitches switches links gpu_type")
    try:
        nodes, per_server, nvswitches, switches, links = (int(part) for part in lines[0][:5])
        listed = [int(part) for part in lines[1]]
    except ValueError:
        raise TopologyError(f"{path}: lines 1 and 2 must be whole numbers (and the GPU type)") from None
    gpus = nodes - nvswitches - switches
    if len(listed) != nvswitches + switches or gpus < 1:
        raise TopologyError(
            f"{path}: line 1 says {nvswitches + switches} switches of {nodes} nodes, line 2 has {len(listed)}"
        )
    if len(lines) - 2 != links:
        raise TopologyError(f"{path}: line 1 says {links} links, there are {len(lines) - 2}")
    nv = set(listed[:nvswitches])
    inner: Counter[tuple[float, float]] = Counter()
    outer: Counter[tuple[float, float]] = Counter()
    uplink: Counter[int] = Counter()
    access: dict[int, list[int]] = {}
    up_rate, up_delay = 0.0, 0.0
    worst = 0.0
    for number, row in enumerate(lines[2:], start=3):
        worst = max(worst, _error_rate(row, f"{path}: link line {number}"))
        src, dst, rate, delay = _link(row, nodes, f"{path}: link line {number}")
        if src >= gpus:
            uplink[src] += 1
            up_rate, up_delay = rate, delay
        elif dst in nv:
            inner[rate, delay] += 1
        else:
            outer[rate, delay] += 1
            access.setdefault(dst, []).append(src)
    if len(inner) > 1 or len(outer) != 1:
        raise TopologyError(f"{path}: all GPUs must have links of one speed, got {len(inner)} and {len(outer)} kinds")
    found = _simai_tiers(path, per_server, gpus, inner, outer, access, uplink, (up_rate, up_delay))
    note = f"; error_rate of up to {worst:g} is not modelled, links are taken to lose nothing" if worst else ""
    if note:
        found = [_noted(tier, note) for tier in found]
    return filled(path, f"imported from SimAI ({lines[0][5]}){note}", like, found, gpus, min(per_server, gpus))


def _link(row: list[str], nodes: int, where: str) -> tuple[int, int, float, float]:
    """Lower and higher node of a link, its bytes/s and its latency in ns."""
    if len(row) != 5:
        raise TopologyError(f"{where} must be: source destination bandwidth latency error_rate, got {' '.join(row)!r}")
    if not (row[0].isdigit() and row[1].isdigit()):
        raise TopologyError(f"{where} must start with two node numbers, got {row[0]} {row[1]}")
    src, dst = sorted((int(row[0]), int(row[1])))
    if not 0 <= src < dst < nodes:
        raise TopologyError(f"{where} names a node outside 0..{nodes - 1}: {row[0]} {row[1]}")
    return src, dst, _rate(row[2], where), _delay_ns(row[3], where)


def _error_rate(row: list[str], where: str) -> float:
    """The share of packets that a link loses; 0 in a row without it, which `_link` refuses."""
    if len(row) != 5:
        return 0.0
    try:
        rate = float(row[4])
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise TopologyError(f"{where}: error_rate must be a number from 0 to 1, got {row[4]!r}")
    return rate


def _noted(tier: Tier, note: str) -> Tier:
    """The tier with a note at the source of its bandwidth."""
    rate = tier.bandwidth_bytes_per_s
    return tier if rate is None else replace(tier, bandwidth_bytes_per_s=Quantity(rate.value, rate.source + note))


def _access(
    path: Path, gpus: int, outer: Counter[tuple[float, float]], access: dict[int, list[int]]
) -> tuple[tuple[float, float], int, int]:
    """A GPU's access link, all its ports together; how many access switches it has; how many GPUs a switch has.

    A GPU with a port on each of two switches (dual ToR) counts as one with a port of both their bandwidths.
    """
    below = {len(set(ranks)) for ranks in access.values()}
    ports = Counter(rank for ranks in access.values() for rank in ranks)
    if len(below) != 1 or len(ports) != gpus or len(set(ports.values())) != 1:
        raise TopologyError(
            f"{path}: every GPU must have as many access links, and every access switch as many GPUs, "
            f"got {sorted(set(ports.values()))} links on {len(ports)} of {gpus} GPUs and {sorted(below)} GPUs"
        )
    (rate, delay), planes = next(iter(outer)), next(iter(ports.values()))
    return (rate * planes, delay), planes, below.pop()


def _simai_tiers(
    path: Path,
    per_server: int,
    gpus: int,
    inner: Counter[tuple[float, float]],
    outer: Counter[tuple[float, float]],
    access: dict[int, list[int]],
    uplink: Counter[int],
    up: tuple[float, float],
) -> list[Tier]:
    def tier(
        name: str, kind: TierKind, group: int | None, link: tuple[float, float], over: float | None = None
    ) -> Tier:
        trunk = kind is TierKind.TRUNK
        return Tier(
            name=name,
            kind=kind,
            ranks_per_group=group,
            bandwidth_bytes_per_s=None if trunk else Quantity(link[0], f"{path.name}: bits per second with suffix"),
            latency_ns=Quantity(link[1], f"{path.name}: latency with suffix"),
            oversubscription=Quantity(over, f"{path.name}: links below over links above") if trunk and over else None,
            dimensions=None,
        )

    tiers = []
    if inner:
        (inside,) = inner
        tiers.append(tier("nvlink", TierKind.SWITCH, per_server if per_server < gpus or access else None, inside))
    link, planes, ports = _access(path, gpus, outer, access)
    spread = all(len({rank % per_server for rank in ranks}) == 1 for ranks in access.values())
    if uplink:
        over = ports * link[0] / (planes * max(uplink[switch] for switch in access) * up[0])
        group = ports * per_server if spread else ports
        tiers.append(tier("access", TierKind.RAIL if spread else TierKind.SWITCH, group, link))
        tiers.append(tier("aggregation", TierKind.TRUNK, None, up, over))
    else:
        tiers.append(tier("access", TierKind.SWITCH, None, link))
    return tiers
