"""Event-driven max-min fair simulation where a change reaches few links: only those are touched."""

from __future__ import annotations

import heapq
import math

import numpy as np

from sim.network.links import Links
from sim.network.problem import Floats, FlowProblem, NodeState

__all__ = ["simulate_events"]

_SAME_TIME = 1e-12

_heappush, _heappop = heapq.heappush, heapq.heappop


class _Ends:
    """When the next flow ends: a heap over links, each with the first of its flows; older entries are void."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.version = [0] * len(links.capacity)
        self.heap: list[tuple[float, int, int]] = []

    def next(self) -> float:
        """The time of the next end, or infinity."""
        heap, version = self.heap, self.version
        while heap and version[heap[0][1]] != heap[0][2]:
            _heappop(heap)
        return heap[0][0] if heap else math.inf

    def take(self, until: float) -> list[int]:
        """Takes out the flows that end up to `until`, which is a rounding after now."""
        links, ended = self.links, []
        while self.next() <= until:
            link = _heappop(self.heap)[1]
            links.advance(link)
            reached = links.clock[link] + (until - links.now) * links.level[link]
            queue, members = links.ends[link], links.members[link]
            while queue and (members.get(queue[0][1]) != queue[0][0] or queue[0][0] <= reached):
                end, flow = _heappop(queue)
                if members.get(flow) == end:
                    links.end(flow)
                    ended.append(flow)
            links.changed.add(link)
        return ended

    def renew(self) -> None:
        """Books the next end of every link that changed."""
        links, version = self.links, self.version
        for link in links.changed:
            version[link] += 1
            members, queue = links.members[link], links.ends[link]
            if not members:
                continue
            while members.get(queue[0][1]) != queue[0][0]:
                _heappop(queue)
            links.advance(link)
            left = max(queue[0][0] - links.clock[link], 0.0)
            _heappush(self.heap, (links.now + left / links.level[link], link, version[link]))
        links.changed.clear()


def simulate_events(problem: FlowProblem) -> Floats:
    """End of each flow in s, NaN for flows that nothing released."""
    nodes, links = NodeState(problem), Links(problem)
    ends, delay = _Ends(links), problem.delay.tolist()
    finish = [math.nan] * problem.num_flows
    starts = [(delay[flow], flow) for flow in nodes.start().tolist()]
    heapq.heapify(starts)
    while (now := min(ends.next(), starts[0][0] if starts else math.inf)) < math.inf:
        links.now, until = now, now + _SAME_TIME * now
        ended = ends.take(until)
        for flow in ended:
            finish[flow] = now
        begin = []
        while starts and starts[0][0] <= until:
            begin.append(_heappop(starts)[1])
        if begin:
            links.start(begin)
        links.settle()
        ends.renew()
        for flow in nodes.finish_few(ended):
            _heappush(starts, (now + delay[flow], flow))
    return np.array(finish)
