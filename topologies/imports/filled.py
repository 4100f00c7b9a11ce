"""What the importers of other tools' files share: reading text, and filling in what such files do not say."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from nestpipe.base import TopologyError
from topologies.cluster import Accelerator, Cluster, Host, Quantity, Tier, load_cluster

__all__ = ["filled", "read_text"]


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TopologyError(f"{path}: is not UTF-8 text") from None


_Part = TypeVar("_Part", Accelerator, Host)


def _assumed(part: _Part, like: str) -> _Part:
    """The part with each number called assumed: the source speaks of another machine than the file's."""
    changed: dict[str, Any] = {}
    for field in fields(part):
        number = getattr(part, field.name)
        if isinstance(number, Quantity) and not number.assumed:
            changed[field.name] = Quantity(number.value, f"assumed: as {like} ({number.source})")
    return replace(part, **changed)


def filled(path: Path, description: str, like: str, tiers: list[Tier], ranks: int, ranks_per_host: int) -> Cluster:
    """The tiers of a file on the accelerators and hosts of a known cluster, whose numbers are assumed here."""
    base = load_cluster(like)
    switch = ranks_per_host if ranks_per_host % base.host.accelerators_per_pcie_switch else None
    host = replace(
        _assumed(base.host, like),
        accelerators_per_host=ranks_per_host,
        accelerators_per_pcie_switch=switch or base.host.accelerators_per_pcie_switch,
    )
    return replace(
        base,
        name=path.stem,
        description=f"{description}; accelerators and hosts assumed to be those of {like}",
        accelerator=replace(_assumed(base.accelerator, like), name=f"assumed: {base.accelerator.name}"),
        host=host,
        tiers=tuple(tiers),
        ranks_max=ranks,
        ranks_default=ranks,
        price_usd_per_accelerator_hour=None,
    )
