"""Message programs: the flows of an algorithm one by one, and the nodes whose completion releases them.

A *node* is a moment a rank (or everybody) waits for: it completes when its `pending` count of flows and of its
predecessor has run down, and then releases its flows. Every algorithm of `sim.network.collectives`, from one burst of
all flows to rounds that each rank enters on its own, becomes such a graph, so one simulation runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from nestpipe.base import CaseError, unknown_name
from sim.network import ALGORITHMS, Floats, FlowProblem, Ints, PairTraffic, Place, Round

__all__ = ["PROGRAMS", "TRAFFIC", "MessageProgram", "build_program", "check_names", "list_flows", "traffic_matrix"]

#: Names of case files: collective and algorithm of `sim.network.collectives.ALGORITHMS`, and whether ranks go from step
#: to step on their own, not all together. Any other row of that table goes by `collective/algorithm`, all together.
PROGRAMS: dict[str, tuple[str, str, bool]] = {
    f"{collective}/{name}": (collective, name, False) for collective, rows in ALGORITHMS.items() for name in rows
} | {
    "direct": ("all_to_all", "direct", False),
    "pairwise_shift": ("all_to_all", "pairwise", True),
    "pairwise_shift_barrier": ("all_to_all", "pairwise", False),
    "pairwise_xor": ("all_to_all", "pairwise_xor", True),
    "hier2_barrier": ("all_to_all", "hierarchical", False),
    "hier2_local": ("all_to_all", "hierarchical", True),
    "ring_allreduce": ("all_reduce", "ring", True),
    "hier_ring_allreduce": ("all_reduce", "hierarchical", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageProgram:
    """Flows between ranks and the nodes that order them; row `f` of each flow array is one flow.

    `done` holds the nodes a flow counts towards (−1: no such node); `node_next` is the node that waits for this one
    too, or −1. `flow_tag` and `node_tag` tell rounds apart. A flow starts to move after `hops` times its route's
    latency. `local` says that ranks enter rounds on their own.
    """

    src: Ints
    dst: Ints
    size_bytes: Ints
    hops: Ints
    release: Ints
    done: Ints
    node_pending: Ints
    node_next: Ints
    flow_tag: Ints
    node_tag: Ints
    local: bool

    @property
    def num_flows(self) -> int:
        return len(self.src)

    def problem(self, routes: np.ndarray, capacity: Floats, latency_s: Floats) -> FlowProblem:
        """The program on a network.

        Args:
            routes: int32 (flows, longest route): links of each flow, padded with `len(capacity)`
            capacity: bytes/s of each link
            latency_s: of each link, and 0 for the padding
        """
        return FlowProblem(
            routes=routes,
            weight=None,
            capacity=capacity,
            size=self.size_bytes.astype(np.float64),
            delay=self.hops * sum((latency_s[hop] for hop in routes.T), start=np.zeros(len(routes))),
            release=self.release,
            done=self.done,
            done_weight=np.ones_like(self.done),
            node_pending=self.node_pending,
            node_next=self.node_next,
        )


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


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Bytes between each two ranks, as the `Traffic` of an All2All."""

    bytes_: Ints

    @property
    def num_ranks(self) -> int:
        return len(self.bytes_)

    @property
    def even(self) -> bool:
        return False  # list every round

    def between(self, src: Ints, dst: Ints) -> Ints:
        return self.bytes_[src, dst]

    def all_pairs(self) -> Round:
        src, dst = np.divmod(np.arange(self.num_ranks**2), self.num_ranks)
        return Round(src=src, dst=dst, size=self.bytes_.ravel())

    def inside(self, place: Place) -> Round:
        return self._grouped(place, axis=2)

    def across(self, place: Place) -> Round:
        return self._grouped(place, axis=1)

    def _grouped(self, place: Place, axis: int) -> Round:
        """Summed over destination nodes (axis 2), for each local rank, or over senders (1), along local ranks."""
        nodes = place.num_nodes
        group = self.num_ranks // nodes
        rank = np.arange(self.num_ranks).reshape(nodes, group)
        size = self.bytes_.reshape(nodes, group, nodes, group).sum(axis=axis)
        if axis == 2:
            src, dst = np.broadcast_arrays(rank[:, :, None], rank[:, None, :])
        else:
            src, dst = np.broadcast_arrays(rank[:, None, :], rank[None, :, :])
        return Round(src=src.ravel(), dst=dst.ravel(), size=size.ravel())


