"""Evaluates the grid of a scenario, or part of it, in parallel and so that an interruption loses nothing finished."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import pandas as pd
import pyarrow.parquet as pq

from nestpipe.base import CaseError
from nestpipe.ir import show
from sim.costs import ModelWorkload, TraceWorkload
from sim.scenario import Evaluator, Grid, Row, better, violations, with_keys_known
from sim.sweep.backends import Backend, Chunk, backend
from sim.sweep.store import Store, as_frame, columns_of, opened

__all__ = ["Estimate", "digest", "estimate", "read_results", "sweep", "sweep_to"]

_CHUNK_S: Final = 0.5
_CHUNK_MAX: Final = 64
_SAMPLE: Final = 12
_SAMPLE_S: Final = 2.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a sweep will do, and how long it will take by a small sample.

    Attributes:
        num_points: configurations to evaluate, at the first rung.
        grid_size: configurations of the whole grid.
        sampled: how many were evaluated to measure.
        point_s: seconds per configuration on one core, mean of the sample.
        invalid: how many of the sample are invalid.
        rungs: for each rung the number of configurations and of seeds.
    """

    num_points: int
    grid_size: int
    sampled: int
    point_s: float
    invalid: int
    rungs: tuple[tuple[int, int | None], ...]

    def seconds(self, workers: int) -> float:
        """Wall time with that many workers, once they have started."""
        return sum(num for num, _ in self.rungs) * self.point_s / workers


def estimate(grid: Grid) -> Estimate:
    """Measures a few configurations, spread evenly over those that would be tried."""
    chosen = grid.chosen()
    evaluator = Evaluator(grid=grid)
    places = sorted({i * (len(chosen) - 1) // max(1, _SAMPLE - 1) for i in range(_SAMPLE)})
    began, sampled, invalid = time.perf_counter(), 0, 0
    for place in places:
        invalid += evaluator.row(grid[chosen[place]])["status"] != "ok"
        sampled += 1
        if time.perf_counter() - began > _SAMPLE_S:
            break
    point_s = (time.perf_counter() - began) / sampled
    return Estimate(
        num_points=len(chosen),
        grid_size=len(grid),
        sampled=sampled,
        point_s=point_s,
        invalid=invalid,
        rungs=tuple((num, seeds) for num, seeds in _rungs(grid, len(chosen))),
    )


def digest(grid: Grid) -> str:
    """The first 16 hex digits of a hash over everything that the results depend on, the version included."""
    try:
        release = version("nestpipe")
    except PackageNotFoundError:
        release = "unknown"
    workload = grid.workload
    model = workload.model if isinstance(workload, ModelWorkload) else None
    trace = workload.frame if isinstance(workload, TraceWorkload) else None
    parts = [
        release,
        msgspec.json.encode(grid.scenario, order="sorted").decode(),
        *(repr(each) for each in (grid.case, model, grid.keys, sorted(grid.hardware.items())) if each),
        "" if trace is None else str(pd.util.hash_pandas_object(trace.astype(str)).sum()),
        *(show(grid.loops[name]) for name in sorted(grid.loops)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def sweep(grid: Grid, *, workers: int = 1, dask: str | None = None, progress: Progress | None = None) -> pd.DataFrame:
    """All results in memory, ordered by index; for grids of up to some ten thousand points.

    Args:
        grid: what to evaluate.
        workers: processes on this machine.
        dask: the address of a Dask scheduler to use instead.
        progress: told how many configurations of how many are done.
    """
    with backend(workers, dask) as run, _store(None, grid) as store:
        below = _evaluate(store, grid, run, progress)
        return as_frame(store.table(below))


def sweep_to(
    folder: Path, grid: Grid, *, workers: int = 1, dask: str | None = None, progress: Progress | None = None
) -> Path:
    """The same into `folder`/results.parquet, in bounded memory; continues what an earlier run has begun.

    Raises:
        NestPipeError: if the folder cannot be written, holds another sweep or is in use, or a worker fails.
    """
    results = folder / "results.parquet"
    with backend(workers, dask) as run, _store(folder, grid) as store:
        if not results.is_file():
            store.write(results, _evaluate(store, grid, run, progress))
    return results


def _store(folder: Path | None, grid: Grid) -> AbstractContextManager[Store]:
    facts = {"scenario": grid.scenario.scenario, "points": len(grid.chosen()), "digest": digest(grid)}
    return opened(folder, columns_of(grid), facts)


def _evaluate(store: Store, grid: Grid, run: Backend, progress: Progress | None) -> int:
    """Evaluates what the store does not have; returns the number of rungs."""
    rungs = _rungs(grid, len(grid.chosen()))
    packed, size = pickle.dumps(with_keys_known(grid)), _chunk_size(grid)
    for rung, (num, seeds) in enumerate(rungs):
        indices = grid.chosen() if rung == 0 else _survivors(grid, store.rows(below=rung), num)
        for rows in run(packed, _chunks(store, indices, rung, seeds, size)):
            store.add(rows)
            if progress is not None:
                progress(store.count(rung), len(indices))
    return len(rungs)


def _chunks(store: Store, indices: Sequence[int], rung: int, seeds: int | None, size: int) -> Iterator[Chunk]:
    """The configurations that the store does not have, `size` at a time."""
    todo = (index for index in indices if not store.has(rung, index))
    while chosen := tuple(islice(todo, size)):
        yield Chunk(rung, chosen, seeds)


def _rungs(grid: Grid, num_points: int) -> list[tuple[int, int | None]]:
    """For each rung how many configurations with how many seeds; one rung unless halving.

    Halving starts without jitter (the cycle bound), then takes a part `keep` with a quarter of the seeds, and a part
    `keep` of that with all of them.

    Raises:
        CaseError: if halving is asked for where it means nothing.
    """
    scenario = grid.scenario
    if scenario.sweep.search != "halving":
        return [(num_points, None)]
    if scenario.objective is None:
        raise CaseError("sweep.search: halving needs an objective to rank by")
    if not scenario.is_random:
        raise CaseError(
            "sweep.search: halving saves seeds, and nothing here is random (jitter, stragglers, vary_assumptions): one "
            "evaluation is exact; use grid or random"
        )
    keep = scenario.sweep.keep
    second = max(1, round(num_points * keep))
    third = max(1, round(second * keep))
    return [(num_points, 0), (second, max(1, scenario.seeds // 4)), (third, None)]


def _survivors(grid: Grid, rows: Iterator[Row], num: int) -> tuple[int, ...]:
    """The indices of the `num` best rows of the highest rung so far, ascending: feasible ones first."""
    objective = grid.scenario.objective
    assert objective is not None
    scored = []
    for row in rows:
        if row["status"] == "ok":
            broken = len(violations(row, grid.scenario))
            scored.append((-row["rung"], broken, better(objective.metric, objective.minimise is not None, row)))
    highest = min((each[0] for each in scored), default=0)
    best = sorted(each for each in scored if each[0] == highest)[:num]
    return tuple(sorted(each[2][3] for each in best))


def _chunk_size(grid: Grid) -> int:
    """Points that take about half a second together."""
    if not len(grid.chosen()):
        return 1
    return max(1, min(_CHUNK_MAX, round(_CHUNK_S / max(estimate(grid).point_s, 1e-4))))


def read_results(path: Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The results of a finished sweep: all columns, or only some, which saves memory where there are many rows."""
    return as_frame(pq.read_table(path, columns=None if columns is None else list(columns)))
