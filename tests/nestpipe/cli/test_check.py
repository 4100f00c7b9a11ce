"""`schedule check`: exit codes, formats, files, bad input."""

from __future__ import annotations

import csv
import json
from importlib.resources import files
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from nestpipe.base.errors import ScheduleError
from nestpipe.cli import app
from nestpipe.cli.check import check
from nestpipe.ir import show, unroll
from nestpipe.schedules import load, names

APP = typer.Typer()
APP.command()(check)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(APP, arguments)


def refusal(*arguments: str) -> str:
    """The message of the error that the top level prints."""
    result = run(*arguments)
    assert isinstance(result.exception, ScheduleError)
    assert result.stdout == ""
    return str(result.exception)


def test_synchronous_schedule_exits_with_0_and_starts_with_provenance() -> None:
    result = run("dbp")
    assert result.exit_code == 0
    assert result.stdout.startswith("# nestpipe: ")
    assert "\ndbp: synchronous: every read sees what a sequential run reads\n" in result.stdout


@pytest.mark.parametrize(("allowed", "exit_code"), [("0", 1), ("1", 0), ("2", 0)])
def test_stale_schedule_passes_only_if_allowed(allowed: str, exit_code: int) -> None:
    assert run("async_prefetch", "--allow-staleness", allowed).exit_code == exit_code


def test_lost_update_is_never_allowed(tmp_path: Path) -> None:
    text = (files("nestpipe.schedules") / "dbp.txt").read_text(encoding="utf-8")
    broken = tmp_path / "broken.txt"
    broken.write_text(text.replace("rows t-1, moments t-1  writes rows, moments", "rows t-1  writes rows"))
    result = run(str(broken), "--allow-staleness", "1000")
    assert result.exit_code == 1
    assert "lost-update" in result.stdout


def test_json_has_the_promised_fields() -> None:
    document = json.loads(run("async_prefetch", "--format", "json").stdout)
    assert document["schedule"] == "async_prefetch"
    assert document["verdict"] == "stale"
    assert document["staleness"]["1"] == 1
    assert document["peak_buffers"]["rows"] == 2
    assert document["witness"][-1]["op"] == "forward 1.0"
    assert set(document["provenance"]) == {"nestpipe", "command", "schedule_digest"}


def test_csv_has_a_row_for_each_key_class() -> None:
    lines = run("async_prefetch", "--format", "csv").stdout.splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [(row["distance"], row["rows_behind"]) for row in rows] == [("1", "1"), ("2", "0"), ("3", "0"), ("", "0")]


def test_programs_by_rank_are_checked_together(tmp_path: Path) -> None:
    text = show(unroll(load("sync"), 2))
    head = "steps=2 micro_batches=1"
    first, second = "      all_reduce          0  ", "      all_reduce          1  "
    swapped = text.replace(first, "?").replace(second, first).replace("?", second)
    path = tmp_path / "ranks.txt"
    path.write_text(text.replace(head, f"{head} ranks=0") + swapped.replace(head, f"{head} ranks=1"))
    result = run(str(path))
    assert result.exit_code == 1
    assert "sync: deadlock" in result.stdout
    assert "rank 1" in result.stdout


def test_memory_is_printed_if_sizes_are_given(tmp_path: Path) -> None:
    path = tmp_path / "small.txt"
    path.write_text(
        "loop v1 small micro_batches=1\n  buffer samples host slots=2\n  buffer batch device slots=3\n"
        "  stream data on host_io\n    read t  after copy_h2d t-2  writes samples\n"
        "  stream h2d on h2d\n    copy_h2d t  after read t  reads samples  writes batch\n"
    )
    result = run(str(path), "--buffer-bytes", "samples=1024", "--buffer-bytes", "batch=2048")
    assert result.exit_code == 0
    assert "buffer memory per rank: host 2.00 KiB, device 6.00 KiB" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nestpip",), "did you mean 'nestpipe'"),
        (("dbp", "--buffer-bytes", "rows=many"), "rows must be a whole number of bytes, got 'many'"),
        (("dbp", "--buffer-bytes", "row=1"), "did you mean 'rows'"),
        (("dbp", "--buffer-bytes", "rows=1"), "no size for buffer activations"),
        (("dbp", "--domain-size", "2"), "is for programs by rank"),
    ],
)
def test_bad_input_is_told_with_a_way_out(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


def test_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.txt"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as UTF-8 text" in refusal(str(path))
    path.write_text("program v1 x steps=1 micro_batches=1\n  stream a on h2d\n    step 0\n      wait 0\n")
    assert "is for loops" in refusal(str(path), "--micro-batches", "2")


def test_the_catalogue_is_a_table_as_csv() -> None:
    result = CliRunner().invoke(app, ["schedule", "list", "--format", "csv"])
    rows = list(csv.DictReader(result.stdout.splitlines()))
    assert [row["name"] for row in rows] == list(names())
    assert all(row["description"] for row in rows)
