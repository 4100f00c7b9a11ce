"""PARAM communication traces: sizes count elements."""

from __future__ import annotations

import json
from pathlib import Path

from tests.paths import INPUTS
from tests.traces.formats.samples import (
    load,
    param_trace,
)
from traces.formats.importing import import_traces


def test_param_sizes_count_elements(tmp_path: Path) -> None:
    imported = load(tmp_path, param_trace())
    (rank,) = imported.summary["ranks"]
    assert rank["collectives"] == {"all_to_all": {"count": 1, "bytes": 24, "bytes_out": 16}}
    assert set(rank["collectives_as_recorded"]) == {"all_to_allv", "init", "wait"}
    row = imported.table.frame.iloc[0]
    assert row[["kind", "splits", "launch_ns"]].tolist() == ["all_to_all[keys]", "[2, 4]", 123]


def test_splits_that_contradict_the_group_or_the_tensor_are_noted(tmp_path: Path) -> None:
    path = INPUTS / "import-splits-not-group-size.json"
    (note,) = import_traces([path]).summary["coverage"]["notes"]
    assert "1 collectives have another number of splits than their group has ranks" in note
    (record,) = json.loads(path.read_text(encoding="utf-8"))
    found = load(tmp_path, [{**record, "in_split": [100, 50, 20, 10], "out_split": [100, 100, 100, 100]}])
    (note,) = found.summary["coverage"]["notes"]
    assert "the splits of 1 collectives do not sum to their tensors; bytes are those of the splits" in note
    assert found.table.frame[["bytes", "bytes_out"]].values.tolist() == [[180 * 4, 400 * 4]]
    # rows of two elements each: the sum is half of the tensor
    rows = load(tmp_path, [{**record, "in_split": [50] * 4, "out_split": [50] * 4}])
    assert rows.summary["coverage"]["notes"] == []
    assert rows.table.frame["bytes"].tolist() == [1600]
