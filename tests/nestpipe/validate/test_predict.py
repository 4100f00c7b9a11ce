"""Predictions from a cost table: repeatable, monotone in the links, refused where the table lacks something."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest

from executor.compute import Compute
from executor.profile.run import sizes_of_run
from nestpipe.base.errors import TraceError
from nestpipe.validate.predict import differences, machine_of, model_error, predict, rehearse
from tests.nestpipe.validate.by_hand import CONFIG, MBIT, costs_by_hand
from traces.workloads.cost_table import CostTable


def test_a_prediction_needs_no_run_and_is_the_same_every_time() -> None:
    table = costs_by_hand(CONFIG)
    machine = machine_of(table, [200 * MBIT] * 2)
    one, two = (predict(CONFIG, table, machine, draws=4, seed=1) for _ in range(2))
    assert one.timeline.frame().equals(two.timeline.frame())
    assert (one.step_ms_low, one.step_ms_high) == (two.step_ms_low, two.step_ms_high)
    # four computing ops of 1 ms, two dedups and an update on the compute stream bound the step from below
    assert one.metrics.step_latency_ms >= 7
    sync = predict(replace(CONFIG, schedule="sync"), table, machine, draws=0)
    assert sync.metrics.step_latency_ms > one.metrics.step_latency_ms


def test_a_faster_link_never_hurts_and_a_slower_one_never_helps() -> None:
    table = costs_by_hand(CONFIG)
    sizes = sizes_of_run(CONFIG, 2)
    steps = [
        predict(CONFIG, table, machine_of(table, [rate * MBIT] * 2), draws=0, sizes=sizes).metrics.step_latency_ms
        for rate in (1, 5, 50)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[2]


def test_how_far_rehearsed_schedules_were_off_widens_the_interval() -> None:
    table = costs_by_hand(CONFIG)
    machine = machine_of(table, [200 * MBIT] * 2)
    step_ms = predict(CONFIG, table, machine, draws=0).metrics.step_latency_ms
    row = {"config": asdict(CONFIG), "rate_bits_per_s": 200 * MBIT}
    rows = [{**row, "step_ms": step_ms / 1.03}, {**row, "step_ms": step_ms / 0.96}]
    rehearsed = rehearse(CostTable(rows=table.rows, meta={**table.meta, "world_size": 2, "rehearsal": rows}))
    assert [each.error for each in rehearsed] == pytest.approx([0.03, -0.04])
    bias = model_error(rehearsed, Compute.REAL)
    assert bias == pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2))
    assert model_error(rehearsed, Compute.EMULATED) == 0
    narrow, wide = (predict(CONFIG, table, machine, draws=0, bias=value) for value in (0.0, bias))
    assert narrow.step_ms_high == narrow.step_ms_low
    # normal: 1.645 standard deviations on either side hold 9 of 10
    assert wide.step_ms_high / step_ms - 1 == pytest.approx(1.645 * bias)


def test_a_table_without_rehearsed_schedules_is_refused() -> None:
    table = costs_by_hand(CONFIG)
    meta = {name: value for name, value in table.meta.items() if name != "rehearsal"}
    with pytest.raises(TraceError, match="rehearsal"):
        rehearse(CostTable(rows=table.rows, meta=meta))


@pytest.mark.parametrize(
    "change",
    [
        {"config": "sync"},
        {"config": {}},
        {"rate_bits_per_s": float("inf")},
        {"step_ms": None},
        {"step_ms": 0},
        {"step_ms": float("nan")},
    ],
)
def test_a_damaged_rehearsal_is_refused_by_key(change: dict[str, Any]) -> None:
    row: dict[str, Any] = {"config": CONFIG.values(), "rate_bits_per_s": 200 * MBIT, "step_ms": 10.0}
    table = costs_by_hand(CONFIG)
    for rows in ([{**row, **change}], [3]):
        with pytest.raises(TraceError, match=r"cost table: meta.rehearsal must have .*nestpipe profile"):
            rehearse(replace(table, meta={**table.meta, "world_size": 2, "rehearsal": rows}))


def test_a_cost_table_without_what_lanes_take_is_refused() -> None:
    table = costs_by_hand(CONFIG)
    meta = {name: value for name, value in table.meta.items() if name != "handoff"}
    with pytest.raises(TraceError, match=r"cost table: meta\.handoff\.p50_ns is missing; write the table anew"):
        machine_of(CostTable(rows=table.rows, meta=meta), [MBIT] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cores": 0}, "meta.cores must be positive, got 0"),
        ({"cores": float("inf")}, "meta.cores must be a finite number"),
        ({"handoff": None}, "meta.handoff.p50_ns is missing"),
        ({"issue": {"p50_ns": float("inf")}}, "meta.issue.p50_ns must be a finite number"),
        ({"turn_bytes": None}, "meta.turn_bytes must be bytes by op kind, got None"),
        ({"turn_bytes": {"all_reduced": 1}}, "meta.turn_bytes must be bytes by op kind"),
        ({"turn_bytes": {"all_reduce": float("nan")}}, "meta.turn_bytes.all_reduce must be a finite number"),
        ({"priority": 3}, "meta.priority must be text, got 3"),
        ({"repeatability_cv": {"real": -1}}, "meta.repeatability_cv.real must be a finite number"),
        ({"repeatability_cv": {}}, "meta.repeatability_cv.real is missing"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    table = costs_by_hand(CONFIG)
    table = replace(table, meta={**table.meta, **change}, name="my.json")
    with pytest.raises(TraceError, match=f"my.json: {message}.*nestpipe profile"):
        predict(CONFIG, table, machine_of(table, [MBIT] * 2), draws=2)


def test_what_runs_otherwise_than_profiled_is_said() -> None:
    table = costs_by_hand(CONFIG)
    assert differences(table, {"priority": "normal", "bench": "torchrun"}) == []
    assert differences(table, {"priority": "realtime"}) == ["priority is realtime here and was normal in the profile"]


def test_predicting_leaves_the_costs_as_they_are() -> None:
    table = costs_by_hand(CONFIG)
    digest = table.digest
    predict(CONFIG, table, machine_of(table, [200 * MBIT] * 2), draws=3)
    assert table.digest == digest
