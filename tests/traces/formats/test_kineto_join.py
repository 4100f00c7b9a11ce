"""Kernels, launches and host ranges joined, also where versions name things differently or leave them out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces.formats.samples import (
    event,
    kernel,
    later_pytorch,
    launched,
    load,
    trace,
)


def test_sizes_come_from_the_kernel_where_shapes_were_not_recorded(tmp_path: Path) -> None:
    imported = load(tmp_path, later_pytorch())
    rank = imported.summary["ranks"][0]
    assert (rank["rank"], rank["world_size"], rank["num_steps"]) == (3, 16, 1)
    assert (rank["compute_us"], rank["comm_us"], rank["exposed_us"]) == (100.0, 50.75, 20.0)
    found = rank["collectives"]["all_to_all"]
    assert (found["count"], found["bytes"], found["bytes_out"], found["kernel_us"]) == (1, 200, 240, 50.75)
    row = imported.table.frame.query("collective == 'all_to_all'").iloc[0]
    assert (row["splits"], row["group"], row["group_size"], row["step"]) == ("[50, 50]", "0", 16, 7)
    assert set(imported.table.frame["stream"]) == {"device 0 stream 20", "device 0 stream 7", "host 100", "host"}


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
