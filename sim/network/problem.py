"""What the flow solvers work on: flows with routes and sizes, links with capacities, nodes that release flows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TopologyError

__all__ = ["FlowProblem", "NodeState"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowProblem:
    """Flows, links and nodes, one row each.

    Attributes:
        routes: int32 (flows, longest route): links of each flow, padded with `len(capacity)`
        weight: float64, same shape: bytes of capacity a flow takes per byte sent; None means 1 everywhere
        capacity: bytes/s of each directed link
        size: bytes of each flow, above 0
        delay: s from the release of a flow to the moment its bytes begin to move
        release: node whose completion releases the flow
        done, done_weight: int64 (flows, 2): nodes a flow counts towards (−1: none), and by how much
        node_pending: what each node still waits for; nodes with 0 complete at time 0
        node_next: the node that also waits for this one, or −1
    """

    routes: NDArray[np.int32]
    weight: Floats | None
    capacity: Floats
    size: Floats
    delay: Floats
    release: Ints
    done: Ints
    done_weight: Ints
    node_pending: Ints
    node_next: Ints

    @property
    def num_flows(self) -> int:
        return len(self.size)

    def check(self) -> None:
        """Raises TopologyError for links without capacity and for flows without a route."""
        wrong = np.flatnonzero(~(self.capacity > 0) | ~np.isfinite(self.capacity))
        if len(wrong):
            link = int(wrong[0])
            raise TopologyError(
                f"link {link}: bandwidth must be positive and finite, got {self.capacity[link]:g} bytes/s"
            )
        lost = np.flatnonzero((self.routes >= len(self.capacity)).all(axis=1))
        if len(lost):
            raise TopologyError(f"flow {int(lost[0])} has no route; every flow needs at least one link")


class NodeState:
    """Which nodes have completed, and the flows their completion releases."""

    def __init__(self, problem: FlowProblem) -> None:
        self.pending = problem.node_pending.copy()
        self.node_next = problem.node_next
        self.done = problem.done
        self.done_weight = problem.done_weight
        order = np.argsort(problem.release, kind="stable")
        self._flows = order
        self._first = np.searchsorted(problem.release[order], np.arange(len(self.pending) + 1))
        self._lists: tuple[list[Any], list[Any], list[Any], list[Any], list[Any], list[Any]] | None = None

    def start(self) -> Ints:
        """Flows released at time 0."""
        return self._complete(np.flatnonzero(self.pending == 0))

    def finish(self, flows: Ints) -> Ints:
        """Counts ended flows; returns the flows that this releases, in flow order per node."""
        nodes = self.done[flows].ravel()
        counted = nodes >= 0
        if not counted.any():
            return flows[:0]
        nodes = nodes[counted]
        np.subtract.at(self.pending, nodes, self.done_weight[flows].ravel()[counted])
        nodes = np.unique(nodes)
        return self._complete(nodes[self.pending[nodes] == 0])

    def finish_few(self, flows: list[int]) -> list[int]:
        """As `finish`, for a handful of flows: plain lists, no numpy call per flow. Do not mix the two."""
        if self._lists is None:
            self._lists = (
                self.pending.tolist(),
                self.node_next.tolist(),
                self.done.tolist(),
                self.done_weight.tolist(),
                self._first.tolist(),
                self._flows.tolist(),
            )
        pending, node_next, done, done_weight, first, order = self._lists
        released: list[int] = []
        for flow in flows:
            for node, amount in zip(done[flow], done_weight[flow], strict=True):
                if node < 0:
                    continue
                pending[node] -= amount
                following = node
                while following >= 0 and pending[following] == 0:
                    pending[following] = -1
                    released += order[first[following] : first[following + 1]]
                    following = node_next[following]
                    if following >= 0:
                        pending[following] -= 1
        return released

    def _complete(self, nodes: Ints) -> Ints:
        released = []
        while len(nodes):
            self.pending[nodes] = -1
            released += [self._flows[self._first[n] : self._first[n + 1]] for n in nodes]
            following = self.node_next[nodes]
            following = following[following >= 0]
            np.subtract.at(self.pending, following, 1)
            following = np.unique(following)
            nodes = following[self.pending[following] == 0]
        return np.concatenate(released) if released else np.zeros(0, dtype=np.int64)
