"""Max-min fair rates link by link, touching only links whose level changes.

Every link has a *level*, the rate of the flows that it holds back; a flow is held back by the link of lowest level on
its route. All flows that a link holds back are served alike, so the link keeps one clock, the bytes that each of them
got, and the end of a flow is a fixed reading of that clock: while its bottleneck stays, nothing is done for a flow,
however often rates change. After a start or an end the levels of the links on the route are computed anew, and from
there those of links that share flows with one that changed, lowest level first, until nothing changes. Then every link
that holds flows back is full, nobody on it is faster, and no other link is over capacity: that is max-min fairness.

Source: Bertsekas and Gallager, *Data Networks*, 2nd ed. 1992, section 6.5.2 (bottleneck condition).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import numpy as np

from sim.network.levels import fill
from sim.network.problem import FlowProblem

__all__ = ["Links"]

_TIE = 1e-12  # relative: levels as close as this are equal, and the link of lowest number holds the flow back
_SAME = 1e-15
_BULK = 64  # so many flows that start at one moment are solved from nothing, if they are a good part of all
_MOST_ROUNDS = 40  # looks at links per moving flow before all is solved from nothing
_GONE = 1e-9  # of a flow's weight: what is left of the sum on a link when its last flow goes

_heappush, _heappop = heapq.heappush, heapq.heappop


class Links:
    """Levels, clocks and flows of the links of a problem; `now` is set by the caller before anything else.

    Attributes:
        level: rate per flow that each link holds back, infinite where it holds back nobody
        members: for each link the flows it holds back, with the reading of its clock at their end
        ends: for each link a heap of (reading, flow); entries that `members` does not have are void
        changed: links whose level or members changed; emptied by the caller
        looks, pairs, moves: what was done so far: levels computed, links asked for them, flows that changed bottleneck
    """

    def __init__(self, problem: FlowProblem) -> None:
        self.problem = problem
        self.capacity: list[float] = problem.capacity.tolist()
        count = len(self.capacity)
        self.level = [math.inf] * count
        self.members: list[dict[int, float]] = [{} for _ in range(count)]
        self.ends: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self.clock, self.since, self.now = [0.0] * count, [0.0] * count, 0.0
        self.changed: set[int] = set()
        self.looks = self.pairs = self.moves = 0
        self.uses: dict[int, dict[int, float]] = {}  # of moving flows: weight on each link of the route
        self._holder: dict[int, int] = {}
        self._weight = [0.0] * count  # of all flows held back here
        self._others: list[dict[int, float]] = [{} for _ in range(count)]  # [l][m]: weight on l of flows that m holds
        self._reach: list[dict[int, None]] = [{} for _ in range(count)]  # [m]: other links of the flows that m holds
        self._spare = list(self.capacity)  # left on links that hold back nobody, but for rounding
        self._margin = [_GONE * capacity for capacity in self.capacity]
        self._queue: list[tuple[float, int]] = []
        self._queued: set[int] = set()
        self._loose: set[int] = set()  # links that hold back nobody and may be over capacity

    # --- flows come and go ----------------------------------------------------------------------------------------

    def start(self, flows: list[int]) -> None:
        """Starts flows; they have no rate before `settle`."""
        for flow in flows:
            self.uses[flow] = self._route(flow)
        if len(flows) >= _BULK and 4 * len(flows) > len(self.uses):
            self._restart(flows)
            return
        level, spare, size = self.level, self._spare, self.problem.size
        for flow in flows:
            uses = self.uses[flow]
            guess = min(uses, key=lambda link: spare[link] if level[link] == math.inf else level[link])
            self._join(flow, guess, float(size[flow]))
            self._touch(uses)

    def end(self, flow: int) -> None:
        """Takes out a flow that is done."""
        self._leave(flow)
        self._touch(self.uses.pop(flow))
        del self._holder[flow]

    def advance(self, link: int) -> None:
        """Brings a link's clock up to now."""
        passed = self.now - self.since[link]
        if passed > 0:
            if self.members[link]:
                self.clock[link] += self.level[link] * passed
            self.since[link] = self.now

    def _route(self, flow: int) -> dict[int, float]:
        count, weights = len(self.capacity), self.problem.weight
        route = self.problem.routes[flow].tolist()
        if weights is None:
            uses = {link: 1.0 for link in route if link < count}
            if len(uses) == len(route) or route[len(uses)] == count:
                return uses
        uses = {}
        for link, weight in zip(route, [1.0] * len(route) if weights is None else weights[flow].tolist(), strict=True):
            if link < count:
                uses[link] = uses.get(link, 0.0) + weight
        return uses

    def _join(self, flow: int, link: int, left: float) -> None:
        """Lets a link hold back a flow that has `left` bytes to send."""
        if self.members[link]:
            self.advance(link)
        else:
            self.clock[link], self.since[link], self.ends[link] = 0.0, self.now, []
            self._weight[link], self.level[link] = 0.0, 0.0
        end = self.clock[link] + left
        self.members[link][flow] = end
        _heappush(self.ends[link], (end, flow))
        self._holder[flow] = link
        others, reach, spare, rate = self._others, self._reach[link], self._spare, self.level[link]
        for other, weight in self.uses[flow].items():
            if other == link:
                self._weight[link] += weight
                continue
            spare[other] -= weight * rate
            row = others[other]
            if link in row:
                row[link] += weight
            else:
                row[link] = weight
                reach[other] = None
        self.changed.add(link)

    def _leave(self, flow: int) -> float:
        """Takes a flow off its bottleneck; the bytes it still has to send."""
        link = self._holder[flow]
        self.advance(link)
        left = self.members[link].pop(flow) - self.clock[link]
        others, reach, spare, rate = self._others, self._reach[link], self._spare, self.level[link]
        for other, weight in self.uses[flow].items():
            if other == link:
                self._weight[link] -= weight
                continue
            spare[other] += weight * rate
            row = others[other]
            rest = row[link] - weight
            if rest > _GONE * weight:
                row[link] = rest
            else:
                del row[link], reach[other]
        if not self.members[link]:
            self.level[link] = math.inf
            for other in reach:
                del others[other][link]
            reach.clear()
            self._loose.add(link)
        self.changed.add(link)
        return max(left, 0.0)

    # --- levels ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Computes levels anew, from links whose flows changed to all that this reaches."""
        queue, queued, loose, members = self._queue, self._queued, self._loose, self.members
        most = self.looks + _MOST_ROUNDS * (len(self.uses) + _MOST_ROUNDS)
        while queue or loose:
            if queue:
                link = _heappop(queue)[1]
                if link not in queued:
                    continue
                queued.discard(link)
            else:
                link = loose.pop()
                if members[link]:
                    continue
            if self.looks > most:
                self._restart([])
                return
            self._look(link)

    def _look(self, link: int) -> None:
        """The level of one link from those of the links it shares flows with, and on to these if it changed."""
        level, row = self.level, self._others[link]
        self.looks += 1
        self.pairs += len(row)
        rest, fastest = self.capacity[link], 0.0
        for other, weight in row.items():
            rate = level[other]
            rest -= weight * rate
            if rate > fastest:
                fastest = rate
        if self.members[link]:
            new = rest / self._weight[link]
        else:
            self._spare[link] = rest
            if rest >= -_TIE * self.capacity[link]:
                return
            new = -math.inf
        pulled = False
        if fastest >= new * (1 - _TIE):
            new, pulled = self._pull(link, rest, new)
        old = level[link]
        if not pulled and abs(new - old) <= _SAME * new:
            return
        self.advance(link)
        level[link] = new
        self.changed.add(link)
        self._spread(link, new - old)

    def _spread(self, link: int, rise: float) -> None:
        members, level, queue, queued = self.members, self.level, self._queue, self._queued
        spare, margin, others, loose = self._spare, self._margin, self._others, self._loose
        for other in self._reach[link]:
            if members[other]:
                if other not in queued:
                    queued.add(other)
                    _heappush(queue, (level[other], other))
            else:
                spare[other] -= others[other][link] * rise
                if spare[other] < margin[other]:
                    loose.add(other)

    def _touch(self, links: Iterable[int]) -> None:
        """Links whose flows have changed are looked at by the next `settle`."""
        for link in links:
            if self.members[link]:
                if link not in self._queued:
                    self._queued.add(link)
                    _heappush(self._queue, (self.level[link], link))
            elif self._spare[link] < self._margin[link]:
                self._loose.add(link)

    def _pull(self, link: int, rest: float, new: float) -> tuple[float, bool]:
        """Holds back here those flows of the link that are faster than its level, fastest first; its level then."""
        level, row, uses = self.level, self._others[link], self.uses
        pulled = []
        for rate, other in sorted([(level[other], other) for other in row], reverse=True):
            if rate < new * (1 - _TIE):
                break
            if rate <= new * (1 + _TIE) and other < link:
                continue
            rest += row[other] * rate
            moving = [flow for flow in self.members[other] if link in uses[flow]]
            for flow in moving:
                self._join(flow, link, self._leave(flow))
            self.moves += len(moving)
            pulled.append(other)
            new = rest / self._weight[link]
        self._touch(pulled)
        return new, bool(pulled)

    def _restart(self, begin: list[int]) -> None:
        """Solves all from nothing by progressive filling, with new flows."""
        problem, count = self.problem, len(self.capacity)
        flows = [*self._holder, *begin]
        left = [self._leave(flow) for flow in self._holder] + problem.size[begin].tolist()
        self._queue.clear()
        self._queued.clear()
        self._loose.clear()
        routes = np.ascontiguousarray(problem.routes[flows].T, dtype=np.int64)
        weight = None if problem.weight is None else np.ascontiguousarray(problem.weight[flows].T)
        rate, holder = fill(routes, weight, problem.capacity)
        level = np.full(count + 1, np.inf)
        level[holder] = rate
        tied = level[routes] <= level[routes].min(axis=0) * (1 + _TIE)
        holder = np.where(tied, routes, count).min(axis=0)
        for flow, link, rest in zip(flows, holder.tolist(), left, strict=True):
            self._join(flow, link, rest)
        load = np.zeros(count + 1)
        for number, hop in enumerate(routes):
            load += np.bincount(hop, weights=rate if weight is None else rate * weight[number], minlength=count + 1)
        self._spare = (problem.capacity - load[:count]).tolist()
        for link in np.unique(holder).tolist():
            self.level[link] = float(level[link])
