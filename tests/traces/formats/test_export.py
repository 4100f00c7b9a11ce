"""Exports: what other tools read is what the table holds, and what they cannot hold is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import TraceError
from nestpipe.cli import app
from tests.traces.formats.samples import timeline
from traces.formats.export_kineto import write_kineto
from traces.formats.export_perfetto import write_perfetto
from traces.formats.importing import import_traces
from traces.table import make_table, write_table


@pytest.mark.parametrize("writer", [write_kineto, write_perfetto])
def test_a_table_without_times_is_refused(tmp_path: Path, writer: Any) -> None:
    frame = make_table([{"source": "assumed: x", "kind": "forward", "rank": 0}]).frame
    with pytest.raises(TraceError, match="no row of the table has start and end times"):
        writer(frame, tmp_path / "out")


@pytest.mark.parametrize("form", ["kineto", "chakra", "perfetto", "csv", "parquet"])
def test_command_line_writes_every_format(tmp_path: Path, form: str) -> None:
    table, out = tmp_path / "t.parquet", tmp_path / f"out.{form}"
    write_table(make_table(timeline(3, 2).assign(source="simulated: x")), table)
    result = CliRunner().invoke(app, ["trace", "export", str(table), "--to", form, "-o", str(out), "--ranks", "0,2"])
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
                app,
                ["trace", "export", str(table), "-o", str(tmp_path / "o"), "--ranks", ranks],
                catch_exceptions=False,
            )
