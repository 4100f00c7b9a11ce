"""Clusters from other tools' files, whose format is detected from content; units are converted.

What such a file does not say (accelerators, hosts) is taken from a named cluster of the catalogue and marked assumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from nestpipe.base import TopologyError
from topologies.cluster import Cluster, load_cluster, names
from topologies.imports import astra, nccl, simai
from topologies.imports.filled import read_text

__all__ = ["import_topology", "load_topology"]


class Importer(Protocol):
    """What the module of a format has to define."""

    def sniff(self, path: Path, text: str, /) -> bool:
        """Whether the file is of this format."""

    def read(self, path: Path, text: str, like: str, /) -> Cluster:
        """The cluster; what the file does not say is that of `like`."""


# asked in this order
_FORMATS: tuple[Importer, ...] = (nccl, simai, astra)
_OURS = ("nestpipe-topology", "accelerator:")  # one of these is in every description of our own, even in a wrong one


def import_topology(path: Path, like: str = "dgx_h100") -> Cluster:
    """A cluster from a file of another tool; the content decides the format.

    Args:
        like: name of the catalogue whose accelerator and host fill in what the file does not say

    Raises:
        TopologyError: unknown format, or an invalid value.
    """
    text = read_text(path)
    for reader in _FORMATS:
        if reader.sniff(path, text):
            return reader.read(path, text, like)
    raise TopologyError(f"{path}: neither an ASTRA-sim network, a SimAI topology nor NCCL topology XML")


def load_topology(name: str, like: str = "dgx_h100") -> Cluster:
    """A cluster of the catalogue by name, or from a file, our own or another tool's.

    Args:
        like: as for `import_topology`

    Raises:
        TopologyError: there is no such name or file, or the file is wrong.
    """
    load_cluster(like)  # an unknown one is an error, also where nothing is taken from it
    path = Path(name)
    if name in names() or not path.is_file() or any(word in read_text(path) for word in _OURS):
        return load_cluster(name)
    return import_topology(path, like)
