"""What a collective moves between the ranks of its group, and how long the network alone takes for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nestpipe.base import NS_PER_S
from nestpipe.ir import Loop, OpKind, Resource, group_ranks
from sim.network.classes import PairTraffic, Transfer, transfer
from topologies.cluster import Cluster
from topologies.fabric import Fabric

__all__ = ["group_transfer", "network_costs"]

_REDUCTIONS = (OpKind.ALL_REDUCE, OpKind.ALL_REDUCE_TABLES)


def group_transfer(
    fabric: Fabric, kind: OpKind, resource: Resource, domain_size: int | None, sent_bytes: float
) -> Transfer:
    """Time and link loads of one group's collective when nothing else uses the network.

    Each rank puts in `sent_bytes`, split evenly over the group in an All2All. An all_reduce is a reduce-scatter and an
    all-gather, each of which moves what an All2All of the same size does; an all_gather sends the whole to everybody.

    Args:
        fabric: the network.
        kind: the collective.
        resource: the kind of group.
        domain_size: ranks per domain; None for one domain.
        sent_bytes: per rank.
    """
    ranks = np.array(group_ranks(resource, 0, fabric.world_size, domain_size or fabric.world_size), dtype=np.int64)
    if len(ranks) < 2:
        return Transfer(time_s=0.0, loads=(), num_classes=1, quantised=False)
    times = 2 if kind in _REDUCTIONS else len(ranks) if kind is OpKind.ALL_GATHER else 1
    return transfer(fabric, PairTraffic.even(ranks, times * sent_bytes / len(ranks)))


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
