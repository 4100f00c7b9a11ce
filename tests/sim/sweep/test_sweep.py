"""Sweeps: the same table wherever they run, and nothing finished is lost."""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from nestpipe.base.errors import CaseError, NestPipeError
from sim.scenario.break_even import break_even, edges
from sim.sweep.backends import Chunk, _run
from sim.sweep.sweep import digest, estimate, read_results, sweep, sweep_to
from tests.paths import ROOT
from tests.sim.scenario.scenarios import PLAIN, PRICED, RANDOM, grid, write

SWEPT = (
    PLAIN
    + """
sweep:
  axes:
    factors.communication_time: {from: 0.1, to: 10, num: 5, scale: log}
    factors.lookup_cost: [0.5, 1, 2]
"""
)


def test_processes_give_the_table_that_one_process_gives(tmp_path: Path) -> None:
    found = grid(SWEPT)
    here = sweep(found)
    assert len(here) == len(found) == 8 * 15
    assert here["index"].tolist() == list(range(len(found)))
    assert_frame_equal(read_results(sweep_to(tmp_path / "two", found, workers=2)), here)
    assert_frame_equal(read_results(sweep_to(tmp_path / "one", found, workers=1)), here)


def test_a_sweep_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    found = grid(SWEPT)
    whole = sweep(found)
    seen: list[int] = []

    class StopError(Exception):
        pass

    def stop(done: int, of: int) -> None:
        seen.append(done)
        if done >= of // 2:
            raise StopError

    with pytest.raises(StopError):
        sweep_to(tmp_path, found, progress=stop)
    assert _num_rows(tmp_path) == max(seen)
    assert not (tmp_path / "results.parquet").exists()
    again: list[int] = []
    results = read_results(sweep_to(tmp_path, found, progress=lambda done, _: again.append(done)))
    assert min(again) > max(seen) or len(seen) == 1
    assert_frame_equal(results, whole)
    assert _num_rows(tmp_path) == 0
    assert_frame_equal(read_results(sweep_to(tmp_path, found)), whole)


def _num_rows(folder: Path) -> int:
    """How many rows the store of a sweep that does not run holds."""
    with closing(sqlite3.connect(folder / "sweep.sqlite")) as connection:
        return int(connection.execute("SELECT count(*) FROM rows").fetchone()[0])


def _runs(process: str) -> bool:
    """Whether a process is there and not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_sweep_loses_only_what_was_running(tmp_path: Path) -> None:
    text = SWEPT.replace("num: 5", "num: 24")
    path = write(tmp_path, text)
    code = (
        "import sys; from pathlib import Path\n"
        "from sim.scenario.grid import Grid; from sim.scenario.file import load_scenario\n"
        "from sim.sweep.sweep import sweep_to\n"
        "if __name__ == '__main__':\n"
        "    sweep_to(Path(sys.argv[2]), Grid.of(load_scenario(sys.argv[1])), workers=2, "
        "progress=lambda done, _: print(done, flush=True))\n"
    )
    out, script = tmp_path / "out", tmp_path / "run.py"
    script.write_text(code, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(path), str(out)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(2)]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    workers = children.read_text(encoding="utf-8").split() if children.exists() else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 60
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [worker for worker in workers if _runs(worker)], "workers outlive their parent"
    finished = _num_rows(out)
    assert finished >= int(told[-1])
    found = grid(text)
    kept: list[int] = []
    results = read_results(sweep_to(out, found, progress=lambda done, _: kept.append(done)))
    if kept:  # it may have been through already
        assert kept[0] > finished
    assert results["index"].tolist() == list(range(len(found)))


def test_an_interrupt_waits_while_a_process_starts_and_the_process_never_sees_it() -> None:
    # in a process of its own: test runners have threads and may ignore the signal
    script = """
import os, signal, subprocess, sys
from sim.sweep.backends import uninterrupted
deaf = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        print(subprocess.check_output([sys.executable, "-c", deaf], text=True).strip())
    print("not interrupted")
except KeyboardInterrupt:
    print("interrupted")
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "interrupted", "True", "False"], done.stderr


def test_a_process_whose_sweep_was_given_up_evaluates_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.sweep.backends._PACKED", [pickle.dumps(grid(PLAIN))])
    given_up, wanted = get_context("spawn").Pipe(duplex=False)
    monkeypatch.setattr("sim.sweep.backends._GIVEN_UP", [given_up])
    chunk = Chunk(rung=0, indices=(0, 1), max_seeds=None)
    assert len(_run(chunk)) == 2
    wanted.close()
    assert _run(chunk) == []
    given_up.close()


def test_another_scenario_is_not_mixed_into_a_sweep(tmp_path: Path) -> None:
    sweep_to(tmp_path, grid(PLAIN))
    with pytest.raises(NestPipeError, match="holds a sweep of another scenario"):
        sweep_to(tmp_path, grid(PLAIN, micro_batches=4))
    assert digest(grid(PLAIN)) == digest(grid(PLAIN)) != digest(grid(PLAIN, seed=1))


def test_a_folder_that_a_running_sweep_uses_is_refused(tmp_path: Path) -> None:
    told: list[int] = []

    def second(done: int, _: int) -> None:
        with pytest.raises(
            NestPipeError, match="another sweep is using it: wait for that one, or choose another --out"
        ):
            sweep_to(tmp_path, grid(PLAIN))
        told.append(done)

    results = read_results(sweep_to(tmp_path, grid(PLAIN), progress=second))
    assert told
    assert len(results) == len(grid(PLAIN))


