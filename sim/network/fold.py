"""Exact symmetry folding: flows that are alike are simulated once.

Colour refinement of the graph of flows, links and nodes gives its coarsest equitable partition: every link of a class
carries the same number of flows of each flow class, and every flow of a class crosses the same number of links of each
link class, is released by a node of the same class, and counts towards nodes of the same classes. By induction over the
events of the max-min fair simulation, flows of a class then have equal rates at all times, start and end together, so
one of them, with the capacity that its class takes on each link, stands for all of them. Nothing is approximated; where
there is no symmetry, nothing is folded.

Source: equitable partitions and linear programs, Grohe, Kersting, Mladenov, Selman, *Dimension Reduction via Colour
Refinement*, ESA 2014.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.network.problem import FlowProblem, Ints

__all__ = ["Folded", "fold"]

_MAX_ROUNDS = 64
_KEEP_BELOW = 0.7  # folding pays only if it leaves fewer rows than this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A smaller problem and, for each flow of the original one, the row that stands for it."""

    problem: FlowProblem
    row_of: Ints


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: a well spread 64-bit hash of each value."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _hash(colour: Ints, salt: int) -> NDArray[np.uint64]:
    return _mix(colour.astype(np.uint64) * np.uint64(0x2545F4914F6CDD1D) + np.uint64(salt * 7919 + 1))


def _relabel(*columns: NDArray[Any]) -> tuple[Ints, int]:
    """Numbers rows that agree in all columns alike, 0, 1, … in order of appearance; how many numbers there are."""
    codes, uniques = pd.factorize(columns[0])
    count = len(uniques)
    for column in columns[1:]:
        more, others = pd.factorize(column)
        if len(others) == 1:
            continue
        codes, uniques = pd.factorize(codes.astype(np.int64) * len(others) + more)
        count = len(uniques)
    return codes.astype(np.int64), count


