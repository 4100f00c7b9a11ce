"""Broken scenario files: whatever a file holds, it is evaluated or refused with a message, never with a traceback."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from nestpipe.base.errors import NestPipeError
from sim.scenario.file import load_scenario
from sim.scenario.grid import Grid
from sim.scenario.plan import plan
from sim.sweep.sweep import sweep
from tests.paths import ROOT
from tests.sim.scenario.scenarios import PLAIN, PRICED

AXES = """
clusters: {h100.v2: {accelerator_hour: 2.0, device_memory_bytes: 1 GiB, factors: {time: {lookup: 2}}}}
sweep:
  axes:
    factors.time.lookup: [1, 2]
    clusters.h100.v2.accelerator_hour: [1, 2]
    clusters.h100.v2.factors.skew: {from: 1, to: 2, num: 2}
"""
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3.5, 1e-300, 1e300, 10**30, -(2**63), "", "a", "h100.v2", "512 GB", "64 GiB", "9e99 TB",
    "dgx_h100", "dlrm", "auto", "nestpipe_2d_sp", [], {}, [1, 2], ["a", "b"], [1, "a"], {"a": 1}, {"value": 1},
    {"from": 0, "to": 1, "num": 2}, {"from": 1, "to": 2, "num": 2, "scale": "log"}, [[1]], float("inf"),
)  # fmt: skip
_AXES = (
    "factors.time.lookup", "factors.time", "clusters.own", "clusters.own.factors", "factors", "memory.row_bytes",
    "workload.case", "memory.table_rows", "seeds", "failures.restart_s", "clusters.h100.v2.factors.skew",
)  # fmt: skip


def _mutated(text: str, seed: int) -> str:
    """The file with one to three values replaced, added or taken away."""
    draw = random.Random(seed)
    document = yaml.safe_load(text)
    document["world_sizes"] = document["world_sizes"][:2]
    for _ in range(draw.randint(1, 3)):
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.7:
                node = node[key]
                continue
            match draw.randint(0, 5):
                case 0:
                    del node[key]
                case 1 if isinstance(node, dict):
                    axes = {draw.choice(_AXES): draw.choice(_VALUES)}
                    document["sweep"] = {"axes": axes}
                case _:
                    node[key] = draw.choice(_VALUES)
            break
    return yaml.safe_dump(document)


def _evaluates(path: Path) -> str:
    """The message of a file that is refused, or nothing."""
    try:
        grid = Grid.of(load_scenario(path))
        if len(grid) > 500 or grid.scenario.is_random or grid.scenario.contention:
            return ""
        results = sweep(grid)
        if grid.scenario.objective is not None:
            plan(grid, results)
    except NestPipeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["break_even", "plan", "scale", "model", "PLAIN", "PRICED"])
def test_no_mutation_of_a_scenario_ends_in_a_traceback(tmp_path: Path, name: str) -> None:
    text = {"PLAIN": PLAIN + AXES, "PRICED": PRICED}.get(name) or (ROOT / f"examples/{name}.yaml").read_text("utf-8")
    path = tmp_path / "scenario.yaml"
    refused = 0
    for seed in range(15 if name in ("model", "plan") else 40):
        path.write_text(_mutated(text, seed), encoding="utf-8")
        refused += bool(_evaluates(path))
    assert refused > 4  # mutations reach what is checked ...
    path.write_text(text, encoding="utf-8")
    assert not _evaluates(path)  # ... and the file itself is sound


def test_axes_reach_factors_of_op_kinds_and_clusters_with_dots(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(PLAIN + AXES, encoding="utf-8")
    results = sweep(Grid.of(load_scenario(path)))
    assert (results["status"] == "ok").all()
    slow = results.groupby("factors.time.lookup")["step_ms"].mean()
    assert slow[2.0] > slow[1.0]
    cost = results.groupby("clusters.h100.v2.accelerator_hour")["cost_per_hour"].mean()
    assert cost[2.0] == 2 * cost[1.0]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("sweep: {axes: {factors.time.lookup: [a, b]}}", "sweep.axes.factors.time.lookup: Expected 'float', got 'str'"),
        ("sweep: {axes: {factors.time: [1, 2]}}", "sweep.axes: unknown key 'factors.time'"),
        ("sweep: {axes: {factors.time.lokup: [1, 2]}}", "unknown op kind 'lokup'"),
        ("clusters: {a.b: {factors: {skew: -1}}}", "clusters.a.b.factors.skew must be positive, got -1"),
        ("x: " + "[" * 3000, "not valid YAML: nested too deeply"),
    ],
)  # fmt: skip
def test_a_broken_file_names_the_key(tmp_path: Path, extra: str, message: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"{PLAIN}\n{extra}\n", encoding="utf-8")
    assert message in _evaluates(path)
    assert str(path) in _evaluates(path) or extra.startswith("sweep")


def test_tables_too_large_to_count_are_a_row_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(PRICED.replace("row_bytes: 512\n", "row_bytes: 512 GB\n"), encoding="utf-8")
    assert "memory: one rank needs more than 1 EiB of device memory, most of it for rows" in _evaluates(path)
