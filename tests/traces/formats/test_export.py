"""Exports: what other tools read is what the table holds, and what they cannot hold is said."""

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
from typer.testing import CliRunner

from nestpipe.base.errors import TraceError
from nestpipe.cli.trace import app
from nestpipe.timeline.timeline import COLUMNS as TIMELINE_COLUMNS
from tests.traces.formats.samples import torchrec_step
from traces.formats import chakra
from traces.formats.export_chakra import write_chakra
from traces.formats.export_kineto import device_class, write_kineto
from traces.formats.export_perfetto import write_perfetto
from traces.formats.format import Options
from traces.formats.importing import import_traces
from traces.formats.intervals import intersection_ns, merge, union_ns
from traces.formats.protobuf import fields
from traces.table import make_table, write_table

STREAMS = ("h2d", "comm", "compute", "host")


def timeline(ranks: int = 2, steps: int = 4, seed: int = 3) -> pd.DataFrame:
    """A Timeline of a nested pipeline: two micro-batches, exchanges beside compute, lookups on the host; odd times."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for rank in range(ranks):
        free = dict.fromkeys(STREAMS, 1000 * rank)
        for step in range(steps):
            ready = max(free.values()) - 1_500_000 if step else 0
            plan = [
                ("h2d", "copy_h2d", step + 1, None),
                ("host", "lookup", step + 1, None),
                ("h2d", "sync", step + 1, None),
            ]
            for micro in (0, 1):
                plan += [("comm", "all_to_all[rows]", step, micro), ("compute", "forward", step, micro)]
                plan += [("compute", "backward", step, micro), ("comm", "all_to_all[grads]", step, micro)]
            plan += [("comm", "all_reduce", step, None), ("compute", "update", step, None)]
            for stream, kind, batch, micro in plan:
                start = max(free[stream], ready) + int(rng.integers(0, 30_000))
                end = free[stream] = start + int(rng.integers(800_000, 4_000_000))
                op = f"{kind} {batch}" + ("" if micro is None else f".{micro}")
                sizes = {"bytes": 4096 if stream == "comm" else None, "keys": None, "unique_keys": None, "wait_ns": 0}
                known = {
                    "step": step,
                    "batch": batch,
                    "micro_batch": micro,
                    "rank": rank,
                    "stream": stream,
                    "kind": kind,
                }
                rows.append({**known, "op": op, "start_ns": start, "end_ns": end, **sizes})
    frame = pd.DataFrame(rows, columns=list(TIMELINE_COLUMNS))
    return frame.astype(dict.fromkeys(("micro_batch", "bytes", "keys", "unique_keys"), "Int64"))


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


def test_chakra_and_back_loses_no_cell(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(torchrec_step()), encoding="utf-8")
    frame = import_traces([tmp_path / "t.json"]).table.frame
    written, warnings = write_chakra(frame, tmp_path / "et")
    assert [path.name for path in written] == ["trace.0.et", "comm_group.json"]
    assert any("one compute and one communication" in warning for warning in warnings)
    back = import_traces(written[:1]).table.frame
    kept = frame[frame["kind"] != "step"].sort_values("start_ns", kind="stable", ignore_index=True)
    pd.testing.assert_frame_equal(back, kept)


def test_chakra_nodes_follow_their_stream_and_what_fed_them(tmp_path: Path) -> None:
    row = {"source": "assumed: x", "rank": 0, "batch": 1}
    plan = [
        ("all_to_all[rows]", "comm", 0, 10_000, 0),
        ("forward", "compute", 10_000, 30_000, 0),
        ("all_to_all[rows]", "comm", 10_000, 20_000, 1),
        ("forward", "compute", 30_000, 50_000, 1),
    ]
    rows = [
        {
            **row,
            "kind": kind,
            "stream": stream,
            "start_ns": start,
            "end_ns": end,
            "micro_batch": micro,
            "bytes": 64,
            "flops": 9,
        }
        for kind, stream, start, end, micro in plan
    ]
    written, _ = write_chakra(make_table(rows).frame, tmp_path)
    trace = chakra.read(written[0], Options())
    assert [node.type for node in trace.nodes] == [7, 4, 7, 4]
    assert [node.data_deps for node in trace.nodes] == [[], [0], [0], [1, 2]]
    assert [node.attributes.get("comm_type") for node in trace.nodes] == [6, None, 6, None]
    assert trace.nodes[0].attributes["comm_size"] == 64
    assert trace.nodes[1].attributes["num_ops"] == 9
    assert all(node.attributes["is_cpu_op"] is False for node in trace.nodes)
    assert "inferred from times" in trace.attributes["nestpipe_lossy"]


def test_what_chakra_cannot_say_is_said(tmp_path: Path) -> None:
    rows = [
        {"source": "assumed: x", "rank": 0, "kind": "all_to_all[keys]", "stream": "a", "start_ns": 0, "end_ns": 500},
        {
            "source": "assumed: x",
            "rank": 0,
            "kind": "send",
            "stream": "b",
            "start_ns": 0,
            "end_ns": 9000,
            "splits": "[1, 2]",
        },
    ]
    _, warnings = write_chakra(make_table(rows).frame, tmp_path)
    text = "\n".join(warnings)
    for part in ("uneven", "1 collectives of unknown size", "without peers", "whole microseconds"):
        assert part in text


def packets(path: Path) -> list[dict[int, Any]]:
    """The packets of a Perfetto trace as field number to last value."""
    return [{part.number: part.value for part in fields(bytes(one.value))} for one in fields(path.read_bytes())]  # type: ignore[arg-type]


def test_perfetto_slices_open_and_close_on_their_track_in_time_order(tmp_path: Path) -> None:
    frame = timeline(ranks=2, steps=2)
    found = packets(write_perfetto(frame, tmp_path / "t.pftrace"))
    assert found[0][13] == 1
    assert all(one[10] == 1 for one in found)
    tracks = {}
    for one in found:
        if 60 in one:
            parts = {part.number: part.value for part in fields(one[60])}
            tracks[parts[1]] = parts
    times = [one[8] for one in found if 11 in one]
    assert times == sorted(times)
    open_slices: dict[Any, int] = {}
    counter: list[int] = []
    for one in found:
        if 11 not in one:
            continue
        event = {part.number: part.value for part in fields(one[11])}
        assert event[11] in tracks
        if event[9] == 4:
            counter.append(event[30])
            continue
        open_slices[event[11]] = open_slices.get(event[11], 0) + (1 if event[9] == 1 else -1)
        assert open_slices[event[11]] in (0, 1)
    assert sum(one.get(8) is not None and 11 in one for one in found) == 2 * len(frame) + len(counter)
    assert set(open_slices.values()) == {0}
    assert counter[-1] == 0
    assert max(counter) == 4096
    names = {bytes(parts[2]).decode() for parts in tracks.values()}
    assert {"rank 0", "rank 1", "compute", "collective bytes in flight"} <= names


def test_perfetto_slices_without_length_close_after_they_open(tmp_path: Path) -> None:
    row = {"source": "assumed: x", "rank": 0, "kind": "wait", "stream": "a", "op": "w"}
    spans = [(0, 5), (5, 5), (5, 5), (5, 9)]
    frame = make_table([{**row, "start_ns": start, "end_ns": end} for start, end in spans]).frame
    kinds = []
    for one in packets(write_perfetto(frame, tmp_path / "t.pftrace")):
        if 11 in one:
            kinds.append({part.number: part.value for part in fields(one[11])}[9])
    assert kinds == [1, 2, 1, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("writer", [write_kineto, write_perfetto])
def test_a_table_without_times_is_refused(tmp_path: Path, writer: Any) -> None:
    frame = make_table([{"source": "assumed: x", "kind": "forward", "rank": 0}]).frame
    with pytest.raises(TraceError, match="no row of the table has start and end times"):
        writer(frame, tmp_path / "out")


@pytest.mark.parametrize("form", ["kineto", "chakra", "perfetto", "csv", "parquet"])
def test_command_line_writes_every_format(tmp_path: Path, form: str) -> None:
    table, out = tmp_path / "t.parquet", tmp_path / f"out.{form}"
    write_table(make_table(timeline(3, 2).assign(source="simulated: x")), table)
    result = CliRunner().invoke(app, ["export", str(table), "--to", form, "-o", str(out), "--ranks", "0,2"])
    assert result.exit_code == 0, result.output
    assert out.exists()
    if form in ("kineto", "chakra", "csv", "parquet"):
        again = import_traces([out] if form in ("csv", "parquet") else sorted(out.glob("*[0-9].*")))
        assert sorted(again.table.frame["rank"].unique()) == [0, 2]


def test_ranks_that_the_table_lacks_are_refused(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    write_table(make_table(timeline(1, 1).assign(source="simulated: x")), table)
    for ranks, message in (("7", "holds none of the ranks 7"), ("1-x", "must list whole numbers")):
        with pytest.raises(TraceError, match=message):
            CliRunner().invoke(
                app, ["export", str(table), "-o", str(tmp_path / "o"), "--ranks", ranks], catch_exceptions=False
            )


# -- HolisticTraceAnalysis -------------------------------------------------------------------------------------------

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
