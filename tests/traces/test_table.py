"""The trace table: what is valid, what is refused, and that nothing is lost on the way to a file and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.errors import TraceError
from nestpipe.timeline.timeline import COLUMNS as TIMELINE_COLUMNS
from traces.table import (
    COLUMNS,
    INT_COLUMNS,
    Origin,
    SourceFile,
    TraceTable,
    concat,
    from_timeline,
    make_table,
    provenance,
    read_table,
    source_file,
    to_timeline,
    write_table,
)

FORWARD = {"kind": "forward", "source": "measured: rank0.json", "rank": 0, "step": 3, "start_ns": 10, "end_ns": 30}


def test_missing_columns_are_added_and_duration_follows_from_the_ends() -> None:
    frame = make_table([FORWARD]).frame
    assert list(frame.columns) == list(COLUMNS)
    assert frame["duration_ns"].tolist() == [20]
    assert frame["bytes"].isna().all()
    assert make_table([{**FORWARD, "end_ns": None, "duration_ns": 5}]).frame["end_ns"].tolist() == [15]


def test_the_given_frame_is_left_as_it_was() -> None:
    given_frame = make_table([FORWARD, {**FORWARD, "step": 4}]).frame
    given_frame["end_ns"] = pd.array([None, 30], dtype="Int64")
    before = given_frame.copy(deep=True)
    assert make_table(given_frame).frame["end_ns"].tolist() == [30, 30]
    pd.testing.assert_frame_equal(given_frame, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "foward"}, r"unknown kind 'foward'; expected one of .*did you mean 'forward'\?"),
        ({"kind": None}, "row 0: kind must not be missing"),
        ({"source": None}, "row 0: source must not be missing"),
        ({"source": "rank0.json"}, "row 0: source must start with one of measured, "),
        ({"end_ns": 5}, "row 0: end_ns must not lie before start_ns, got 5"),
        ({"duration_ns": 19}, "row 0: duration_ns must be end_ns - start_ns, got 19"),
        ({"rank": -1}, "row 0: rank must not be negative, got -1"),
        ({"bytes": -4}, "row 0: bytes must not be negative, got -4"),
        ({"bytes": 1.5}, "column 'bytes' must hold whole numbers"),
        ({"wait_ns": 21}, "row 0: wait_ns must not exceed duration_ns, got 21"),
        ({"keys": 3, "unique_keys": 4}, "row 0: unique_keys must not exceed keys, got 4"),
        ({"byte": 3}, r"unknown column 'byte'; .*did you mean 'bytes'\?"),
    ],
)
def test_a_row_that_cannot_be_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        make_table([{**FORWARD, **change}])


def test_required_columns_are_required() -> None:
    with pytest.raises(TraceError, match="column 'source' is missing"):
        make_table(pd.DataFrame({"kind": ["forward"]}))


def test_times_may_lie_before_zero() -> None:
    assert make_table([{**FORWARD, "start_ns": -10, "end_ns": 5}]).frame["duration_ns"].tolist() == [15]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_table_survives_its_file(tmp_path: Path, suffix: str) -> None:
    rows = [FORWARD, {"kind": "all_to_all[keys]", "source": 'fitted: a, "b"\nc', "splits": "[1, 2]", "bytes": 2**60}]
    table = make_table(rows, [SourceFile(name="a.json", format="kineto", sha256="ab", rank=0)])
    path = tmp_path / f"t{suffix}"
    write_table(table, path)
    again = read_table(path)
    pd.testing.assert_frame_equal(again.frame, table.frame)
    assert again.files == table.files


@given(
    st.lists(
        st.fixed_dictionaries(
            {"kind": st.sampled_from(["forward", "step", "unclassified", "all_to_all[rows]"])},
            optional={
                **{name: st.integers(0, 2**62) for name in ("rank", "step", "bytes", "flops", "group_size")},
                "op": st.text(max_size=5).filter(lambda text: text != "" and "\r" not in text and "\0" not in text),
                "start_ns": st.integers(-(2**61), 2**61),
            },
        ),
        max_size=4,
    )
)
def test_any_valid_table_survives_both_formats(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    table = make_table([{**row, "source": provenance(Origin.ASSUMED, "x")} for row in rows])
    folder = tmp_path_factory.mktemp("table")
    for name in ("t.parquet", "t.csv"):
        write_table(table, folder / name)
        pd.testing.assert_frame_equal(read_table(folder / name).frame, table.frame)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1 but nothing more", "not a readable Parquet file"),
        (b"kind,source,rank\nforward,measured: x,one\n", "column 'rank' must hold whole numbers"),
        (b"kind,source\nforward,measured: x\nupdate", "row 1: source must not be missing"),
        (b"# nestpipe trace {}\nkind,source\n", "metadata is damaged"),
        (b'# nestpipe trace {"version": 9, "files": []}\nkind,source\n', "version 9 is not known"),
        (b"\xff\xfe\x00", "not a readable CSV file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_table(path)


def test_nothing_is_left_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t.parquet"
    target.write_bytes(b"what was there before")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_table(make_table([FORWARD]), target)
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    assert target.read_bytes() == b"what was there before"


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TraceError, match=r"file/t.csv: cannot be written: .*; choose another --out"):
        write_table(make_table([FORWARD]), tmp_path / "file" / "t.csv")


def test_a_timeline_becomes_a_table_and_a_timeline_again() -> None:
    row = {
        "step": 0,
        "batch": 1,
        "micro_batch": None,
        "rank": 2,
        "stream": "compute",
        "kind": "forward",
        "op": "forward 1",
    }
    timeline = pd.DataFrame(
        [{**row, "start_ns": 5, "end_ns": 9, "wait_ns": 0, "bytes": None, "keys": None, "unique_keys": None}]
    )
    table = from_timeline(timeline, provenance(Origin.SIMULATED, "x"))
    assert table.frame["duration_ns"].tolist() == [4]
    back = to_timeline(concat([table, make_table([{**FORWARD, "kind": "step"}])]))
    assert list(back.columns) == list(TIMELINE_COLUMNS)
    assert back[["rank", "kind", "start_ns", "end_ns", "wait_ns"]].values.tolist() == [[2, "forward", 5, 9, 0]]
    with pytest.raises(TraceError, match="missing: op"):
        from_timeline(timeline.drop(columns="op"), "simulated: x")


def test_concat_keeps_rows_and_files_of_all() -> None:
    one = make_table([FORWARD], [SourceFile(name="a", format="kineto", sha256="1")])
    both = concat([one, make_table([]), make_table([FORWARD, FORWARD])])
    assert len(both.frame) == 3
    assert both.files == one.files
    assert isinstance(concat([]), TraceTable)


def test_a_source_file_carries_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert source_file(path, "kineto").sha256.startswith("ba7816bf")
    with pytest.raises(TraceError, match="cannot be read"):
        source_file(tmp_path / "y", "kineto")


def test_every_column_has_one_type() -> None:
    frame = make_table([FORWARD]).frame
    assert {str(frame[name].dtype) for name in INT_COLUMNS} == {"Int64"}
