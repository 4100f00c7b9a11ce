"""Max-min fair levels of many flows at once, with numpy.

Every link has a *level*: the rate of the flows it holds back. A flow's rate is the smallest level on its route; the
link with that level is its bottleneck. Two solvers find the levels:

- `fill`, progressive filling: all links whose fair share is the smallest among the links they share flows with are
  bottlenecks at once, so a round settles many levels; exact from any state.
- `Levels.settle`, for a state that changed a little: given each flow's bottleneck, the levels solve a linear system
  (row of a link: the flows it holds back, and those held back elsewhere). With new levels some flows have another
  bottleneck; repeat until none has. The end state is checked against the definition: no link over capacity, every
  flow at the smallest level of its route, every bottleneck full. If it is not reached within a few rounds, `fill`
  does it.

Source: progressive filling, Bertsekas and Gallager, *Data Networks*, 2nd ed. 1992, section 6.5.2.
"""

from __future__ import annotations

import numpy as np

from sim.network.problem import Floats, Ints

__all__ = ["Levels", "fill"]

_TIE = 1e-12
_ROUNDS = 12
_BLOCK = 64


def fill(routes: Ints, weight: Floats | None, capacity: Floats) -> tuple[Floats, Ints]:
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


def _sum_at_links(routes: Ints, weight: Floats | None, value: Floats | None, num_links: int) -> Floats:
    """For every link (and the padding), the sum over its flows of weight times value."""
    total = np.zeros(num_links + 1)
    for number, hop in enumerate(routes):
        factor = None if weight is None else weight[number]
        if value is not None:
            factor = value if factor is None else factor * value
        total += np.bincount(hop, weights=factor, minlength=num_links + 1)
    return total


def _forward(holds: Floats, order: Ints, right: Floats) -> Floats:
    """Solves the rows and columns `order` of `holds`, which are lower triangular.

    In blocks: what is gathered stays in the cache, and BLAS starts no threads, which would cost more than they give.
    """
    from scipy.linalg.blas import dtrsv

    found = np.empty(len(right))
    for start in range(0, len(right), _BLOCK):
        end = min(start + _BLOCK, len(right))
        rows = holds.take(order[start:end], axis=0).take(order[:end], axis=1)
        rest = right[start:end] - np.einsum("ij,j->i", rows[:, :start], found[:start])
        found[start:end] = dtrsv(rows[:, start:].T, rest, lower=0, trans=1)
    return found


