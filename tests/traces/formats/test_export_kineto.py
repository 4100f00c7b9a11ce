"""Kineto export: times and kinds come back, and other tools read it as this program does."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.traces.formats.samples import timeline, torchrec_step
from traces.formats.export_kineto import device_class, write_kineto
from traces.formats.importing import import_traces
from traces.formats.intervals import intersection_ns, merge, union_ns
from traces.table import make_table


def events_of(path: Path) -> dict[str, Any]:
    """The document in an exported file."""
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def breakdown(frame: pd.DataFrame, rank: int) -> dict[str, float]:
    """Our own numbers for one rank of a Timeline, in us and per cent."""
    mine = frame[frame["rank"] == rank]
    collective = mine["collective"] if "collective" in mine else pd.Series([None] * len(mine), index=mine.index)
    classes = np.array(
        [
            device_class(kind, stream, op, None if pd.isna(word) else word)
            for kind, stream, op, word in zip(mine["kind"], mine["stream"], mine["op"], collective, strict=True)
        ]
    )
    start, end = (mine[name].to_numpy(dtype=np.int64, na_value=0) for name in ("start_ns", "end_ns"))
    one = {name: merge(start[classes == name], end[classes == name]) for name in ("compute", "comm", "mem")}
    device = classes != "host"
    busy, span = union_ns(start[device], end[device]), end[device].max() - start[device].min()
    compute, comm = union_ns(*one["compute"]), union_ns(*one["comm"])
    overlap = 100 * intersection_ns(one["compute"], one["comm"]) / comm
    return {"compute": compute / 1e3, "idle": (span - busy) / 1e3, "other": (busy - compute) / 1e3, "overlap": overlap}


def test_a_timeline_exported_for_chrome_comes_back_with_its_times_and_kinds(tmp_path: Path) -> None:
    frame = timeline()
    written = write_kineto(frame, tmp_path)
    assert [path.name for path in written] == ["rank0.json.gz", "rank1.json.gz"]
    for rank, path in enumerate(written):
        imported, ours = import_traces([path]), breakdown(frame, rank)
        (summary,) = imported.summary["ranks"]
        assert (summary["rank"], summary["num_steps"]) == (rank, 4)
        assert summary["compute_us"] == pytest.approx(ours["compute"], abs=1e-6)
        assert summary["overlap_percent"] == pytest.approx(ours["overlap"], abs=1e-3)
        back = imported.table.frame
        found = back[back["stream"].str.startswith("device")]
        # the lookup is the host's; what an import calls 0 is the first device event or step of the file
        sent = frame[(frame["rank"] == rank) & (frame["kind"] != "lookup")]
        shift = int(sent["start_ns"].min()) - int(found["start_ns"].min())
        expected = sorted(
            zip(sent["kind"], sent["step"], sent["start_ns"] - shift, sent["end_ns"] - shift, strict=True)
        )
        assert sorted(found[["kind", "step", "start_ns", "end_ns"]].itertuples(index=False, name=None)) == expected


def test_what_other_tools_demand_of_a_chrome_trace(tmp_path: Path) -> None:
    text = gzip.decompress(write_kineto(timeline(), tmp_path)[1].read_bytes()).decode()
    assert '"rank": 1' in text
    document = json.loads(text)
    slices = [one for one in document["traceEvents"] if one["ph"] == "X"]
    device = [one for one in slices if one["cat"] in ("kernel", "gpu_memcpy")]
    calls = [one for one in slices if one["cat"] == "cuda_runtime"]
    assert all(isinstance(one["ts"], int) and isinstance(one["dur"], int) for one in slices)
    assert all(one["args"]["stream"] > 0 and isinstance(one["args"]["correlation"], int) for one in device)
    numbers = sorted(one["args"]["correlation"] for one in device)
    assert numbers == sorted(one["args"]["correlation"] for one in calls)
    assert len(set(numbers)) == len(numbers)
    steps = sorted((one for one in slices if one["name"].startswith("ProfilerStep#")), key=lambda one: one["ts"])
    assert [one["name"] for one in steps] == [f"ProfilerStep#{number}" for number in range(5)]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(steps))
    for one in device:
        is_comm = one["args"]["kind"].startswith("all_")
        assert one["name"].startswith("nccl") == is_comm
        assert one["name"].startswith("Memcpy") == (one["args"]["kind"] in ("copy_h2d", "sync"))
    for pid in {(one["pid"], one["tid"]) for one in device}:
        track = sorted((one["ts"], one["ts"] + one["dur"]) for one in device if (one["pid"], one["tid"]) == pid)
        assert all(first[1] <= second[0] for first, second in pairwise(track))


def test_a_measured_table_survives_chrome_and_back(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(torchrec_step()), encoding="utf-8")
    first = import_traces([tmp_path / "t.json"])
    again = import_traces(write_kineto(first.table.frame, tmp_path / "out"))
    ignored = ("file", "num_events")
    ours, theirs = ({k: v for k, v in i.summary["ranks"][0].items() if k not in ignored} for i in (first, again))
    assert ours == theirs
    assert first.summary["coverage"] == again.summary["coverage"]


def test_names_that_would_mislead_by_their_class_are_changed(tmp_path: Path) -> None:
    row = {
        "source": "measured: x",
        "rank": 0,
        "stream": "device stream 7",
        "start_ns": 0,
        "end_ns": 5000,
        "kind": "forward",
    }
    frame = make_table([{**row, "op": "void MemsetKernelSync<float>()"}]).frame
    (kernel,) = [
        one for one in events_of(write_kineto(frame, tmp_path)[0])["traceEvents"] if one.get("cat") == "kernel"
    ]
    assert kernel["name"] == "void memsetKernelsync<float>()"
    assert kernel["args"]["op"] == "void MemsetKernelSync<float>()"


ASK_HTA = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_dir=sys.argv[1])
parts = trace.get_temporal_breakdown(visualize=False).to_dict("records")
overlap = trace.get_comm_comp_overlap(visualize=False).to_dict("records")
print(json.dumps([{**a, **b} for a, b in zip(parts, overlap)]))
"""


