"""Chrome JSON read event by event: exact times, any form of file, files cut short."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import rank_of, torchrec_step, write
from traces.formats.importing import import_traces
from traces.formats.json_stream import EventStream, exact_ns


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0.0005", 1),
        ("1e3", 1_000_000),
        ("-1.5", -1500),
        ("x", None),
        ("nan", None),
        ("1e99", None),
        (None, None),
        (2, 2000),
    ],
)
def test_times_are_read_exactly(value: object, expected: int | None) -> None:
    assert exact_ns(value) == expected


@pytest.mark.parametrize("form", ["plain", "gzip", "bare list", "byte order mark", "single line", "bare inf"])
def test_the_same_trace_in_any_form(tmp_path: Path, form: str) -> None:
    document = torchrec_step()
    text = json.dumps(document, indent=1)
    if form == "bare list":
        text = json.dumps(document["traceEvents"])
    if form == "single line":
        text = json.dumps(document, separators=(",", ":"))
    if form == "bare inf":
        text = text.replace('"bytes": 4096', '"memory bandwidth (GB/s)": inf, "x": -nan, "bytes": 4096')
    data = text.encode()
    if form == "gzip":
        data = gzip.compress(data)
    if form == "byte order mark":
        data = b"\xef\xbb\xbf" + data
    path = tmp_path / "named_as.txt"
    path.write_bytes(data)
    assert rank_of(import_traces([path]))["comm_us"] == 325


def test_values_that_cross_chunks_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.json", torchrec_step())
    whole = list(EventStream(path))
    for size in (1, 7, 64):
        monkeypatch.setattr("traces.formats.json_stream.CHUNK_BYTES", size)
        assert list(EventStream(path)) == whole


def test_a_file_cut_short_is_refused_unless_asked_for(tmp_path: Path) -> None:
    text = json.dumps(torchrec_step())
    path = tmp_path / "t.json"
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(TraceError, match=r"cut short after \d+ complete events; .*--partial"):
        import_traces([path])
    imported = import_traces([path], partial=True)
    assert 0 < rank_of(imported)["num_events"] < len(torchrec_step()["traceEvents"])
    assert any("cut short" in note for note in imported.summary["coverage"]["notes"])
    packed = tmp_path / "t.json.gz"
    packed.write_bytes(gzip.compress(text.encode())[:-20])
    with pytest.raises(TraceError, match="gzip data ends early"):
        import_traces([packed])
    assert 0 < rank_of(import_traces([packed], partial=True))["num_events"] <= len(torchrec_step()["traceEvents"])
