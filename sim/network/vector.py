"""Event-driven max-min fair simulation for many flows at a time: all flows advance together, with numpy."""

from __future__ import annotations

import heapq

import numpy as np

from sim.network.levels import Levels
from sim.network.problem import Floats, FlowProblem, Ints, NodeState

__all__ = ["simulate_vector"]

_SAME_TIME = 1e-11
_REFILL_SHARE = 0.05  # more new flows than this share of the active ones: solve from nothing


class _Active:
    """The moving flows in columns; ended ones stay parked until so many are that the columns are packed."""

    def __init__(self, problem: FlowProblem) -> None:
        self.problem = problem
        weight = problem.weight
        self.levels = Levels(problem.capacity, 1.0 if weight is None else float(weight[weight > 0].min(initial=1.0)))
        width = problem.routes.shape[1]
        self.flow = np.zeros(0, dtype=np.int64)
        self.routes = np.zeros((width, 0), dtype=np.int64)
        self.weight = None if weight is None else np.zeros((width, 0))
        self.left = np.zeros(0)
        self.bottleneck = np.zeros(0, dtype=np.int64)
        self.num_live = 0

    def add(self, flows: Ints) -> None:
        """Starts flows and solves anew."""
        problem, levels = self.problem, self.levels
        few = len(flows) <= _REFILL_SHARE * self.num_live
        routes = np.ascontiguousarray(problem.routes[flows].T, dtype=np.int64)
        weight = None if problem.weight is None else problem.weight[flows].T
        self.pack()
        self.flow = np.concatenate([self.flow, flows])
        self.routes = np.concatenate([self.routes, routes], axis=1)
        if self.weight is not None and weight is not None:
            self.weight = np.concatenate([self.weight, weight], axis=1)
        self.left = np.concatenate([self.left, problem.size[flows]])
        self.num_live += len(flows)
        if few:
            self.bottleneck = np.concatenate([self.bottleneck, levels.book(routes, weight)])
            levels.settle(self.routes, self.weight, self.bottleneck)
        else:
            self.bottleneck = np.concatenate([self.bottleneck, np.zeros(len(flows), dtype=np.int64)])
            levels.restart(self.routes, self.weight, self.bottleneck)

    def remove(self, columns: Ints) -> None:
        """Parks ended flows; the caller settles."""
        weight = None if self.weight is None else self.weight[:, columns]
        self.levels.move(self.routes[:, columns], weight, self.bottleneck[columns], None)
        self.routes[:, columns] = self.levels.num_links + 1
        self.bottleneck[columns] = self.levels.num_links + 1
        self.left[columns] = np.inf
        self.num_live -= len(columns)
        if self.num_live < 0.85 * len(self.flow):
            self.pack()

    def pack(self) -> None:
        keep = np.flatnonzero(self.bottleneck <= self.levels.num_links)
        if len(keep) == len(self.flow):
            return
        self.flow, self.left, self.bottleneck = self.flow[keep], self.left[keep], self.bottleneck[keep]
        self.routes = np.ascontiguousarray(self.routes[:, keep])
        self.weight = None if self.weight is None else np.ascontiguousarray(self.weight[:, keep])


def simulate_vector(problem: FlowProblem) -> Floats:
    """End of each flow in s; NaN for flows that nothing released."""
    nodes, active = NodeState(problem), _Active(problem)
    finish = np.full(problem.num_flows, np.nan)
    starts: list[tuple[float, Ints]] = []
    now = 0.0
    order = 0

    def release(flows: Ints) -> None:
        nonlocal order
        moments = now + problem.delay[flows]
        for moment in np.unique(moments):
            heapq.heappush(starts, (float(moment), order, flows[moments == moment]))  # type: ignore[misc]
            order += 1

    release(nodes.start())
    while starts or active.num_live:
        if active.num_live:
            rate = active.levels.level[active.bottleneck]
            to_end = active.left / rate
            next_end = now + float(to_end.min())
        else:
            next_end = np.inf
        slack = _SAME_TIME * max(min(next_end, starts[0][0] if starts else np.inf), 1e-12)
        moment = min(next_end, starts[0][0]) if starts else next_end
        ended = np.zeros(0, dtype=np.int64)
        if active.num_live:
            active.left -= rate * (moment - now)
            if next_end <= moment + slack:
                ended = np.flatnonzero(to_end <= moment - now + slack)
        now = moment
        if len(ended):
            flows = active.flow[ended]
            finish[flows] = now
            active.remove(ended)
            released = nodes.finish(flows)
            if len(released):
                release(released)
        begin = []
        while starts and starts[0][0] <= now + slack:
            begin.append(heapq.heappop(starts)[-1])
        if begin:
            active.add(np.concatenate(begin))
        elif len(ended) and active.num_live:
            active.levels.settle(active.routes, active.weight, active.bottleneck)
    return finish
