"""The command line: documented shapes, clear errors, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer

from nestpipe import cli
from nestpipe.ir import show
from nestpipe.schedules import load

METRICS = {
    "step_latency_ms",
    "lookup_ms",
    "communication_ms",
    "speedup",
    "qps",
    "scaling_efficiency",
    "utilization",
    "exposed_communication_ratio",
}
ROW = {"method", "world_size", "metric", "published", "value", "relative_error", "status"}


def nestpipe(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nestpipe", *arguments], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_reproduce_prints_rows_with_the_documented_keys() -> None:
    done = nestpipe("reproduce", "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(set(row) == ROW for row in rows)
    assert {row["metric"] for row in rows} == METRICS
    assert {row["status"] for row in rows} == {"fitted", "predicted", "assumed", "extrapolated"}


def test_simulate_prints_the_same_metrics_for_one_run() -> None:
    done = nestpipe("simulate", "--schedule", "nestpipe", "--world-size", "1536", "--steps", "12", "--format", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result["metrics"]) == METRICS
    assert all(set(row) == ROW for row in result["rows"])
    assert sum(result["parts_ms"].values()) == pytest.approx(result["metrics"]["step_latency_ms"])


def test_a_file_of_schedule_text_works_wherever_a_name_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(show(load("dbp")).replace("loop v1 dbp", "loop v1 mine"), encoding="utf-8")
    named, filed = (
        json.loads(nestpipe("simulate", "--schedule", each, "--world-size", "256", "--format", "json").stdout)
        for each in ("dbp", str(path))
    )
    assert filed["schedule"] == "mine"
    assert named["metrics"] == filed["metrics"]
    assert nestpipe("schedule", "show", str(path)).stdout == path.read_text(encoding="utf-8")


def test_what_the_user_changed_is_not_called_fitted_and_is_compared_with_its_like() -> None:
    done = nestpipe(
        *("simulate", "--schedule", "sync", "--world-size", "128", "--straggler", "3:3", "--format", "json")
    )
    result = json.loads(done.stdout)
    assert {row["status"] for row in result["rows"]} == {"assumed"}
    assert result["metrics"]["speedup"] == 1
    plain = json.loads(nestpipe("simulate", "--schedule", "sync", "--world-size", "128", "--format", "json").stdout)
    assert {row["status"] for row in plain["rows"]} == {"fitted"}


def test_jitter_needs_the_unfolded_ranks_and_is_reproducible() -> None:
    arguments = ("simulate", "--schedule", "nestpipe", "--world-size", "128", "--jitter", "0.05", "--format", "json")
    first, again, other = (
        json.loads(nestpipe(*arguments, "--seed", seed).stdout)["metrics"] for seed in ("1", "1", "2")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "--schedule", "nestpip"), "did you mean 'nestpipe'?"),
        (("simulate", "--schedule", "sync", "--case", "nestpipe_papr"), "did you mean 'nestpipe_paper'?"),
        (("simulate", "--schedule", "sync", "--world-size", "0"), "world_size must be at least 1, got 0"),
        (("simulate", "--schedule", "2d_sp", "--world-size", "1000"), "not divisible by domain_size 128"),
        (("simulate", "--schedule", "nestpipe", "--micro-batches", "513"), "between 1 and the batch per worker, 512"),
        (("simulate", "--schedule", "nestpipe", "--steps", "3"), "leave no steady state"),
        (("simulate", "--schedule", "sync", "--straggler", "fast"), "RANK:FACTOR"),
        (("simulate", "--schedule", "sync", "--world-size", "1000000000"), "world_size must be at most 1,000,000"),
        (("simulate", "--schedule", "sync", "--steps", "10000000"), "take fewer steps"),
        (("simulate", "--schedule", "2d_sp", "--domain-size", "0"), "domain-size"),
        (("simulate", "--schedule", "sync", "--jitter", "0.1", "--seed", "-1"), "seed"),
        (("simulate", "--schedule", "sync", "--communication-share", "0.2"), "needs --topology"),
        (("simulate", "--schedule", "sync", "--batch", "64"), "--batch 64 needs --model NAME"),
        (("simulate", "--schedule", "sync", "--jitter", "-1"), "between 0 and 10"),
        (("reproduce", "--case", "nowhere.yaml"), "unknown case 'nowhere.yaml'"),
        (("schedule", "show", "missing.txt"), "unknown schedule 'missing.txt'"),
        (("simulate",), "--schedule"),
        (("simulat",), "No such command"),
    ],
)
def test_bad_input_is_one_clear_error_and_exit_2(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = nestpipe(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_cannot_run_is_refused_before_it_does(tmp_path: Path) -> None:
    path = tmp_path / "stuck.txt"
    text = show(load("sync")).splitlines(keepends=True)
    lookup = next(i for i, line in enumerate(text) if line.strip().startswith("lookup"))
    text[lookup], text[lookup + 1] = text[lookup + 1], text[lookup]
    path.write_text("".join(text), encoding="utf-8")
    done = nestpipe("simulate", "--schedule", str(path), "--world-size", "8")
    assert done.returncode == 2
    assert "deadlock" in done.stderr.lower() or "cannot finish" in done.stderr or "circle" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unwritable_output_is_an_error() -> None:
    done = nestpipe("reproduce", "--out", "/proc/nestpipe")
    assert done.returncode == 2
    assert "choose another --out" in done.stderr


def test_nestpipe_alone_shows_what_it_is_for() -> None:
    done = nestpipe()
    assert done.returncode == 0
    assert "nestpipe reproduce" in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    done = nestpipe("--version")
    assert (done.returncode, done.stdout) == (0, f"nestpipe {version('nestpipe')}\n")


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stub = typer.Typer()

    @stub.command()
    def work() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", stub)
    monkeypatch.setattr(sys, "argv", ["nestpipe"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130
    assert capsys.readouterr().err.endswith("interrupted; nothing was left half-written\n")
