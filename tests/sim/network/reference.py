"""A second opinion on case files: the schedules and the fluid, from the words of the format alone, as slow as it gets.

Nothing here is shared with the solvers. Every rank is a coroutine of rounds, every rate comes from progressive filling
of all moving flows with exact fractions of the links' capacities, after each event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

__all__ = ["completion_s", "finish_s", "rates"]

_SAME = 1e-12  # relative: moments as close as this are one


@dataclass(eq=False)
class _Flow:
    path: list[int]
    left: float
    begins: float
    ends: float = math.nan
    waited_by: list[_Wait] = field(default_factory=list)


@dataclass(eq=False)
class _Wait:
    """Something that happens once so many flows, and other waits, are over."""

    count: int
    then: Callable[[float], None]

    def tick(self, now: float) -> None:
        self.count -= 1
        if self.count == 0:
            self.then(now)


def rates(capacity: list[float], paths: list[list[int]]) -> list[float]:
    """Max-min fair rates by progressive filling: all grow alike until a link is full, whose flows then stop."""
    found: dict[int, Fraction] = {}
    level, left = Fraction(0), [Fraction(value) for value in capacity]
    while len(found) < len(paths):
        growing = [path for number, path in enumerate(paths) if number not in found]
        users = [sum(path.count(link) for path in growing) for link in range(len(capacity))]
        rise = min(rest / count for rest, count in zip(left, users, strict=True) if count)
        level += rise
        left = [rest - rise * count for rest, count in zip(left, users, strict=True)]
        full = {link for link, count in enumerate(users) if count and left[link] == 0}
        found |= {n: level for n, path in enumerate(paths) if n not in found and full & set(path)}
    return [float(found[number]) for number in range(len(paths))]


class _Fluid:
    """Flows of a network on one clock."""

    def __init__(self, links: list[dict[str, Any]]) -> None:
        self.capacity = [float(link["bandwidth"]) for link in links]
        self.latency = [float(link["latency"]) for link in links]
        self.waiting: list[_Flow] = []
        self.moving: list[_Flow] = []

    def send(self, now: float, path: list[int], size: float, *waits: _Wait) -> _Flow:
        flow = _Flow(path, float(size), now + sum(self.latency[link] for link in path), waited_by=list(waits))
        self.waiting.append(flow)
        return flow

    def run(self) -> float:
        """The end of the last flow."""
        now = 0.0
        while self.waiting or self.moving:
            speed = rates(self.capacity, [flow.path for flow in self.moving])
            ends = [now + flow.left / rate for flow, rate in zip(self.moving, speed, strict=True)]
            until = min([*ends, *(flow.begins for flow in self.waiting)])
            slack = until * (1 + _SAME)
            over = [flow for flow, end in zip(self.moving, ends, strict=True) if end <= slack]
            for flow, rate in zip(self.moving, speed, strict=True):
                flow.left -= rate * (until - now)
            now = until
            self.moving = [flow for flow in self.moving if flow not in over]
            for flow in over:
                flow.ends = now
            self.moving += [flow for flow in self.waiting if flow.begins <= slack]
            self.waiting = [flow for flow in self.waiting if flow.begins > slack]
            for flow in over:
                for wait in flow.waited_by:
                    wait.tick(now)
        return now


def finish_s(basic: dict[str, Any]) -> list[float]:
    """End of each flow of a basic case."""
    fluid = _Fluid(basic["links"])
    flows = [fluid.send(flow["start"], flow["path"], flow["bytes"]) for flow in basic["flows"]]
    for flow in flows:
        if not flow.left:
            flow.ends = flow.begins
    fluid.waiting = [flow for flow in flows if flow.left]
    fluid.run()
    return [flow.ends for flow in flows]


def completion_s(topology: dict[str, Any], case: dict[str, Any]) -> float:
    """End of the last flow of a case on a topology with its routes."""
    fluid, routes = _Fluid(topology["links"]), topology["routes"]
    ranks, group, size = topology["P"], topology["ranks_per_node"], case["S_bytes_per_rank"]
    if case["algorithm"].endswith("allreduce"):
        return _in_rounds(fluid, routes, ranks, list(_ring_rounds(case["algorithm"], ranks, group, size)), False)
    table = _traffic(case["traffic"], ranks, size)
    name = case["algorithm"]
    if name == "direct":
        return _in_rounds(
            fluid, routes, ranks, [[(i, j, table[i][j]) for i in range(ranks) for j in range(ranks)]], True
        )
    if name.startswith("pairwise"):
        partner: Callable[[int, int], int] = (
            (lambda i, r: i ^ r) if name == "pairwise_xor" else (lambda i, r: (i + r) % ranks)
        )
        rounds = [[(i, partner(i, r), table[i][partner(i, r)]) for i in range(ranks)] for r in range(1, ranks)]
        return _in_rounds(fluid, routes, ranks, rounds, name.endswith("barrier"))
    return _in_rounds(fluid, routes, ranks, _two_levels(table, ranks, group), name == "hier2_barrier")


_Round = list[tuple[int, int, int]]


def _in_rounds(fluid: _Fluid, routes: Any, ranks: int, rounds: list[_Round], barrier: bool) -> float:
    """Rounds that all enter together, or each rank once what it sends and gets in the last one is over."""
    rounds = [[(i, j, size) for i, j, size in one if i != j and size > 0] for one in rounds]
    actors: list[list[int]] = [list(range(ranks))] if barrier else [[rank] for rank in range(ranks)]
    waits: dict[tuple[int, int], _Wait] = {}

    def enter(number: int, actor: int) -> Callable[[float], None]:
        def then(now: float) -> None:
            if number == len(rounds):
                return
            for i, j, size in rounds[number]:
                if i in actors[actor]:
                    sides = {actor_of[i], actor_of[j]}
                    fluid.send(now, routes[i][j], size, *(waits[number, side] for side in sides))
            waits[number, actor].tick(now)

        return then

    actor_of = {rank: number for number, members in enumerate(actors) for rank in members}
    for number, one in enumerate(rounds):
        for actor in range(len(actors)):
            mine = sum(actor in {actor_of[i], actor_of[j]} for i, j, _ in one)
            waits[number, actor] = _Wait(mine + 1, enter(number + 1, actor))
    for actor in range(len(actors)):
        enter(0, actor)(0.0)
    return fluid.run()


def _two_levels(table: list[list[int]], ranks: int, group: int) -> list[_Round]:
    def node(rank: int) -> int:
        return rank // group

    first, second = [], []
    for i in range(ranks):
        for j in range(ranks):
            if node(i) == node(j):
                first.append((i, j, sum(table[i][k] for k in range(ranks) if k % group == j % group)))
            elif i % group == j % group:
                second.append((i, j, sum(table[k][j] for k in range(ranks) if node(k) == node(i))))
    return [first, second]


def _ring_rounds(name: str, ranks: int, group: int, size: int) -> Iterator[_Round]:
    if name == "ring_allreduce":
        for _ in range(2 * (ranks - 1)):
            yield [(i, (i + 1) % ranks, size // ranks) for i in range(ranks)]
        return
    nodes, chunk = ranks // group, size // group
    inside = [(i, i - i % group + (i % group + 1) % group, chunk) for i in range(ranks)]
    yield from [inside] * (group - 1)
    for _ in range(2 * (nodes - 1)):
        yield [(i, (i + group) % ranks, chunk // nodes) for i in range(ranks)]
    yield from [inside] * (group - 1)


def _traffic(rule: str, ranks: int, size: int) -> list[list[int]]:
    def entry(i: int, j: int) -> int:
        if i == j:
            return 0
        if rule == "uniform":
            return size // ranks
        if rule == "zipf1":
            weights = [1 / (1 + ((37 * k + 11) % ranks)) for k in range(ranks)]
            return math.floor(size * weights[j] / sum(weights))
        if rule == "hot0":
            return size // 2 if j == 0 else size // 2 // (ranks - 1)
        x = ((i * ranks + j) * 2654435761) % 2**32
        y = ((x ^ (x >> 15)) * 2246822519) % 2**32
        return size // ranks * (1 + (y >> 8) % 1000) // 500

    return [[entry(i, j) for j in range(ranks)] for i in range(ranks)]
