"""Fluid resources over SimPy: everything that shares something is an activity with work, at a max-min fair rate.

A `FluidSystem` has resources with capacities (bytes/s of a link or of DRAM, rows/s of a host, flop/s of a device).
An `Activity` has work and takes `weight` of each resource per unit of its rate; rates are max-min fair (optionally
weighted, optionally capped) and are solved again whenever an activity starts or ends, for those the change can reach.

    fluid = FluidSystem(env)
    link = fluid.resource("nic0", 25e9)
    done = yield fluid.start(Activity(work=1e9, uses={link: 1.0}))

Time is in whole nanoseconds: an activity ends at the first nanosecond at which its work is done. What starts and ends
within the same nanosecond is solved together, after all of it, so the order of equal events does not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import simpy
from simpy.events import EventPriority

from nestpipe.base import NS_PER_S
from sim.engine.maxmin import MaxMin

__all__ = ["Activity", "Capacity", "FluidSystem", "ResourceUse"]

_ROUNDING = 1e-9  # ns: work that ends this close after a nanosecond ends at it


@dataclass(frozen=True, slots=True)
class Capacity:
    """A handle to a resource of one `FluidSystem`."""

    index: int
    name: str
    capacity_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Something that takes a share of resources until its work is done.

    Attributes:
        work: in units of the resources (bytes, rows, flop), 0 or more
        uses: capacity taken of each resource per unit of work; 1 for a flow on its links
        cap_per_s: greatest rate, or None
        share: its weight against others on a full resource; 2 gets twice the rate of 1
        label: for messages and traces
    """

    work: float
    uses: Mapping[Capacity, float] = field(default_factory=dict)
    cap_per_s: float | None = None
    share: float = 1.0
    label: str = ""

    def __post_init__(self) -> None:
        name = f"activity {self.label!r}"
        if not (math.isfinite(self.work) and self.work >= 0):
            raise ValueError(f"{name}: work must be finite and 0 or more, got {self.work}")
        if not (math.isfinite(self.share) and self.share > 0):
            raise ValueError(f"{name}: share must be positive, got {self.share}")
        if self.cap_per_s is not None and not self.cap_per_s > 0:
            raise ValueError(f"{name}: cap_per_s must be positive, got {self.cap_per_s}")
        if not self.uses and self.cap_per_s is None:
            raise ValueError(f"{name}: must use a resource or have a cap_per_s, or it would never take time")
        for resource, weight in self.uses.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"{name}: weight on {resource.name} must be positive, got {weight}")


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """How much a resource did: `busy_ns` with any activity on it, `utilisation` of its capacity, both up to now."""

    name: str
    work: float
    busy_ns: int
    utilisation: float


