"""What the tests of validation share: a configuration, and costs, fits and outcomes by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from executor.profile.run import RunConfig
from nestpipe.ir import OpKind
from nestpipe.validate.compare import Outcome, outcome_of
from nestpipe.validate.grid import Point
from nestpipe.validate.predict import Prediction, machine_of, predict
from traces.workloads.cost_table import COST_COLUMNS, CostFit, CostTable

CONFIG = RunConfig(schedule="nestpipe", micro_batches=2, batch_size=24, dim=8, num_rows=500, steps=12, seed=3)


MBIT = 1_000_000


def fit_by_hand(kind: OpKind, **coefficients: float) -> CostFit:
    sizes = dict.fromkeys(coefficients, 0.0)
    return CostFit(
        kind=kind,
        variant="v",
        coefficients=coefficients,
        low=sizes,
        high=dict.fromkeys(coefficients, 1e12),
        num_points=1,
        error=0.0,
        spread=0.0,
    )


def costs_by_hand(config: RunConfig, *, handoff_ns: int = 10_000) -> CostTable:
    """Costs by hand: every local op 1 ms, keys 1 us each for lookup, collectives 100 us and their bytes on the wire."""
    rows = []
    for kind in OpKind:
        for scale in (1, 10, 100):
            values: dict[str, Any] = {
                "kind": kind.value,
                "variant": config.variant,
                "world_size": 2,
                "link_bits_per_s": 1,
            }
            values |= {"samples": scale, "keys": 10 * scale, "unique_keys": 0, "bytes": 0, "wire_ns": 0, "repeats": 5}
            local = 1e6 + (1e4 * scale if kind is OpKind.LOOKUP else 0)
            values |= {f"time_ns_{name}": local for name in ("mean", "min", "p50", "p75", "p95", "max")} | {
                "source": "by hand"
            }
            rows.append(values)
    meta = {"burst_bytes": 0, "cores": 8, "handoff": {"p50_ns": handoff_ns}, "issue": {"p50_ns": 1000}}
    meta |= {
        "turn_bytes": {},
        "rehearsal": [],
        "world_size": 2,
        "transfer_cores": 0.0,
        "repeatability_cv": {"real": 0.0, "emulated": 0.0},
        "configurations": [{"batch_size": 1, "dim": 1, "micro_batches": 1, "seed": 1}],
        "priority": "normal",
        "probe_ns": 1000,
    }
    return CostTable(rows=pd.DataFrame(rows, columns=list(COST_COLUMNS)), meta=meta)


def outcome_by_hand(schedule: str, predicted: Prediction, factor: float) -> Outcome:
    """A point whose measured timeline is the predicted one, slower by a factor."""
    frame = predicted.timeline.frame()
    for name in ("start_ns", "end_ns", "wait_ns"):
        frame[name] = (frame[name] * factor).round().astype(np.int64)
    point = Point(config=replace(CONFIG, schedule=schedule), rate_bits_per_s=200 * MBIT)
    return outcome_of(point, predicted, [frame.assign(load=0.5, slowdown=1.0)])


def prediction_by_hand() -> Prediction:
    table = costs_by_hand(CONFIG)
    return predict(CONFIG, table, machine_of(table, [200 * MBIT] * 2), draws=4)
