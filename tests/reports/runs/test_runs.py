"""Runs on disk: what is written is what is read, whole or not at all, and what is wrong is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.timeline.files import read_timeline, write_timeline
from nestpipe.timeline.metrics import measure
from nestpipe.timeline.timeline import COLUMNS, Timeline
from reports.runs.runs import RUN_FILE, TIMELINE_FILE, read_run, read_side, write_run
from sim.engine.costs import Jitter
from tests.reports.examples import record, timeline


@pytest.fixture(scope="module")
def run() -> Timeline:
    return timeline("nestpipe", ranks=8)


@pytest.mark.parametrize("fold_ranks", [True, False])
def test_a_timeline_comes_back_as_it_was(fold_ranks: bool, tmp_path: Path) -> None:
    jitter = None if fold_ranks else Jitter(cv=0.1, seed=5)
    before = timeline("nestpipe", ranks=8, fold_ranks=fold_ranks, jitter=jitter)
    after = read_timeline(write_timeline(before, tmp_path / "x.parquet"))
    pd.testing.assert_frame_equal(after.frame(), before.frame(), check_categorical=False)
    assert np.array_equal(after.weights, before.weights)
    assert after.meta == before.meta
    assert measure(after, global_batch=64) == measure(before, global_batch=64)


def test_the_same_timeline_is_written_as_the_same_bytes(run: Timeline, tmp_path: Path) -> None:
    first, second = (write_timeline(run, tmp_path / f"{i}.parquet").read_bytes() for i in range(2))
    assert first == second


def test_the_file_holds_the_columns_of_a_timeline(run: Timeline, tmp_path: Path) -> None:
    frame = pd.read_parquet(write_timeline(run, tmp_path / "x.parquet"))
    assert list(frame.columns) == [*COLUMNS, "weight"]


def test_a_run_comes_back_as_it_was(run: Timeline, tmp_path: Path) -> None:
    result = record(run)
    read = read_run(write_run(tmp_path / "my run", run=result, timeline=run, files={"trace.json": b"{}"}))
    assert read.name == "my run"
    assert read.record.parts_ms == result["parts_ms"]
    assert {row.metric: row.value for row in read.record.rows} == result["metrics"]
    assert read.record.limit is not None
    assert [op.kind for op in read.record.limit.cycle] == [op["kind"].value for op in result["limit"]["cycle"]]
    assert read.record.status == "predicted"
    assert (tmp_path / "my run" / "trace.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["my run"]


def test_a_run_is_replaced_at_once_and_nothing_else_is(run: Timeline, tmp_path: Path) -> None:
    write_run(tmp_path / "a", run=record(run, name="first"), timeline=run, files={"old.json": b""})
    write_run(tmp_path / "a", run=record(run, name="second"), timeline=run)
    assert read_run(tmp_path / "a").name == "second"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [RUN_FILE, TIMELINE_FILE]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("do not lose")
    with pytest.raises(TraceError, match="exists and is not a run"):
        write_run(tmp_path / "mine", run=record(run), timeline=run)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "do not lose"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "mine"]


def test_an_empty_directory_is_filled(run: Timeline, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert read_run(write_run(tmp_path / "a", run=record(run), timeline=run)).record.world_size == 8


def test_a_write_that_fails_leaves_the_old_run(run: Timeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a", run=record(run, name="old"), timeline=run)
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "a" and Path(source).name != "folder":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(TraceError, match="cannot be written: No space left on device"):
        write_run(tmp_path / "a", run=record(run, name="new"), timeline=run)
    assert read_run(tmp_path / "a").name == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_numpy_numbers_in_a_result_are_written_as_numbers(run: Timeline, tmp_path: Path) -> None:
    result = record(run, resources=[{"resource": "link", "busy": np.float64(0.5), "status": "assumed"}])
    assert read_run(write_run(tmp_path / "a", run=result, timeline=run)).record.resources[0].busy == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": "eight"}, r"run\.json: world_size: Expected 'int', got 'str'"),
        ({"world_size": 0}, "world_size must be at least 1, got 0"),
        ({"parts_ms": {"compute": -1.0}}, r"parts_ms\['compute'\] must not be negative, got -1.0"),
        ({"parts_ms": {"computing": 1.0}}, "unknown part 'computing'.*did you mean 'compute'"),
        ({"critical_cycle_rests_on": {"hoped": 1.0}}, "unknown status 'hoped'"),
        ({"format": "nestpipe run v9"}, "format must be 'nestpipe run v1', got 'nestpipe run v9'"),
        (
            {"resources": [{"resource": "link", "busy": 1.5, "status": "assumed"}]},
            r"resources\[0\].busy must be between",
        ),
        ({"limit": {"step_ns": 1.0, "iterations": 1}}, "limit: Object missing required field 'cycle'"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(
    change: dict[str, Any], message: str, run: Timeline, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "a", run=record(run), timeline=run) / RUN_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TraceError, match=message) as found:
        read_run(tmp_path / "a")
    assert str(path) in str(found.value)


def test_a_result_that_cannot_be_read_back_is_not_written(run: Timeline, tmp_path: Path) -> None:
    bad = record(run, rows=[{"method": "x", "world_size": 1, "metric": "speed", "value": 1.0, "status": "predicted"}])
    with pytest.raises(TraceError, match="unknown metric 'speed'"):
        write_run(tmp_path / "a", run=bad, timeline=run)
    assert not list(tmp_path.iterdir())


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such directory; expected a directory written by nestpipe simulate"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"run\.json is missing"):
        read_run(tmp_path)
    (tmp_path / RUN_FILE).write_text("{")
    with pytest.raises(TraceError, match=r"run\.json: Input data was truncated"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="stream"), "missing column stream"),
        (lambda f: f.assign(kind="forwards"), "unknown kind 'forwards'.*did you mean 'forward'"),
        (lambda f: f.assign(start_ns="soon"), "column start_ns must hold whole numbers"),
        (lambda f: f.assign(start_ns=f["start_ns"] / 2), "column start_ns must hold whole numbers, got double"),
        (lambda f: f.assign(end_ns=f["start_ns"] - 1), "lies before start_ns"),
        (lambda f: f.assign(rank=f["rank"].astype("Int64").where(f.index > 3)), "column rank must not have empty"),
        (lambda f: pd.concat([f, f]), "an op appears twice on a rank"),
        (lambda f: f.assign(weight=0), "weight must be at least 1, got 0"),
        (lambda f: f.iloc[:0], "has no rows"),
    ],
)
def test_a_wrong_column_is_named_with_its_file(change: Any, message: str, run: Timeline, tmp_path: Path) -> None:
    path = write_timeline(run, tmp_path / "x.parquet")
    change(pd.read_parquet(path)).to_parquet(path)
    with pytest.raises(TraceError, match=message) as found:
        read_timeline(path)
    assert str(path) in str(found.value)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("step,batch")
    with pytest.raises(TraceError, match="cannot be read as Parquet"):
        read_timeline(tmp_path / "x.parquet")
    with pytest.raises(TraceError, match="there is no such file or directory; expected a run or a Timeline"):
        read_side(tmp_path / "y.parquet")


def test_a_timeline_that_went_through_pandas_is_still_one(run: Timeline, tmp_path: Path) -> None:
    path = write_timeline(run, tmp_path / "x.parquet")
    pd.read_parquet(path).to_parquet(path)
    assert measure(read_timeline(path)) == measure(run)


def test_a_trace_table_is_compared_like_a_timeline(run: Timeline, tmp_path: Path) -> None:
    from traces.table import from_timeline, write_table

    frame = run.frame()
    write_table(from_timeline(frame[frame["step"] >= 0], "measured: a test"), tmp_path / "mine.parquet")
    name, read = read_side(tmp_path / "mine.parquet")
    assert name == "mine"
    assert read.meta["source"] == "measured"
    assert measure(read) == measure(run)
