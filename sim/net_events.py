"""Event-driven max-min fair simulation for few flows at a time: only the flows a change reaches are touched."""

from __future__ import annotations

import heapq

import numpy as np

from sim.net_maxmin import MaxMin, Uses
from sim.net_problem import Floats, FlowProblem, NodeState

__all__ = ["simulate_events"]

_SAME_TIME = 1e-12


def _uses(problem: FlowProblem, flow: int) -> Uses:
    """Links and weights of a flow, made when it starts, so that millions of waiting flows take no memory."""
    num_links = len(problem.capacity)
    route = problem.routes[flow].tolist()
    if problem.weight is None:
        return tuple([(link, 1.0) for link in route if link < num_links])
    weights = problem.weight[flow].tolist()
    return tuple([(link, weight) for link, weight in zip(route, weights, strict=True) if link < num_links])


def simulate_events(problem: FlowProblem) -> Floats:
    """End of each flow in s; NaN for flows that nothing released."""
    nodes = NodeState(problem)
    size, delay = problem.size.tolist(), problem.delay.tolist()
    shares = MaxMin(problem.capacity.tolist())
    finish = [float("nan")] * problem.num_flows
    left: dict[int, float] = {}
    since: dict[int, float] = {}
    version = [0] * problem.num_flows  # 0: not started; events of an older version are void
    events = [(delay[flow], flow, 0) for flow in nodes.start().tolist()]
    heapq.heapify(events)
    rate = shares.rate
    while events:
        now = events[0][0]
        until = now + _SAME_TIME * now
        ended = []
        while events and events[0][0] <= until:
            _, flow, age = heapq.heappop(events)
            if age != version[flow]:
                continue
            if age == 0:
                version[flow] = 1
                left[flow], since[flow] = size[flow], now
                shares.add(flow, _uses(problem, flow))
            else:
                version[flow] = -1
                finish[flow] = now
                shares.remove(flow)
                ended.append(flow)
        for flow, old in shares.resolve().items():
            left[flow] -= old * (now - since[flow])
            since[flow] = now
            version[flow] += 1
            if rate[flow] > 0:
                heapq.heappush(events, (now + max(left[flow], 0.0) / rate[flow], flow, version[flow]))
        if ended:
            for flow in nodes.finish_few(ended):
                heapq.heappush(events, (now + delay[flow], flow, 0))
    return np.array(finish)
