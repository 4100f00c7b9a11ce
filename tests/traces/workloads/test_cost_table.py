"""The cost table and its fits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.ir import OpKind
from traces.workloads.cost_table import (
    COST_COLUMNS,
    CostTable,
    costs_of,
    fit_kind,
    read_cost_table,
    resample,
    summarise,
)


def rows_by_hand(points: list[tuple[float, float, float]], kind: OpKind = OpKind.LOOKUP) -> pd.DataFrame:
    """Rows of a table: keys, bytes, time_ns."""
    rows = []
    for keys, size, time_ns in points:
        values = {"kind": kind.value, "variant": "v", "world_size": 2, "link_bits_per_s": 1e9, "samples": 0.0}
        values |= {"keys": keys, "unique_keys": 0.0, "bytes": size, "wire_ns": 0.0, "repeats": 10, "source": "by hand"}
        values |= {f"time_ns_{name}": time_ns for name in ("mean", "min", "p50", "p75", "p95", "max")}
        rows.append(values)
    return pd.DataFrame(rows, columns=list(COST_COLUMNS))


def test_a_fit_finds_the_cost_per_key_and_per_byte() -> None:
    points = [(keys, size, 1000 + 20 * keys + 0.5 * size) for keys in (10, 100, 1000) for size in (400, 4000)]
    fit = fit_kind(rows_by_hand(points), OpKind.LOOKUP, "v")
    assert fit.coefficients == pytest.approx({"one": 1000, "keys": 20, "bytes": 0.5}, rel=1e-6)
    assert fit.error < 1e-6
    assert fit.time_ns({"keys": 50, "bytes": 100}) == pytest.approx(2050)


def test_a_fit_says_when_it_is_asked_outside_of_what_it_has_seen() -> None:
    fit = fit_kind(rows_by_hand([(10, 0, 110), (100, 0, 1010)]), OpKind.LOOKUP, "v")
    assert fit.status({"keys": 50}) == "interpolated"
    assert fit.status({"keys": 500}) == "extrapolated"


def test_time_on_the_wire_is_its_rate_and_not_a_matter_of_fit() -> None:
    rows = rows_by_hand([(0, size, 5000 + size + 2.0 * size) for size in (1000, 2000, 4000)], OpKind.ALL_TO_ALL_ROWS)
    fit = fit_kind(rows.assign(wire_ns=2.0 * rows["bytes"]), OpKind.ALL_TO_ALL_ROWS, "v")
    assert fit.coefficients == pytest.approx({"one": 5000, "bytes": 1.0, "wire_ns": 1.0}, rel=1e-6)


def test_no_cost_is_negative_even_where_noise_says_so() -> None:
    fit = fit_kind(rows_by_hand([(10, 0, 1000), (100, 0, 990), (1000, 0, 980)]), OpKind.LOOKUP, "v")
    assert all(value >= 0 for value in fit.coefficients.values())


def test_a_missing_variant_is_named_with_those_there_are() -> None:
    with pytest.raises(TraceError, match="no rows of lookup for variant 'other'; it has v"):
        fit_kind(rows_by_hand([(1, 1, 1)]), OpKind.LOOKUP, "other")


def test_a_cost_table_survives_its_file(tmp_path: Path) -> None:
    table = CostTable(rows=rows_by_hand([(10, 4, 100), (20, 8, 200)]), meta={"cores": 2})
    (tmp_path / "costs.json").write_text(table.to_json(), encoding="utf-8")
    again = read_cost_table(tmp_path / "costs.json")
    assert again.digest == table.digest
    assert again.meta == table.meta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "cost table version 9 is not known"),
        ({"columns": ["kind"], "rows": [["lookup"]]}, "missing column variant"),
        ({"columns": "kind"}, "columns must be a list of names, got 'kind'"),
        ({"columns": ["kind", "kind"]}, "columns must differ, got kind, kind"),
        ({"rows": "x"}, "rows must be a list, got 'x'"),
        ({"rows": []}, "no rows; write the table anew"),
        ({"rows": [[1, 2]]}, "row 0 must be a list of 17 values"),
        ({"meta": None}, "meta must be an object, got None"),
    ],
)
def test_a_damaged_cost_table_is_refused_by_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    value = json.loads(CostTable(rows=rows_by_hand([(10, 4, 100)])).to_json()) | change
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(TraceError, match=f"costs.json: .*{message}"):
        read_cost_table(path)


def test_a_negative_time_and_an_unknown_kind_are_refused_by_row() -> None:
    rows = rows_by_hand([(10, 4, 100), (20, 8, -1)])
    with pytest.raises(TraceError, match="row 1: time_ns_mean must be a number that is not negative, got -1"):
        CostTable(rows=rows)
    with pytest.raises(TraceError, match=r"row 0: unknown kind 'lookups'.*did you mean 'lookup'"):
        CostTable(rows=rows_by_hand([(10, 4, 100)]).assign(kind="lookups"))
    with pytest.raises(TraceError, match=r"row 0: unknown kind \"\['lookup'\]\""):
        CostTable(rows=rows_by_hand([(10, 4, 100)]).assign(kind=[["lookup"]]))
    with pytest.raises(TraceError, match="row 0: bytes must be a number that is not negative, got '12'"):
        CostTable(rows=rows_by_hand([(10, 4, 100)]).assign(bytes="12"))
    with pytest.raises(TraceError, match=r"row 0: time_ns_p50 must be a number.*got 1e\+300"):
        CostTable(rows=rows_by_hand([(10, 4, 100)]).assign(time_ns_p50=1e300))


@pytest.mark.parametrize("value", [None, "2", [], True, -1, float("nan"), float("inf")])
def test_a_number_of_the_meta_is_refused_by_table_and_key(value: object) -> None:
    table = CostTable(rows=rows_by_hand([(10, 4, 100)]), meta={"issue": {"p50_ns": value}}, name="my.json")
    with pytest.raises(TraceError, match=r"my.json: meta.issue.p50_ns must be a finite number.*profile"):
        table.number("issue", "p50_ns")
    with pytest.raises(TraceError, match=r"my.json: meta.issue.p50_ns.more is missing"):
        table.number("issue", "p50_ns", "more")


def test_redrawn_means_stay_within_their_sampling_error() -> None:
    rows = rows_by_hand([(10, 4, 1000.0)] * 400).assign(time_ns_p75=1067.45)
    drawn = resample(rows, np.random.default_rng(1))["time_ns_mean"]
    # sigma = 100 and 10 repeats: standard error 100 / sqrt(10)
    assert drawn.std() == pytest.approx(31.6, rel=0.1)
    assert drawn.mean() == pytest.approx(1000, abs=8)


def test_samples_of_one_point_become_one_row_of_medians() -> None:
    samples = pd.DataFrame({"point": "p", "kind": "lookup", "variant": "v", "time_ns": [10, 20, 30, 1000]})
    samples = samples.assign(
        world_size=2, link_bits_per_s=1, samples=1, keys=[1, 1, 3, 3], unique_keys=0, bytes=4, wire_ns=0
    )
    row = summarise(samples, source="by hand").iloc[0]
    assert (row["keys"], row["repeats"], row["time_ns_p50"], row["time_ns_max"]) == (2, 4, 25, 1000)


def test_costs_depend_on_what_their_kind_touches() -> None:
    assert costs_of(OpKind.FORWARD) == ("samples", "keys", "bytes")
    assert "wire_ns" not in costs_of(OpKind.LOOKUP)
