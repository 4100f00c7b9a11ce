"""Max-min fair levels of many flows at once, with numpy.

Every link has a *level*: the rate of the flows it holds back. A flow's rate is the smallest level on its route; the link
with that level is its bottleneck. Two solvers find the levels:

- `fill`, progressive filling: all links whose fair share is the smallest among the links they share flows with are
  bottlenecks at once, so a round settles many levels; exact from any state.
- `Levels.settle`, for a state that changed a little: given each flow's bottleneck, the levels solve a linear system (row
  of a link: the flows it holds back, and those held back elsewhere). With new levels some flows have another bottleneck;
  repeat until none has. The end state is checked against the definition: no link over capacity, every flow at the smallest
  level of its route, every bottleneck full. If it is not reached within a few rounds, `fill` does it.

Source: progressive filling, Bertsekas and Gallager, *Data Networks*, 2nd ed. 1992, section 6.5.2.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

from sim.net_problem import Floats, Ints

__all__ = ["Levels", "fill"]

_TIE = 1e-12
_ROUNDS = 12


def fill(routes: NDArray[np.int32], weight: Floats | None, capacity: Floats) -> tuple[Floats, Ints]:
    """Max-min fair rates and the bottleneck link of each flow.

    Args:
        routes: (longest route, flows), padded with `len(capacity)`
        weight: same shape, capacity taken per unit of rate, or None for 1
        capacity: of each link
    """
    num_links, num_flows = len(capacity), routes.shape[1]
    left = np.append(capacity, np.inf)
    rate, bottleneck = np.zeros(num_flows), np.zeros(num_flows, dtype=np.int64)
    open_flows = np.arange(num_flows)
    while len(open_flows):
        count = _sum_at_links(routes, weight, None, num_links)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.maximum(left, 0.0) / count
        share[num_links] = np.inf
        shares = share[routes]
        smallest = shares.min(axis=0)
        rival = np.full(num_links + 1, np.inf)
        for hop in routes:
            np.minimum.at(rival, hop, smallest)
        full = share <= rival * (1 + _TIE)
        full[num_links] = False
        holder = routes[np.where(full[routes], shares, np.inf).argmin(axis=0), np.arange(routes.shape[1])]
        settled = full[holder]
        fixed = np.flatnonzero(settled)
        rate[open_flows[fixed]], bottleneck[open_flows[fixed]] = share[holder[fixed]], holder[fixed]
        part = None if weight is None else weight[:, fixed]
        left -= _sum_at_links(routes[:, fixed], part, share[holder[fixed]], num_links)
        left[num_links] = np.inf
        keep = np.flatnonzero(~settled)
        open_flows, routes = open_flows[keep], routes[:, keep]
        weight = None if weight is None else weight[:, keep]
    return rate, bottleneck


def _sum_at_links(routes: NDArray[np.int32], weight: Floats | None, value: Floats | None, num_links: int) -> Floats:
    """For every link (and the padding), the sum over its flows of weight times value."""
    total = np.zeros(num_links + 1)
    for number, hop in enumerate(routes):
        factor = None if weight is None else weight[number]
        if value is not None:
            factor = value if factor is None else factor * value
        total += np.bincount(hop, weights=factor, minlength=num_links + 1)
    return total


class Levels:
    """Levels of the links under a set of flows that changes now and then.

    Flows sit in columns; `capacity` has one entry a link. Column arrays belong to the caller, who passes the live part of
    them to each method. Two more entries follow the links: `num_links`, the padding, with an infinite level, and
    `num_links + 1`, where ended flows are parked, with level 1.
    """

    def __init__(self, capacity: Floats) -> None:
        self.capacity = capacity
        self.num_links = len(capacity)
        self.level = np.full(self.num_links + 2, np.inf)
        self.level[-1] = 1.0
        self.holds = np.zeros((self.num_links + 2, self.num_links + 2))  # [l, m]: flows on l whose bottleneck is m
        self.fills = 0
        self.solves = 0

    def restart(self, routes: NDArray[np.int32], weight: Floats | None, bottleneck: Ints) -> None:
        """Solves from nothing for the flows given, writing their bottlenecks."""
        self.fills += 1
        live = np.flatnonzero(routes[0] <= self.num_links)
        part = None if weight is None else weight[:, live]
        rate, bottleneck[live] = fill(routes[:, live], part, self.capacity)
        self.level[: self.num_links] = np.inf
        self.level[bottleneck[live]] = rate
        self.holds[:] = 0
        for hop, row in enumerate(routes[:, live]):
            np.add.at(self.holds, (row, bottleneck[live]), 1.0 if part is None else part[hop])

    def move(self, routes: NDArray[np.int32], weight: Floats | None, old: Ints | None, new: Ints | None) -> None:
        """Books a few flows from one bottleneck to another, or in, or out."""
        for hop, row in enumerate(routes):
            amount = 1.0 if weight is None else weight[hop]
            if old is not None:
                np.subtract.at(self.holds, (row, old), amount)
            if new is not None:
                np.add.at(self.holds, (row, new), amount)

    def settle(self, routes: NDArray[np.int32], weight: Floats | None, bottleneck: Ints) -> None:
        """Levels for the flows given, starting from the bottlenecks they had before the change."""
        for _ in range(_ROUNDS):
            if not self._solve():
                break
            changed = self._reassign(routes, weight, bottleneck)
            over = self._overloaded()
            if not changed and not len(over):
                return
            if len(over):
                self._open(over, routes, weight, bottleneck)
        self.restart(routes, weight, bottleneck)

    def _solve(self) -> bool:
        """Levels of the links that hold flows back; False if the system makes no sense."""
        self.solves += 1
        full = np.flatnonzero(self.holds.diagonal()[: self.num_links] > 0.5)
        order = full[np.argsort(self.level[full], kind="stable")]
        system = self.holds[order[:, None], order]
        right = self.capacity[order]
        if len(order) and np.count_nonzero(np.triu(system, 1)):
            try:
                found = np.linalg.solve(system, right)
            except np.linalg.LinAlgError:
                return False
        else:
            found = scipy.linalg.solve_triangular(system, right, lower=True, check_finite=False)
        if not (found > 0).all():
            return False
        self.level[: self.num_links] = np.inf
        self.level[order] = found
        return True

    def _reassign(self, routes: NDArray[np.int32], weight: Floats | None, bottleneck: Ints) -> int:
        """Gives every flow that meets a smaller level than its bottleneck's that link instead; how many there were."""
        levels = self.level[routes]
        wrong = np.flatnonzero(levels.min(axis=0) < self.level[bottleneck] * (1 - _TIE))
        if len(wrong):
            self._assign(wrong, levels[:, wrong].argmin(axis=0), routes, weight, bottleneck)
        return len(wrong)

    def _assign(
        self, flows: Ints, hop: Ints, routes: NDArray[np.int32], weight: Floats | None, bottleneck: Ints
    ) -> None:
        new = routes[hop, flows].astype(np.int64)
        self.move(routes[:, flows], None if weight is None else weight[:, flows], bottleneck[flows], new)
        bottleneck[flows] = new

    def _overloaded(self) -> Ints:
        """Links without a level whose flows, held back elsewhere, take more than there is."""
        slack = np.flatnonzero(np.isinf(self.level[: self.num_links]))
        full = np.flatnonzero(np.isfinite(self.level[: self.num_links]))
        load = self.holds[slack[:, None], full] @ self.level[full]
        return slack[load > self.capacity[slack] * (1 + _TIE)]

    def _open(self, links: Ints, routes: NDArray[np.int32], weight: Floats | None, bottleneck: Ints) -> None:
        """Gives overloaded links the level at which their flows, cut down to it, fit; the cut ones move there."""
        for link in links:
            hop, flows = np.nonzero(routes == link)
            rates = self.level[bottleneck[flows]]
            amount = np.ones(len(flows)) if weight is None else weight[hop, flows]
            order = np.argsort(rates)
            below = np.concatenate([[0.0], np.cumsum((amount * rates)[order])[:-1]])
            above = amount[order][::-1].cumsum()[::-1]
            level = (self.capacity[link] - below) / above
            first = int(np.argmax(level < rates[order]))
            self.level[link] = level[first]
            cut = order[first:]
            self._assign(flows[cut], hop[cut], routes, weight, bottleneck)