class FluidSystem:
    """Resources shared max-min fairly by activities, in simulated time.

    Attributes:
        num_solves: how often rates were solved again, to count before optimising
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.num_solves = 0
        self._shares = MaxMin([])
        self._resources: list[Capacity] = []
        self._spare_caps: list[int] = []
        self._cap_of: dict[int, int] = {}
        self._next = 0
        self._done: dict[int, simpy.Event] = {}
        self._activity: dict[int, Activity] = {}
        self._left: dict[int, float] = {}
        self._since: dict[int, float] = {}
        self._ends: list[tuple[float, int, int]] = []  # (time, activity, age); an older age is void
        self._age: dict[int, int] = {}
        self._solve_at: int | None = None
        self._wake_at: float = math.inf
        self._served: list[float] = []
        self._busy_since: list[int | None] = []
        self._busy: list[int] = []

    def resource(self, name: str, capacity_per_s: float) -> Capacity:
        """A new resource.

        Raises:
            ValueError: the capacity is not positive and finite.
        """
        if not (math.isfinite(capacity_per_s) and capacity_per_s > 0):
            raise ValueError(f"resource {name!r}: capacity_per_s must be positive and finite, got {capacity_per_s}")
        index = self._shares.add_resource(capacity_per_s / NS_PER_S)
        found = Capacity(index, name, capacity_per_s)
        self._resources.append(found)
        self._grow()
        return found

    def _grow(self) -> None:
        missing = len(self._shares.capacity) - len(self._served)
        self._served += [0.0] * missing
        self._busy += [0] * missing
        self._busy_since += [None] * missing

    def start(self, activity: Activity) -> simpy.Event:
        """Starts an activity now; the event happens when its work is done and carries that time in ns."""
        event = self.env.event()
        if activity.work == 0:
            return event.succeed(int(self.env.now))
        number = self._next
        self._next += 1
        share = activity.share
        uses = [(resource.index, weight * share) for resource, weight in activity.uses.items()]
        if activity.cap_per_s is not None:
            uses.append((self._cap(number, activity.cap_per_s), share))
        self._done[number], self._activity[number] = event, activity
        self._left[number], self._since[number], self._age[number] = activity.work, self.env.now, 0
        self._shares.add(number, tuple(uses))
        for resource in activity.uses:
            if self._busy_since[resource.index] is None:
                self._busy_since[resource.index] = int(self.env.now)
        self._solve_soon()
        return event

    def _cap(self, number: int, cap_per_s: float) -> int:
        """A resource of one activity's own; they are used again, so that their number stays small."""
        if self._spare_caps:
            index = self._spare_caps.pop()
            self._shares.capacity[index] = cap_per_s / NS_PER_S
        else:
            index = self._shares.add_resource(cap_per_s / NS_PER_S)
            self._grow()
        self._cap_of[number] = index
        return index

    def _solve_soon(self) -> None:
        """Solves once, at the end of this nanosecond, however many activities start or end in it."""
        if self._solve_at == self.env.now:
            return
        self._solve_at = int(self.env.now)
        settle = simpy.Event(self.env)
        settle._ok, settle._value = True, None
        assert settle.callbacks is not None
        settle.callbacks.append(lambda _: self._solve())
        # after the urgent (0) and normal (1) events of this nanosecond
        self.env.schedule(settle, priority=EventPriority(2))

    def _solve(self) -> None:
        self._solve_at = None
        self.num_solves += 1
        now = self.env.now
        for number, old in self._shares.resolve().items():
            share = self._activity[number].share
            self._advance(number, old * share, now)
            rate = self._shares.rate[number] * share
            self._age[number] += 1
            if rate > 0:
                heapq.heappush(self._ends, (now + self._left[number] / rate, number, self._age[number]))
        self._wake()

    def _advance(self, number: int, rate: float, now: float) -> None:
        moved = min(rate * (now - self._since[number]), self._left[number])
        self._left[number] -= moved
        self._since[number] = now
        for resource, weight in self._activity[number].uses.items():
            self._served[resource.index] += moved * weight

    def _wake(self) -> None:
        """Sleeps until the next end, at the first whole nanosecond not before it."""
        ends = self._ends
        while ends and self._age.get(ends[0][1]) != ends[0][2]:
            heapq.heappop(ends)
        if not ends:
            return
        at = math.ceil(ends[0][0] - _ROUNDING)
        if at >= self._wake_at and self._wake_at > self.env.now:
            return
        self._wake_at = at
        timer = self.env.timeout(max(at - self.env.now, 0))
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._finish(at))

    def _finish(self, at: int) -> None:
        if at != self._wake_at:
            return  # an earlier end has come in between
        self._wake_at = math.inf
        ends, now = self._ends, int(self.env.now)
        while ends and ends[0][0] <= now + _ROUNDING:
            _, number, age = heapq.heappop(ends)
            if self._age.get(number) == age:
                self._end(number, now)
        self._wake()

    def _end(self, number: int, now: int) -> None:
        activity = self._activity[number]
        for resource, weight in activity.uses.items():
            self._served[resource.index] += self._left[number] * weight
        self._shares.remove(number)
        if number in self._cap_of:
            self._spare_caps.append(self._cap_of.pop(number))
        for resource in activity.uses:
            index = resource.index
            if not self._shares.users[index] and (since := self._busy_since[index]) is not None:
                self._busy[index] += now - since
                self._busy_since[index] = None
        del self._activity[number], self._left[number], self._since[number], self._age[number]
        self._solve_soon()
        self._done.pop(number).succeed(now)

    def run(self, activity: Activity) -> Generator[simpy.Event, Any, int]:
        """As `start`, to be used with `yield from`; returns the end in ns."""
        end: int = yield self.start(activity)
        return end

    def usage(self) -> list[ResourceUse]:
        """What each resource has done so far, in order of creation."""
        now = self.env.now
        for number in self._activity:
            self._advance(number, self._shares.rate[number] * self._activity[number].share, now)
        found = []
        for resource in self._resources:
            index = resource.index
            since = self._busy_since[index]
            busy = self._busy[index] + (0 if since is None else int(now) - since)
            possible = resource.capacity_per_s * now / NS_PER_S
            share = self._served[index] / possible if possible else 0.0
            found.append(ResourceUse(resource.name, self._served[index], busy, share))
        return found
