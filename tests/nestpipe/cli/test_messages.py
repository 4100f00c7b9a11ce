"""What commands say to input that is wrong, tiny or only partly there, and how they mark what rests on little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import NestPipeError
from nestpipe.cli import app
from nestpipe.cli._common import decimals
from tests.sim.scenario.scenarios import PLAIN, write
from tests.traces.formats.samples import torchrec_step

FAST = """
scenario: fast
workload: {model: dlrm}
clusters: {h: {topology: dgx_h100, accelerator_hour: 3.0}}
schedules: [sync, nestpipe]
world_sizes: [16]
batch_per_worker: [1024]
micro_batches: [4, 4096]
objective: {minimise: cost_per_million_samples}
"""


def _trace(folder: Path) -> Path:
    path = folder / "t.json"
    path.write_text(json.dumps(torchrec_step()), encoding="utf-8")
    return path


def _run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def _refused(*words: object) -> str:
    with pytest.raises(NestPipeError) as caught:
        _run(*words)
    return str(caught.value)


def test_small_prices_keep_four_digits(tmp_path: Path) -> None:
    assert (decimals([2304.0], 0, 2), decimals([0.8], 0, 2), decimals([0.000376], 3, 4)) == (0, 2, 7)
    path = write(tmp_path, FAST)
    best = json.loads(_run("plan", path, "--format", "json"))["best"]
    cost = best["cost_per_hour"] / 3600 / best["qps"] * 1e6
    assert best["cost_per_million_samples"] == pytest.approx(cost)
    assert cost < 0.001
    for text in (_run("plan", path), _run("sweep", path, "--workers", 1)):
        shown = [float(word) for word in text.replace(" USD/million", "").split() if word.startswith("0.000")]
        assert any(number == pytest.approx(cost, rel=1e-3) for number in shown), text


def test_plan_says_which_configurations_are_invalid(tmp_path: Path) -> None:
    path = write(tmp_path, FAST)
    reason = "4096 micro-batches of 1024 samples per worker"
    assert json.loads(_run("plan", path, "--format", "json"))["cannot_be"] == {reason: 1}
    assert f"Invalid configurations:\n  1 x {reason}\n" in _run("plan", path)


@pytest.mark.parametrize("value", ["90", "0", "-1", "nan", "inf"])
def test_an_efficiency_threshold_is_a_fraction(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, PLAIN)
    assert "--threshold must be a fraction above 0 and at most 1" in _refused("scale", path, "--threshold", value)


def test_an_efficiency_threshold_in_per_cent_is_refused_in_the_file_too(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN + "efficiency_threshold: 90\n")
    assert "scenario.yaml: efficiency_threshold must be a fraction" in _refused("scale", path)


def test_where_a_curve_falls_is_extrapolated_beyond_the_fitted_sizes(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    limits = {row["method"]: row for row in json.loads(_run("scale", path, "--format", "json"))["limits"]}
    assert {name: row["extrapolated"] for name, row in limits.items()} == {
        name: row["looked_at"] > 1536 for name, row in limits.items()
    }
    assert {row["extrapolated"] for row in limits.values()} == {True, False}
    lines = _run("scale", path).splitlines()
    for name, row in limits.items():
        line = next(each for each in lines if each.startswith(f"  {name}: from"))
        assert line.endswith(", extrapolated)") is row["extrapolated"]


def test_a_curve_that_never_falls_ends_at_its_last_valid_size(tmp_path: Path) -> None:
    small = FAST.replace("dgx_h100", "laptop").replace("[16]", "[1, 2]").replace("[4, 4096]", "[4]")
    path = write(tmp_path, small + "base_world_size: 1\nefficiency_threshold: 0.01\n")
    limits = json.loads(_run("scale", path, "--format", "json"))["limits"]
    assert [(row["world_size"], row["looked_at"]) for row in limits] == [(None, 8), (None, 8)]
    assert "\n  sync: nowhere (" in _run("scale", path)


@pytest.mark.parametrize("value", ["nan", "0", "-1", "inf"])
def test_the_gain_that_pays_is_a_positive_factor(tmp_path: Path, value: str) -> None:
    path = write(tmp_path, PLAIN)
    assert "--pays-at must be a factor above 0" in _refused("sweep", path, "--map", "world_size", "--pays-at", value)


def test_a_trace_table_needs_a_known_ending_and_gets_its_folder(tmp_path: Path) -> None:
    path, out = _trace(tmp_path), tmp_path / "nöw" / "t.parquet"
    assert "--out must end in .parquet or .csv, got" in _refused("trace", "import", path, "--out", tmp_path / "t.txt")
    assert not (tmp_path / "t.txt").exists()
    _run("trace", "import", path, "--out", out)
    for name in ("a/t.csv", "b/t.pb", "c"):
        to = {"a/t.csv": "csv", "b/t.pb": "perfetto", "c": "kineto"}[name]
        _run("trace", "export", out, "--to", to, "--out", tmp_path / name)
        assert (tmp_path / name).exists()


@pytest.mark.parametrize("to", ["kineto", "chakra"])
def test_a_file_where_a_folder_is_written_is_refused(tmp_path: Path, to: str) -> None:
    table = tmp_path / "t.parquet"
    _run("trace", "import", _trace(tmp_path), "--out", table)
    assert "cannot be made a folder" in _refused("trace", "export", table, "--to", to, "--out", table)


def test_a_replay_says_how_many_kinds_of_op_cost_nothing(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    _run("trace", "import", _trace(tmp_path), "--out", table)
    found = json.loads(_run("trace", "replay", table, "--schedule", "nestpipe", "--format", "json"))
    missing = found["without_cost"]
    assert "sync" in missing
    assert "forward" not in missing
    text = _run("trace", "replay", table, "--schedule", "nestpipe")
    assert f", and on {len(missing)} kinds of op that are not in the trace and cost nothing" in text
    assert " 0% " not in text


def test_the_command_ends_with_two_and_no_traceback(tmp_path: Path) -> None:
    table = tmp_path / "t.parquet"
    _run("trace", "import", _trace(tmp_path), "--out", table)
    words = ["trace", "export", str(table), "--out", str(table)]
    done = subprocess.run([sys.executable, "-m", "nestpipe", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
