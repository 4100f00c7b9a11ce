"""Printed tables: alignment, units, rounding, and what they refuse."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.errors import TraceError
from nestpipe.timeline.metrics import measure
from reports.runs import tables
from tests.reports.examples import results, timeline


def test_results_print_each_metric_in_its_unit_with_its_status(golden: Callable[[str], None]) -> None:
    frame = results()
    golden(tables.results(frame[frame["world_size"].isin([1536, 6144])], title="Published against computed"))


def test_parts_print_shares_and_sum_to_the_step(golden: Callable[[str], None]) -> None:
    parts = {name: measure(timeline(name)).parts_ms for name in ("sync", "nestpipe")}
    golden(tables.parts(parts, title="Where the step goes"))


def test_numbers_line_up_on_the_right_and_text_on_the_left() -> None:
    frame = pd.DataFrame({"op": ["a", "long name"], "ms": [1234.5, 0.25]})
    lines = tables.text(frame, [tables.Column(name="op"), tables.Column(name="ms", digits=2)]).splitlines()
    assert lines == ["op               ms", "a          1,234.50", "long name      0.25"]


@given(st.floats(-1e9, 1e9), st.integers(0, 4), st.booleans())
def test_a_cell_is_within_half_a_last_digit_of_its_value(value: float, digits: int, sign: bool) -> None:
    shown = tables.cell(value, digits, sign=sign)
    assert abs(float(shown.replace(",", "")) - value) <= 0.5 * 10**-digits * (1 + 1e-6) + 1e-6
    assert "e" not in shown
    assert not shown.startswith("-0.0000") or float(shown) < 0


def test_zero_has_no_sign() -> None:
    assert tables.cell(-0.0004, 2, sign=True) == "0.00"
    assert tables.cell(0.0, 1, sign=True) == "0.0"


def test_what_does_not_apply_is_a_dash() -> None:
    assert [tables.cell(value, 2) for value in (None, float("nan"), pd.NA)] == ["-", "-", "-"]


def test_csv_keeps_every_digit() -> None:
    frame = pd.DataFrame({"x": [1 / 3, 2e-9], "unused": [1, 2]})
    read = pd.read_csv(io.StringIO(tables.csv(frame, [tables.Column(name="x", digits=1)])))
    assert list(read.columns) == ["x"]
    assert np.array_equal(read["x"], frame["x"])


def test_an_unknown_metric_is_named_with_the_nearest_one() -> None:
    frame = results().assign(metric="speedups")
    with pytest.raises(TraceError, match=r"unknown metric 'speedups'.*did you mean 'speedup'"):
        tables.results(frame)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(TraceError, match="missing column status"):
        tables.results(results().drop(columns="status"))
    with pytest.raises(TraceError, match="missing column nope"):
        tables.text(results(), [tables.Column(name="nope")])
