"""A cluster as data: accelerators, hosts and tiers of links, each number with its unit in the key and its source.

`load_cluster(name_or_path)` reads YAML. The world size is not part of it: a description says how ranks hang together
(8 to a node, 32 nodes to a pod), and `topologies.fabric` lays it out for any number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from nestpipe.base import TopologyError, parse_yaml, unknown_name
from topologies.reading import Quantity, Reader

__all__ = [
    "Accelerator",
    "Cluster",
    "Degraded",
    "Host",
    "MeasuredCollective",
    "Quantity",
    "Tier",
    "TierKind",
    "load_cluster",
    "names",
    "parse_cluster",
]

FORMAT = "nestpipe-topology-1"
_DEGRADED = re.compile(r"(?P<tier>\S+)(?: (?P<local>\d+))? of node (?P<node>\d+)")


class TierKind(StrEnum):
    """How the ranks of a group, or the switches of the tier before, are joined."""

    SWITCH = "switch"  # a switch per group, a link pair per rank
    RAIL = "rail"  # a switch per group and local rank, a link pair per rank
    TRUNK = "trunk"  # joins the switches of the tier before, a link pair per switch
    MESH = "mesh"  # a link pair between any two ranks of a group
    TORUS = "torus"  # a ring per dimension, dimension-order routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One rank's device; `generation` is what fitted protocols go by (`sim.network.protocols`)."""

    name: str
    compute_flops_per_s: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    memory_capacity_bytes: Quantity
    copy_engines: Quantity
    generation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: what its accelerators share.

    Attributes:
        pcie_bandwidth_bytes_per_s: of an accelerator's own link to the host, each direction
        accelerators_per_pcie_switch: how many share one uplink; 1 if each has its own
        pcie_switch_bandwidth_bytes_per_s: of that uplink, each direction
        lookup_rate_rows_per_s: random rows that all cores together read from DRAM
    """

    accelerators_per_host: int
    cores: Quantity
    dram_bandwidth_bytes_per_s: Quantity
    dram_capacity_bytes: Quantity
    lookup_rate_rows_per_s: Quantity
    pcie_bandwidth_bytes_per_s: Quantity
    accelerators_per_pcie_switch: int
    pcie_switch_bandwidth_bytes_per_s: Quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A layer of the network, inner ones first.

    Attributes:
        ranks_per_group: consecutive ranks that the tier joins; None: all of them
        bandwidth_bytes_per_s: of each link and direction; None for a trunk, which follows from `oversubscription`
        latency_ns: of crossing one link
        oversubscription: bandwidth below a switch over bandwidth of its trunk; 1 for a non-blocking fabric
        dimensions: ranks along each axis of a torus; None: as square as the world size allows
        in_switch_reduction: 1 if its switches add up what they forward (NVLink SHARP, InfiniBand SHARP)
    """

    name: str
    kind: TierKind
    ranks_per_group: int | None
    bandwidth_bytes_per_s: Quantity | None
    latency_ns: Quantity
    oversubscription: Quantity | None
    dimensions: tuple[int, ...] | None
    in_switch_reduction: Quantity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """Times of one collective on ranks 0 to `world_size` - 1 of a cluster, by bytes per rank; sizes ascend."""

    collective: str
    world_size: int
    size_bytes: tuple[int, ...]
    time_ns: tuple[float, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded:
    """Links of ranks to a tier of switches or rails that give a share of their rate, both ways.

    Attributes:
        local_rank: of the node's ranks; None: all of them
        share: of the described rate, above 0 and at most 1
    """

    tier: str
    node: int
    local_rank: int | None
    share: float

    def __str__(self) -> str:
        which = self.tier if self.local_rank is None else f"{self.tier} {self.local_rank}"
        return f"{which} of node {self.node} at {self.share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A described cluster; `ranks_per_node` is how many ranks a host has, `measured` what its collectives took."""

    name: str
    description: str
    accelerator: Accelerator
    host: Host
    tiers: tuple[Tier, ...]
    ranks_max: int
    ranks_default: int
    price_usd_per_accelerator_hour: Quantity | None
    measured: tuple[MeasuredCollective, ...] = ()
    degraded: tuple[Degraded, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        return self.host.accelerators_per_host

    def with_degraded(self, shares: Mapping[str, float]) -> Cluster:
        """The same cluster with links that give less: `{"rail 3 of node 17": 0.5}`, or `rail of node 17` for all.

        Raises:
            TopologyError: not such words, no such tier or rank, or a share outside (0, 1].
        """
        found = tuple(self._degraded(text, share) for text, share in shares.items())
        return replace(self, degraded=(*self.degraded, *found))

    def _degraded(self, text: str, share: object) -> Degraded:
        kinds, where = {tier.name: tier.kind for tier in self.tiers}, f"{self.name}: degrade"
        match = _DEGRADED.fullmatch(text.strip())
        if match is None:
            raise TopologyError(f"{where} must name links like 'rail 3 of node 17', got {text!r}")
        tier, local = match["tier"], None if match["local"] is None else int(match["local"])
        if tier not in kinds:
            raise TopologyError(f"{where}: {unknown_name('tier', tier, kinds)}")
        if kinds[tier] not in (TierKind.SWITCH, TierKind.RAIL):
            raise TopologyError(f"{where}: {tier} must be a tier of kind switch or rail, is {kinds[tier]}")
        if local is not None and local >= self.ranks_per_node:
            raise TopologyError(f"{where}: a node has local ranks 0 to {self.ranks_per_node - 1}, got {local}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise TopologyError(f"{where}: {text!r} must be above 0 and at most 1, got {share!r}")
        return Degraded(tier=tier, node=int(match["node"]), local_rank=local, share=float(share))

    def with_group(self, tier: str, ranks: int) -> Cluster:
        """The same cluster with another group size in one tier, for example 64 of the 72 ranks of a rack in use."""
        if tier not in [t.name for t in self.tiers]:
            raise TopologyError(f"{self.name}: {unknown_name('tier', tier, [t.name for t in self.tiers])}")
        if ranks < 1:
            raise TopologyError(f"{self.name}: tiers.{tier}.ranks_per_group must be 1 or more, got {ranks}")
        tiers = tuple(replace(t, ranks_per_group=ranks) if t.name == tier else t for t in self.tiers)
        return replace(self, tiers=tiers)


def parse_cluster(text: str, where: str) -> Cluster:
    """A cluster from YAML text; `where` is what errors name as the file.

    Raises:
        TopologyError: not YAML, an unknown or missing key, a value in another unit, without a source or impossible.
    """
    top = Reader(parse_yaml(text, TopologyError, source=where), "", where)
    if (version := top.take("format")) != FORMAT:
        raise top.error("format", f"must be {FORMAT!r}, got {version!r}")
    degrade = top.take("degrade", optional=True)
    if degrade is not None and not isinstance(degrade, Mapping):
        raise top.error("degrade", f"must be a mapping like {{rail 3 of node 17: 0.5}}, got {degrade!r}")
    cluster = Cluster(
        name=top.text("name"),
        description=top.text("description"),
        accelerator=_accelerator(top.group("accelerator")),
        host=_host(top.group("host")),
        tiers=_tiers(top),
        ranks_max=top.count("ranks_max") or 1,
        ranks_default=top.count("ranks_default") or 1,
        price_usd_per_accelerator_hour=top.quantity("price_usd_per_accelerator_hour", optional=True),
    )
    top.finish()
    if cluster.ranks_default > cluster.ranks_max:
        raise top.error("ranks_default", f"must be at most ranks_max, {cluster.ranks_max}, got {cluster.ranks_default}")
    return cluster.with_degraded(degrade or {})


def _accelerator(at: Reader) -> Accelerator:
    found = Accelerator(
        name=at.text("name"),
        compute_flops_per_s=at.need("compute_flops_per_s"),
        memory_bandwidth_bytes_per_s=at.need("memory_bandwidth_bytes_per_s"),
        memory_capacity_bytes=at.need("memory_capacity_bytes"),
        copy_engines=at.need("copy_engines"),
        generation=at.text("generation", optional=True) or None,
    )
    at.finish()
    return found


def _host(at: Reader) -> Host:
    found = Host(
        accelerators_per_host=at.count("accelerators_per_host") or 1,
        cores=at.need("cores"),
        dram_bandwidth_bytes_per_s=at.need("dram_bandwidth_bytes_per_s"),
        dram_capacity_bytes=at.need("dram_capacity_bytes"),
        lookup_rate_rows_per_s=at.need("lookup_rate_rows_per_s"),
        pcie_bandwidth_bytes_per_s=at.need("pcie_bandwidth_bytes_per_s"),
        accelerators_per_pcie_switch=at.count("accelerators_per_pcie_switch") or 1,
        pcie_switch_bandwidth_bytes_per_s=at.need("pcie_switch_bandwidth_bytes_per_s"),
    )
    at.finish()
    if found.accelerators_per_host % found.accelerators_per_pcie_switch:
        raise at.error(
            "accelerators_per_pcie_switch",
            f"must divide accelerators_per_host, {found.accelerators_per_host}, "
            f"got {found.accelerators_per_pcie_switch}",
        )
    return found


def _tiers(top: Reader) -> tuple[Tier, ...]:
    rows = top.take("tiers")
    if not isinstance(rows, list) or not rows:
        raise top.error("tiers", "must be a list of one tier or more, inner tiers first")
    tiers: list[Tier] = []
    for number, row in enumerate(rows):
        at = Reader(row, f"tiers[{number}]", top.where)
        tier = _tier(at)
        at.finish()
        inner = tiers[-1] if tiers else None
        if tier.name in [t.name for t in tiers]:
            raise at.error("name", f"is used twice: {tier.name!r}")
        if inner is not None and inner.ranks_per_group is None:
            raise at.error("", f"is never reached: tier {inner.name!r} already joins all ranks")
        inside = inner.ranks_per_group if inner is not None else None
        if inside and tier.ranks_per_group and tier.ranks_per_group % inside:
            raise at.error("ranks_per_group", f"must be a multiple of {inside}, got {tier.ranks_per_group}")
        if tier.kind is TierKind.TRUNK and (inner is None or inner.kind in (TierKind.MESH, TierKind.TORUS)):
            raise at.error("kind", "is trunk, which must follow a tier of switches or rails")
        tiers.append(tier)
    return tuple(tiers)


def _tier(at: Reader) -> Tier:
    kind_text = at.text("kind")
    if kind_text not in list(TierKind):
        raise at.error("kind", f"is not known: {unknown_name('kind', kind_text, [kind.value for kind in TierKind])}")
    kind = TierKind(kind_text)
    trunk = kind is TierKind.TRUNK
    dimensions = at.take("dimensions", optional=True) if kind is TierKind.TORUS else None
    if dimensions is not None and (
        not isinstance(dimensions, list) or not all(isinstance(n, int) and n > 0 for n in dimensions)
    ):
        raise at.error("dimensions", f"must be a list of whole numbers, got {dimensions!r}")
    return Tier(
        name=at.text("name"),
        kind=kind,
        ranks_per_group=at.count("ranks_per_group", optional=True),
        bandwidth_bytes_per_s=None if trunk else at.need("bandwidth_bytes_per_s"),
        latency_ns=at.need("latency_ns", zero=True),
        oversubscription=at.need("oversubscription") if trunk else None,
        dimensions=tuple(dimensions) if dimensions is not None else None,
        in_switch_reduction=at.quantity("in_switch_reduction", optional=True),
    )


def names() -> list[str]:
    """Names of the catalogue."""
    folder = files("topologies.catalogue")
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_cluster(name: str | Path) -> Cluster:
    """A cluster of the catalogue by name, or from a YAML file by path.

    Raises:
        TopologyError: there is no such name or file, or the file is wrong.
    """
    if isinstance(name, str) and name in names():
        return parse_cluster(
            (files("topologies.catalogue") / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml"
        )
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.exists():
        raise TopologyError(unknown_name("topology", str(name), names()) + "; or give a .yaml file")
    try:
        return parse_cluster(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TopologyError(f"{path}: is not UTF-8 text") from None
