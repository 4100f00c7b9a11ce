"""The figures of a validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.validate.compare import compare
from reports.figures.sheet import save
from reports.figures.validation import history, predicted_against_measured, timeline_pair
from tests.nestpipe.validate.by_hand import outcome_by_hand, prediction_by_hand


def test_figures_show_every_configuration(tmp_path: Path) -> None:
    prediction = prediction_by_hand()
    rows = compare([outcome_by_hand("sync", prediction, 1.0), outcome_by_hand("nestpipe", prediction, 1.02)])
    figure = predicted_against_measured(rows)
    assert {text.get_text() for text in figure.axes[0].get_legend().get_texts()} >= {"sync", "nestpipe", "±5 %"}
    assert save(figure, tmp_path / "points.png").stat().st_size > 10_000
    pair = timeline_pair(prediction.timeline, prediction.timeline, name="nestpipe")
    assert [axes.get_title("left").split(":")[0] for axes in pair.axes] == ["nestpipe predicted", "nestpipe measured"]


def test_an_axis_of_less_than_a_decade_has_ticks_enough() -> None:
    steps = np.array([33.0, 48.0, 92.0])
    table = pd.DataFrame({"schedule": "sync", "predicted_ms": steps, "low_ms": steps, "high_ms": steps})
    figure = predicted_against_measured(table.assign(measured_ms=steps, error=0.0))
    assert figure.axes[0].get_xticks().tolist() == [30, 40, 50, 60, 80, 100]


def test_the_history_is_drawn_in_order_and_a_damaged_one_is_refused() -> None:
    entry = {
        "commit": "abc",
        "grid": "quick",
        "world_size": 2,
        "compute": "real",
        "mean_absolute_error": 0.04,
        "worst_absolute_error": 0.1,
    }
    figure = history([entry, {**entry, "commit": "def"}])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [
        "abc\nquick\n2 ranks\nreal",
        "def\nquick\n2 ranks\nreal",
    ]
    many = history([entry] * 40)
    assert many.get_figwidth() / 40 >= 0.6, "labels would cover each other"
    with pytest.raises(TraceError, match="entry 0 lacks grid"):
        history([{name: value for name, value in entry.items() if name != "grid"}])
    with pytest.raises(
        TraceError, match="entry 1: worst_absolute_error must be a number that is not negative, got '1'"
    ):
        history([entry, {**entry, "worst_absolute_error": "1"}])
    with pytest.raises(TraceError, match="no entry to draw"):
        history([])
