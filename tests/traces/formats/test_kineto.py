"""Profiler traces: kernel, launch and host range joined; classes, exposure, steps, coverage by definition."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import (
    AUTOGRAD,
    MAIN,
    collective,
    event,
    launched,
    load,
    rank_of,
    torchrec_step,
    trace,
)


def test_classes_unions_and_exposure_follow_the_definitions(tmp_path: Path) -> None:
    rank = rank_of(load(tmp_path, torchrec_step()))
    assert (rank["rank"], rank["world_size"], rank["num_steps"]) == (0, 2, 1)
    assert (rank["compute_us"], rank["comm_us"], rank["mem_sum_us"]) == (270, 325, 8)
    # 100 - 10 under the lookup - 10 under the product, 75, and 150 - 90 under the backward
    assert rank["exposed_us"] == 80 + 75 + 60
    assert (rank["num_compute_kernels"], rank["num_comm_kernels"], rank["num_mem_events"]) == (4, 3, 1)
    assert rank["span_us"] == 700
    assert rank["steps"] == [{"step": 5, "duration_us": 1000}]
    assert rank["overlap_percent"] == pytest.approx(100 * (1 - 215 / 325), abs=1e-4)


def test_copies_are_neither_compute_nor_communication_but_may_cover(tmp_path: Path) -> None:
    events = [
        *collective("all_reduce", 1, 10, 100, 1, 10),
        *launched("gpu_memcpy", "Memcpy DtoD", 5, 20, 30, 2, 9),
        *launched("gpu_memset", "Memset (Device)", 7, 40, 30, 3, 9),
    ]
    rank = rank_of(load(tmp_path, trace(events)))
    assert (rank["compute_us"], rank["comm_us"], rank["exposed_us"]) == (0, 100, 100)
    assert rank["exposed_with_mem_us"] == 50


def test_a_send_recv_kernel_is_what_its_host_range_says(tmp_path: Path) -> None:
    events = [
        *collective("all_to_all", 1, 10, 20, 1, 100),
        *collective("_all_gather_base", 40, 50, 30, 2, 7, "c10::BFloat16"),
    ]
    found = rank_of(load(tmp_path, trace(events)))
    sizes = {name: (one["count"], one["bytes"], one["kernel_us"]) for name, one in found["collectives"].items()}
    assert sizes == {"all_to_all": (1, 400, 20), "all_gather": (1, 14, 30)}
    assert found["kernels_by_name_alone"] == {"all_to_all": {"num_kernels": 2, "kernel_us": 50}}


def test_sizes_come_from_kernel_arguments_where_shapes_are_missing(tmp_path: Path) -> None:
    arguments = {
        "Collective_name": "all_to_allv",
        "In_msg_nelems": 100,
        "Out_msg_nelems": 60,
        "dtype": "BFloat16",
        "Group_size": 4,
        "In_split_size": "[10, 20, 30, 40]",
        "Out_split_size": "[15, 15, 15, 15]",
        "Process_Group_Name": "7",
    }
    events = [
        event("user_annotation", "nccl:all_to_all", 1, 5),
        *launched("kernel", "ncclDevKernel_SendRecv", 2, 10, 20, 1, **arguments),
    ]
    imported = load(tmp_path, trace(events))
    one = rank_of(imported)["collectives"]["all_to_all"]
    assert (one["count"], one["bytes"], one["bytes_out"], one["without_size"]) == (1, 200, 120, 0)
    row = imported.table.frame[imported.table.frame["collective"].notna()].iloc[0]
    assert row[["bytes", "group", "group_size", "splits"]].tolist() == [200, "7", 4, "[10, 20, 30, 40]"]


def test_kernels_stand_for_collectives_where_no_host_range_exists(tmp_path: Path) -> None:
    named = {"Collective_name": "allreduce", "In_msg_nelems": 8, "Out_msg_nelems": 8, "dtype": "Float"}
    events = [
        *launched("kernel", "ncclKernel_AllReduce_RING", 2, 10, 20, 1, **named),
        *launched("kernel", "ncclDevKernel_Generic", 42, 50, 20, 2, **named),
        *launched("kernel", "rcclKernel_ReduceScatter", 82, 90, 5, 3),
    ]
    imported = load(tmp_path, trace(events))
    sizes = {name: (one["count"], one["bytes"]) for name, one in rank_of(imported)["collectives"].items()}
    assert sizes == {"all_reduce": (2, 64), "reduce_scatter": (1, 0)}
    assert any("no host range" in note for note in imported.summary["coverage"]["notes"])


def test_a_host_collective_without_kernel_is_counted_and_kept(tmp_path: Path) -> None:
    host = collective("all_to_all", 1, 10, 20, 1, 100)[0]
    imported = load(tmp_path, trace([host, event("cpu_op", "aten::add", 3, 4)]))
    one = rank_of(imported)["collectives"]["all_to_all"]
    assert (one["count"], one["bytes"], one["without_kernel"], one["num_kernels"]) == (1, 400, 1, 0)
    row = imported.table.frame.iloc[0]
    assert row["bytes"] == 400
    assert imported.table.frame["duration_ns"].isna().all()


def test_output_bytes_come_from_the_op_around_the_range(tmp_path: Path) -> None:
    types = ["int", "int", "", ""]
    around = event("cpu_op", "c10d::alltoall_base_", 0, 9, Input_Dims=[[30], [10], [], []], Input_type=types)
    imported = load(tmp_path, trace([around, *collective("all_to_all", 2, 20, 5, 1, 10, "int")]))
    one = rank_of(imported)["collectives"]["all_to_all"]
    assert (one["bytes"], one["bytes_out"]) == (40, 120)


def test_stages_become_op_kinds_also_for_what_another_thread_launches(tmp_path: Path) -> None:
    imported = load(tmp_path, torchrec_step())
    kinds = imported.summary["coverage"]["by_kind_us"]
    assert kinds == {
        "all_to_all[grads]": 150,
        "all_to_all[rows]": 100,
        "forward": 100,
        "backward": 100,
        "all_to_all[keys]": 75,
        "update": 40,
        "lookup": 30,
        "copy_h2d": 8,
    }
    assert imported.summary["coverage"]["classified_share"] == 1


def test_work_of_the_next_batches_gets_their_numbers(tmp_path: Path) -> None:
    frame = load(tmp_path, torchrec_step(step=5)).table.frame
    batch = frame.dropna(subset=["batch"]).groupby("kind")["batch"].first().to_dict()
    assert (batch["copy_h2d"], batch["all_to_all[keys]"], batch["forward"], batch["update"]) == (7, 6, 5, 5)


def test_coverage_says_why_work_was_not_classified(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 500),
        *launched("kernel", "lonely", 10, 20, 30, 1),
        event("kernel", "orphan", 100, 10, 7, 0, correlation=999, stream=7),
        *collective("all_to_all", 200, 210, 40, 2, 10),
        *collective("broadcast", 300, 310, 50, 3, 10),
    ]
    coverage = load(tmp_path, trace(events)).summary["coverage"]
    assert {(one["reason"], one["us"]) for one in coverage["unclassified"]} == {
        ("launched outside any annotated stage", 30),
        ("no launch with this correlation in the trace", 10),
        ("all_to_all outside any annotated stage: rows or gradients", 40),
        ("collective broadcast has no op kind", 50),
    }
    assert coverage["classified_share"] == 0


def test_a_float_time_keeps_its_nanoseconds(tmp_path: Path) -> None:
    events = launched("kernel", "k", 4458676524600.5, 4458676524670.502, 92.804, 1)
    frame = load(tmp_path, trace(events, baseTimeNanoseconds=10**18)).table.frame
    assert frame["duration_ns"].tolist() == [92_804]
    assert frame["launch_ns"].tolist() == [4458676524600500 - 4458676524670502]


def test_categories_may_be_written_in_any_case(tmp_path: Path) -> None:
    document = torchrec_step()
    shouted = copy.deepcopy(document)
    for one in shouted["traceEvents"]:
        one["cat"] = one["cat"].upper()
    assert rank_of(load(tmp_path, shouted)) == rank_of(load(tmp_path, document))


def test_device_copies_of_annotations_are_no_steps(tmp_path: Path) -> None:
    document = torchrec_step()
    document["traceEvents"].append(event("gpu_user_annotation", "ProfilerStep#6", 0, 10, 7, 0))
    document["traceEvents"].append(event("gpu_user_annotation", "nccl:all_to_all", 0, 10, 7, 0))
    rank = rank_of(load(tmp_path, document))
    assert rank["num_steps"] == 1
    assert rank["collectives"]["all_to_all"]["count"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ts": None}, r"traceEvents\[\d+\]: ts must be a time in us, got None"),
        ({"dur": -1}, r"dur must be a time in us from 0 up, got -1"),
        ({"name": 3}, "name must be a string, got 3"),
        ({"ts": 1e30}, "ts must be a time"),
    ],
)
def test_an_event_that_cannot_be_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    kernel = launched("kernel", "k", 1, 10, 5, 1)[1]
    with pytest.raises(TraceError, match=message):
        load(tmp_path, trace([{**kernel, **change}]))


def test_a_chrome_trace_without_device_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no device kernel, profiler step or collective"):
        load(tmp_path, trace([event("cpu_op", "aten::add", 1, 2)]))


def test_events_outside_every_step_belong_to_none(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 100, 100),
        event("user_annotation", "ProfilerStep#2", 200, 100),
        *launched("kernel", "before", 50, 120, 5, 1),
        *launched("kernel", "first", 150, 260, 5, 2),
        *launched("kernel", "second", 200, 270, 5, 3),
    ]
    frame = load(tmp_path, trace(events)).table.frame
    steps = frame[frame["kind"] == "unclassified"].set_index("op")["step"]
    assert steps.isna()["before"]
    assert (steps["first"], steps["second"]) == (1, 2)


def test_blocking_calls_and_steps_are_host_rows(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cuda_runtime", "cudaStreamSynchronize", 40, 30, correlation=9),
        *launched("kernel", "k", 10, 20, 5, 1, tid=AUTOGRAD),
    ]
    frame = load(tmp_path, trace(events)).table.frame.set_index("kind")
    assert frame.loc["host_wait", ["step", "duration_ns", "stream"]].tolist() == [1, 30_000, f"host {MAIN}"]
    assert frame.loc["step", "duration_ns"] == 100_000
    assert frame.loc["unclassified", ["thread", "launch_end_ns"]].tolist() == [f"host {AUTOGRAD}", 12_000]
