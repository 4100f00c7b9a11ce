"""Execution traces, PARAM, Chakra, workloads: sizes and counts as recorded, formats told apart by content."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import (
    AICB_TEXT,
    WORKLOAD_TEXT,
    chakra_bytes,
    chakra_json,
    event,
    execution_trace_new,
    execution_trace_old,
    kernel,
    later_pytorch,
    launched,
    param_trace,
    samples,
    torchrec_step,
    trace,
)
from traces.formats.importing import Imported, detect, import_to, import_traces
from traces.formats.protobuf import WireError, double_field, fields, read_varint, text_field, uint_field
from traces.table import read_table

FORMAT_OF = {
    "kineto": "kineto",
    "nccl_json": "collective_log",
    "rccl_json": "collective_log",
    "nccl": "collective_log",
    "table_csv": "collective_log",
    "execution_trace_old": "execution_trace",
    "execution_trace_new": "execution_trace",
    "param": "param",
    "chakra_json": "chakra_json",
    "chakra": "chakra",
    "workload": "workload",
    "aicb": "aicb",
}


def load(tmp_path: Path, content: Any, name: str = "x") -> Imported:
    """What importing this content (bytes, text or a document) gives."""
    path = tmp_path / name
    data = content if isinstance(content, bytes) else content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return import_traces([path])


@pytest.mark.parametrize("name", sorted(samples()))
def test_a_format_is_known_by_content_plain_or_gzip(tmp_path: Path, name: str) -> None:
    path = tmp_path / "misleading.csv"
    for data in (samples()[name], gzip.compress(samples()[name])):
        path.write_bytes(data)
        assert detect(path).name == FORMAT_OF[name]
        assert import_traces([path]).summary["files"][0]["format"] == FORMAT_OF[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"{", "not valid JSON"),
        (b'{"a": 1}', "JSON of no known trace format; expected one of: PyTorch profiler"),
        (b"[1, 2]", "JSON of no known trace format"),
        (b"\x00\x01\x02\x03" * 9, "a binary file"),
        (b"\xff\xd8\xff\xe0 text", "is not UTF-8 text"),
        (b"just some words\n", "no row of a collective log"),
        (b"test\nTP:\nallreduce,: 300\n", "bus bandwidths by group: no sizes and no times"),
    ],
)
def test_what_is_no_trace_is_refused_by_reason(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load(tmp_path, content)


def test_execution_trace_of_the_old_schema(tmp_path: Path) -> None:
    imported = load(tmp_path, execution_trace_old())
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


def test_param_sizes_count_elements(tmp_path: Path) -> None:
    imported = load(tmp_path, param_trace())
    (rank,) = imported.summary["ranks"]
    assert rank["collectives"] == {"all_to_all": {"count": 1, "bytes": 24, "bytes_out": 16}}
    assert set(rank["collectives_as_recorded"]) == {"all_to_allv", "init", "wait"}
    row = imported.table.frame.iloc[0]
    assert row[["kind", "splits", "launch_ns"]].tolist() == ["all_to_all[keys]", "[2, 4]", 123]


def test_chakra_protobuf_of_another_producer(tmp_path: Path) -> None:
    imported = load(tmp_path, chakra_bytes(), "all_to_all.3.et")
    (rank,) = imported.summary["ranks"]
    assert (rank["rank"], rank["schema"], rank["num_messages"]) == (3, "0.0.4", 2)
    assert rank["collectives"] == {"all_to_all": {"count": 1, "bytes": 1 << 20}}
    assert imported.table.frame["duration_ns"].tolist() == [7000]


def test_chakra_json_keeps_times_and_what_runs_on_the_device(tmp_path: Path) -> None:
    imported = load(tmp_path, chakra_json())
    (rank,) = imported.summary["ranks"]
    assert (rank["duration_us"], rank["num_device_nodes"], rank["world_size"]) == (31, 1, 8)
    assert imported.table.frame["collective"].tolist()[1] == "broadcast"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (chakra_bytes()[:-3], "announces 58 bytes, 55 are left; the file is cut short"),
        (chakra_bytes() + b"\x80", "cut short"),
        (chakra_bytes()[:8] + b"\x02\x18\x09", "type must be 0 to 7, got 9"),
        (chakra_bytes()[:8] + b"\x03\x0b\x00\x00", "message 1 is no Chakra node: wire type 3"),
    ],
)
def test_a_damaged_chakra_file_names_the_message(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load(tmp_path, data)


def test_workload_gives_ops_with_bytes_and_leaves_cycles_out(tmp_path: Path) -> None:
    imported = load(tmp_path, WORKLOAD_TEXT)
    (summary,) = imported.summary["workloads"]
    assert summary["compute"] == {"forward": 1580, "input_gradient": 1104, "weight_gradient": 1216}
    assert summary["collectives"] == {
        "all_to_all": {"count": 2, "bytes": 196608},
        "all_reduce": {"count": 1, "bytes": 13312},
    }
    frame = imported.table.frame
    assert frame["duration_ns"].isna().all()
    assert frame["source"].str.startswith("assumed: ").all()
    assert frame[frame["collective"].notna()]["kind"].tolist() == [
        "all_to_all[rows]",
        "all_to_all[grads]",
        "all_reduce",
    ]


def test_simai_times_are_nanoseconds_and_groups_follow_the_suffix(tmp_path: Path) -> None:
    first = "HYBRID_TRANSFORMER model_parallel_NPU_group: 4 ep: 2 pp: 1 vpp: 1 ga: 1 all_gpus: 32\n"
    layer = "moe -1 500 ALLTOALL_EP 64 1 ALLREDUCE 32 2 REDUCESCATTER_DP_EP 16 3\n"
    frame = load(tmp_path, first + "1\n" + layer).table.frame
    assert frame["duration_ns"].dropna().tolist() == [500, 1, 2, 3]
    sizes = frame.dropna(subset=["collective"])[["collective", "group_size"]].values.tolist()
    assert sizes == [["all_to_all", 2], ["all_reduce", 4], ["reduce_scatter", 4]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WORKLOAD_TEXT.replace("\n2\n", "\n3\n"), "3 layers announced, 2 found; the file is cut short"),
        (WORKLOAD_TEXT.replace(" 98304 310", " x 310"), "line 3: forward bytes must be a whole number, got 'x'"),
        (
            WORKLOAD_TEXT.replace("ALLREDUCE", "ALLREDUSE"),
            "line 4: weight_gradient collective 'ALLREDUSE' is not known",
        ),
        (WORKLOAD_TEXT.replace(" 896 ALLREDUCE 13312 13", ""), "a layer has 12 columns, got 8"),
        (AICB_TEXT.replace("8192,test_step", "-8192,test_step"), "line 3: msg_size must lie between 0"),
        (AICB_TEXT[:-10], "cut short"),
    ],
)
def test_a_damaged_workload_names_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load(tmp_path, text)


def test_aicb_rows_without_size_are_no_collectives(tmp_path: Path) -> None:
    matrices = 'CommType.computation,CommGroup.all,"((1, 2), (3, 4))",fw,None,None,,None,None,None,1\n'
    imported = load(tmp_path, AICB_TEXT + matrices)
    assert imported.table.frame[["collective", "bytes", "group"]].values.tolist() == [
        ["all_to_all", 4096, "dp_group"],
        ["all_reduce", 8192, "tp_group"],
    ]


def test_varints_and_fields_are_read_as_written() -> None:
    body = uint_field(3, 300) + text_field(2, "ä") + double_field(5, 1.5)
    assert [(part.number, part.wire) for part in fields(body)] == [(3, 0), (2, 2), (5, 1)]
    for damaged in (b"\x80" * 11, body[:-1], b"\x00"):
        with pytest.raises(WireError):
            list(fields(damaged))
    with pytest.raises(WireError, match="does not end"):
        read_varint(b"", 0)


def test_sizes_come_from_the_kernel_where_shapes_were_not_recorded(tmp_path: Path) -> None:
    imported = load(tmp_path, later_pytorch())
    rank = imported.summary["ranks"][0]
    assert (rank["rank"], rank["world_size"], rank["num_steps"]) == (3, 16, 1)
    assert (rank["compute_us"], rank["comm_us"], rank["exposed_us"]) == (100.0, 50.75, 20.0)
    found = rank["collectives"]["all_to_all"]
    assert (found["count"], found["bytes"], found["bytes_out"], found["kernel_us"]) == (1, 200, 240, 50.75)
    row = imported.table.frame.query("collective == 'all_to_all'").iloc[0]
    assert (row["splits"], row["group"], row["group_size"], row["step"]) == ("[50, 50]", "0", 16, 7)
    assert set(imported.table.frame["stream"]) == {"device 0 stream 20", "device 0 stream 7", "host 100"}


SPELLINGS = {
    "nccl:_all_gather_base": "all_gather",
    "nccl:all_gather_into_tensor_coalesced": "all_gather",
    "nccl:ALLGATHER_coalesced": "all_gather",
    "nccl:_reduce_scatter_base": "reduce_scatter",
    "nccl:reduce_scatter_tensor_coalesced": "reduce_scatter",
    "nccl:_broadcast_oop": "broadcast",
    "nccl:all_reduce_barrier": "all_reduce",
    "nccl:allreduce_coalesced": "all_reduce",
    "nccl:coalesced": "coalesced",
    "nccl:send 0->1": "send",
    "nccl:recv 0<-1": "recv",
    "rccl:all_to_all": "all_to_all",
    "hccl:alltoallv": "all_to_all",
    "xccl:all_reduce": "all_reduce",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_range_of_a_backend_is_one_collective(tmp_path: Path, name: str) -> None:
    range_ = event("user_annotation", name, 10, 2, Input_Dims=[[4, 4]], Input_type=["c10::BFloat16"])
    rank = load(tmp_path, trace([range_, kernel("gemm", 1, 1)])).summary["ranks"][0]
    assert {key: (one["count"], one["bytes"]) for key, one in rank["collectives"].items()} == {SPELLINGS[name]: (1, 32)}


def test_kernels_without_host_are_told_by_their_arguments(tmp_path: Path) -> None:
    told = kernel("ncclDevKernel_Generic_4(x)", 1.5, 10.25)
    told["args"] |= {"Collective name": "_allgather_base", "dtype": "Float", "In msg nelems": 10, "Out msg nelems": 80}
    summary = load(tmp_path, {"traceEvents": [told, kernel("ncclDevKernel_SendRecv(x)", 20, 5)]}).summary
    found = summary["ranks"][0]["collectives"]
    assert (found["all_gather"]["bytes"], found["all_gather"]["bytes_out"]) == (40, 320)
    assert (found["all_to_all"]["bytes"], found["all_to_all"]["without_size"]) == (0, 1)
    assert summary["ranks"][0]["rank"] is None
    assert any("2 communication kernels have no host range" in note for note in summary["coverage"]["notes"])


def test_a_list_of_tensors_has_the_size_that_the_kernel_states(tmp_path: Path) -> None:
    dims = {"Input_Dims": [[[8, 16], [8, 16]]], "Input_type": ["TensorList"]}
    exchange = launched("kernel", "ncclDevKernel_SendRecv(x)", 5, 10, 5, 3)
    exchange[1]["args"] |= {"Collective name": "all_to_all", "In msg nelems": 256, "dtype": "ComplexFloat"}
    events = [event("user_annotation", "nccl:all_to_all", 4, 6, **dims), *exchange]
    assert load(tmp_path, trace(events)).summary["ranks"][0]["collectives"]["all_to_all"]["bytes"] == 256 * 8


def test_categories_of_older_versions_mean_the_same(tmp_path: Path) -> None:
    events = [
        event("Operator", "ProfilerStep#1", 100, 50),
        event("Runtime", "hipExtLaunchKernel", 110, 5, correlation=9),
        kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 120, 20, 9, "stream 7"),
        event("Memcpy", "CopyHostToDevice", 150, 2, "stream 7", 0, bytes=8),
    ]
    events[2]["cat"] = "Kernel"
    imported = load(tmp_path, trace(events))
    rank = imported.summary["ranks"][0]
    assert (rank["num_steps"], rank["comm_us"], rank["num_mem_events"]) == (1, 20.0, 1)
    assert rank["collectives"]["all_reduce"]["num_kernels"] == 1
    assert "copy_h2d" in set(imported.table.frame["kind"])


def test_a_tensor_of_an_execution_trace_may_have_further_fields(tmp_path: Path) -> None:
    document = execution_trace_new()
    for node in document["nodes"]:
        node["inputs"]["values"] = json.loads(json.dumps(node["inputs"]["values"]).replace('"cuda:0"]', '"cuda:0", 0]'))
    plain = load(tmp_path, execution_trace_new(), "rank0.json").summary["ranks"][0]["collectives"]
    assert load(tmp_path, document, "rank1.json").summary["ranks"][0]["collectives"] == plain


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_a_table_written_as_it_is_made_is_the_one_made_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    paths = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_text(json.dumps(torchrec_step(rank, late_us=40 * rank)))
    whole = import_traces(paths)
    monkeypatch.setattr("traces.formats.kineto_table._ROWS", 3)
    summary = import_to(tmp_path / f"t.{suffix}", paths)
    assert summary == whole.summary == import_to(None, paths)
    again = read_table(tmp_path / f"t.{suffix}")
    assert again.frame.equals(whole.table.frame)
    assert again.files == whole.table.files


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
