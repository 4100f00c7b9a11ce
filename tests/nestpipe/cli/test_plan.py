"""`nestpipe plan`, `scale` and `sweep`: what they print and write, and what they refuse before anything runs."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from nestpipe.base.errors import NestPipeError
from nestpipe.cli.plan import plan
from nestpipe.cli.scale import scale
from nestpipe.cli.sweep import sweep
from tests.sim.scenario.scenarios import PLAIN, PRICED, RANDOM, write

APP = typer.Typer()
for _function in (plan, scale, sweep):
    APP.command()(_function)

SMALL = PRICED.replace("[256, 512, 1024, 1536]", "[512, 1024]").replace("[2, 4, 8, 16]", "[4, 8]")
MAPPED = PLAIN.replace("[128, 1536]", "[1536]") + (
    "sweep: {axes: {factors.compute_time: [0.5, 1, 2], factors.skew: [1, 2, 4]}}\n"
)


def _run(*words: object) -> str:
    result = CliRunner().invoke(APP, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_prints_the_recommendation_and_keeps_everything(tmp_path: Path) -> None:
    path, out = write(tmp_path, SMALL), tmp_path / "out"
    text = _run("plan", path, "--out", out, "--workers", 1)
    for words in (
        "# scenario: priced",
        "# objective: minimise cost_per_million_samples",
        "Recommended: ",
        "limited by ",
        "Runner-up: ",
        "Front of cost, QPS and device memory:",
        "Constraints, the tightest first:",
        "Memory of one rank:",
        "checkpoint every",
        "What moves cost_per_million_samples",
        "rests on numbers that are",
    ):
        assert words in text
    assert {entry.name for entry in out.iterdir()} == {
        "sweep.sqlite",
        "results.parquet",
        "plan.json",
        "front.png",
    }
    document = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    printed = json.loads(_run("plan", path, "--format", "json"))
    assert printed["best"] == document["best"]
    assert {"provenance", "runner_up", "front", "sensitivity", "constraints", "memory", "goodput", "rests_on"} <= set(
        printed
    )
    assert _run("plan", path, "--format", "csv").splitlines()[0].startswith("index,cluster,schedule,micro_batches")


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, MAPPED)
    text = _run("sweep", path, "--dry-run", "--out", tmp_path / "out")
    assert "Would evaluate 36 of 36 configurations:" in text
    assert "ms each on one core" in text
    assert "Takes about" in text
    assert not (tmp_path / "out").exists()
    document = json.loads(_run("sweep", path, "--dry-run", "--format", "json"))
    assert document["configurations"] == 36
    assert document["axes"]["factors.skew"] == [1, 2, 4]
    pairs = dict(csv.reader(io.StringIO(_run("sweep", path, "--dry-run", "--format", "csv"))))
    assert (pairs["name"], pairs["configurations"], pairs["axes.factors.skew"]) == ("value", "36", "1; 2; 4")
    for command in ("plan", "scale"):
        assert "Would evaluate" in _run(command, write(tmp_path, SMALL), "--dry-run")


def test_sweep_prints_the_best_and_the_map_and_draws_it(tmp_path: Path) -> None:
    path, out = write(tmp_path, MAPPED), tmp_path / "out"
    command = ["sweep", path, "--workers", 1, "--map", "factors.compute_time,factors.skew"]
    text = _run(*command, "--pays-at", 2, "--out", out)
    assert "36 configurations, 0 of them invalid; best by step_ms:" in text
    assert "Where a schedule gains" in text
    assert (out / "break_even.png").stat().st_size > 10_000
    document = json.loads(_run(*command, "--format", "json"))
    assert len(document["rows"]) == 36
    assert len(document["gains"]) == 18
    assert {"schedule", "pays", "factors.skew"} <= set(document["edges"][0])
    rows = pd.read_csv(io.StringIO(_run("sweep", path, "--workers", 1, "--format", "csv")))
    assert len(rows) == 36


def test_scale_prints_curves_with_intervals_and_where_they_fall(tmp_path: Path) -> None:
    path, out = write(tmp_path, RANDOM), tmp_path / "out"
    text = _run("scale", path, "--out", out)
    assert "mean of 6 seeds [5th .. 95th percentile]" in text
    assert "critical cycle:" in text
    assert {entry.name for entry in out.iterdir()} == {"scaling_efficiency.png", "qps.png", "rows.csv", "limits.csv"}
    document = json.loads(_run("scale", path, "--format", "json", "--threshold", 0.5))
    assert document["threshold"] == 0.5
    assert {"method", "world_size", "metric", "value", "low", "high", "status"} <= set(document["rows"][0])


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["plan"], PLAIN, "plan needs an objective"),
        (["plan"], SMALL.replace("qps_min: 150000", "qps_min: 900000"), "constraints.qps_min binds"),
        (["sweep", "--map", "factors.skw"], MAPPED, "did you mean 'factors.skew'?"),
        (["sweep", "--map", "a,b,c"], MAPPED, "--map takes one or two keys"),
        (["sweep", "--map", "factors.skew", "--baseline", "snyc"], MAPPED, "did you mean 'sync'?"),
        (["sweep", "--dask", "tcp://127.0.0.1:1"], MAPPED, "no Dask scheduler answers"),
        (["scale"], MAPPED, "drop sweep.axes"),
        (["sweep"], "scenario: x\nworld_sizes: 3\n", "world_sizes"),
        (["sweep"], "scenario: [\n", "not valid YAML"),
        (["sweep"], PLAIN.replace("nestpipe_paper", "nestpipe_papr"), "scenario.yaml: unknown case 'nestpipe_papr'"),
    ],
)
def test_bad_input_is_refused_with_nothing_written(tmp_path: Path, words: list[str], text: str, message: str) -> None:
    if "--dask" in words:
        pytest.importorskip("distributed")
    path, out = write(tmp_path, text), tmp_path / "out"
    with pytest.raises(NestPipeError) as caught:
        _run(words[0], path, *words[1:], "--out", out)
    assert message in str(caught.value)
    assert not (out / "plan.json").exists()
    if "binds" not in message:
        assert not out.exists()


@pytest.mark.parametrize("command", ["plan", "sweep", "scale"])
def test_an_unwritable_out_is_refused(tmp_path: Path, command: str) -> None:
    path = write(tmp_path, SMALL)
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with pytest.raises(NestPipeError, match="choose another --out"):
        _run(command, path, "--out", tmp_path / "taken")
