"""Max-min fair rates kept up to date while users come and go, re-solving only what a change can reach.

A user takes `weight * rate` of each resource it uses. The allocation is max-min fair exactly if every user has a
*bottleneck*: a full resource on which nobody is faster. After a change only the users held back by a resource that
changed are solved again (progressive filling over what the others leave); then the condition is checked on every
resource touched, and users for which it no longer holds join the re-solved ones, until it holds everywhere. The
result is the global optimum, found without looking at the rest of the system.

Source: Bertsekas and Gallager, *Data Networks*, 2nd ed. 1992, section 6.5.2 (bottleneck condition, progressive
filling).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

__all__ = ["MaxMin"]

_EPS = 1e-9
_SAME = 1e-13

Uses = tuple[tuple[int, float], ...]


class MaxMin:
    """Rates of users on shared resources, both known by whole numbers.

    >>> shares = MaxMin([10.0, 4.0])
    >>> shares.add(0, ((0, 1.0),))
    >>> shares.add(1, ((0, 1.0), (1, 1.0)))
    >>> sorted(shares.resolve()), shares.rate
    ([0, 1], {0: 6.0, 1: 4.0})
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.capacity = list(capacities)
        self.load = [0.0] * len(self.capacity)
        self.users: list[dict[int, float]] = [{} for _ in self.capacity]
        self.held: list[dict[int, None]] = [{} for _ in self.capacity]  # users whose bottleneck this is
        self.uses: dict[int, Uses] = {}
        self.rate: dict[int, float] = {}
        self.bottleneck: dict[int, int] = {}
        self._dirty: dict[int, None] = {}

    def add_resource(self, capacity: float) -> int:
        """Adds a resource; returns its number."""
        self.capacity.append(capacity)
        self.load.append(0.0)
        self.users.append({})
        self.held.append({})
        return len(self.capacity) - 1

    def add(self, user: int, uses: Uses) -> None:
        """Adds a user with its (resource, weight) pairs, each resource once; it has no rate before `resolve`."""
        self.uses[user] = uses
        self.rate[user] = 0.0
        for resource, weight in uses:
            self.users[resource][user] = weight
        self._dirty[user] = None

    def remove(self, user: int) -> None:
        """Takes a user out; those it held back get its share by the next `resolve`."""
        rate = self.rate.pop(user)
        dirty = self._dirty
        dirty.pop(user, None)
        bottleneck = self.bottleneck.pop(user, None)
        if bottleneck is not None:
            del self.held[bottleneck][user]
        for resource, weight in self.uses.pop(user):
            users = self.users[resource]
            del users[user]
            self.load[resource] = self.load[resource] - weight * rate if users else 0.0
            if self.held[resource]:
                dirty.update(self.held[resource])

    def resolve(self) -> dict[int, float]:
        """Makes the allocation max-min fair again; returns the users whose rate changed, with their old rate."""
        if not self._dirty:
            return {}
        free = self._dirty
        self._dirty = {}
        while True:
            fresh, holder, left = self._fill(free)
            more = self._unfair(free, fresh, holder, left)
            if not more:
                return self._commit(fresh, holder, left)
            free.update(more)

    def _fill(self, free: Iterable[int]) -> tuple[dict[int, float], dict[int, int], dict[int, float]]:
        """Progressive filling of the free users over what the others leave: rates, bottlenecks, what is left."""
        left: dict[int, float] = {}
        wanted: dict[int, float] = {}
        members: dict[int, list[int]] = {}
        rate, all_uses = self.rate, self.uses
        for user in free:
            old = rate[user]
            for resource, weight in all_uses[user]:
                if resource in left:
                    left[resource] += weight * old
                    wanted[resource] += weight
                    members[resource].append(user)
                else:
                    left[resource] = self.capacity[resource] - self.load[resource] + weight * old
                    wanted[resource] = weight
                    members[resource] = [user]
        heap = [(max(left[r], 0.0) / wanted[r], r) for r in left]
        heapq.heapify(heap)
        fresh: dict[int, float] = {}
        holder: dict[int, int] = {}
        while heap:
            level, resource = heapq.heappop(heap)
            amount = wanted[resource]
            if amount <= _SAME:
                continue
            now = max(left[resource], 0.0) / amount
            if now > level * (1 + _SAME) and heap and now > heap[0][0]:
                heapq.heappush(heap, (now, resource))
                continue
            for user in members[resource]:
                if user in fresh:
                    continue
                fresh[user] = now
                holder[user] = resource
                for other, weight in all_uses[user]:
                    left[other] -= weight * now
                    wanted[other] -= weight
            wanted[resource] = 0.0
        return fresh, holder, left

    def _unfair(
        self, free: dict[int, None], fresh: dict[int, float], holder: dict[int, int], left: dict[int, float]
    ) -> dict[int, None]:
        """Users outside `free` that the new rates leave without a bottleneck, or that are faster than one allows."""
        more: dict[int, None] = {}
        level: dict[int, float] = {}
        for user, resource in holder.items():
            level[resource] = fresh[user]
        rate = self.rate
        for resource, rest in left.items():
            users = self.users[resource]
            if resource in level:
                limit = level[resource] * (1 + _EPS)
                for user in users:
                    if user not in free and rate[user] > limit:
                        more[user] = None
            held = self.held[resource]
            if not held:
                continue
            outside = next((u for u in held if u not in free), None)
            if outside is None:
                continue
            fastest = max((fresh[u] for u in users if u in fresh), default=0.0)
            if rest > _EPS * self.capacity[resource] or fastest > rate[outside] * (1 + _EPS):
                more.update((u, None) for u in held if u not in free)
        return more

    def _commit(self, fresh: dict[int, float], holder: dict[int, int], left: dict[int, float]) -> dict[int, float]:
        changed: dict[int, float] = {}
        for resource, rest in left.items():
            self.load[resource] = self.capacity[resource] - rest
        for user, new in fresh.items():
            old = self.rate[user]
            resource = holder[user]
            before = self.bottleneck.get(user)
            if before != resource:
                if before is not None:
                    del self.held[before][user]
                self.bottleneck[user] = resource
                self.held[resource][user] = None
            if abs(new - old) > _SAME * old or before is None:
                changed[user] = old
                self.rate[user] = new
        return changed
