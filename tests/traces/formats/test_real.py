"""Real public traces: every file is imported or refused with a reason, and the numbers are the published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nestpipe.base.errors import TraceError
from traces.formats.importing import detect, import_traces

# (our name, name in expected.json): times within 1 us or 0.1 %, everything else exactly
FIELDS = (
    ("num_events", "n_events"),
    ("num_compute_kernels", "n_comp"),
    ("num_comm_kernels", "n_comm"),
    ("num_mem_events", "n_mem"),
    ("compute_us", "comp_union"),
    ("compute_sum_us", "comp_sum"),
    ("comm_us", "comm_union"),
    ("comm_sum_us", "comm_sum"),
    ("mem_sum_us", "mem_sum"),
    ("exposed_us", "exposed"),
    ("exposed_with_mem_us", "exposed_mem"),
    ("span_us", "k_span"),
)


@pytest.fixture(scope="module")
def real(shared_data: Path) -> Path:
    """The folder of real inputs."""
    return shared_data / "real"


@pytest.fixture(scope="module")
def expected(real: Path) -> Any:
    """The published numbers."""
    return json.loads((real / "expected.json").read_text(encoding="utf-8"))


def check_rank(rank: dict[str, Any], truth: dict[str, Any]) -> None:
    """All numbers of one rank against the published ones."""
    assert (rank["rank"], rank["world_size"]) == (truth["rank"], truth["world"])
    assert rank["num_steps"] == len(truth["steps"])
    for ours, theirs in FIELDS:
        if ours.startswith("num_") or truth[theirs] is None:
            assert rank[ours] == truth[theirs], ours
        else:
            assert rank[ours] == pytest.approx(truth[theirs], rel=1e-3, abs=1), ours
    names = [f"ProfilerStep#{step['step']}" for step in rank["steps"]]
    durations = dict(zip(names, [step["duration_us"] for step in rank["steps"]], strict=True))
    assert durations == pytest.approx(
        dict(truth["step_dur"]) if isinstance(truth["step_dur"], list) else truth["step_dur"]
    )
    for name, (count, num_bytes, without_dims) in truth["host_nccl"].items():
        one = rank["collectives"][name.removeprefix("nccl:")]
        assert one["count"] == count
        if not without_dims:
            assert one["bytes"] == num_bytes
    for name, (count, time_us) in truth["kernel_time_by_host_op"].items():
        one = rank["collectives"][name.removeprefix("nccl:")]
        assert one["num_kernels"] == count
        assert one["kernel_us"] == pytest.approx(time_us, abs=1)
    for name, count in truth["host_ops_without_kernel"].items():
        assert rank["collectives"][name.removeprefix("nccl:")]["without_kernel"] == count


@pytest.mark.parametrize(
    "name",
    [
        "recsys_a100x8_rank3",
        "resnet_ddp_a100x2_rank0",
        "edge_distributed_info_missing",
        "edge_rank_missing",
        "edge_rocm_mi250_toy",
    ],
)
def test_profiler_trace_of_one_rank(real: Path, expected: Any, name: str) -> None:
    (rank,) = import_traces([real / "kineto" / f"{name}.json.gz"]).summary["ranks"]
    check_rank(rank, expected["kineto"][f"kineto/{name}.json.gz"])


def test_profiler_traces_of_all_ranks_and_the_waiting_between_them(real: Path, expected: Any) -> None:
    imported = import_traces([real / "kineto" / "dlrm_v100x8"])
    ranks = imported.summary["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(8))
    for rank in ranks:
        check_rank(rank, expected["kineto"][f"kineto/dlrm_v100x8/rank{rank['rank']}.json.gz"])
    received = [rank["collectives"]["all_to_all"]["bytes_out"] for rank in ranks]
    assert received == [53952, 58048, 60096, 104128, 69824, 53952, 57024, 58560]
    matched = imported.summary["matched_collectives"]
    assert [one["transfer_us"] for one in matched] == [10, 8, 7, 7, 86, 10, 20, 69]
    assert [one["end_spread_us"] for one in matched] == [2, 2, 1, 2, 5, 3, 5, 7]
    assert [one["bytes"] for one in matched] == [24576, 192, 1536, 13568, 1576964, 24576, 448, 907840]
    assert matched[0]["duration_us"] == [2146, 7635, 518, 6132, 4882, 4679, 514, 10]
    assert matched[0]["start_us"] == [5489, 0, 7116, 1502, 2752, 2955, 7119, 7624]
    assert all(rank["clock_offset_us"] == 0 for rank in ranks)
    # what the stages are is in the annotations: nearly all device time has a kind
    assert imported.summary["coverage"]["classified_share"] > 0.99
    kinds = imported.table.frame.groupby(["rank", "kind"]).size().unstack().loc[0]
    assert kinds[["all_to_all[rows]", "all_to_all[keys]", "all_to_all[grads]", "all_reduce"]].tolist() == [1, 3, 1, 3]


def test_sizes_per_peer_are_taken_from_the_execution_trace(real: Path) -> None:
    imported = import_traces(
        [real / "kineto" / "dlrm_v100x8" / "rank3.json.gz", real / "et" / "dlrm_v100x8" / "rank3.json.gz"]
    )
    frame = imported.table.frame
    values = frame[(frame["bytes"] == 13568) & (frame["kind"] == "all_to_all[keys]")].iloc[0]
    assert json.loads(values["splits"]) == [96, 224, 288, 1664, 592, 96, 192, 240]
    assert json.loads(values["splits_out"]) == [1664] * 8
    assert values["group_size"] == 8
    assert len(imported.summary["ranks"]) == 1


def test_sizes_that_only_kernels_carry(real: Path) -> None:
    (rank,) = import_traces([real / "kineto" / "resnet_ddp_a100x2_rank0.json.gz"]).summary["ranks"]
    sizes = {name: (one["count"], one["bytes"], one["bytes_out"]) for name, one in rank["collectives"].items()}
    assert sizes == {"all_reduce": (15, 306684384, 306684384), "broadcast": (6, 638712, 638712)}


def test_every_execution_trace_has_the_published_counts(real: Path, expected: Any) -> None:
    for name, truth in expected["et"].items():
        (rank,) = import_traces([real / name]).summary["ranks"]
        assert (rank["schema"], rank["num_nodes"]) == (truth["schema"], truth["n_nodes"])
        recorded = {key: [v["count"], v["bytes"], v["bytes_out"]] for key, v in rank["collectives_as_recorded"].items()}
        assert recorded == {key: list(value) for key, value in truth["comms"].items()}


def test_chakra_files_of_both_kinds(real: Path) -> None:
    ranks = import_traces([real / "et" / "chakra_pb_all_to_all_8npus_1MB"]).summary["ranks"]
    assert [rank["rank"] for rank in ranks] == list(range(8))
    assert {json.dumps(rank["collectives"]) for rank in ranks} == {
        '{"all_to_all": {"count": 1, "bytes": 1048576, "without_size": 0}}'
    }
    assert {(rank["schema"], rank["num_messages"]) for rank in ranks} == {("0.0.4", 2)}
    (rank,) = import_traces([real / "et" / "chakra_json_small.json"]).summary["ranks"]
    assert rank["node_types"] == {"compute": 4, "collective": 3}


def test_workloads_have_the_published_sums(real: Path) -> None:
    folder = real / "workload"
    (dlrm,) = import_traces([folder / "astra1_DLRM_HybridParallel.txt"]).summary["workloads"]
    assert dlrm["num_layers"] == 8
    assert dlrm["compute"] == {"forward": 19020, "input_gradient": 19014, "weight_gradient": 13644}
    assert dlrm["collectives_by_part"] == {
        "forward": {"all_to_all": {"count": 1, "bytes": 98304}},
        "input_gradient": {"all_to_all": {"count": 1, "bytes": 98304}},
        "weight_gradient": {"all_reduce": {"count": 7, "bytes": 3191808}},
    }
    (micro,) = import_traces([folder / "astra1_microAllToAll.txt"]).summary["workloads"]
    assert micro["collectives_by_part"]["weight_gradient"] == {"all_to_all": {"count": 1, "bytes": 1048576}}
    (simai,) = import_traces([folder / "simai_microAllReduce.txt"]).summary["workloads"]
    assert simai["collectives"] == {"all_reduce": {"count": 2, "bytes": 83886080}}
    assert simai["compute_unit"] == "ns"
    aicb = import_traces([folder / "aicb_all_to_all_workload.csv"])
    (summary,) = aicb.summary["workloads"]
    assert summary["num_rows"] == 2002
    assert summary["stages"] == {"warmup": 100, "": 2, "test_step": 1900}
    assert aicb.table.frame["bytes"].max() == 2**30


@pytest.mark.parametrize("folder", ["et", "collectives", "workload"])
def test_every_file_is_imported_or_refused_with_a_reason(real: Path, folder: str) -> None:
    refused: dict[str, str] = {}
    for path in sorted(path for path in (real / folder).rglob("*") if path.is_file()):
        try:
            imported = import_traces([path])
        except TraceError as error:
            refused[path.name] = str(error)
        else:
            assert imported.summary["files"][0]["format"] == detect(path).name
    # bandwidths by group, not even YAML: no sizes, no times
    assert list(refused) == (["simai_busbw.yaml"] if folder == "collectives" else [])
    assert all("no sizes and no times, so nothing to import" in reason for reason in refused.values())


def test_every_profiler_trace_is_known_as_one(real: Path) -> None:
    assert {detect(path).name for path in (real / "kineto").rglob("*.gz")} == {"kineto"}
