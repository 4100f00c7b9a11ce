"""Communication schedules as data: flows, and the nodes whose completion releases them.

A *node* is a moment a rank (or everybody) waits for: it completes when its `pending` count of flows and of its
predecessor has run down, and then releases its flows. Every algorithm here, from one burst of all flows to rounds that
each rank enters on its own, is such a graph, so one simulation runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import CaseError, unknown_name

__all__ = ["ALGORITHMS", "TRAFFIC", "Plan", "build_plan", "check_names", "traffic_matrix"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Flows between ranks and the nodes that order them; row `f` of each flow array is one flow.

    `done` holds the nodes a flow counts towards (−1: no such node) and `done_weight` by how much; `node_next` is the
    node that waits for this one too, or −1. `flow_tag` and `node_tag` tell rounds and phases apart.
    """

    src: Ints
    dst: Ints
    size_bytes: Ints
    release: Ints
    done: Ints
    done_weight: Ints
    node_pending: Ints
    node_next: Ints
    flow_tag: Ints
    node_tag: Ints
    barriers_only: bool

    @property
    def num_flows(self) -> int:
        return len(self.src)


def _uniform(size: int, world_size: int) -> Ints:
    return np.full((world_size, world_size), size // world_size, dtype=np.int64)


def _zipf1(size: int, world_size: int) -> Ints:
    weights = [1 / (1 + ((37 * j + 11) % world_size)) for j in range(world_size)]
    total = sum(weights)
    row = [math.floor(size * weight / total) for weight in weights]
    return np.tile(np.array(row, dtype=np.int64), (world_size, 1))


def _hot0(size: int, world_size: int) -> Ints:
    half = size // 2
    table = np.full((world_size, world_size), half // max(world_size - 1, 1), dtype=np.int64)
    table[:, 0] = half
    return table


def _random(size: int, world_size: int) -> Ints:
    index = np.arange(world_size * world_size, dtype=np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    x = (index * np.uint64(2654435761)) & mask
    y = ((x ^ (x >> np.uint64(15))) * np.uint64(2246822519)) & mask
    u = np.uint64(1) + (y >> np.uint64(8)) % np.uint64(1000)
    return (size // world_size * u.astype(np.int64) // 500).reshape(world_size, world_size)


TRAFFIC: dict[str, Callable[[int, int], Ints]] = {
    "uniform": _uniform,
    "zipf1": _zipf1,
    "hot0": _hot0,
    "random": _random,
}


def traffic_matrix(rule: str, size_bytes: int, world_size: int) -> Ints:
    """Bytes from every rank to every other by a named rule; the diagonal is 0.

    >>> traffic_matrix("hot0", 100, 3).tolist()
    [[0, 25, 25], [50, 0, 25], [50, 25, 0]]
    """
    table = TRAFFIC[rule](size_bytes, world_size)
    np.fill_diagonal(table, 0)
    return table


def _finish(
    src: Ints,
    dst: Ints,
    size: Ints,
    release: Ints,
    done: Ints,
    tag: Ints,
    node_next: Ints,
    node_tag: Ints,
    barriers: bool,
) -> Plan:
    """Drops empty flows and counts what every node waits for."""
    keep = np.flatnonzero((size > 0) & (src != dst))
    done = done[keep]
    pending = np.zeros(len(node_next), dtype=np.int64)
    np.add.at(pending, done[done >= 0], 1)
    np.add.at(pending, node_next[node_next >= 0], 1)
    return Plan(
        src=src[keep],
        dst=dst[keep],
        size_bytes=size[keep],
        release=release[keep],
        done=done,
        done_weight=np.ones_like(done),
        node_pending=pending,
        node_next=node_next,
        flow_tag=tag[keep],
        node_tag=node_tag,
        barriers_only=barriers,
    )


def _pairs(world_size: int) -> tuple[Ints, Ints]:
    src, dst = np.divmod(np.arange(world_size * world_size), world_size)
    return src, dst


def _no_nodes(count: int) -> Ints:
    return np.full((count, 2), -1, dtype=np.int64)


def _direct(table: Ints, group: int) -> Plan:
    del group
    src, dst = _pairs(len(table))
    zeros = np.zeros(len(src), dtype=np.int64)
    one = np.array([-1])
    return _finish(src, dst, table.ravel(), zeros, _no_nodes(len(src)), zeros, one, np.array([0]), True)


def _chains(world_size: int, rounds: int) -> tuple[Ints, Ints]:
    """A node per round and rank, `round * world_size + rank`, each waiting for the rank's round before: next, tag."""
    nodes = np.arange((rounds + 1) * world_size)
    following = np.where(nodes < rounds * world_size, nodes + world_size, -1)
    return following, nodes // world_size


def _rounds(table: Ints, partner: Callable[[int, Ints], Ints], barrier: bool) -> Plan:
    world_size = len(table)
    rank = np.arange(world_size)
    rounds = world_size - 1
    number = np.repeat(np.arange(1, world_size), world_size)
    src = np.tile(rank, rounds)
    dst = np.concatenate([partner(r, rank) for r in range(1, world_size)]) if rounds else src
    done = _no_nodes(len(src))
    if barrier:
        done[:, 0] = number
        following = np.append(np.arange(1, world_size), -1)
        return _finish(
            src, dst, table[src, dst], number - 1, done, number, following, np.arange(world_size), barriers=True
        )
    following, node_tag = _chains(world_size, rounds)
    done[:, 0] = number * world_size + src
    done[:, 1] = number * world_size + dst
    release = (number - 1) * world_size + src
    return _finish(src, dst, table[src, dst], release, done, number, following, node_tag, barriers=False)


def _shift(table: Ints, group: int) -> Plan:
    del group
    return _rounds(table, lambda r, rank: (rank + r) % len(table), barrier=False)


def _shift_barrier(table: Ints, group: int) -> Plan:
    del group
    return _rounds(table, lambda r, rank: (rank + r) % len(table), barrier=True)


def _xor(table: Ints, group: int) -> Plan:
    del group
    return _rounds(table, lambda r, rank: rank ^ r, barrier=False)


def _two_level(table: Ints, group: int, barrier: bool) -> Plan:
    world_size = len(table)
    nodes = world_size // group
    by_node = table.reshape(nodes, group, nodes, group)
    inside = by_node.sum(axis=2)  # (node, local source, local destination)
    across = by_node.sum(axis=1)  # (node, other node, local): carried by the rank of that local index
    rank = np.arange(world_size).reshape(nodes, group)
    src1 = np.broadcast_to(rank[:, :, None], inside.shape).ravel()
    dst1 = np.broadcast_to(rank[:, None, :], inside.shape).ravel()
    src2 = np.broadcast_to(rank[:, None, :], across.shape).ravel()
    dst2 = np.broadcast_to(rank[None, :, :], across.shape).ravel()
    first, second = np.zeros(len(src1), dtype=np.int64), np.ones(len(src2), dtype=np.int64)
    done = _no_nodes(len(src1) + len(src2))
    if barrier:
        done[: len(src1), 0] = 1
        release = np.concatenate([first, second])
        following, node_tag = np.array([1, -1]), np.array([0, 1])
    else:
        done[: len(src1), 0], done[: len(src1), 1] = 1 + src1, 1 + dst1
        release = np.concatenate([first, 1 + src2])
        following = np.full(1 + world_size, -1)
        node_tag = np.append([0], np.ones(world_size, dtype=np.int64))
    return _finish(
        np.concatenate([src1, src2]),
        np.concatenate([dst1, dst2]),
        np.concatenate([inside.ravel(), across.ravel()]),
        release,
        done,
        np.concatenate([first, second]),
        following,
        node_tag,
        barrier,
    )


def _hier2_barrier(table: Ints, group: int) -> Plan:
    return _two_level(table, group, barrier=True)


def _hier2_local(table: Ints, group: int) -> Plan:
    return _two_level(table, group, barrier=False)


def _ring_steps(sizes: Ints, peers: NDArray[np.int64]) -> Plan:
    """One flow a step and rank, to `peers[step, rank]`; a rank goes on when its own send and receive are over."""
    steps, world_size = peers.shape
    number = np.repeat(np.arange(1, steps + 1), world_size)
    src = np.tile(np.arange(world_size), steps)
    dst = peers.ravel()
    following, node_tag = _chains(world_size, steps)
    done = np.stack([number * world_size + src, number * world_size + dst], axis=1)
    release = (number - 1) * world_size + src
    size = np.repeat(sizes, world_size)
    return _finish(src, dst, size, release, done, number, following, node_tag, barriers=False)


def _ring_allreduce(size_bytes: int, world_size: int, group: int) -> Plan:
    del group
    steps = 2 * (world_size - 1)
    peers = np.tile((np.arange(world_size) + 1) % world_size, (steps, 1))
    return _ring_steps(np.full(steps, size_bytes // world_size), peers)


def _hier_ring_allreduce(size_bytes: int, world_size: int, group: int) -> Plan:
    nodes = world_size // group
    rank = np.arange(world_size)
    inner = rank // group * group + (rank % group + 1) % group
    outer = (rank + group) % world_size
    stage_b = 2 * (nodes - 1)
    peers = [inner] * (group - 1) + [outer] * stage_b + [inner] * (group - 1)
    chunk = size_bytes // group
    sizes = [chunk] * (group - 1) + [chunk // nodes] * stage_b + [chunk] * (group - 1)
    return _ring_steps(np.array(sizes, dtype=np.int64), np.array(peers, dtype=np.int64).reshape(len(peers), world_size))


ALGORITHMS: dict[str, Callable[[Ints, int], Plan]] = {
    "direct": _direct,
    "pairwise_shift": _shift,
    "pairwise_shift_barrier": _shift_barrier,
    "pairwise_xor": _xor,
    "hier2_barrier": _hier2_barrier,
    "hier2_local": _hier2_local,
}
_RINGS: dict[str, Callable[[int, int, int], Plan]] = {
    "ring_allreduce": _ring_allreduce,
    "hier_ring_allreduce": _hier_ring_allreduce,
}


def build_plan(algorithm: str, traffic: str | None, size_bytes: int, world_size: int, group: int) -> Plan:
    """The flows and nodes of a named algorithm.

    Args:
        algorithm: one of `ALGORITHMS` (all-to-all; `traffic` says who sends how much), or `ring_allreduce`,
            `hier_ring_allreduce` (`traffic` does not apply)
        traffic: one of `TRAFFIC`
        size_bytes: S of the traffic and algorithm rules, bytes per rank
        group: ranks per node of the two-level algorithms
    """
    check_names(algorithm, traffic, world_size, group)
    if algorithm in _RINGS:
        return _RINGS[algorithm](size_bytes, world_size, group)
    assert traffic is not None
    return ALGORITHMS[algorithm](traffic_matrix(traffic, size_bytes, world_size), group)


def check_names(algorithm: str, traffic: str | None, world_size: int, group: int) -> None:
    """Refuses an unknown algorithm or traffic rule, and ranks that an algorithm cannot take.

    Raises:
        CaseError: names the field of a case file.
    """
    if algorithm not in ALGORITHMS and algorithm not in _RINGS:
        raise CaseError(f"algorithm: {unknown_name('algorithm', algorithm, [*ALGORITHMS, *_RINGS])}")
    if algorithm in ALGORITHMS:
        if traffic is None:
            raise CaseError(
                f"traffic: algorithm {algorithm!r} needs a rule; expected one of {', '.join(sorted(TRAFFIC))}"
            )
        if traffic not in TRAFFIC:
            raise CaseError(f"traffic: {unknown_name('traffic rule', traffic, TRAFFIC)}")
    if algorithm == "pairwise_xor" and world_size & (world_size - 1):
        raise CaseError(f"P: pairwise_xor needs a power of two of ranks, got {world_size}; use pairwise_shift")
    if algorithm.startswith("hier") and (group < 1 or world_size % group):
        raise CaseError(f"ranks_per_node must divide {world_size} ranks, got {group}")
