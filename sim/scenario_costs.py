"""The time of every op kind under a scenario: the workload's own times, changed by batch, cluster and factors.

For a case the fitted laws are split as the case explains them: the part that does not depend on the number of workers
is bytes and keys, so it grows with the batch per worker and with skew and shrinks with link bandwidth; the part per
peer is messages, which depends on neither and scales with `peer_cost`. Whatever a factor or another batch has touched
no longer counts as fitted but as assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from nestpipe.errors import CaseError
from nestpipe.ir import COLLECTIVES, COMPUTE, Loop, MicroBlock, OpKind
from nestpipe.units import NS_PER_US
from sim.bound import Bound
from sim.grid import Grid
from sim.reproduce import varied
from sim.run import provenance
from sim.scenario import Scenario
from sim.scenario_parts import Factors
from traces.case import Case, Growth, Workload, batch_times, workload

__all__ = ["STATUSES", "OpTimes", "assumed_values", "drawn_assumptions", "op_times", "rests_on"]

#: Where the numbers of a scenario's results come from; the shares of a result sum to 1.
STATUSES = ("measured", "fitted", "interpolated", "extrapolated", "assumed")
_DEDUPED = COMPUTE | {OpKind.DEDUP}
_HOST = frozenset({OpKind.LOOKUP, OpKind.WRITE_BACK})
_ROWS = frozenset({OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS})
_LOOKUP_LAW = frozenset({OpKind.READ, OpKind.COPY_H2D, OpKind.ALL_TO_ALL_KEYS, *_HOST})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimes:
    """Nanoseconds per batch of every op kind, and the kinds that no longer rest on the workload alone."""

    batch_ns: Mapping[OpKind, int]
    touched: frozenset[OpKind]


def op_times(
    grid: Grid,
    scenario: Scenario,
    factors: Factors,
    loop: Loop,
    *,
    world_size: int,
    batch_per_worker: int,
    domain_size: int | None,
    assumptions: Mapping[str, float] | None = None,
) -> OpTimes:
    """Times of the ops of `loop` for one configuration.

    Args:
        grid: what was loaded.
        scenario: with the settings of the configuration.
        factors: of the cluster and of the scenario together.
        loop: with its number of micro-batches.
        world_size: number of ranks.
        batch_per_worker: samples per rank and step.
        domain_size: ranks per domain, where the schedule has domains.
        assumptions: the case's assumptions if they are varied; by default its own.
    """
    if grid.case is None:
        raise CaseError("workload: only 'case' can be evaluated without a topology")
    values = assumed_values(grid.case, scenario) if assumptions is None else dict(assumptions)
    if domain_size is not None:
        values["domain_size"] = domain_size
    ratio = batch_per_worker / grid.case.batch_per_worker
    per_doubling = scenario.micro_batching.row_duplication_per_doubling ** math.log2(loop.micro_batches)
    values["row_duplication"] *= per_doubling * factors.row_duplication
    values["dedup_ms"] *= ratio
    values["sync_ms"] *= ratio
    law = workload(grid.case)
    times = batch_times(_scaled(law, factors, ratio), values, loop, world_size)
    own = _own_factors(law, factors, ratio, world_size)
    overhead_ns = scenario.micro_batching.overhead_us * NS_PER_US * (loop.micro_batches - 1)
    in_block = _kinds_in_blocks(loop)
    batch_ns = {
        kind: round(ns * own.get(kind, 1.0) + (overhead_ns if kind in in_block else 0)) for kind, ns in times.items()
    }
    return OpTimes(batch_ns=batch_ns, touched=_touched(factors, ratio, per_doubling, overhead_ns, in_block, loop))


def assumed_values(case: Case, scenario: Scenario) -> dict[str, float]:
    """The case's assumptions with those that the scenario replaces; shares of the lookup path still sum to 1."""
    values = case.values()
    for name, value in scenario.workload.assumptions.items():
        values = varied(values, name, value)
    return values


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


def _scaled(law: Workload, factors: Factors, ratio: float) -> Workload:
    """The laws at another batch, skew, bandwidth and cost per peer."""
    sent = ratio * factors.skew / factors.link_bandwidth
    return replace(
        law,
        lookup=_law(law.lookup, ratio, factors.peer_cost),
        communication=_law(law.communication, sent, factors.peer_cost),
        compute=_law(law.compute, ratio, ratio),
    )


def _law(growth: Growth, fixed: float, per_peer: float) -> Growth:
    """A law whose part independent of workers and part per peer are scaled apart; a power law scales as a whole."""
    return replace(growth, a=growth.a * fixed, b=growth.b if growth.mechanism == "power" else growth.b * per_peer)


def _own_factors(law: Workload, factors: Factors, ratio: float, world_size: int) -> dict[OpKind, float]:
    """Factors on single kinds that the laws do not carry."""
    sent = _law(law.communication, ratio * factors.skew / factors.link_bandwidth, factors.peer_cost)
    plain = _law(law.communication, ratio, factors.peer_cost)
    own = dict.fromkeys(COLLECTIVES, factors.communication_time / factors.link_bandwidth)
    own |= dict.fromkeys(_ROWS, factors.communication_time)
    base = plain.at(world_size)
    own[OpKind.ALL_TO_ALL_KEYS] = factors.communication_time * (sent.at(world_size) / base if base else 1.0)
    own |= dict.fromkeys(_HOST, factors.lookup_cost * factors.skew)
    own |= dict.fromkeys(_DEDUPED, factors.compute_time)
    for kind, factor in factors.time.items():
        own[OpKind(kind)] = own.get(OpKind(kind), 1.0) * factor
    return own


def _kinds_in_blocks(loop: Loop) -> frozenset[OpKind]:
    blocks = (item for stream in loop.streams for item in stream.body if isinstance(item, MicroBlock))
    return frozenset(op.kind for block in blocks for op in block.ops)


def _touched(
    factors: Factors, ratio: float, per_doubling: float, overhead_ns: float, in_block: frozenset[OpKind], loop: Loop
) -> frozenset[OpKind]:
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
            yield from _DEDUPED
        if loop.micro_batches > 1 and per_doubling * factors.row_duplication != 1:
            yield from _ROWS
        if overhead_ns:
            yield from in_block
        yield from (OpKind(kind) for kind, factor in factors.time.items() if factor != 1)

    return frozenset(kinds())


def rests_on(case: Case, bound: Bound, world_size: int, touched: frozenset[OpKind]) -> dict[str, float]:
    """The share of the critical cycle by where its numbers come from; see `STATUSES`.

    As `sim.run.provenance` has it, but that whatever a factor, an overhead or another batch has touched is assumed.
    """
    total = sum(step.ns for step in bound.cycle)
    kept = tuple(step for step in bound.cycle if step.kind not in touched)
    share = sum(step.ns for step in kept) / total if total else 0.0
    shares = dict.fromkeys(STATUSES, 0.0)
    if share:
        for status, part in provenance(case, replace(bound, cycle=kept), world_size).items():
            shares[status] += part * share
    shares["assumed"] += 1.0 - share
    return shares
