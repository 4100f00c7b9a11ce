"""Key files size the lookups and All2Alls of a simulated model, and the output says what of that was measured."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from nestpipe.base.errors import CaseError, TraceError
from nestpipe.cli.simulate import simulate
from nestpipe.ir import with_micro_batches
from nestpipe.schedules import load
from sim.costs.demand import num_owners
from sim.scenario.evaluate import Evaluator, with_keys_known
from sim.scenario.file import load_scenario
from sim.scenario.grid import Grid
from sim.sweep.sweep import digest, sweep
from traces.keys.generate import criteo_like, generate_stream
from traces.keys.scale import KeyRatios, read_key_files, statistics_at
from traces.workloads.key_use import key_uses
from traces.workloads.models import preset

SCENARIO = """
scenario: keys
workload:
  model: dlrm
  keys: {files: [log.csv], columns: [c1, c4]}
clusters: {h100: {topology: dgx_h100}}
schedules: [sync, nestpipe, 2d_sp]
world_sizes: [4, 64]
batch_per_worker: [32, 2000]
micro_batches: [4]
domain_sizes: [2]
"""

app = typer.Typer(pretty_exceptions_enable=False)
app.command("simulate")(simulate)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    stream = generate_stream(criteo_like(4, 2000), 640, np.random.default_rng(3))
    rows = [",".join(map(str, row)) for row in stream.values.reshape(-1, 4).tolist()]
    path = tmp_path / "log.csv"
    path.write_text("\n".join([",".join(stream.features), *rows]) + "\n")
    return path


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["--schedule", "nestpipe", "--steps", "8", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def keyed(log: Path, *more: str) -> tuple[str, ...]:
    return ("--model", "dlrm", "--topology", "dgx_h100", "--keys", str(log), "--batch", "32", *more)


@pytest.mark.parametrize(("world_size", "more"), [(4, ()), (1536, ()), (1536, ("--key-resample",))])
def test_the_result_says_what_was_measured_and_what_was_not(
    log: Path, golden: Callable[[str], None], world_size: int, more: tuple[str, ...]
) -> None:
    # one micro-batch: clustering rounds differently on other processors
    text = run(*keyed(log, "--world-size", str(world_size), "--micro-batches", "1", *more))
    golden(text[text.index("Sizes from") :])


def test_sizes_are_those_of_the_statistics(log: Path) -> None:
    result = json.loads(
        run(*keyed(log, "--world-size", "4", "--micro-batches", "4", "--key-column", "c4", "--format", "json"))
    )
    model, files = preset("dlrm"), read_key_files([str(log)], columns=["c4"])
    statistics = KeyRatios(files).at(32, 4, 4)
    assert statistics.origin == "measured"
    assert result["keys"]["key_columns"] == ["c4"]
    assert result["keys"]["rows"] == [use._asdict() for use in key_uses(model, 32, 4, statistics)]
    assert {each["name"] for each in result["assumptions"]} >= {"keys_per_sample", "busiest_owner"}


def test_repeated_keys_make_transfers_shorter(log: Path) -> None:
    def all_to_all_ms(*arguments: str) -> float:
        stages = json.loads(run(*arguments, "--world-size", "4", "--format", "json"))["stages"]
        return float(next(each["alone_ms"] for each in stages if each["kind"] == "all_to_all[keys]"))

    plain = ("--model", "dlrm", "--topology", "dgx_h100", "--batch", "32")
    assert all_to_all_ms(*keyed(log)) < all_to_all_ms(*plain)


def test_owners_are_the_ranks_of_a_domain_where_there_are_domains() -> None:
    assert num_owners(load("2d_sp"), 64, 8) == 8
    assert num_owners(load("2d_sp"), 4, 8) == 4
    assert num_owners(load("nestpipe"), 64, 8) == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keys", "x.csv"), "--keys needs --model"),
        (("--model", "dlrm", "--topology", "dgx_h100", "--key-column", "c1"), "need --keys FILE"),
    ],
)
def test_keys_without_a_model_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        run(*arguments)


def test_a_stream_too_short_to_extrapolate_is_refused(log: Path) -> None:
    with pytest.raises(TraceError, match="3 batches of one rank are too few to extrapolate from, which needs 4"):
        statistics_at(read_key_files([str(log)]).stream, batch=200, world_size=8)
    found, note = statistics_at(read_key_files([str(log)]).stream, batch=200, world_size=8, drawn=True)
    assert found.origin == "resampled"
    assert "resampled with replacement" in str(note)


@pytest.mark.usefixtures("log")
def test_a_scenario_takes_keys_and_its_workers_need_only_the_statistics(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    grid = Grid.of(load_scenario(tmp_path / "s.yaml"))
    before = digest(grid)
    rows = sweep(grid)
    assert digest(grid) == before
    assert grid.keys is not None
    assert grid.keys.facts["key_columns"] == ["c1", "c4"]
    assert grid.keys.origins() == {"extrapolated": [64], "measured": [2, 4]}
    alone = Evaluator(grid=pickle.loads(pickle.dumps(with_keys_known(grid))))
    for row in rows.to_dict("records"):
        again = alone.row(grid[row["index"]])
        assert (again["status"], again["step_ms"]) == (row["status"], row["step_ms"]) or row["batch_per_worker"] != 32
    refused = rows[rows["status"] == "invalid"]
    assert set(refused["reason"].str.extract(r"(too few to extrapolate)")[0]) == {"too few to extrapolate"}
    assert len(refused) == len(rows) // 2
    loop = with_micro_batches(load("nestpipe"), 4)
    assert grid.keys.notes(32, num_owners(loop, 64, None), 4)[0].startswith("640 samples are fewer than two")


def test_keys_of_a_case_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("model: dlrm", "case: nestpipe_paper"))
    with pytest.raises(CaseError, match="keys belong to a model"):
        load_scenario(tmp_path / "s.yaml")
