"""PARAM communication traces: sizes count elements."""

from __future__ import annotations

from pathlib import Path

from tests.traces.formats.samples import (
    load,
    param_trace,
)


def test_param_sizes_count_elements(tmp_path: Path) -> None:
    imported = load(tmp_path, param_trace())
    (rank,) = imported.summary["ranks"]
    assert rank["collectives"] == {"all_to_all": {"count": 1, "bytes": 24, "bytes_out": 16}}
    assert set(rank["collectives_as_recorded"]) == {"all_to_allv", "init", "wait"}
    row = imported.table.frame.iloc[0]
    assert row[["kind", "splits", "launch_ns"]].tolist() == ["all_to_all[keys]", "[2, 4]", 123]
