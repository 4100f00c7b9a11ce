"""Small runs and results for the tests of the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from nestpipe.base.units import ms_to_ns
from nestpipe.ir import OpKind, unroll, with_micro_batches
from nestpipe.schedules import load
from nestpipe.timeline.metrics import measure, metric_values
from nestpipe.timeline.timeline import Timeline
from reports.runs.records import ResultRow
from sim.engine.bound import max_cycle_ratio
from sim.engine.costs import Jitter, TimedCosts
from sim.engine.engine import simulate
from sim.engine.folding import World

BATCH_MS = {
    OpKind.READ: 90,
    OpKind.COPY_H2D: 16,
    OpKind.DEDUP: 4,
    OpKind.ALL_TO_ALL_KEYS: 27,
    OpKind.LOOKUP: 120,
    OpKind.WRITE_BACK: 30,
    OpKind.SYNC: 1,
    OpKind.ALL_TO_ALL_ROWS: 60,
    OpKind.ALL_TO_ALL_GRADS: 64,
    OpKind.FORWARD: 56,
    OpKind.BACKWARD: 112,
    OpKind.UPDATE: 2,
    OpKind.ALL_REDUCE: 4,
}


def costs(micro_batches: int, faster: Mapping[OpKind, float] | None = None, jitter: Jitter | None = None) -> TimedCosts:
    """Times of ops; those in `faster` divided by its factors."""
    batch_ns = {kind: ms_to_ns(value / (faster or {}).get(kind, 1.0)) for kind, value in BATCH_MS.items()}
    return TimedCosts(batch_ns=batch_ns, micro_batches=micro_batches, jitter=jitter or Jitter())


def timeline(
    schedule: str = "nestpipe",
    *,
    ranks: int = 4,
    steps: int = 12,
    micro_batches: int | None = None,
    fold_ranks: bool = True,
    faster: Mapping[OpKind, float] | None = None,
    jitter: Jitter | None = None,
) -> Timeline:
    """One simulated run."""
    loop = load(schedule)
    if micro_batches is not None:
        loop = with_micro_batches(loop, micro_batches)
    work = costs(loop.micro_batches, faster, jitter)
    return simulate(unroll(loop, steps), work, World(world_size=ranks), fold_ranks=fold_ranks)


def record(run: Timeline, schedule: str = "nestpipe", **more: Any) -> dict[str, Any]:
    """The result of a run in the form that `nestpipe simulate --format json` prints."""
    metrics = measure(run, global_batch=2048)
    loop = load(schedule)
    bound = max_cycle_ratio(loop, costs(loop.micro_batches).op_ns)
    world_size = int(run.weights.sum())
    rows = [
        ResultRow(method=schedule, world_size=world_size, metric=name, value=value, status="predicted")
        for name, value in metric_values(metrics).items()
    ]
    return {
        "provenance": {"nestpipe": "0.0.0", "command": "nestpipe simulate", "seed": 0},
        "schedule": schedule,
        "world_size": world_size,
        "metrics": {row.metric: row.value for row in rows},
        "rows": rows,
        "parts_ms": metrics.parts_ms,
        "limit": {
            "step_ns": float(bound.step_ns),
            "iterations": bound.iterations,
            "cycle": [step._asdict() for step in bound.cycle],
            "text": bound.text(),
        },
        "critical_cycle_rests_on": {"fitted": 0.75, "assumed": 0.25},
        "speedup_relative_to": "sync",
        "scaling_efficiency_relative_to": 2,
        **more,
    }


def results() -> pd.DataFrame:
    """Results in long format: two methods at four sizes, every status, some published."""
    rows = []
    for method, fall, status in (
        ("TorchRec", 0.2, "fitted"),
        ("NestPipe", 0.02, "predicted"),
        ("2D-SP", 0.18, "assumed"),
    ):
        for i, size in enumerate((128, 512, 1536, 6144)):
            of_point = "extrapolated" if size > 1536 else status
            efficiency = 1 - fall * i
            published = efficiency + 0.004 if size == 1536 and method != "2D-SP" else np.nan
            qps = efficiency * size * 100
            rows.append((method, size, "scaling_efficiency", efficiency, published, of_point))
            rows.append((method, size, "qps", qps, np.nan, of_point))
            rows.append((method, size, "speedup", 1 + (0.2 - fall) * 10, 3.06 if size == 1536 else np.nan, of_point))
    return pd.DataFrame(rows, columns=["method", "world_size", "metric", "value", "published", "status"])
