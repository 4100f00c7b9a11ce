"""The commands `profile` and `validate`: what they refuse, and the whole loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import CaseError, TraceError
from nestpipe.validate.grid import load_grid
from tests.nestpipe.validate.by_hand import CONFIG, costs_by_hand
from traces.workloads.cost_table import CostTable


def test_the_command_refuses_to_validate_on_what_was_profiled(tmp_path: Path) -> None:
    from nestpipe.cli.validate import validate

    table = costs_by_hand(CONFIG)
    used = load_grid("quick", None)[0].config
    spoiled = CostTable(rows=table.rows, meta={**table.meta, "configurations": [used.values() | {"device": None}]})
    path = tmp_path / "costs.json"
    path.write_text(spoiled.to_json(), encoding="utf-8")
    with pytest.raises(CaseError, match="validate only on what no fit has seen"):
        validate(costs=path, grid="quick", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": float("nan")}, "--tolerance and --seed must not be negative, got nan and 0"),
        ({"seed": -1}, "--tolerance and --seed must not be negative, got 0.05 and -1"),
        ({"rate": 100.0}, "--rate-mbit-per-s is for torchrun; on a testbed links have the rates of the grid"),
        ({"timeout_s": 0.0}, "--timeout-s must be positive, got 0"),
        ({"patience_s": float("nan")}, "--patience-s must not be negative, got nan"),
        ({"world_size": 1}, "--world-size must be 2 to 250, got 1"),
        ({"world_size": 999}, "--world-size must be 2 to 250, got 999"),
        ({"device": "cuda"}, "--backend gloo --device cuda: a testbed has gloo and cpu only"),
    ],
)
def test_impossible_options_are_refused_before_anything_runs(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    from nestpipe.cli.validate import validate

    path = tmp_path / "costs.json"
    path.write_text(costs_by_hand(CONFIG).to_json(), encoding="utf-8")
    with pytest.raises(CaseError, match=message):
        validate(**{"costs": path, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": [float("nan")]}, "--rate-mbit-per-s must be a positive number, got nan"),
        ({"rate": [-5.0]}, "--rate-mbit-per-s must be a positive number, got -5"),
        ({"backend": "nccl"}, "--backend nccl --device cpu: a testbed has gloo and cpu only"),
        ({"device": "cuda", "topology": Path("node.yaml")}, "--topology describes ranks that are cores of a host"),
    ],
)
def test_impossible_options_of_a_profile_are_refused(options: dict[str, Any], message: str) -> None:
    from nestpipe.cli.profile import profile

    with pytest.raises(CaseError, match=message):
        profile(**options)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1: not valid JSON"),
        (b"\xff", "byte 0 is not UTF-8 text"),
        (b"3\n", "entry 0 must be an object, got 3"),
        (b"\n{}\n", "entry 0 lacks commit, grid"),
    ],
)
def test_a_damaged_history_is_refused_before_anything_runs(tmp_path: Path, content: bytes, message: str) -> None:
    from nestpipe.cli.validate import validate

    costs, lines = tmp_path / "costs.json", tmp_path / "history.jsonl"
    costs.write_text(costs_by_hand(CONFIG).to_json(), encoding="utf-8")
    lines.write_bytes(content)
    with pytest.raises(TraceError, match=f"history.jsonl: {message}"):
        validate(costs=costs, out=tmp_path / "out", history=lines)
    assert lines.read_bytes() == content
    with pytest.raises(TraceError, match="Is a directory"):
        validate(costs=costs, out=tmp_path / "out", history=tmp_path)


@pytest.mark.usefixtures("testbed_allowed")
def test_profile_and_validate_close_the_loop_on_a_testbed(tmp_path: Path) -> None:
    """The reduced loop, under a minute on two cores; a wrong unit or a missing wait would be off by more than half."""
    from nestpipe.cli import app

    costs, out = str(tmp_path / "costs.json"), tmp_path / "out"
    profiled = CliRunner().invoke(app, ["profile", "--quick", "--out", costs, "--patience-s", "1"])
    assert profiled.exit_code == 0, profiled.output
    command = ["validate", "--costs", costs, "--grid", "quick", "--out", str(out), "--tolerance", "0.5"]
    command += ["--repeats", "1", "--draws", "2", "--patience-s", "1", "--history", str(tmp_path / "history.jsonl")]
    validated = CliRunner().invoke(app, command)
    assert validated.exit_code == 0, validated.output
    result = json.loads((out / "validation.json").read_text())
    written = json.loads((out / "predictions.json").read_text())
    assert [row["predicted_ms"] for row in result["rows"]] == [row["predicted_ms"] for row in written["rows"]]
    assert result["summary"]["configurations"] == 5
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1
