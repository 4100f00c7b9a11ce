"""The time of every op kind under a scenario: the workload's own times, changed by batch, cluster and factors.

For a case without a topology the fitted laws are split as the case explains them: the part that does not depend on the
number of workers is bytes and keys, so it grows with the batch per worker and with skew and shrinks with link
bandwidth; the part per peer is messages, which depends on neither and scales with `peer_cost`. For a trace, `skew` and
`link_bandwidth` act on collectives as a whole. On a described cluster the factors act on what the ops ask for
(`sim.scenario.hardware`). Whatever a factor or another batch has touched counts as assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from nestpipe.base import NS_PER_US, CaseError
from nestpipe.ir import COLLECTIVES, COMPUTE, Loop, OpKind
from sim.costs import HardwareCosts, costs_from_trace, provenance, varied
from sim.engine import Bound, Jitter, World
from sim.scenario.assumptions import assumed_values
from sim.scenario.file import Scenario
from sim.scenario.grid import Grid
from sim.scenario.hardware import blocks_of, case_demands, changed, hardware_costs, hardware_times, model_demands
from sim.scenario.sections import Factors
from traces.workloads import Case, Growth, GrowthLaws, batch_times

__all__ = ["STATUSES", "OpTimes", "Place", "drawn_assumptions", "op_times", "rests_on"]

#: Where the numbers of a scenario's results come from; the shares of a result sum to 1.
STATUSES = ("measured", "fitted", "interpolated", "extrapolated", "assumed")
_COMPUTED = COMPUTE | {OpKind.DEDUP}
_HOST = frozenset({OpKind.LOOKUP, OpKind.WRITE_BACK})
_ROWS = frozenset({OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS})
_LOOKUP_LAW = frozenset({OpKind.READ, OpKind.COPY_H2D, OpKind.ALL_TO_ALL_KEYS, *_HOST})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a loop runs: number of ranks, samples per rank and step, ranks per domain, the cluster and its factors."""

    world_size: int
    batch_per_worker: int
    domain_size: int | None
    cluster: str
    factors: Factors


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Nanoseconds per batch of every op kind, and what they rest on.

    Attributes:
        batch_ns: without jitter, different ops sharing nothing.
        touched: kinds that no longer rest on the workload alone.
        origin: for each kind where its time comes from; None for a case without topology, whose fit says that.
        hardware: on a described cluster, makes the costs of a run in which ops that overlap share what they use.
    """

    batch_ns: Mapping[OpKind, int]
    touched: frozenset[OpKind]
    origin: Mapping[OpKind, str] | None = None
    hardware: Callable[[Jitter], HardwareCosts] | None = None


def op_times(
    grid: Grid, scenario: Scenario, loop: Loop, place: Place, assumptions: Mapping[str, float] | None = None
) -> OpTimes:
    """Times of the ops of `loop` for one configuration.

    Args:
        grid: what was loaded.
        scenario: with the settings of the configuration.
        loop: with its number of micro-batches.
        place: where it runs.
        assumptions: a case's assumptions if they are varied; by default its own.

    Raises:
        NestPipeError: if the configuration cannot be.
    """
    ratio = place.batch_per_worker / grid.batch_per_worker if grid.batch_per_worker else 1.0
    touched = _touched(scenario, place.factors, ratio, loop)
    values, law = None, None
    if grid.case is not None and grid.law is not None:
        values = _values(grid.case, scenario, place, assumptions, ratio)
        law = _at_batch(grid.law, ratio)
    if place.cluster in grid.hardware:
        return _on_hardware(grid, scenario, loop, place, values, law, touched)
    factors, size = place.factors, place.world_size
    if grid.trace is not None:
        costs = costs_from_trace(grid.trace, loop, batch_scale=ratio, world_size=size)
        times = {kind: round(float(samples.mean())) for kind, samples in costs.batch_ns.items()}
        own = _own_factors(factors, sent=factors.skew / factors.link_bandwidth)
        own |= dict.fromkeys(_ROWS, own[OpKind.ALL_TO_ALL_ROWS] * _duplication(scenario, factors, loop))
        return OpTimes(batch_ns=_timed(times, own, scenario, loop), touched=touched, origin=dict(costs.origin))
    if values is None or law is None:
        raise CaseError("workload: a model needs a topology: clusters: {NAME: {topology: NAME or FILE}}")
    values["row_duplication"] *= _duplication(scenario, factors, loop)
    sent = factors.skew / factors.link_bandwidth
    slower = replace(
        law,
        lookup=_law(law.lookup, 1.0, factors.peer_cost),
        communication=_law(law.communication, sent, factors.peer_cost),
    )
    plain = _law(law.communication, 1.0, factors.peer_cost).at(size)
    own = _own_factors(factors, sent=slower.communication.at(size) / plain if plain else 1.0)
    own |= {kind: factors.communication_time * factors.time.get(kind.value, 1.0) for kind in _ROWS}
    return OpTimes(
        batch_ns=_timed(batch_times(slower, values, loop, size), own, scenario, loop),
        touched=touched,
    )


def _on_hardware(
    grid: Grid,
    scenario: Scenario,
    loop: Loop,
    place: Place,
    values: dict[str, float] | None,
    law: GrowthLaws | None,
    touched: frozenset[OpKind],
) -> OpTimes:
    hardware = grid.hardware[place.cluster]
    if grid.model is not None:
        demands = model_demands(
            grid.model,
            hardware,
            loop,
            batch_per_worker=place.batch_per_worker,
            world_size=place.world_size,
            domain_size=place.domain_size,
            keys=grid.keys,
        )
    elif grid.case is not None and law is not None and values is not None:
        demands = case_demands(grid.case, law, values, loop, place.world_size)
    else:
        raise CaseError("workload: a trace has times and no demands, so it cannot move to a topology; use factors")
    demands = changed(demands, place.factors, scenario.micro_batching, loop)

    def make(jitter: Jitter) -> HardwareCosts:
        return hardware_costs(
            hardware,
            demands,
            loop,
            world_size=place.world_size,
            domain_size=place.domain_size,
            jitter=jitter,
            compute_efficiency=scenario.workload.compute_efficiency,
        )

    return OpTimes(
        batch_ns=hardware_times(make(Jitter()), loop),
        touched=touched,
        origin=dict.fromkeys(demands, "assumed"),
        hardware=make,
    )


def drawn_assumptions(case: Case, values: Mapping[str, float], uniforms: Mapping[str, float]) -> dict[str, float]:
    """Assumptions drawn from triangular distributions between low and high with the mode at the value.

    Args:
        case: for low and high.
        values: the modes.
        uniforms: for each assumption to draw a number in [0, 1).
    """
    drawn = dict(values)
    for name, uniform in uniforms.items():
        each, mode = case.assumptions[name], values[name]
        low, high = min(each.low, mode), max(each.high, mode)
        if high > low:
            drawn = varied(drawn, name, _triangular(uniform, low, mode, high))
    return drawn


def _triangular(uniform: float, low: float, mode: float, high: float) -> float:
    """The quantile of a triangular distribution."""
    cut = (mode - low) / (high - low)
    if uniform < cut:
        return low + math.sqrt(uniform * (high - low) * (mode - low))
    return high - math.sqrt((1 - uniform) * (high - low) * (high - mode))


def _values(
    case: Case, scenario: Scenario, place: Place, assumptions: Mapping[str, float] | None, ratio: float
) -> dict[str, float]:
    """The assumptions of a case at this batch and domain."""
    values = assumed_values(case, scenario) if assumptions is None else dict(assumptions)
    if place.domain_size is not None:
        values["domain_size"] = place.domain_size
    values["dedup_ms"] *= ratio
    values["sync_ms"] *= ratio
    return values


def _at_batch(law: GrowthLaws, ratio: float) -> GrowthLaws:
    """The laws at another batch."""
    return replace(
        law,
        lookup=_law(law.lookup, ratio, 1.0),
        communication=_law(law.communication, ratio, 1.0),
        compute=_law(law.compute, ratio, ratio),
    )


def _law(growth: Growth, fixed: float, per_peer: float) -> Growth:
    """A law whose part independent of workers and part per peer are scaled apart; a power law scales as a whole."""
    return replace(growth, a=growth.a * fixed, b=growth.b if growth.mechanism == "power" else growth.b * per_peer)


def _duplication(scenario: Scenario, factors: Factors, loop: Loop) -> float:
    """Rows sent with micro-batches over rows sent without, beyond what the workload has."""
    if loop.micro_batches == 1:
        return 1.0
    per_doubling = scenario.micro_batching.row_duplication_per_doubling
    return float(factors.row_duplication * per_doubling ** math.log2(loop.micro_batches))


def _own_factors(factors: Factors, *, sent: float) -> dict[OpKind, float]:
    """The factor on the time of every kind; `sent` is that on All2Alls by skew and bandwidth."""
    own = dict.fromkeys(COLLECTIVES, factors.communication_time / factors.link_bandwidth)
    own |= dict.fromkeys((*_ROWS, OpKind.ALL_TO_ALL_KEYS), factors.communication_time * sent)
    own |= dict.fromkeys(_HOST, factors.lookup_cost * factors.skew)
    own |= dict.fromkeys(_COMPUTED, factors.compute_time)
    for kind, factor in factors.time.items():
        own[OpKind(kind)] = own.get(OpKind(kind), 1.0) * factor
    return own


def _timed(
    times: Mapping[OpKind, int], own: Mapping[OpKind, float], scenario: Scenario, loop: Loop
) -> dict[OpKind, int]:
    """The times by their factors, with the overhead of every micro-batch after the first."""
    overhead_ns = scenario.micro_batching.overhead_us * NS_PER_US * (loop.micro_batches - 1)
    in_block = blocks_of(loop)
    return {
        kind: round(ns * own.get(kind, 1.0) + (overhead_ns if kind in in_block else 0)) for kind, ns in times.items()
    }


def _touched(scenario: Scenario, factors: Factors, ratio: float, loop: Loop) -> frozenset[OpKind]:
    def kinds() -> Iterator[OpKind]:
        if ratio != 1:
            yield from OpKind
        if factors.communication_time != 1 or factors.link_bandwidth != 1:
            yield from COLLECTIVES
        if factors.peer_cost != 1:
            yield from (*_LOOKUP_LAW, *_ROWS)
        if factors.lookup_cost != 1:
            yield from _HOST
        if factors.skew != 1:
            yield from (*_HOST, *_ROWS, OpKind.ALL_TO_ALL_KEYS)
        if factors.compute_time != 1:
            yield from _COMPUTED
        if _duplication(scenario, factors, loop) != 1:
            yield from _ROWS
        if scenario.micro_batching.overhead_us and loop.micro_batches > 1:
            yield from blocks_of(loop)
        yield from (OpKind(kind) for kind, factor in factors.time.items() if factor != 1)

    return frozenset(kinds())


def rests_on(case: Case | None, loop: Loop, bound: Bound, world: World, times: OpTimes) -> dict[str, float]:
    """The share of the critical cycle by where its numbers come from; see `STATUSES`.

    Whatever a factor, an overhead or another batch has touched is assumed.
    """
    total = sum(step.ns for step in bound.cycle)
    kept = tuple(step for step in bound.cycle if step.kind not in times.touched)
    share = sum(step.ns for step in kept) / total if total else 0.0
    shares = dict.fromkeys(STATUSES, 0.0)
    if times.origin is not None:
        for step in kept:
            shares[times.origin.get(step.kind, "assumed")] += step.ns / total if total else 0.0
    elif share and case is not None:
        kept_bound = replace(bound, cycle=kept)
        for status, part in provenance(case, loop, kept_bound, world.world_size, world.domain_size).items():
            shares[status] += part * share
    shares["assumed"] += 1.0 - share
    return shares
