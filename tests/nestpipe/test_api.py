"""The Python API: frames and figures, the numbers of the command line; examples run and print what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from nestpipe import api
from nestpipe.base.errors import CaseError, NestPipeError
from sim.scenario.file import load_scenario
from sim.scenario.grid import Grid
from tests.paths import ROOT
from tests.sim.scenario.scenarios import PLAIN, PRICED, RANDOM, scenario, write

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
SCENARIOS = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_an_example_prints_what_stands_beside_it(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    expected = script.with_suffix(".out").read_text(encoding="utf-8")
    assert [line.rstrip() for line in done.stdout.splitlines()] == [line.rstrip() for line in expected.splitlines()]


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_an_example_scenario_loads_and_all_of_its_first_and_last_configurations_can_be(path: Path) -> None:
    found = Grid.of(load_scenario(path))
    from sim.scenario.evaluate import Evaluator

    evaluator = Evaluator(grid=found, max_seeds=1)
    assert {evaluator.row(found[index])["status"] for index in (0, len(found) - 1)} == {"ok"}


def test_simulate_gives_frames_that_sum_and_a_figure() -> None:
    run = api.simulate("nestpipe", world_size=64, steps=12)
    assert run.parts["share"].sum() == pytest.approx(1)
    step = run.metrics.set_index("metric")["value"]["step_latency_ms"]
    assert run.parts["ms"].sum() == pytest.approx(step)
    assert sum(run.rests_on.values()) == pytest.approx(1)
    assert run.figure().axes
    slow = api.simulate("nestpipe", world_size=64, steps=12, stragglers={3: 2.0})
    assert slow.metrics.set_index("metric")["value"]["step_latency_ms"] > step


def test_a_file_and_a_value_give_the_same_sweep(tmp_path: Path) -> None:
    from_file = api.sweep(write(tmp_path, PLAIN))
    pd.testing.assert_frame_equal(from_file, api.sweep(scenario(PLAIN)))
    pd.testing.assert_frame_equal(from_file, api.sweep(write(tmp_path, PLAIN), out=tmp_path / "kept"))
    assert api.estimate(scenario(PLAIN)).num_points == len(from_file)


def test_curves_hold_their_intervals_and_name_the_edge() -> None:
    curves = api.scale(scenario(RANDOM, seeds=3, base_world_size=16))
    rows = curves.rows[curves.rows["metric"] == "qps"]
    assert (rows["low"] <= rows["value"]).all()
    assert (rows["value"] <= rows["high"]).all()
    assert curves.table().loc["sync", 16] == 1.0
    assert set(curves.limits["method"]) == {"sync", "nestpipe"}
    assert curves.figure().axes
    assert curves.figure("qps").axes


def test_the_edge_of_a_curve_is_where_efficiency_first_lies_below() -> None:
    curves = api.scale(scenario(PLAIN, schedules=("dbp",), base_world_size=128), threshold=0.8)
    limit = curves.limits.iloc[0]
    sizes = (int(limit["world_size"]) - 8, int(limit["world_size"]))
    before, after = api.sweep(scenario(PLAIN, schedules=("dbp",), world_sizes=sizes))["scaling_efficiency"]
    assert before >= 0.8 > after
    assert limit["scaling_efficiency"] == after
    assert limit["limit"]


def test_a_curve_that_never_falls_says_so() -> None:
    curves = api.scale(scenario(PLAIN, schedules=("dbp",)), threshold=0.0001)
    assert pd.isna(curves.limits["world_size"].iloc[0])


def test_scale_refuses_swept_keys() -> None:
    with pytest.raises(CaseError, match=r"drop sweep\.axes"):
        api.scale(scenario(PLAIN + "sweep: {axes: {factors.skew: [1, 2]}}\n"))


def test_a_plan_is_frames_and_a_figure() -> None:
    planned = api.plan(scenario(PRICED, world_sizes=(512, 1024), micro_batches=(4, 8)))
    assert planned.best["index"] == planned.ranked["index"].iloc[0]
    assert planned.runner_up is not None
    assert planned.moves["span"].is_monotonic_decreasing
    assert planned.figure().axes


def test_a_map_is_frames_and_a_figure() -> None:
    text = PLAIN.replace("[128, 1536]", "[1536]") + (
        "sweep: {axes: {factors.compute_time: [0.5, 1, 2], factors.skew: [1, 2, 4]}}\n"
    )
    results = api.sweep(scenario(text))
    found = api.break_even(results, "factors.compute_time", "factors.skew", pays_at=2)
    assert len(found.gains) == 2 * 9
    assert found.figure().axes
    line = api.break_even(results[results["factors.skew"] == 1], "factors.compute_time")
    assert line.figure().axes


def test_goodput_and_check_are_a_call_away() -> None:
    assert 0.9 < api.goodput(1536, accelerator_mtbf_hours=50_000, restart_s=600, checkpoint_s=60).expected < 1
    assert api.check("async_prefetch").worst_staleness == 1


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reports.html.page", lambda *_, **__: "<html>new</html>")
    out = tmp_path / "page.html"
    out.write_text("old", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr("os.replace", fail)
        with pytest.raises(NestPipeError, match="cannot be written"):
            api.report(out=out)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert out.read_text(encoding="utf-8") == "old"
    assert api.report(out=out) == out
    assert out.read_text(encoding="utf-8") == "<html>new</html>"
