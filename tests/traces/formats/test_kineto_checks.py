"""What no device does: copies, lost times, overlaps, reused correlations, several ranks; and who communicates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestpipe.base.errors import TraceError
from tests.paths import INPUTS
from tests.traces.formats.samples import load, rank_of
from traces.formats.importing import import_traces
from traces.formats.phases import kernel_collective


def document(name: str) -> dict[str, Any]:
    """One of the inputs, to be varied."""
    found: dict[str, Any] = json.loads((INPUTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def times(summary: dict[str, Any]) -> tuple[float, float]:
    return summary["compute_us"], summary["comm_us"]


def renamed(found: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    events = [{**e, "name": e["name"].replace(old, new)} for e in found["traceEvents"]]
    return {**found, "traceEvents": events}


def test_copies_of_kernels_count_once() -> None:
    found = import_traces([INPUTS / "import-duplicate-kernels.json"])
    rank = rank_of(found)
    assert (rank["num_comm_kernels"], rank["comm_sum_us"], rank["num_compute_kernels"]) == (2, 200.0, 2)
    assert any("4 device events are in the file twice or more" in n for n in found.summary["coverage"]["notes"])


def test_kernels_that_are_alike_but_for_their_start_are_no_copies(tmp_path: Path) -> None:
    events = document("import-duplicate-kernels")
    for event in events["traceEvents"][-4:]:
        event["ts"] += 200
    assert rank_of(load(tmp_path, events))["comm_sum_us"] == 400.0


def test_a_duration_beyond_the_next_kernel_is_noted(tmp_path: Path) -> None:
    found = import_traces([INPUTS / "import-dur-overflows-next-kernel.json"])
    (note,) = found.summary["coverage"]["notes"]
    assert "1 device events last beyond the start of the next one on their stream, by up to 999000.0 us" in note
    # on another stream the two may run together
    events = document("import-dur-overflows-next-kernel")
    events["traceEvents"][3]["tid"] = 8
    assert load(tmp_path, events).summary["coverage"]["notes"] == []


def test_lost_time_stamps_are_refused(tmp_path: Path) -> None:
    events = document("import-dur-overflows-next-kernel")
    for event in events["traceEvents"]:
        if event["cat"] == "kernel":
            event.update(dur=100, ts=0 if event["name"] == "gemm_kernel" else event["ts"])
    with pytest.raises(TraceError, match="2 of 4 device events have the time stamp 0, several of them on one stream"):
        load(tmp_path, events)


def test_a_reused_correlation_means_the_last_launch_before_the_kernel() -> None:
    frame = import_traces([INPUTS / "import-correlation-reused.json"]).table.frame
    assert frame[frame["kind"].isin(["forward", "all_reduce"])]["step"].tolist() == [1, 1, 2, 2, 11, 11, 12, 12]
    assert frame[frame["kind"] == "all_reduce"]["bytes"].tolist() == [4096] * 4
    assert ((frame["start_ns"] - frame["launch_ns"]).dropna() < 100_000).all()


def test_a_file_of_two_ranks_is_refused_and_one_of_two_devices_noted(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds 2 processes with device work or steps \(pid 100, 200\)"):
        import_traces([INPUTS / "import-two-ranks-one-file.json"])
    events = document("import-two-ranks-one-file")
    last = events["traceEvents"][-1]
    events["traceEvents"] = [e for e in events["traceEvents"] if e["pid"] not in (200, 1)]
    events["traceEvents"].append({**last, "args": {**last["args"], "correlation": 99}})
    notes = load(tmp_path, events).summary["coverage"]["notes"]
    assert any("kernels ran on 2 devices" in note for note in notes)


@pytest.mark.parametrize(
    "kernel",
    [
        "hcom_allReduce__950_0_1",
        "oneccl_allreduce_entry",
        "void vllm::cross_device_reduce_1stage<float, 2>(...)",
        "my_company_ring_kernel",
    ],
)
def test_kernels_launched_inside_a_collective_communicate_whatever_they_are_called(tmp_path: Path, kernel: str) -> None:
    found = load(tmp_path, renamed(document("import-hcom-kernel-names"), "hcom_allReduce__950_0_1", kernel))
    assert times(rank_of(found)) == (400.0, 200.0)
    assert rank_of(found)["collectives"]["all_reduce"]["num_kernels"] == 2
    assert found.summary["coverage"]["notes"] == []


def test_kernels_that_pack_tensors_for_a_collective_compute(tmp_path: Path) -> None:
    events = document("import-duplicate-kernels")
    del events["traceEvents"][-4:]
    kernel = events["traceEvents"][6]
    events["traceEvents"].append({**kernel, "name": "CatArrayBatchedCopy", "ts": kernel["ts"] - 50, "dur": 40})
    assert times(rank_of(load(tmp_path, events))) == (440.0, 200.0)


@pytest.mark.parametrize(
    ("kernel", "collective"),
    [
        ("void deep_ep::internode::dispatch<true, 4, false>(...)", "all_to_all"),
        ("void some::ep::internode::combine<4>(...)", "all_to_all"),
        ("void vllm::cross_device_reduce_2stage<half, 8>(...)", "all_reduce"),
        ("hcom_allGather__123_0_1", "all_gather"),
        ("oneccl_alltoallv", "all_to_all"),
        ("void one_shot_all_reduce_kernel<c10::BFloat16>()", "all_reduce"),
        ("multimem_all_gather_kernel", "all_gather"),
        ("void step::kernel<float>()", None),
        ("DeviceReduceByKeyKernel", None),
    ],
)
def test_communication_kernels_by_name(kernel: str, collective: str | None) -> None:
    assert kernel_collective(kernel) == collective


@pytest.mark.parametrize("hidden", ["name", "args"])
def test_ascends_tasks_are_refused_not_dropped(tmp_path: Path, hidden: str) -> None:
    path = INPUTS / "import-ascend-trace-view.json"
    with pytest.raises(TraceError, match=r"2 device tasks without a category, 300.75 us together, such as 'MatMulV2'"):
        import_traces([path])
    # by the arguments of tasks alone, or by the name of the process alone
    events = [e for e in json.loads(path.read_text(encoding="utf-8")) if hidden == "args" or e["ph"] != "M"]
    for event in events:
        if hidden == "args" and event["ph"] == "X":
            event["args"] = {}
    with pytest.raises(TraceError, match="device tasks without a category"):
        load(tmp_path, events)


def test_ranks_that_differ_in_what_ran_before_recording_are_matched(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = document("import-hcom-kernel-names")
        events["distributedInfo"]["rank"] = rank
        if rank:
            kernel = {**events["traceEvents"][6], "ts": 900, "dur": 50, "name": "ncclDevKernel_Broadcast_RING_LL"}
            events["traceEvents"].append({**kernel, "args": {**kernel["args"], "correlation": 77}})
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(events), encoding="utf-8")
    summary = import_traces([tmp_path]).summary
    assert not any("different collectives" in note for note in summary["coverage"]["notes"])
    assert len(summary["matched_collectives"]) == 2


def test_the_world_is_the_largest_group_where_nothing_else_states_it(tmp_path: Path) -> None:
    events = document("import-hcom-kernel-names")
    del events["distributedInfo"]
    events["traceEvents"][4]["args"]["Group size"] = 8
    events["traceEvents"][11]["args"]["Group size"] = 4
    assert rank_of(load(tmp_path, events))["world_size"] == 8


@pytest.mark.parametrize("key", ["rank", "world_size"])
def test_a_rank_or_world_beyond_any_number_of_ranks_is_unknown(tmp_path: Path, key: str) -> None:
    events = document("import-hcom-kernel-names")
    events["distributedInfo"][key] = 10**25
    events["traceEvents"][4]["args"]["Group size"] = 10**25
    assert rank_of(load(tmp_path, events))[key] is None
