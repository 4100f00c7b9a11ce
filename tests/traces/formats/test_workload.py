"""Workloads of ASTRA-sim, SimAI and AICB: bytes, times in ns, groups, damaged lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import (
    AICB_TEXT,
    WORKLOAD_TEXT,
    load,
)


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