@pytest.mark.parametrize("name", ["sweep.sqlite", "results.parquet"])
def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("something else " * 100, encoding="utf-8")
    with pytest.raises(NestPipeError, match=r"(not readable as a sweep|of something else).*; choose another --out"):
        sweep_to(tmp_path, grid(PLAIN))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") == "something else " * 100


def test_an_unwritable_folder_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(NestPipeError, match=r"file: cannot be written: .*choose another --out"):
        sweep_to(tmp_path / "file", grid(PLAIN))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_halving_gives_all_seeds_to_the_best_and_comes_close_to_the_best_of_the_grid() -> None:
    text = RANDOM + (
        "clusters: {a: {accelerator_hour: 2}}\nobjective: {minimise: step_ms}\n"
        "sweep: {search: halving, points: 24, keep: 0.25, axes: {factors.compute_time: [0.5, 0.7, 1, 1.4, 2, 3]}}\n"
    )
    halved = sweep(grid(text))
    assert halved["rung"].value_counts().to_dict() == {0: 18, 1: 4, 2: 2}
    assert set(halved[halved["rung"] == 2]["how"]) == {"6 seeds"}
    assert set(halved[halved["rung"] == 0]["how"]) == {"cycle bound"}
    full = sweep(grid(text.replace("halving", "grid"))).drop(columns="rung")
    last = halved[halved["rung"] == 2].drop(columns="rung")
    assert_frame_equal(last, full.loc[last.index])
    assert last["step_ms"].min() <= 1.05 * full["step_ms"].min()


def test_halving_is_refused_where_one_evaluation_is_exact() -> None:
    text = PLAIN + "objective: {minimise: step_ms}\nsweep: {search: halving, points: 4}\n"
    with pytest.raises(CaseError, match="nothing here is random"):
        sweep(grid(text))


def test_an_estimate_counts_what_would_run() -> None:
    found = estimate(grid(SWEPT))
    assert (found.num_points, found.grid_size, found.invalid) == (120, 120, 0)
    assert 0 < found.point_s < 5
    assert found.seconds(2) == pytest.approx(120 * found.point_s / 2)


def test_the_map_holds_gains_and_the_edge_lies_between_its_neighbours() -> None:
    results = sweep(grid(SWEPT, world_sizes=(1536,)))
    x, y = "factors.communication_time", "factors.lookup_cost"
    gains = break_even(results, x, y)
    for row in gains.to_dict("records"):
        mine = results[(results[x] == row[x]) & (results[y] == row[y])]
        own = mine[mine["schedule"] == row["schedule"]]["step_ms"].min()
        assert row["gain"] == mine[mine["schedule"] == "sync"]["step_ms"].iloc[0] / own
    level = 1.0001 * float(gains[gains["schedule"] == "nestpipe"]["gain"].median())
    for edge in edges(gains, x, y, pays_at=level).dropna(subset=[x]).to_dict("records"):
        line = gains[(gains["schedule"] == edge["schedule"]) & (gains[y] == edge[y])].sort_values(x)
        left, right = line[line[x] <= edge[x]].iloc[-1], line[line[x] >= edge[x]].iloc[0]
        assert (left["gain"] >= level) != (right["gain"] >= level)
        assert edge["pays"] == ("above" if right["gain"] >= level else "below")


def test_the_edge_of_a_known_curve_is_found() -> None:
    gains = pd.DataFrame({"schedule": ["s"] * 4, "k": [1.0, 10.0, 100.0, 1000.0], "gain": [2.0, 1.0, 0.5, 1.5]})
    found = edges(gains, "k", pays_at=0.75)
    assert found["k"].tolist() == pytest.approx([10**1.5, 10**2.25])
    assert found["pays"].tolist() == ["below", "above"]
    assert edges(gains, "k", pays_at=0.1)["pays"].tolist() == ["always"]
    assert edges(gains, "k", pays_at=9)["pays"].tolist() == ["never"]


def test_a_map_over_what_also_varies_is_refused() -> None:
    results = sweep(grid(SWEPT))
    with pytest.raises(CaseError, match="world_size has 2 values and is on neither axis"):
        break_even(results, "factors.communication_time", "factors.lookup_cost")
    with pytest.raises(CaseError, match=r"unknown key 'factors.skew'"):
        break_even(results, "factors.skew")


def test_invalid_configurations_stay_in_the_table(tmp_path: Path) -> None:
    found = grid(PLAIN, world_sizes=(100, 128), schedules=("sync", "nestpipe_2d_sp"), domain_sizes=(32,))
    results = read_results(sweep_to(tmp_path, found))
    assert results["status"].value_counts().to_dict() == {"ok": 4, "invalid": 2}
    assert results[results["status"] == "invalid"]["reason"].str.contains("not divisible").all()


def test_prices_goodput_and_memory_are_in_the_row() -> None:
    row = sweep(grid(PRICED, world_sizes=(512,), schedules=("nestpipe",), micro_batches=8)).iloc[0]
    assert row["cost_per_hour"] == pytest.approx(512 * 1.5)
    assert row["expected_qps"] == pytest.approx(row["qps"] * row["goodput"])
    assert row["cost_per_million_samples"] == pytest.approx(512 * 1.5 / row["expected_qps"] / 3600 * 1e6)
    assert row["device_bytes_max"] == 64 * 2**30
