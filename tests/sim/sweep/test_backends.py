"""Sweeps on Dask: the same table as here, whatever happens to a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal

from executor.process import reserved_port
from nestpipe.base.errors import NestPipeError
from sim.sweep.sweep import read_results, sweep, sweep_to
from tests.paths import ROOT
from tests.sim.scenario.scenarios import RANDOM, grid
from tests.sim.sweep.test_sweep import SWEPT

distributed = pytest.importorskip("distributed", reason="needs the extra 'sweep'")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def test_a_local_cluster_gives_the_table_that_one_process_gives(tmp_path: Path) -> None:
    found = grid(SWEPT)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, host="127.0.0.1", protocol="tcp"
    ) as cluster:
        results = read_results(sweep_to(tmp_path, found, dask=cluster.scheduler_address))
        assert_frame_equal(results, sweep(found))
        assert_frame_equal(sweep(found, dask=cluster.scheduler_address), results)


def _start(*arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _worker(address: str, folder: Path) -> subprocess.Popen[bytes]:
    return _start(
        "dask_worker", address, "--nworkers", "1", "--nthreads", "1", "--no-dashboard", "--no-nanny",
        "--local-directory", str(folder),
    )  # fmt: skip


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[str, list[Any]]]:
    """A scheduler and two workers, each a process of its own."""
    with reserved_port() as port:
        address = f"tcp://127.0.0.1:{port}"
        running = [_start("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard", "--no-show")]
        running += [_worker(address, tmp_path / f"worker-{i}") for i in range(2)]
        try:
            with distributed.Client(address, timeout=60) as client:
                client.wait_for_workers(2, timeout=60)
            yield address, running
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def test_a_worker_that_is_killed_changes_nothing_but_time(machines: tuple[str, list[Any]], tmp_path: Path) -> None:
    address, running = machines
    killed = []

    def kill_one(done: int, of: int) -> None:
        if not killed and 0 < done < of:
            running[1].send_signal(signal.SIGKILL)
            running[1].wait()
            killed.append(done)
            time.sleep(0.2)

    for seeds in (8, 32, 128):  # a fast machine may be through with the small one before it can be disturbed
        found = grid(RANDOM, world_sizes=(32, 48, 64), micro_batches=(2, 4), seeds=seeds)
        results = read_results(sweep_to(tmp_path / f"out-{seeds}", found, dask=address, progress=kill_one))
        if killed:
            break
    assert killed, "the sweep was through before a worker could be killed"
    assert_frame_equal(results, sweep(found))


def test_an_address_that_does_not_answer_is_one_clear_error(tmp_path: Path) -> None:
    began = time.monotonic()
    with reserved_port() as port, pytest.raises(NestPipeError, match=r"no Dask scheduler answers within 5 s"):
        sweep_to(tmp_path / "out", grid(SWEPT), dask=f"tcp://127.0.0.1:{port}")
    assert time.monotonic() - began < 30
    assert not (tmp_path / "out").exists()
    with pytest.raises(NestPipeError, match="--dask"):
        sweep(grid(SWEPT), dask="nonsense")
