"""Files and folders imported: ranks by name, what is left out, tables and summaries written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import TraceError
from nestpipe.cli import app
from tests.traces.formats.samples import NCCL_TEXT, launched, load, rank_of, torchrec_step, trace, write
from traces.formats.importing import import_traces
from traces.formats.reading import rank_in_name
from traces.table import read_table


def test_rank_is_taken_from_elsewhere_where_the_trace_lacks_it(tmp_path: Path) -> None:
    document = trace(launched("kernel", "k", 1, 10, 5, 1), rank=None)
    assert rank_of(load(tmp_path, document))["rank"] is None
    named = rank_of(import_traces([write(tmp_path / "worker_7.pt.trace.json", document)]))
    assert (named["rank"], named["rank_source"]) == (7, "file name")
    del document["distributedInfo"]
    folder = tmp_path / "several"
    folder.mkdir()
    for name in ("a.json", "b.json"):
        write(folder / name, document)
    several = import_traces([folder])
    assert [rank["rank"] for rank in several.summary["ranks"]] == [0, 1]
    assert any("numbered in the order given" in note for note in several.summary["coverage"]["notes"])


@pytest.mark.parametrize(
    ("name", "rank"), [("rank12.json.gz", 12), ("w/worker0_step_3.json", 0), ("a.3.et", 3), ("x.json", None)]
)
def test_ranks_in_file_names(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        write(tmp_path / name, torchrec_step())
    with pytest.raises(
        TraceError, match=r"b.json: holds rank 0, and so does .*a.json; import separate runs separately"
    ):
        import_traces([tmp_path])


def test_a_folder_leaves_out_what_is_no_trace_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / "t.json", torchrec_step())
    (tmp_path / "README.md").write_text("no trace", encoding="utf-8")
    (tmp_path / ".hidden").write_text("{", encoding="utf-8")
    refused = import_traces([tmp_path]).summary["coverage"]["refused"]
    assert [Path(one["file"]).name for one in refused] == ["README.md"]
    with pytest.raises(TraceError, match="no row of a collective log"):
        import_traces([tmp_path / "README.md"])
    with pytest.raises(TraceError, match="no such file or folder"):
        import_traces([tmp_path / "absent"])


def test_command_line_writes_the_table_and_prints_the_summary(tmp_path: Path) -> None:
    path, out = write(tmp_path / "t.json", torchrec_step()), tmp_path / "t.parquet"
    result = CliRunner().invoke(app, ["trace", "import", str(path), "--out", str(out), "--format", "json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["ranks"][0]["collectives"]["all_to_all"]["bytes"] == 8512
    table = read_table(out)
    assert len(table.frame) == summary["num_rows"] == 15
    assert [file.format for file in table.files] == ["kineto"]
    for form, expected in (("text", "classified 100.0 %"), ("csv", "rank,world_size,num_steps")):
        result = CliRunner().invoke(app, ["trace", "import", str(path), "--format", form])
        assert result.exit_code == 0
        assert expected in result.stdout


def test_csv_of_a_benchmark_has_a_line_per_collective(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(NCCL_TEXT, encoding="utf-8")
    result = CliRunner().invoke(app, ["trace", "import", str(tmp_path / "x.log"), "--format", "csv"])
    assert result.stdout.splitlines()[0].startswith("file,collective,world_size")
    assert ",all_to_all,2,float,2,1024,134217728,20.5,33.56," in result.stdout


def test_an_imported_table_can_be_imported_again(tmp_path: Path) -> None:
    path, out = write(tmp_path / "t.json", torchrec_step()), tmp_path / "t.csv"
    CliRunner().invoke(app, ["trace", "import", str(path), "--out", str(out)])
    again = import_traces([out])
    assert again.table.frame.equals(import_traces([path]).table.frame)
    assert again.summary["tables"][0]["kinds"]["forward"] == {"count": 1, "us": 100}