def _flows(step: Round | PairTraffic) -> Round:
    """A step as a round of flows."""
    if isinstance(step, Round):
        return step
    src, dst = np.divmod(np.arange(len(step.ranks) ** 2), len(step.ranks))
    size = np.where(step.label[src] == step.label[dst], step.send[src] * step.recv[dst], 0.0)
    return Round(src=step.ranks[src], dst=step.ranks[dst], size=size)


def list_flows(steps: Iterable[Round | PairTraffic], world_size: int, *, local: bool) -> MessageProgram:
    """The flows of some steps, one step after the other; empty flows and those of a rank to itself are left out.

    Args:
        local: a rank enters its next round when its own flows, sent and received, have ended; else all wait for all
    """
    rounds = [flows for step in steps for flows in [_flows(step)] * int(step.times if isinstance(step, Round) else 1)]
    counts = [len(flows.src) for flows in rounds]
    number = np.repeat(np.arange(len(rounds)), counts)
    src, dst, size = (
        np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(flows, name) for flows in rounds)]).astype(np.int64)
        for name in ("src", "dst", "size")
    )
    keep = np.flatnonzero((size > 0) & (src != dst))
    number, src, dst, size = number[keep], src[keep], dst[keep], size[keep]
    width = world_size if local else 1  # nodes of a round
    done = (number[:, None] + 1) * width + (np.stack([src, dst], axis=1) if local else 0)
    done[number == len(rounds) - 1] = -1  # nobody waits for the last round
    if not local:
        done = np.stack([done[:, 0], np.full(len(src), -1)], axis=1)
    nodes = np.arange(max(len(rounds), 1) * width)
    following = np.where(nodes + width < len(nodes), nodes + width, -1)
    pending = np.zeros(len(nodes), dtype=np.int64)
    np.add.at(pending, done[done >= 0], 1)
    np.add.at(pending, following[following >= 0], 1)
    return MessageProgram(
        src=src,
        dst=dst,
        size_bytes=size,
        hops=np.repeat([flows.hops for flows in rounds], counts)[keep].astype(np.int64),
        release=number * width + (src if local else 0),
        done=done,
        node_pending=pending,
        node_next=following,
        flow_tag=number,
        node_tag=nodes // width,
        local=local,
    )


def build_program(algorithm: str, traffic: str | None, size_bytes: int, world_size: int, group: int) -> MessageProgram:
    """The flows and nodes of a named algorithm.

    Args:
        algorithm: one of `PROGRAMS`
        traffic: one of `TRAFFIC`, for All2Alls; does not apply to others
        size_bytes: S of the traffic and algorithm rules, bytes per rank
        group: ranks per node of the two-level algorithms

    Raises:
        CaseError: see `check_names`.
    """
    check_names(algorithm, traffic, world_size, group)
    collective, name, local = PROGRAMS[algorithm]
    place = _place(world_size, group)
    if collective == "all_to_all":
        assert traffic is not None
        steps = ALGORITHMS[collective][name].steps(_Matrix(traffic_matrix(traffic, size_bytes, world_size)), place)
    else:
        steps = ALGORITHMS[collective][name].steps(size_bytes, place)
    return list_flows(steps, world_size, local=local)


def _place(world_size: int, group: int) -> Place:
    rank = np.arange(world_size)
    whole = group >= 1 and world_size % group == 0
    width = group if whole else 1
    return Place(node=rank // width, local=rank % width, table=rank.reshape(-1, width) if whole else None, num_rings=1)


def check_names(algorithm: str, traffic: str | None, world_size: int, group: int) -> None:
    """Refuses an unknown algorithm or traffic rule, and ranks that an algorithm does not take.

    Raises:
        CaseError: names the field of a case file.
    """
    if algorithm not in PROGRAMS:
        raise CaseError(f"algorithm: {unknown_name('algorithm', algorithm, PROGRAMS)}")
    collective, name, _ = PROGRAMS[algorithm]
    if collective == "all_to_all":
        if traffic is None:
            raise CaseError(
                f"traffic: algorithm {algorithm!r} needs a rule; expected one of {', '.join(sorted(TRAFFIC))}"
            )
        if traffic not in TRAFFIC:
            raise CaseError(f"traffic: {unknown_name('traffic rule', traffic, TRAFFIC)}")
    if name == "hierarchical" and (group < 1 or world_size % group):
        raise CaseError(f"ranks_per_node must divide {world_size} ranks, got {group}")
    if (lacking := ALGORITHMS[collective][name].lacks(_place(world_size, group))) is not None:
        raise CaseError(f"P: {algorithm} needs {lacking}")