class Levels:
    """Levels of the links under a set of flows that changes now and then.

    Flows sit in columns; `capacity` has one entry a link. Column arrays belong to the caller, who passes them to each
    method. Two more entries follow the links: `num_links`, the padding, with an infinite level, and `num_links + 1`,
    where ended flows are parked, with level 1. Links are ranked by level, equal levels (to 1e-12) by number, so the
    bottleneck of a flow is the link of lowest rank on its route, and the linear system, in rank order, is lower
    triangular.
    """

    def __init__(self, capacity: Floats, least_weight: float) -> None:
        self.capacity = capacity
        self.holding = 0.5 * least_weight  # a link that holds flows back has at least one of them
        self.num_links = len(capacity)
        self.level = np.full(self.num_links + 2, np.inf)
        self.level[-1] = 1.0
        self.rank = np.full(self.num_links + 2, self.num_links, dtype=np.int32)
        self.order = np.zeros(0, dtype=np.int64)
        self.holds = np.zeros((self.num_links + 2, self.num_links + 2))  # [l, m]: flows on l whose bottleneck is m
        self.guessed = False  # some levels are guesses, so bottlenecks may not be of lowest rank
        self.fills = 0
        self.solves = 0

    def restart(self, routes: Ints, weight: Floats | None, bottleneck: Ints) -> None:
        """Solves from nothing for the flows given, writing their bottlenecks."""
        self.fills += 1
        live = np.flatnonzero(routes[0] <= self.num_links)
        whole = len(live) == routes.shape[1]
        part = weight if whole or weight is None else weight[:, live]
        live_routes = routes if whole else routes[:, live]
        rate, holder = fill(live_routes, part, self.capacity)
        self.level[: self.num_links] = np.inf
        self.level[holder] = rate
        self._rank()
        first = self.rank.take(live_routes).min(axis=0)
        bottleneck[live] = self.order[first]
        self.holds[:] = 0
        self.move(live_routes, part, None, bottleneck[live])

    def move(self, routes: Ints, weight: Floats | None, old: Ints | None, new: Ints | None) -> None:
        """Books flows from one bottleneck to another, or in, or out."""
        for hop, row in enumerate(routes):
            amount = 1.0 if weight is None else weight[hop]
            if old is not None:
                np.subtract.at(self.holds, (row, old), amount)
            if new is not None:
                np.add.at(self.holds, (row, new), amount)

    def book(self, routes: Ints, weight: Floats | None) -> Ints:
        """Takes new flows in at a first guess of their bottleneck, which is returned; `settle` puts it right."""
        known = np.append(self.level[: self.num_links], np.inf)
        guess = np.where(np.isfinite(known), known, np.append(self.capacity, np.inf))
        new: Ints = np.take_along_axis(routes, guess.take(routes).argmin(axis=0)[None, :], axis=0)[0]
        self.level[new] = np.minimum(self.level[new], self.capacity[new])
        self.move(routes, weight, None, new)
        self._rank()
        self.guessed = True
        return new

    def settle(self, routes: Ints, weight: Floats | None, bottleneck: Ints) -> None:
        """Levels for the flows given, starting from the bottlenecks they had before the change."""
        for _ in range(_ROUNDS):
            if self.guessed:
                self._reassign(routes, weight, bottleneck)
                self.guessed = False
            if not self._solve():
                break
            self._rank()
            over = self._overloaded()
            if len(over):
                self._open(over, routes, weight, bottleneck)
                self._rank()
                self.guessed = True
            elif not self._reassign(routes, weight, bottleneck):
                return
        self.guessed = False
        self.restart(routes, weight, bottleneck)

    def _rank(self) -> None:
        full = np.flatnonzero(np.isfinite(self.level[: self.num_links]))
        levels = self.level[full]
        order = np.argsort(levels, kind="stable")
        ascending = levels[order]
        tied = ascending[1:] <= ascending[:-1] * (1 + _TIE)
        if tied.any():
            group = np.concatenate([[0], np.cumsum(~tied)])
            order = order[np.lexsort((order, group))]
        self.order = full[order]
        self.rank[: self.num_links] = self.num_links
        self.rank[self.order] = np.arange(len(order), dtype=np.int32)
        self.order = np.append(self.order, self.num_links + 1)
        self.rank[-1] = len(order)

    def _solve(self) -> bool:
        """Levels of the links that hold flows back; False if the system makes no sense."""
        self.solves += 1
        order = self.order[:-1]
        holding = self.holds.diagonal().take(order) > self.holding
        order = order[holding]
        found = _forward(self.holds, order, self.capacity.take(order))
        if not (found > 0).all():
            return False
        self.level[: self.num_links] = np.inf
        self.level[order] = found
        return True

    def _reassign(self, routes: Ints, weight: Floats | None, bottleneck: Ints) -> bool:
        """Gives every flow the link of lowest rank on its route as bottleneck; True if any had another."""
        first = self.rank.take(routes).min(axis=0)
        wrong = np.flatnonzero(first != self.rank.take(bottleneck))
        if not len(wrong):
            return False
        old, new = bottleneck[wrong], self.order[first[wrong]]
        self.move(routes[:, wrong], None if weight is None else weight[:, wrong], old, new)
        bottleneck[wrong] = new
        return bool((np.abs(self.level[old] - self.level[new]) > _TIE * self.level[new]).any())

    def _overloaded(self) -> Ints:
        """Links without a level whose flows, held back elsewhere, take more than there is."""
        idle = np.flatnonzero(~np.isfinite(self.level[: self.num_links]))
        full = self.order[:-1]
        level = np.zeros(self.num_links + 2)
        level[full] = self.level.take(full)
        load = np.einsum("ij,j->i", self.holds, level)  # of all links: gathering the rows of the idle would cost more
        over: Ints = idle[load.take(idle) > self.capacity.take(idle) * (1 + _TIE)]
        return over

    def _open(self, links: Ints, routes: Ints, weight: Floats | None, bottleneck: Ints) -> None:
        """Gives overloaded links the level at which their flows, cut down to it, fit."""
        wanted = np.zeros(self.num_links + 2, dtype=bool)
        wanted[links] = True
        hops, flows = np.nonzero(wanted.take(routes))
        owner = routes[hops, flows]
        rates = self.level[bottleneck[flows]]
        order = np.lexsort((rates, owner))
        owner, rates = owner[order], rates[order]
        amounts = np.ones(len(flows)) if weight is None else weight[hops, flows][order]
        for start, end in zip(*_runs(owner), strict=True):
            rate, amount = rates[start:end], amounts[start:end]
            below = np.concatenate([[0.0], np.cumsum(amount * rate)[:-1]])
            above = amount[::-1].cumsum()[::-1]
            level = (self.capacity[owner[start]] - below) / above
            self.level[owner[start]] = level[int(np.argmax(level < rate))]


def _runs(values: Ints) -> tuple[Ints, Ints]:
    """Where runs of equal values start and end."""
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    return starts, np.append(starts[1:], len(values))
