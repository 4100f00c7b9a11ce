"""Why a prediction was off: the measured times put into the simulation in turn, cause by cause.

Both Timelines are taken apart into what ops took, what collectives took once all had arrived, and how long lanes needed
to start what was ready. A replay puts such parts together again in the schedule's order. Replacing one part after the
other, from the predicted to the measured, moves the step from the predicted to the measured: each move is a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import simpy

from nestpipe.ir import COLLECTIVES, Op, OpKind, Program, Resource, program_graph
from nestpipe.timeline import Timeline, measure
from sim.engine import World, simulate

__all__ = ["CAUSES", "split_error"]

#: op_cost: local ops of another length. interference: collectives of another length. hand_over: lanes that start ready
#: ops later or sooner. skew: ranks and batches that differ from their mean. order: what no replay explains.
CAUSES: Final = ("op_cost", "interference", "hand_over", "skew", "order")
_WARM_UP: Final = 2
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A Timeline taken apart; arrays float64 (ranks, ops) in program order, nanoseconds.

    local: what local ops took. transfer: what collectives took from the last arrival. gap: from ready to started.
    """

    local: Float64
    transfer: Float64
    gap: Float64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replay:
    """Costs that are given: the gap before an op is part of it."""

    program: Program
    parts: _Parts
    index: dict[tuple[OpKind, int, int | None], int]

    def colours(self, world_size: int) -> Sequence[int]:
        return range(world_size)

    def local(self, ops: Sequence[Op], rank: int) -> Sequence[Any]:
        total = self.parts.local[rank] + self.parts.gap[rank]
        return [None if op.kind in COLLECTIVES else round(total[number]) for number, op in enumerate(ops)]

    def collective(self, op: Op, resource: Resource, ranks: Sequence[int], group_size: int) -> int:  # noqa: ARG002
        number = self.index[op.kind, op.batch, op.micro_batch]
        rows = list(ranks)
        return round(float(self.parts.transfer[rows, number].max() + self.parts.gap[rows, number].max()))

    def start(self, env: simpy.Environment, work: Any) -> simpy.Event:  # noqa: ARG002
        raise TypeError(f"a replay has whole nanoseconds only, got {work!r}")


def split_error(program: Program, predicted: Timeline, measured: Timeline) -> dict[str, float]:
    """The difference measured - predicted of the step latency in milliseconds, by cause; the causes sum to it.

    Args:
        program: what both ran, every rank of one host or cluster.
        predicted, measured: its Timelines.
    """
    before, after = _take_apart(program, predicted), _take_apart(program, measured)
    even, uneven = _even(program, before), _even(program, after)
    stages = (
        even,
        replace(even, local=uneven.local),
        replace(even, local=uneven.local, transfer=uneven.transfer),
        uneven,
        before,
        after,
    )
    steps = [_step_ms(program, parts, len(measured.ranks)) for parts in stages]
    op_cost, interference, hand_over = np.diff(steps[:4]).tolist()
    skew = (steps[5] - steps[3]) - (steps[4] - steps[0])
    total = measure(measured).step_latency_ms - measure(predicted).step_latency_ms
    order = total - op_cost - interference - hand_over - skew
    return dict(zip(CAUSES, (op_cost, interference, hand_over, skew, order), strict=True))


def _even(program: Program, parts: _Parts) -> _Parts:
    """The parts without differences between ranks and batches."""
    kinds = pd.Series([(op.kind.value, -1 if op.micro_batch is None else op.micro_batch) for op in program.ops])
    steady = np.array([op.batch >= _WARM_UP for op in program.ops])
    return _Parts(
        local=_mean(parts.local, kinds, steady),
        transfer=_mean(parts.transfer, kinds, steady),
        gap=_mean(parts.gap, kinds, steady),
    )


def _take_apart(program: Program, timeline: Timeline) -> _Parts:
    ops = program.ops
    key = ["kind", "batch", "micro_batch"]
    columns = timeline.ops.assign(column=range(len(timeline.ops)), micro_batch=timeline.ops["micro_batch"].fillna(-1))
    where = {
        (str(kind), int(batch), int(micro)): int(column)
        for kind, batch, micro, column in columns[[*key, "column"]].itertuples(index=False)
    }
    order = [where[op.kind.value, op.batch, -1 if op.micro_batch is None else op.micro_batch] for op in ops]
    start, end = timeline.start_ns[:, order].astype(np.float64), timeline.end_ns[:, order].astype(np.float64)
    collective = np.array([op.kind in COLLECTIVES for op in ops])
    transfer = np.where(collective, np.maximum(end.max(axis=0) - start.max(axis=0), 0.0), 0.0)
    return _Parts(
        local=np.where(collective, 0.0, end - start),
        transfer=np.broadcast_to(transfer, start.shape),
        gap=_gaps(program, start, end),
    )


def _gaps(program: Program, start: Float64, end: Float64) -> Float64:
    """From the moment an op could start, by its stream and by what it waits for, to its start."""
    ready = np.zeros_like(start)
    for number, before in enumerate(program_graph(program).preceding):
        if before:
            ready[:, number] = end[:, list(before)].max(axis=1)
    return np.maximum(start - ready, 0.0)


def _mean(values: Float64, groups: pd.Series[Any], steady: npt.NDArray[np.bool_]) -> Float64:
    """Each value replaced by the mean over ranks and steady batches of its kind and micro-batch."""
    means = pd.Series(values.mean(axis=0))[steady].groupby(groups[steady]).mean()
    return np.broadcast_to(groups.map(means).to_numpy(dtype=np.float64), values.shape)


def _step_ms(program: Program, parts: _Parts, world_size: int) -> float:
    index = {(op.kind, op.batch, op.micro_batch): number for number, op in enumerate(program.ops)}
    costs = _Replay(program=program, parts=parts, index=index)
    return measure(simulate(program, costs, World(world_size=world_size), fold_ranks=False)).step_latency_ms
