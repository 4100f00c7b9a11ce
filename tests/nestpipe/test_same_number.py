"""The same configuration takes the same time in every command, to the nanosecond."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe import api
from nestpipe.cli import app
from nestpipe.schedules import load
from sim.costs import CaseWorkload, Options, run

PLANNED = """
scenario: same
workload: {workload}
clusters: {{only: {{accelerator_hour: 1.0{cluster}}}}}
schedules: [{schedule}]
world_sizes: [{world_size}]
base_world_size: {world_size}
micro_batches: [{micro_batches}]
efficiency_threshold: 2  # the search for the end of the curve ends at once
objective: {{minimise: cost_per_million_samples}}
"""


def _ns(step_ms: float) -> int:
    return round(step_ms * 1e6)


def _json(*arguments: object) -> dict:
    result = CliRunner().invoke(app, [*map(str, arguments), "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _scenario(folder: Path, more: str = "", cluster: str = "", **values: object) -> Path:
    path = folder / "same.yaml"
    path.write_text(PLANNED.format(cluster=cluster, **values) + more)
    return path


def _rows(path: Path) -> dict[str, int]:
    """The step of the only configuration of a scenario, by command."""
    scaled = api.scale(path).rows
    scaled = scaled[(scaled["metric"] == "step_latency_ms")]
    return {
        "sweep": _ns(api.sweep(path)["step_ms"].item()),
        "plan": _ns(_json("plan", path)["best"]["step_ms"]),
        "scale": _ns(scaled["value"].item()),
    }


@pytest.mark.parametrize("schedule", ["sync", "nestpipe"])
@pytest.mark.parametrize("topology", [None, "dgx_h100"])
def test_a_case(schedule: str, topology: str | None, tmp_path: Path) -> None:
    micro_batches = 4 if load(schedule).micro_batches > 1 else 1
    on = [] if topology is None else ["--topology", topology]
    found = _json(
        "simulate", "--schedule", schedule, "--world-size", 64, "--micro-batches", micro_batches, "--steps", 12, *on
    )
    again = api.simulate(schedule, world_size=64, micro_batches=micro_batches, topology=topology, steps=12)
    path = _scenario(
        tmp_path,
        "steps: 12\n" + ("" if topology is None else "contention: true\n"),
        "" if topology is None else f", topology: {topology}",
        workload="{case: nestpipe_paper}",
        schedule=schedule,
        world_size=64,
        micro_batches=micro_batches,
    )
    expected = _ns(found["metrics"]["step_latency_ms"])
    assert _ns(again.metrics.set_index("metric")["value"]["step_latency_ms"]) == expected
    assert _rows(path) == dict.fromkeys(("sweep", "plan", "scale"), expected)
    row = api.sweep(path).iloc[0]
    rests_on = found["critical_cycle_rests_on"]
    assert dict(again.rests_on) == rests_on
    assert {name: row[name] for name in rests_on} == pytest.approx(rests_on, rel=1e-6)


@pytest.mark.parametrize("more", ["", "jitter: {cv: 0.1}\nseeds: 1\nseed: 3\n"])
def test_a_model_and_jitter(more: str, tmp_path: Path) -> None:
    noise = ["--jitter", 0.1, "--seed", 3] if more else []
    found = _json(
        *("simulate", "--schedule", "nestpipe", "--model", "dlrm", "--topology", "dgx_h100", "--world-size", 16),
        *("--micro-batches", 4, "--batch", 256, "--compute-efficiency", 0.5, "--steps", 12, *noise),
    )
    path = _scenario(
        tmp_path,
        f"steps: 12\ncontention: true\nbatch_per_worker: 256\n{more}",
        ", topology: dgx_h100",
        workload="{model: dlrm, compute_efficiency: 0.5}",
        schedule="nestpipe",
        world_size=16,
        micro_batches=4,
    )
    assert _rows(path) == dict.fromkeys(("sweep", "plan", "scale"), _ns(found["metrics"]["step_latency_ms"]))


def test_jitter_where_nothing_is_shared(tmp_path: Path) -> None:
    noise = ["--jitter", 0.1, "--seed", 3]
    found = _json("simulate", "--schedule", "nestpipe", "--world-size", 16, "--micro-batches", 4, *noise)
    path = _scenario(
        tmp_path,
        "jitter: {cv: 0.1}\nseeds: 1\nseed: 3\n",
        workload="{case: nestpipe_paper}",
        schedule="nestpipe",
        world_size=16,
        micro_batches=4,
    )
    assert _rows(path) == dict.fromkeys(("sweep", "plan", "scale"), _ns(found["metrics"]["step_latency_ms"]))


def test_a_recorded_trace(tmp_path: Path) -> None:
    workload = CaseWorkload.of("nestpipe_paper")
    recorded = run(load("sync"), workload, None, Options(world_size=16, steps=8)).timeline.frame()
    recorded = recorded.astype({"stream": str, "kind": str, "op": str})
    recorded = recorded.assign(duration_ns=recorded["end_ns"] - recorded["start_ns"], group_size=16, source="measured")
    recorded.to_csv(tmp_path / "recorded.csv", index=False)
    path = _scenario(
        tmp_path,
        workload="{trace: recorded.csv, recorded_batch_per_worker: 512}",
        schedule="nestpipe",
        world_size=16,
        micro_batches=4,
    )
    found = _json("trace", "replay", tmp_path / "recorded.csv", "--schedule", "nestpipe", "--micro-batches", 4)
    assert _rows(path) == dict.fromkeys(("sweep", "plan", "scale"), _ns(found["step_latency_ms"]))
    row = api.sweep(path).iloc[0]
    assert {name: row[name] for name in found["critical_cycle_rests_on"]} == found["critical_cycle_rests_on"]
