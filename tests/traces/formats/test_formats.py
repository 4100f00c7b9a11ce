"""Formats told apart by content, and what is no trace refused with the reason."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import (
    load,
    samples,
    torchrec_step,
)
from traces.formats.format import Format, Found, Head, Options
from traces.formats.importing import FORMATS, detect, import_to, import_traces
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


class OneOpALine:
    """A made-up format: `op kind ns` after a first line `ops`."""

    def sniff(self, head: Head, /) -> bool:
        return head.text.startswith("ops\n")

    def read(self, path: Path, _options: Options, /) -> list[list[str]]:
        return [line.split() for line in path.read_text(encoding="utf-8").splitlines()[1:]]

    def summarise(self, trace: list[list[str]], /) -> Found:
        rows = [{"op": op, "kind": kind, "duration_ns": int(ns), "source": "measured: x"} for op, kind, ns in trace]
        return Found(rank=3, rows=rows, section="lines", summaries=[{"num_ops": len(rows)}])


def test_a_new_format_needs_a_reader_and_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traces.formats.importing.FORMATS", (Format("lines", "an op a line", OneOpALine()), *FORMATS))
    imported = load(tmp_path, "ops\nproduct forward 70\nproduct backward 140\n")
    assert imported.table.frame["duration_ns"].tolist() == [70, 140]
    assert imported.summary["lines"] == [{"num_ops": 2}]
    assert [(file["format"], file["rank"]) for file in imported.summary["files"]] == [("lines", 3)]
