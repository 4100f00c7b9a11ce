"""Chakra export: nothing is lost on the way back, and what Chakra cannot say is said."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from tests.traces.formats.samples import torchrec_step
from traces.formats import chakra
from traces.formats.export_chakra import write_chakra
from traces.formats.format import Options
from traces.formats.importing import import_traces
from traces.table import EXTRA_KINDS, make_table


def test_chakra_and_back_loses_no_cell(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(torchrec_step()), encoding="utf-8")
    frame = import_traces([tmp_path / "t.json"]).table.frame
    written, warnings = write_chakra(frame, tmp_path / "et")
    assert [path.name for path in written] == ["trace.0.et", "comm_group.json"]
    assert any("one compute and one communication" in warning for warning in warnings)
    back = import_traces(written[:1]).table.frame
    kept = frame[~frame["kind"].isin(list(EXTRA_KINDS))].sort_values("start_ns", kind="stable", ignore_index=True)
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
