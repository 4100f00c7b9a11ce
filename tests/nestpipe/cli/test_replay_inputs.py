"""`nestpipe trace replay` of recordings with unusual edges: work before the steps, empty steps, missing kernels."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from nestpipe.cli import app
from tests.paths import INPUTS


@pytest.mark.parametrize(
    ("name", "steps", "note"),
    [
        ("replay-collective-without-kernel", [(0, 1), (0, 2), (1, 1), (1, 2)], ""),
        ("replay-launch-before-first-step.json", [(0, 1), (0, 2)], ""),
        ("replay-zero-length-step.json", [(0, 1)], "they take no time"),
    ],
)
def test_a_step_takes_as_long_as_recorded(name: str, steps: list[tuple[int, int]], note: str) -> None:
    run = CliRunner().invoke(app, ["trace", "replay", str(INPUTS / name), "--format", "json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert (found["anchor"]["recorded_ms"], found["anchor"]["predicted_ms"]) == (1.0, 1.0)
    assert [(step["rank"], step["step"]) for step in found["steps"]] == steps
    assert note in " ".join(found["anchor"]["notes"])
