"""PyTorch execution traces: sizes and splits in both schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nestpipe.base.errors import TraceError
from tests.paths import INPUTS
from tests.traces.formats.samples import (
    execution_trace_new,
    execution_trace_old,
    load,
)
from traces.formats.importing import import_traces


def test_execution_trace_of_the_old_schema(tmp_path: Path) -> None:
    imported = load(tmp_path, execution_trace_old(), "x")
    (rank,) = imported.summary["ranks"]
    assert (rank["rank"], rank["world_size"], rank["num_nodes"], rank["schema"]) == (1, 2, 5, "1.0.1")
    assert rank["collectives"] == {
        "all_reduce": {"count": 1, "bytes": 20, "bytes_out": 20},
        "all_to_all": {"count": 1, "bytes": 48, "bytes_out": 32},
    }
    assert rank["collectives_as_recorded"]["wait"] == {"count": 1, "bytes": 0, "bytes_out": 0}
    frame = imported.table.frame.set_index("collective")
    assert frame.loc["all_to_all", ["kind", "splits", "splits_out"]].tolist() == [
        "all_to_all[rows]",
        "[4, 8]",
        "[4, 4]",
    ]
    assert frame["duration_ns"].isna().all()
    assert frame["source"].tolist() == ["recorded: x"] * 2


def test_execution_trace_of_the_new_schema_has_sizes_in_attributes(tmp_path: Path) -> None:
    imported = load(tmp_path, execution_trace_new(), "rank2.json")
    (rank,) = imported.summary["ranks"]
    assert (rank["rank"], rank["world_size"]) == (2, 4)
    assert rank["collectives"] == {"all_gather": {"count": 1, "bytes": 200, "bytes_out": 800}}
    assert imported.table.frame[["kind", "group", "group_size"]].values.tolist() == [["all_gather", "3", 4]]


def test_a_tensor_of_an_execution_trace_may_have_further_fields(tmp_path: Path) -> None:
    document = execution_trace_new()
    for node in document["nodes"]:
        node["inputs"]["values"] = json.loads(json.dumps(node["inputs"]["values"]).replace('"cuda:0"]', '"cuda:0", 0]'))
    plain = load(tmp_path, execution_trace_new(), "rank0.json").summary["ranks"][0]["collectives"]
    assert load(tmp_path, document, "rank1.json").summary["ranks"][0]["collectives"] == plain


@pytest.mark.parametrize(("recorded", "rank"), [("allreduce", 5), ("broadcast", None), ("send", None)])
def test_the_number_before_a_name_is_a_rank_only_where_it_is_ones_own(
    tmp_path: Path, recorded: str, rank: int | None
) -> None:
    inputs = {"values": [[[1, 2, 0, 8, 4, "cpu"]], 3, ["0", "default_pg"], 5, recorded, [], [], 0, 1, 8]}
    node = {"id": 2, "name": "record_param_comms", "ctrl_deps": 1, "inputs": inputs, "outputs": {}, "attrs": []}
    document = {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "start_ts": 1, "nodes": [node]}
    found = load(tmp_path, document).summary["ranks"][0]
    assert (found["rank"], found["world_size"]) == (rank, 8)
    assert sum(one["bytes"] for one in found["collectives"].values()) == 32


def test_device_nodes_of_a_merged_trace_carry_their_times(tmp_path: Path) -> None:
    path = INPUTS / "import-et-plus-times.json"
    found = import_traces([path])
    frame = found.table.frame
    assert frame[["op", "stream", "duration_ns"]].values.tolist() == [["gemm", "device 0 stream 7", 300_000]]
    assert (found.summary["ranks"][0]["duration_us"], found.summary["ranks"][0]["num_device_nodes"]) == (300.0, 1)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["nodes"][1]["name"] = "## forward ##"
    document["nodes"].append({**document["nodes"][2], "id": 4, "name": "ncclKernel_AllReduce", "ts": 2000, "tid": 20})
    rows = load(tmp_path, document).table.frame
    assert rows["kind"].tolist() == ["forward", "all_reduce"]
    assert set(rows["source"].str.partition(":")[0]) == {"measured"}
    document["nodes"][2]["dur"] = "x"
    with pytest.raises(TraceError, match="node 3: ts and dur must be times in us, got 1010, 'x'"):
        load(tmp_path, document)
