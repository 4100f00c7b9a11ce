"""What the importers of other tools' files share: reading text, and filling in what such files do not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nestpipe.base import TopologyError
from topologies.cluster import Cluster, Tier, load_cluster

__all__ = ["filled", "read_text"]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TopologyError(f"{path}: is not UTF-8 text") from None


def filled(path: Path, description: str, like: str, tiers: list[Tier], ranks: int, ranks_per_host: int) -> Cluster:
    """The tiers of a file on the accelerators and hosts of a known cluster."""
    base = load_cluster(like)
    switch = ranks_per_host if ranks_per_host % base.host.accelerators_per_pcie_switch else None
    host = replace(
        base.host,
        accelerators_per_host=ranks_per_host,
        accelerators_per_pcie_switch=switch or base.host.accelerators_per_pcie_switch,
    )
    return replace(
        base,
        name=path.stem,
        description=f"{description}; accelerators and hosts assumed to be those of {like}",
        host=host,
        tiers=tuple(tiers),
        ranks_max=ranks,
        ranks_default=ranks,
        price_usd_per_accelerator_hour=None,
    )
