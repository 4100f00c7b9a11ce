"""`nestpipe report` and `nestpipe diff`: results on stdout, errors that say the way out, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nestpipe.base.errors import NestPipeError
from nestpipe.cli.report import diff, report
from nestpipe.ir import OpKind
from nestpipe.timeline.files import write_timeline
from reports.runs.runs import write_run
from tests.reports.examples import record, results, timeline

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(report)
app.command()(diff)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs and one bare Timeline."""
    path = tmp_path_factory.mktemp("runs")
    for name in ("sync", "nestpipe"):
        run = timeline(name)
        write_run(path / name, run=record(run, name), timeline=run)
    (path / "bad.csv").write_text("method,metric\nNestPipe,qps\n")
    write_timeline(timeline("nestpipe", faster={OpKind.BACKWARD: 2.0}), path / "faster.parquet")
    return path


def test_report_writes_a_page_that_names_its_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "report.html"
    result = CliRunner().invoke(app, ["report", str(folder / "sync"), str(folder / "nestpipe"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    html = out.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "command: nestpipe" in html
    assert result.stdout == ""
    assert result.stderr == f"wrote {out}\n"


def test_report_to_stdout_is_the_page_alone(folder: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(folder / "sync"), "--out", "-", "--title", "A & B"])
    assert result.stdout.startswith("<!doctype html>")
    assert "<h1>A &amp; B</h1>" in result.stdout


@pytest.mark.parametrize("suffix", ["json", "csv"])
def test_report_draws_the_curve_of_a_results_file(suffix: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    rows = results().replace({float("nan"): None})
    text = results().to_csv(index=False) if suffix == "csv" else json.dumps({"rows": rows.to_dict("records")})
    path.write_text(text)
    result = CliRunner().invoke(app, ["report", str(folder / "sync"), "--curve", str(path), "--out", "-"])
    assert 'id="curve"' in result.stdout
    assert f"The {len(results())} points of all curves" in result.stdout


def test_diff_compares_a_run_with_a_timeline(folder: Path) -> None:
    arguments = ["diff", str(folder / "nestpipe"), str(folder / "faster.parquet")]
    text = CliRunner().invoke(app, arguments).stdout
    assert text.startswith("# nestpipe: ")
    assert "In short: the step of faster is " in text
    read = json.loads(CliRunner().invoke(app, [*arguments, "--format", "json"]).stdout)
    assert set(read) >= {"provenance", "a", "b", "summary", "parts", "kinds", "ops", "step_latency_change_ms"}
    assert next(row for row in read["kinds"] if row["kind"] == "backward")["change_ms"] == pytest.approx(-56)
    csv = CliRunner().invoke(app, [*arguments, "--format", "csv"]).stdout
    assert csv.splitlines()[0] == "section,name,batch,micro_batch,a_ms,b_ms,change_ms"


@pytest.mark.parametrize(("tolerance", "status"), [("60", 0), ("10", 1)])
def test_diff_fails_where_step_latency_differs_by_more_than_allowed(folder: Path, tolerance: str, status: int) -> None:
    arguments = ["diff", str(folder / "nestpipe"), str(folder / "faster.parquet"), "--tolerance-percent", tolerance]
    assert CliRunner().invoke(app, arguments).exit_code == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], r"nowhere/run.json cannot be found.*written by nestpipe simulate --out DIR"),
        (["report", "sync", "--rank", "7"], "sync: rank 7 is not in the run; it holds 0"),
        (["report", "sync", "--out", "sync"], "sync: cannot be written.*choose another --out"),
        (["report", "sync", "--curve", "bad.csv"], "bad.csv: .*expected results printed with --format json or csv"),
        (["report", "sync", "--curve", "gone.csv"], "gone.csv: cannot be read"),
        (["diff", "sync", "nowhere.parquet"], "nowhere.parquet: there is no such file"),
        (["diff", "sync", "sync/run.json"], "run.json: cannot be read as Parquet"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(NestPipeError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert sorted(folder.rglob("*")) == before
