"""Chakra traces, protobuf and JSON: times, device nodes, damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import TraceError
from nestpipe.cli import app
from tests.paths import INPUTS
from tests.traces.formats.samples import (
    chakra_bytes,
    chakra_json,
    load,
)
from traces.formats.importing import import_traces


def test_chakra_protobuf_of_another_producer(tmp_path: Path) -> None:
    imported = load(tmp_path, chakra_bytes(), "all_to_all.3.et")
    (rank,) = imported.summary["ranks"]
    assert (rank["rank"], rank["schema"], rank["num_messages"]) == (3, "0.0.4", 2)
    assert rank["collectives"] == {"all_to_all": {"count": 1, "bytes": 1 << 20, "without_size": 0}}
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


def test_the_hosts_part_of_a_collective_is_none_where_the_devices_is_there(tmp_path: Path) -> None:
    found = import_traces([INPUTS / "import-chakra-host-halves.json"])
    (rank,) = found.summary["ranks"]
    assert rank["collectives"] == {"all_reduce": {"count": 1, "bytes": 4096, "without_size": 0}}
    frame = found.table.frame
    assert frame[frame["kind"] == "all_reduce"]["duration_ns"].tolist() == [500_000]
    assert any("2 collective nodes are the host's part" in note for note in found.summary["coverage"]["notes"])
    # a trace of the host alone has nothing better
    document = json.loads((INPUTS / "import-chakra-host-halves.json").read_text(encoding="utf-8"))
    del document["workload_graph"][2]
    (rank,) = load(tmp_path, document).summary["ranks"]
    assert rank["collectives"] == {"all_reduce": {"count": 2, "bytes": 0, "without_size": 2}}
    assert load(tmp_path, document).table.frame["bytes"].isna().all()


def test_recorded_durations_and_unknown_sizes_are_said_so() -> None:
    run = CliRunner().invoke(app, ["trace", "import", str(INPUTS / "import-chakra-host-halves.json")])
    assert "3 nodes, 650.0 us recorded" in run.stdout
    assert "all_reduce: 1 x, 4096 bytes in\n" in run.stdout


@pytest.mark.parametrize("size", [123, 91, 34, 32, 9, 13])
def test_metadata_whose_length_is_the_byte_of_a_bracket_or_blank_is_no_json(tmp_path: Path, size: int) -> None:
    node = chakra_bytes()[8:]
    metadata = b"\x0a" + bytes([size - 2]) + b"0" * (size - 2)
    found = load(tmp_path, bytes([size]) + metadata + node, "some.3.et")
    assert found.summary["files"][0]["format"] == "chakra"
    assert found.table.frame["duration_ns"].tolist() == [7000]