class _Refinement:
    """Colours of flows, links and nodes, made finer round by round until they are stable."""

    def __init__(self, problem: FlowProblem, flow_tag: Ints, node_tag: Ints) -> None:
        self.problem = problem
        self.num_links = len(problem.capacity)
        self.flow, self.num_flow = _relabel(problem.size, problem.delay, flow_tag)
        self.link, self.num_link = _relabel(problem.capacity)
        self.node, self.num_node = _relabel(problem.node_pending, node_tag)
        self.salt = 0
        # one sort of all (link, flow) incidences, so that sums over the flows of a link are sums over runs
        used = problem.routes < self.num_links
        flows, _ = np.nonzero(used)
        links = problem.routes[used]
        order = np.argsort(links, kind="stable")
        self.flows_by_link = flows[order].astype(np.int32)
        self.run_starts = np.searchsorted(links[order], np.arange(self.num_links))
        self.empty = np.bincount(links, minlength=self.num_links) == 0

    def _sum_over_flows(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """For every link, the sum of `values` over its flows (modulo 2^64)."""
        gathered = np.append(values[self.flows_by_link], np.uint64(0))
        sums = np.add.reduceat(gathered, np.minimum(self.run_starts, len(gathered) - 1))
        sums[self.empty] = 0
        return cast("NDArray[np.uint64]", sums)

    def round(self) -> bool:
        """One round of refinement; True if any class was split."""
        problem, before = self.problem, (self.num_flow, self.num_link, self.num_node)
        self.salt += 1
        flow_hash = _hash(self.flow, 3 * self.salt)
        self.link, self.num_link = _relabel(_mix(_hash(self.link, 3 * self.salt + 1)) + self._sum_over_flows(flow_hash))
        self._round_nodes(flow_hash)
        link_hash = np.append(_hash(self.link, 3 * self.salt + 1), np.uint64(0))
        node_hash = np.append(_hash(self.node, 3 * self.salt + 2), np.uint64(0))
        total = _mix(flow_hash) + _mix(node_hash[problem.release])
        for hop in range(problem.routes.shape[1]):
            total += link_hash[problem.routes[:, hop]]
        if (problem.done >= 0).any():
            total += node_hash[problem.done[:, 0]] + node_hash[problem.done[:, 1]]
        self.flow, self.num_flow = _relabel(total)
        return (self.num_flow, self.num_link, self.num_node) != before

    def _round_nodes(self, flow_hash: NDArray[np.uint64]) -> None:
        problem = self.problem
        if len(self.node) == 1:
            return
        total = _mix(_hash(self.node, 3 * self.salt + 2))
        own = np.append(_hash(self.node, 3 * self.salt + 2), np.uint64(0))
        total += _mix(own[problem.node_next])
        np.add.at(total, problem.node_next[problem.node_next >= 0], _mix(_mix(own[:-1][problem.node_next >= 0])))
        np.add.at(total, problem.release, flow_hash)
        counted = _mix(_mix(flow_hash))
        for column in range(2):
            there = problem.done[:, column] >= 0
            np.add.at(total, problem.done[there, column], counted[there])
        self.node, self.num_node = _relabel(total)


def fold(problem: FlowProblem, flow_tag: Ints, node_tag: Ints) -> Folded | None:
    """The problem with equal flows, links and nodes merged, or None where that would save little.

    Args:
        problem: an unfolded problem (`weight` is None, `done_weight` all 1)
        flow_tag, node_tag: any labels that make different flows or nodes start out different (rounds, phases)
    """
    colours = _Refinement(problem, flow_tag, node_tag)
    limit = _KEEP_BELOW * problem.num_flows
    for _ in range(_MAX_ROUNDS):
        if colours.num_flow > limit:
            return None
        if not colours.round():
            break
    else:
        return None
    return None if colours.num_flow > limit else _quotient(problem, colours)


def _first_of(codes: Ints, count: int) -> Ints:
    first = np.full(count, len(codes), dtype=np.int64)
    np.minimum.at(first, codes, np.arange(len(codes)))
    return first


def _quotient(problem: FlowProblem, colours: _Refinement) -> Folded:
    flows = _first_of(colours.flow, colours.num_flow)
    nodes = _first_of(colours.node, colours.num_node)
    flow_count = np.bincount(colours.flow, minlength=colours.num_flow)
    link_count = np.bincount(colours.link, minlength=colours.num_link)
    node_count = np.bincount(colours.node, minlength=colours.num_node)
    link_class = np.append(colours.link, colours.num_link)
    routes = np.sort(link_class[problem.routes[flows]], axis=1)
    repeats = (routes[:, :, None] == routes[:, None, :]).sum(axis=2)
    first = np.ones_like(routes, dtype=bool)
    first[:, 1:] = routes[:, 1:] != routes[:, :-1]
    used = first & (routes < colours.num_link)
    weight = np.where(used, flow_count[:, None] * repeats / np.append(link_count, 1)[routes], 0.0)
    routes = np.where(used, routes, colours.num_link)
    packed = np.argsort(~used, axis=1, kind="stable")[:, : max(int(used.sum(axis=1).max(initial=1)), 1)]
    routes, weight = np.take_along_axis(routes, packed, axis=1), np.take_along_axis(weight, packed, axis=1)
    node_class = np.append(colours.node, -1)
    done = node_class[problem.done[flows]]
    same = (done[:, 0] == done[:, 1]) & (done[:, 0] >= 0)
    done_weight = np.where(done >= 0, flow_count[:, None] // np.append(node_count, 1)[done], 0)
    done_weight[same, 0] = (2 * flow_count[same]) // node_count[done[same, 0]]
    done[same, 1] = -1
    folded = FlowProblem(
        routes=routes.astype(np.int32),
        weight=weight,
        capacity=problem.capacity[_first_of(colours.link, colours.num_link)],
        size=problem.size[flows],
        delay=problem.delay[flows],
        release=node_class[problem.release[flows]],
        done=done,
        done_weight=done_weight,
        node_pending=problem.node_pending[nodes],
        node_next=node_class[problem.node_next[nodes]],
    )
    return Folded(problem=folded, row_of=colours.flow)
