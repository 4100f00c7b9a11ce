"""Evaluates the grid of a scenario, or part of it, in parallel and so that an interruption loses nothing finished."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.base import CaseError
from nestpipe.ir import show
from sim.costs import ModelWorkload, TraceWorkload
from sim.scenario import Evaluator, Grid, better, violations, with_keys_known
from sim.sweep.backends import Backend, Chunk, backend
from sim.sweep.store import Store, as_frame, schema_of

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
    tables: list[pa.Table] = []
    packed = pickle.dumps(with_keys_known(grid))
    with backend(workers, dask) as run:
        for rung, (num, seeds) in enumerate(_rungs(grid, len(grid.chosen()))):
            indices = grid.chosen() if rung == 0 else _survivors(grid, iter(tables), num)
            chunks = _Chunks(indices=indices, rung=rung, seeds=seeds, size=_chunk_size(grid))
            done: dict[int, pa.Table] = {}
            for chunk, table in run(packed, iter(chunks)):
                done[chunk.number] = table
                if progress is not None:
                    progress(sum(each.num_rows for each in done.values()), len(indices))
            later = [done[number] for number in sorted(done)]
            tables = later if rung == 0 else list(_overlaid(iter(tables), later))
    return as_frame(pa.concat_tables(tables) if tables else schema_of(grid).empty_table())


def sweep_to(
    folder: Path, grid: Grid, *, workers: int = 1, dask: str | None = None, progress: Progress | None = None
) -> Path:
    """The same into `folder`/results.parquet, in bounded memory; continues what an earlier run has begun.

    Raises:
        NestPipeError: if the folder cannot be written or holds another sweep, or a worker fails.
    """
    stamp = digest(grid)
    facts = {"scenario": grid.scenario.scenario, "points": len(grid.chosen()), "nestpipe_digest": stamp}
    rungs = _rungs(grid, len(grid.chosen()))
    with backend(workers, dask) as run:
        size = _chunk_size(grid) if not (folder / "sweep.json").is_file() else 1
        store = Store.open(folder, schema_of(grid), digest=stamp, facts=facts, chunk_size=size)
        if store.results.is_file():
            return store.results
        merged: list[int] = []
        for rung, (num, seeds) in enumerate(rungs):
            indices = grid.chosen() if rung == 0 else _survivors(grid, _all(store, merged), num)
            chunks = _Chunks(indices=indices, rung=rung, seeds=seeds, size=store.chunk_size)
            _fill(store, grid, chunks, run, progress)
            merged.append(len(chunks))
    return store.merge(_all(store, merged), facts)


def _fill(store: Store, grid: Grid, chunks: _Chunks, run: Backend, progress: Progress | None) -> None:
    """Evaluates the chunks of a rung that the store does not have."""
    rung = chunks.rung
    finished = sum(len(chunks[i].indices) for i in range(len(chunks)) if store.has(rung, i))
    todo = (chunks[i] for i in range(len(chunks)) if not store.has(rung, i))
    for chunk, table in run(pickle.dumps(with_keys_known(grid)), todo):
        store.add(rung, chunk.number, table)
        finished += table.num_rows
        if progress is not None:
            progress(finished, len(chunks.indices))


def _all(store: Store, num_chunks: Sequence[int]) -> Iterator[pa.Table]:
    """Every row of the first rung, replaced by the row of the highest rung that evaluated it."""
    later = [table for rung in range(1, len(num_chunks)) for table in store.tables(rung, num_chunks[rung])]
    yield from _overlaid(store.tables(0, num_chunks[0]), later)


def _overlaid(first: Iterator[pa.Table], later: Sequence[pa.Table]) -> Iterator[pa.Table]:
    """The tables with rows replaced by those of later rungs, by index; the last one wins."""
    if not later:
        yield from first
        return
    rows = {row["index"]: row for table in later for row in table.to_pylist()}
    empty = True
    for table in first:
        empty = False
        yield pa.Table.from_pylist([rows.get(row["index"], row) for row in table.to_pylist()], schema=table.schema)
    if empty:
        yield from later


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


def _survivors(grid: Grid, tables: Iterator[pa.Table], num: int) -> tuple[int, ...]:
    """The indices of the `num` best rows of the highest rung so far, ascending: feasible ones first."""
    objective = grid.scenario.objective
    assert objective is not None
    scored = []
    for table in tables:
        for row in table.to_pylist():
            if row["status"] == "ok":
                broken = len(violations(row, grid.scenario))
                scored.append((-row["rung"], broken, better(objective.metric, objective.minimise is not None, row)))
    highest = min((each[0] for each in scored), default=0)
    best = sorted(each for each in scored if each[0] == highest)[:num]
    return tuple(sorted(each[2][3] for each in best))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """The chunks of a rung, made when asked for."""

    indices: Sequence[int]
    rung: int
    seeds: int | None
    size: int

    def __len__(self) -> int:
        return -(-len(self.indices) // self.size)

    def __getitem__(self, number: int) -> Chunk:
        if number >= len(self):
            raise IndexError(number)
        start = number * self.size
        return Chunk(number, self.rung, tuple(self.indices[start : start + self.size]), self.seeds)


def _chunk_size(grid: Grid) -> int:
    """Points that take about half a second together."""
    if not len(grid.chosen()):
        return 1
    return max(1, min(_CHUNK_MAX, round(_CHUNK_S / max(estimate(grid).point_s, 1e-4))))


def read_results(path: Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """The results of a finished sweep: all columns, or only some, which saves memory where there are many rows."""
    return as_frame(pq.read_table(path, columns=None if columns is None else list(columns)))
