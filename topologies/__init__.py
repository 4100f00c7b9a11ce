"""Clusters as data: accelerators, hosts, links; a YAML catalogue with sources."""

from topologies.cluster import Accelerator, Cluster, Host, Tier, TierKind, load_cluster, names, parse_cluster
from topologies.fabric import Fabric
from topologies.reading import Quantity

__all__ = [
    "Accelerator",
    "Cluster",
    "Fabric",
    "Host",
    "Quantity",
    "Tier",
    "TierKind",
    "load_cluster",
    "names",
    "parse_cluster",
]
