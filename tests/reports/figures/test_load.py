"""The heat map of links and hosts: what it takes, and that every place of every kind is in it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import NestPipeError, TraceError
from nestpipe.cli import app
from reports.figures.load import load_figure, load_table


def test_every_kind_is_a_row_with_the_numbers_of_its_places() -> None:
    load = pd.DataFrame({"resource": ["h2d switch 1", "h2d switch 0", "rows 7"], "utilisation": [0.9, 0.2, 0.5]})
    assert load_table(load).to_dict("index") == {
        "h2d switch": {0: 0.2, 1: 0.9, 7: pytest.approx(float("nan"), nan_ok=True)},
        "rows": {0: pytest.approx(float("nan"), nan_ok=True), 1: pytest.approx(float("nan"), nan_ok=True), 7: 0.5},
    }
    axes = load_figure(load, "three").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["h2d switch (2)", "rows (1)"]
    assert sorted(text.get_text() for text in axes.texts) == ["20%", "50%", "90%"]


def test_a_resource_without_a_place_is_refused() -> None:
    with pytest.raises(TraceError, match="'dram' must be a kind and the number of a place"):
        load_table(pd.DataFrame({"resource": ["dram"], "utilisation": [0.5]}))


def test_simulate_draws_it_and_says_what_it_needs(tmp_path: Path) -> None:
    drawn = tmp_path / "load.svg"
    options = ["simulate", "--schedule", "nestpipe", "--model", "dlrm", "--world-size", "8", "--load-plot", str(drawn)]
    run = CliRunner().invoke(app, [*options, "--topology", "dgx_h100"])
    assert run.exit_code == 0, run.output
    assert b"<svg" in drawn.read_bytes()
    refused = CliRunner().invoke(app, ["simulate", "--schedule", "nestpipe", "--load-plot", str(drawn)])
    assert isinstance(refused.exception, NestPipeError)
    assert "--load-plot needs --topology" in str(refused.exception)
