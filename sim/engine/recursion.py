"""The step time of every rank with jitter, without events: the schedule as a recursion over vectors of ranks.

With given durations and nothing shared an op starts at the latest end of what comes before it, and a collective when
the last rank of its group arrives. One pass over the ops, in an order that respects both, gives every time for all
ranks at once: exactly what the engine gives (a test compares them), in a fraction of its time; see
benchmarks/bench_sweep.py.

Source: Baccelli, Cohen, Olsder, Quadrat, Synchronization and Linearity (1992), section 2.5 (max-plus linear systems).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nestpipe.base import CaseError, DeadlockError, ScheduleError
from nestpipe.ir import COLLECTIVES, Loop, Op, OpKind, OpRef, Resource, op_name, program_graph, unroll
from nestpipe.timeline import Window
from sim.engine.costs import TimedCosts
from sim.engine.folding import World
from sim.engine.steady import Start

__all__ = ["rank_step_ns"]

_EMPTY: Final = Start()
Int64: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A program in an order that can be walked once.

    `before` holds for each op what it comes after, `last_use` after which place in `order` its end is needed no more.
    """

    ops: tuple[Op, ...]
    resources: tuple[Resource, ...]
    order: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    last_use: tuple[int, ...]


def rank_step_ns(
    loop: Loop, steps: int, costs: TimedCosts, world: World, start: Start = _EMPTY
) -> npt.NDArray[np.float64]:
    """Mean time between the ends of successive steady steps of each rank; float64 (world_size,), nanoseconds.

    Args:
        loop: the schedule.
        steps: batches to run.
        costs: given durations, with their jitter.
        world: ranks and domains.
        start: how the run begins, by default with empty buffers.

    Raises:
        DeadlockError: if the program cannot finish.
        TraceError: if the steps leave no steady state.
    """
    plan = _plan(loop, start.steps or steps)
    updates = any(op.kind is OpKind.UPDATE for op in plan.ops)
    ends: dict[int, Int64] = {}
    for op, end in _walk(plan, costs, world, start.earliest_ns):
        if not updates or op.kind is OpKind.UPDATE:
            step = op.batch if updates else op.step
            ends[step] = np.maximum(ends.get(step, 0), end)
    ahead = max(op.batch - op.step for op in plan.ops)
    window = Window.of(len(ends), first=min(ends), last=max(ends), ahead=ahead).whole(start.period)
    if not updates:
        ends = {step: np.max([ends[s] for s in ends if s <= step], axis=0) for step in (window.first, window.last)}
    return (ends[window.last] - ends[window.first]) / window.steps


def _walk(plan: _Plan, costs: TimedCosts, world: World, earliest_ns: Mapping[OpRef, int]) -> Iterator[tuple[Op, Int64]]:
    """Each op with its end on every rank, int64 (world_size,)."""
    local = np.array([0 if op.kind in COLLECTIVES else costs.op_ns(op) for op in plan.ops], dtype=np.float64)
    factors = np.stack([costs.jitter.factors(len(plan.ops), rank) for rank in range(world.world_size)], axis=1)
    transfers = sum(costs.op_ns(op) for op in plan.ops if op.kind in COLLECTIVES)
    with np.errstate(over="ignore"):
        longest = (local * factors.max(axis=1)).sum() + transfers
    if not longest < 2**63:
        raise CaseError("an op ends later than the clock can count, 2^63 ns (292 years); give shorter times")
    groups = {each: world.group_of(each) for each in set(plan.resources) if each in _GROUPED}
    zero = np.zeros(world.world_size, dtype=np.int64)
    ends: dict[int, Int64] = {}
    for place, i in enumerate(plan.order):
        op = plan.ops[i]
        start = zero + earliest_ns.get(op.ref, 0) if earliest_ns else zero
        for other in plan.before[i]:
            start = np.maximum(start, ends[other])
        if op.kind in COLLECTIVES:
            end = _last_arrival(start, plan.resources[i], groups) + costs.op_ns(op)
        else:
            end = start + np.rint(local[i] * factors[i]).astype(np.int64)
        ends[i] = end
        yield op, end
        for other in (i, *plan.before[i]):
            if plan.last_use[other] <= place:
                ends.pop(other, None)


_GROUPED = frozenset({Resource.DOMAIN, Resource.REPLICA})


def _last_arrival(start: Int64, resource: Resource, groups: dict[Resource, Int64]) -> Int64:
    if resource is Resource.WORLD:
        return np.full_like(start, start.max())
    if resource not in groups:
        raise ScheduleError(f"a collective on {resource}, which is not a group of ranks")
    group = groups[resource]
    latest = np.zeros(int(group.max()) + 1, dtype=np.int64)
    np.maximum.at(latest, group, start)
    return latest[group]


@lru_cache(maxsize=64)
def _plan(loop: Loop, steps: int) -> _Plan:
    program = unroll(loop, steps)
    graph = program_graph(program)
    order = graph.run()
    if len(order) < len(graph.ops):
        stuck = [op_name(graph.ops[i]) for i in sorted({*range(len(graph.ops))} - {*order})]
        raise DeadlockError(f"{program.name} cannot finish; these ops wait for each other: {', '.join(stuck[:8])}")
    place_of = {i: place for place, i in enumerate(order)}
    last_use = [place_of[i] for i in range(len(graph.ops))]
    for i, others in enumerate(graph.preceding):
        for other in others:
            last_use[other] = max(last_use[other], place_of[i])
    return _Plan(
        ops=graph.ops,
        resources=tuple(program.streams[number].resource for number in graph.streams),
        order=order,
        before=graph.preceding,
        last_use=tuple(last_use),
    )
