"""Chakra traces, protobuf and JSON: times, device nodes, damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import (
    chakra_bytes,
    chakra_json,
    load,
)


def test_chakra_protobuf_of_another_producer(tmp_path: Path) -> None:
    imported = load(tmp_path, chakra_bytes(), "all_to_all.3.et")
    (rank,) = imported.summary["ranks"]
    assert (rank["rank"], rank["schema"], rank["num_messages"]) == (3, "0.0.4", 2)
    assert rank["collectives"] == {"all_to_all": {"count": 1, "bytes": 1 << 20}}
    assert imported.table.frame["duration_ns"].tolist() == [7000]


def test_chakra_json_keeps_times_and_what_runs_on_the_device(tmp_path: Path) -> None:
    imported = load(tmp_path, chakra_json())
    (rank,) = imported.summary["ranks"]
    assert (rank["duration_us"], rank["num_device_nodes"], rank["world_size"]) == (31, 1, 8)
    assert imported.table.frame["collective"].tolist()[1] == "broadcast"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (chakra_bytes()[:-3], "announces 58 bytes, 55 are left; the file is cut short"),
        (chakra_bytes() + b"\x80", "cut short"),
        (chakra_bytes()[:8] + b"\x02\x18\x09", "type must be 0 to 7, got 9"),
        (chakra_bytes()[:8] + b"\x03\x0b\x00\x00", "message 1 is no Chakra node: wire type 3"),
    ],
)
def test_a_damaged_chakra_file_names_the_message(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load(tmp_path, data)
