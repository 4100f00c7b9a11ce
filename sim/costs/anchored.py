"""A trace as a workload, anchored: its own step first, op by op and from the text of the schedule that it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nestpipe.schedules import load, names
from sim.costs.run import run
from sim.costs.trace import TraceWorkload
from sim.costs.workload import Options
from sim.engine import Anchor, anchor

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["anchored_trace"]


def anchored_trace(frame: pd.DataFrame, **more: Any) -> tuple[TraceWorkload, Anchor]:
    """The workload of a profiled trace, host included, and its anchor.

    Args:
        frame: a trace table with host launches and steps.
        more: further attributes of the workload, which the anchor does not depend on.

    Raises:
        TraceError, DeadlockError: if the trace cannot be replayed.
    """
    found = anchor(frame)
    plain = TraceWorkload.of(frame, found)
    if found.schedule in names():
        predicted = run(load(found.schedule), plain, None, Options(world_size=plain.world_size))
        found = replace(found, as_schedule_ms=predicted.metrics.step_latency_ms)
    return replace(plain, anchor=found, **more), found
