"""Exact symmetry folding: flows that are alike are simulated once.

Colour refinement (`nestpipe.base.refine`) of flows, links and nodes: every link of a class carries the same number of
flows of each flow class, and every flow of a class crosses the same number of links of each link class, is released by
a node of the same class, and counts towards nodes of the same classes. By induction over the events of the max-min fair
simulation, flows of a class then have equal rates at all times, start and end together, so one of them, with the
capacity that its class takes on each link, stands for all of them. Nothing is approximated; where there is no symmetry,
nothing is folded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.base.refine import Edges, equal_rows, refine
from sim.network.problem import FlowProblem, Ints

__all__ = ["Folded", "fold"]

_MAX_ROUNDS = 64
_KEEP_BELOW = 0.7  # folding pays only if it leaves fewer rows than this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """A smaller problem and, for each flow of the original one, the row that stands for it."""

    problem: FlowProblem
    row_of: Ints


def fold(problem: FlowProblem, flow_tag: Ints, node_tag: Ints) -> Folded | None:
    """The problem with equal flows, links and nodes merged, or None where that would save little.

    Args:
        problem: an unfolded problem (`weight` is None, `done_weight` all 1)
        flow_tag, node_tag: any labels that make different flows or nodes start out different (rounds, phases)
    """
    limit = _KEEP_BELOW * problem.num_flows
    flow, link, node = "flow", "link", "node"
    colours = refine(
        {
            link: equal_rows(problem.capacity),
            node: equal_rows(problem.node_pending, node_tag),
            flow: equal_rows(problem.size, problem.delay, flow_tag),
        },
        [
            Edges(flow, link, problem.routes),
            Edges(flow, node, problem.release[:, None]),
            Edges(flow, node, problem.done),
            Edges(node, node, problem.node_next[:, None]),
        ],
        most={flow: limit},
        most_rounds=_MAX_ROUNDS,
    )
    return None if colours is None else _quotient(problem, colours[flow], colours[link], colours[node])


def _first_of(codes: Ints, count: int) -> Ints:
    first = np.empty(count, dtype=np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    return first


def _quotient(problem: FlowProblem, flow: Ints, link: Ints, node: Ints) -> Folded:
    flow_count, link_count, node_count = np.bincount(flow), np.bincount(link), np.bincount(node)
    flows, nodes = _first_of(flow, len(flow_count)), _first_of(node, len(node_count))
    num_link = len(link_count)
    link_class = np.append(link, num_link)
    routes = np.sort(link_class[problem.routes[flows]], axis=1)
    repeats = (routes[:, :, None] == routes[:, None, :]).sum(axis=2)
    first = np.ones_like(routes, dtype=bool)
    first[:, 1:] = routes[:, 1:] != routes[:, :-1]
    used = first & (routes < num_link)
    weight = np.where(used, flow_count[:, None] * repeats / np.append(link_count, 1)[routes], 0.0)
    routes = np.where(used, routes, num_link)
    packed = np.argsort(~used, axis=1, kind="stable")[:, : max(int(used.sum(axis=1).max(initial=1)), 1)]
    routes, weight = np.take_along_axis(routes, packed, axis=1), np.take_along_axis(weight, packed, axis=1)
    node_class = np.append(node, -1)
    done = node_class[problem.done[flows]]
    same = (done[:, 0] == done[:, 1]) & (done[:, 0] >= 0)
    done_weight = np.where(done >= 0, flow_count[:, None] // np.append(node_count, 1)[done], 0)
    done_weight[same, 0] = (2 * flow_count[same]) // node_count[done[same, 0]]
    done[same, 1] = -1
    folded = FlowProblem(
        routes=routes.astype(np.int32),
        weight=weight,
        capacity=problem.capacity[_first_of(link, num_link)],
        size=problem.size[flows],
        delay=problem.delay[flows],
        release=node_class[problem.release[flows]],
        done=done,
        done_weight=done_weight,
        node_pending=problem.node_pending[nodes],
        node_next=node_class[problem.node_next[nodes]],
    )
    return Folded(problem=folded, row_of=flow)
