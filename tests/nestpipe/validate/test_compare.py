"""Predicted against measured: errors, speedups, rankings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nestpipe.timeline.metrics import measure
from nestpipe.validate.compare import compare, kind_errors, summarise
from nestpipe.validate.predict import Prediction, machine_of, predict
from tests.nestpipe.validate.by_hand import CONFIG, MBIT, costs_by_hand, outcome_by_hand


def test_errors_speedups_and_rankings_follow_their_definitions() -> None:
    table = costs_by_hand(CONFIG)
    machine = machine_of(table, [200 * MBIT] * 2)
    predicted = {
        name: predict(replace(CONFIG, schedule=name), table, machine, draws=4) for name in ("sync", "nestpipe")
    }
    outcomes = [
        outcome_by_hand("sync", predicted["sync"], 1.0),
        outcome_by_hand("nestpipe", predicted["nestpipe"], 1.1),
    ]
    rows = compare(outcomes)
    assert rows["error"].tolist() == pytest.approx([0.0, 1 / 1.1 - 1], abs=1e-3)
    assert rows["speedup_error"].tolist() == pytest.approx([0.0, 0.1], abs=2e-3)
    assert rows["inside"].tolist() == [True, False]
    summary = summarise(rows)
    assert summary["mean_absolute_error"] == pytest.approx(0.1 / 2.2, abs=1e-3)
    assert summary["worst_absolute_error"] == pytest.approx(0.1 / 1.1, abs=1e-3)
    assert (summary["rankings_right"], summary["rankings_judged"]) == (1, 1)
    kinds = kind_errors(outcomes).set_index("kind")
    assert kinds.loc["forward", "error"] == pytest.approx(-0.1 / 2.2, abs=2e-3)  # one of two runs is slower


def test_measured_metrics_come_from_the_same_code_as_predicted(prediction: Prediction) -> None:
    outcome = outcome_by_hand("nestpipe", prediction, 2.0)
    assert outcome.step_ms == pytest.approx(2 * measure(prediction.timeline).step_latency_ms, rel=1e-6)