@pytest.fixture(scope="module")
def hta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with HTA 0.5.0 and what it imports beyond our own dependencies; skips where it cannot be installed."""
    folder = tmp_path_factory.mktemp("hta")
    packages = ["HolisticTraceAnalysis==0.5.0", "plotly", "narwhals", "pydot"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if result.returncode:
        pytest.skip(f"HolisticTraceAnalysis 0.5.0 cannot be installed here: {result.stderr.strip()[-200:]}")
    return folder


def ask_hta(hta: Path, folder: Path) -> dict[int, dict[str, float]]:
    """HTA's breakdown and overlap of every rank in a folder."""
    command = [sys.executable, "-W", "ignore", "-c", ASK_HTA, str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(hta)}, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    return {one["rank"]: one for one in json.loads(result.stdout.splitlines()[-1])}


def check_hta(found: dict[int, dict[str, float]], frame: pd.DataFrame, ranks: list[int]) -> None:
    """Within 0.1 % of our own numbers, 3 us (edges are whole us there) or the last digit that HTA prints."""
    assert sorted(found) == ranks
    for rank in ranks:
        ours = breakdown(frame, rank)
        assert found[rank]["compute_time(us)"] == pytest.approx(ours["compute"], rel=1e-3)
        assert found[rank]["idle_time(us)"] == pytest.approx(ours["idle"], rel=1e-3, abs=3)
        assert found[rank]["non_compute_time(us)"] == pytest.approx(ours["other"], rel=1e-3, abs=3)
        assert found[rank]["comp_comm_overlap_pctg"] == pytest.approx(ours["overlap"], rel=1e-3, abs=0.006)


def test_hta_reads_our_timeline_as_we_do(hta: Path, tmp_path: Path) -> None:
    frame = timeline(ranks=2, steps=20)
    write_kineto(frame, tmp_path)
    check_hta(ask_hta(hta, tmp_path), frame, [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("dlrm_v100x8", range(8)), ("recsys_a100x8_rank3.json.gz", [3]), ("resnet_ddp_a100x2_rank0.json.gz", [0])],
)
def test_hta_reads_our_export_of_a_real_trace_as_we_do(
    hta: Path, tmp_path: Path, shared_data: Path, name: str, ranks: Any
) -> None:
    frame = import_traces([shared_data / "real" / "kineto" / name]).table.frame
    write_kineto(frame, tmp_path)
    device = frame[frame["stream"].fillna("").str.startswith("device")]
    check_hta(ask_hta(hta, tmp_path), device, list(ranks))
