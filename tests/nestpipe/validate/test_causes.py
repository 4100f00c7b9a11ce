"""The causes of an error sum to it, and a change is found as its cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.profile.run import loop_of
from nestpipe.ir import unroll
from nestpipe.validate.causes import CAUSES, split_error
from nestpipe.validate.predict import Prediction, machine_of, predict
from tests.nestpipe.validate.by_hand import CONFIG, MBIT, costs_by_hand
from traces.workloads.cost_table import CostTable


def test_the_causes_of_an_error_sum_to_it_and_nothing_is_left_for_equal_timelines(prediction: Prediction) -> None:
    program = unroll(loop_of(CONFIG), CONFIG.steps)
    causes = split_error(program, prediction.timeline, prediction.timeline)
    assert set(causes) == set(CAUSES)
    assert sum(causes.values()) == pytest.approx(0, abs=1e-9)
    assert all(abs(causes[name]) < 1e-9 for name in CAUSES)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("forward", "op_cost"), ("all_to_all[rows]", "interference"), ("all_to_all[grads]", "interference")],
)
def test_an_op_that_takes_longer_than_predicted_is_found_as_the_cause(kind: str, cause: str) -> None:
    config = replace(CONFIG, schedule="sync")
    table = costs_by_hand(config)
    machine = machine_of(table, [200 * MBIT] * 2)
    program = unroll(loop_of(config), config.steps)
    slower = table.rows.copy()
    mine = slower["kind"] == kind
    for name in ("mean", "min", "p50", "p75", "p95", "max"):
        slower.loc[mine, f"time_ns_{name}"] += 2_000_000
    before = predict(config, table, machine, draws=0)
    after = predict(config, CostTable(rows=slower, meta=table.meta), machine, draws=0)
    causes = split_error(program, before.timeline, after.timeline)
    assert causes[cause] == pytest.approx(4.0, rel=0.05)  # twice 2 ms, one for each micro-batch
    assert sum(causes.values()) == pytest.approx(after.metrics.step_latency_ms - before.metrics.step_latency_ms)


def test_slower_hand_overs_are_found_as_the_cause() -> None:
    config = replace(CONFIG, schedule="sync")
    machines = [machine_of(costs_by_hand(config, handoff_ns=each), [200 * MBIT] * 2) for each in (10_000, 310_000)]
    before, after = (predict(config, costs_by_hand(config), machine, draws=0) for machine in machines)
    causes = split_error(unroll(loop_of(config), config.steps), before.timeline, after.timeline)
    assert causes["hand_over"] == pytest.approx(sum(causes.values()), rel=0.05)
