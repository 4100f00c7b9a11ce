"""How much work an op is: the small interface between the engine and whatever knows about hardware.

The engine asks a `Costs` for the work of each op. Work is either a whole number of nanoseconds, for an op that shares
nothing, or something that the costs' own `start` turns into an event (an activity on shared resources).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import simpy

from nestpipe.base import CaseError, split_evenly
from nestpipe.ir import COLLECTIVES, Op, OpKind, Resource
from sim.engine.folding import Actors
from sim.engine.host import HostLane

__all__ = ["Costs", "Jitter", "SharedCosts", "TimedCosts", "Work"]

Work: TypeAlias = Any  # int nanoseconds, or an activity that Costs.start understands


class Costs(Protocol):
    """What the engine needs to know about hardware and workload."""

    def colours(self, world_size: int) -> Sequence[int] | None:
        """Equal numbers for ranks whose costs are equal; None if all ranks are alike."""
        ...

    def local(self, ops: Sequence[Op], rank: int) -> Sequence[Work]:
        """The work of each non-collective op on this rank; entries of collectives are ignored."""
        ...

    def collective(self, op: Op, resource: Resource, ranks: Sequence[int], group_size: int) -> Work:
        """The work of a collective once all ranks have arrived.

        Args:
            op: the collective.
            resource: the kind of group it runs on.
            ranks: the simulated ranks of the group (representatives, when folded).
            group_size: how many ranks the group really has.
        """
        ...

    def start(self, env: simpy.Environment, work: Work) -> simpy.Event:
        """The event at which work that is not a number of nanoseconds is done."""
        ...


@runtime_checkable
class SharedCosts(Costs, Protocol):
    """Costs whose ops share resources: told before a run which actors there are, and in which simulated time."""

    def partitions(self, world_size: int) -> Mapping[str, Any]:
        """Ways in which ranks share something, by name: int64 (world_size,), the number of each rank's part."""
        ...

    def bind(self, env: simpy.Environment, actors: Actors) -> None:
        """Makes the resources of a run; a new run begins with a new call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random and systematic differences between ranks.

    Attributes:
        cv: coefficient of variation of the lognormal factor (mean 1) on each local op of each rank; 0 for none.
        stragglers: factor on the local ops of single ranks, for example {17: 1.5}.
        seed: the generator's seed; each rank draws from its own stream, so results do not depend on folding or order.
    """

    cv: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.cv < 10:
            raise CaseError(f"jitter must be a coefficient of variation between 0 and 10, got {self.cv}")
        for rank, factor in self.stragglers.items():
            if rank < 0 or not 0 < factor < np.inf:
                raise CaseError(f"a straggler is RANK:FACTOR, a finite factor above 0, got {rank}:{factor}")

    @property
    def is_random(self) -> bool:
        """Whether ranks differ at all."""
        return bool(self.cv or self.stragglers)

    def colours(self, world_size: int) -> Sequence[int] | None:
        """Equal for ranks with equal factors."""
        outside = [rank for rank in self.stragglers if rank >= world_size]
        if outside:
            raise CaseError(f"straggler rank {outside[0]} is not below world_size {world_size}")
        if self.cv:
            return range(world_size)
        if not self.stragglers:
            return None
        factors = sorted(set(self.stragglers.values()))
        colours = [0] * world_size
        for rank, factor in self.stragglers.items():
            colours[rank] = 1 + factors.index(factor)
        return colours

    def factors(self, num_ops: int, rank: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """float64 (num_ops,): the factor on each op of this rank."""
        base = self.stragglers.get(rank, 1.0)
        if not self.cv:
            return np.full(num_ops, base)
        sigma = np.sqrt(np.log1p(self.cv**2))
        generator = np.random.default_rng([self.seed, rank])
        return base * generator.lognormal(-0.5 * sigma**2, sigma, num_ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCosts:
    """Every op takes a given time and shares nothing.

    Attributes:
        batch_ns: for each op kind the nanoseconds it takes for a whole batch; kinds that are missing take none.
        micro_batches: micro-batches split a batch's time evenly, to the nanosecond.
        jitter: differences between ranks, on local ops only.
        host: the thread that issues the ops, where it is known; its own time does not vary.
    """

    batch_ns: Mapping[OpKind, int]
    micro_batches: int = 1
    jitter: Jitter = Jitter()
    host: HostLane | None = None

    def __post_init__(self) -> None:
        for kind, value in self.batch_ns.items():
            if value < 0:
                raise CaseError(f"the time of {kind} must not be negative, got {value} ns")

    def op_ns(self, op: Op) -> int:
        """Nanoseconds of one op, without jitter."""
        total = self.batch_ns.get(op.kind, 0)
        return total if op.micro_batch is None else split_evenly(total, self.micro_batches, op.micro_batch)

    def colours(self, world_size: int) -> Sequence[int] | None:
        """See `Costs.colours`; the hosts of some ranks are those of all, in turn."""
        own, hosts = self.jitter.colours(world_size), 1 if self.host is None else len(self.host.work_ns)
        if hosts == 1:
            return own
        return [(0 if own is None else own[rank]) * hosts + rank % hosts for rank in range(world_size)]

    def local(self, ops: Sequence[Op], rank: int) -> Sequence[int]:
        """See `Costs.local`."""
        base = np.array([0 if op.kind in COLLECTIVES else self.op_ns(op) for op in ops], dtype=np.float64)
        with np.errstate(over="ignore"):  # the engine refuses what is too long to count
            return [int(value) for value in np.rint(base * self.jitter.factors(len(ops), rank))]

    def collective(self, op: Op, resource: Resource, ranks: Sequence[int], group_size: int) -> int:  # noqa: ARG002
        """See `Costs.collective`."""
        return self.op_ns(op)

    def start(self, env: simpy.Environment, work: Work) -> simpy.Event:  # noqa: ARG002
        """See `Costs.start`; timed work is always a number of nanoseconds, so this is never asked for."""
        raise TypeError(f"timed work must be an int of nanoseconds, got {work!r}")
