"""Scaling curves of a scenario: QPS and efficiency against workers with intervals, and where each falls off and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from nestpipe.base import ORIGINS, CaseError
from sim.costs import status_of
from sim.scenario.constraints import better
from sim.scenario.evaluate import Evaluator, Row, base_world_size
from sim.scenario.grid import Configuration, Grid, Variant
from sim.scenario.sections import ClusterChoice, Factors, MicroBatching

__all__ = ["WORLD_SIZE_MAX", "Scaling", "require_plain", "scale"]

#: Where the search for the end of a curve stops.
WORLD_SIZE_MAX: Final = 1 << 20
_UNIT: Final = 8
_METRICS: Final = ("step_latency_ms", "qps", "scaling_efficiency", "utilization")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Curves and limits.

    Attributes:
        rows: long format, one row per method, world size and metric: value, low, high (5th and 95th percentile over
            seeds, None where nothing is random), published (None), status.
        limits: one row per method: the first world size whose efficiency lies below the threshold (None if there is
            none up to `WORLD_SIZE_MAX` or to the last valid size), efficiency there, critical cycle and busiest stream
            there.
        base_world_size: what efficiency is relative to.
        threshold: efficiency, as a fraction of 1.
        missing: for each invalid point of a curve, which and why.
    """

    rows: pd.DataFrame
    limits: pd.DataFrame
    base_world_size: int
    threshold: float
    missing: tuple[str, ...] = ()


def scale(grid: Grid, *, threshold: float | None = None, progress: Callable[[str], None] = lambda _: None) -> Scaling:
    """The curves of every variant of the scenario on every cluster; the first batch where several are listed.

    With `micro_batches: auto` each world size takes the number with the shortest step.

    Args:
        grid: the scenario; `sweep.axes` must be empty.
        threshold: by default the scenario's `efficiency_threshold`.
        progress: told of each curve as it starts.

    Raises:
        CaseError: if the scenario sweeps other keys, or every configuration is invalid.
    """
    require_plain(grid)
    threshold = grid.scenario.efficiency_threshold if threshold is None else threshold
    evaluator = Evaluator(grid=grid)
    base = base_world_size(grid)
    rows: list[Row] = []
    limits: list[Row] = []
    missing: list[str] = []
    for name, cluster, variants in _methods(grid):
        progress(name)
        curve = [_best(evaluator, cluster, variants, size) for size in sorted({*grid.scenario.world_sizes, base})]
        fine = [row for row in curve if row["status"] == "ok"]
        if not fine:
            raise CaseError(f"{name}: {curve[0]['reason']}")
        rows += [line for row in fine for line in _lines(grid, name, row)]
        start = next((row["world_size"] for row in fine if row["world_size"] >= base), fine[-1]["world_size"])
        limits.append({"method": name, "cluster": cluster, **_limit(evaluator, cluster, variants, threshold, start)})
        absent = [row for row in curve if row["status"] != "ok"]
        missing += [f"{name} at {row['world_size']:,} workers: {row['reason']}" for row in absent]
    return Scaling(
        rows=pd.DataFrame(rows),
        limits=pd.DataFrame(limits),
        base_world_size=base,
        threshold=threshold,
        missing=tuple(missing),
    )


def require_plain(grid: Grid) -> None:
    """Raises a CaseError if the scenario sweeps keys: a curve is drawn over world sizes alone."""
    if grid.axes:
        raise CaseError(f"scale draws one curve per schedule; {next(iter(grid.axes))} is swept: drop sweep.axes")


def _methods(grid: Grid) -> Iterator[tuple[str, str, tuple[Variant, ...]]]:
    """Name, cluster and variants of each curve."""
    for cluster in grid.clusters:
        at = f" on {cluster}" if len(grid.clusters) > 1 else ""
        for schedule in grid.scenario.schedules:
            mine = tuple(each for each in grid.variants if each.schedule == schedule)
            if len(mine) == 1 or grid.scenario.micro_batches == "auto":
                yield f"{schedule}{at}", cluster, mine
                continue
            for each in mine:
                domain = f" G={each.domain_size}" if len({v.domain_size for v in mine}) > 1 else ""
                yield f"{schedule} N={each.micro_batches}{domain}{at}", cluster, (each,)


def _best(evaluator: Evaluator, cluster: str, variants: tuple[Variant, ...], world_size: int) -> Row:
    rows = [evaluator.row(_configuration(evaluator.grid, cluster, each, world_size)) for each in variants]
    fine = [row for row in rows if row["status"] == "ok"]
    return min(fine, key=lambda row: better("step_ms", True, row), default=rows[0])


def _configuration(grid: Grid, cluster: str, variant: Variant, world_size: int) -> Configuration:
    fixed = grid.scenario.global_batch is not None
    return Configuration(
        index=0,
        cluster=cluster,
        variant=variant,
        world_size=world_size,
        batch_per_worker=None if fixed else grid.batches[0],
        global_batch=grid.batches[0] if fixed else None,
    )


def _lines(grid: Grid, name: str, row: Row) -> Iterator[Row]:
    """One row of results in long format per metric."""
    random = grid.scenario.is_random
    spread = {
        "step_latency_ms": ("step_ms", "step_ms_low", "step_ms_high"),
        "qps": ("qps", "qps_low", "qps_high"),
        "scaling_efficiency": ("scaling_efficiency", "scaling_efficiency_low", "scaling_efficiency_high"),
        "utilization": ("utilization", None, None),
    }
    for metric in _METRICS:
        column, low, high = spread[metric]
        value = row[column]
        if value is None:
            continue
        ends: tuple[float | None, float | None] = (None, None)
        if random and low is not None and high is not None:
            ends = (row[low], row[high])
        yield {
            "method": name,
            "world_size": row["world_size"],
            "micro_batches": row["micro_batches"],
            "metric": metric,
            "value": value,
            "low": ends[0],
            "high": ends[1],
            "published": None,
            "status": _status(grid, row),
        }


def _status(grid: Grid, row: Row) -> str:
    """What the numbers of a row are: as in `sim.costs.reproduce` where the scenario is the case's own, else assumed."""
    if grid.case is None:
        return max(ORIGINS, key=lambda name: row[name] or 0.0)
    scenario = grid.scenario
    cluster = scenario.clusters.get(str(row["cluster"]), ClusterChoice())
    own = cluster.factors.combined(scenario.factors) == Factors() and scenario.micro_batching == MicroBatching()
    if not own or scenario.is_random or row["batch_per_worker"] != grid.case.batch_per_worker:
        return "assumed"
    baseline = row["schedule"] == grid.case.baseline.schedule
    return status_of(grid.case, baseline, grid.loops[row["schedule"]], row["world_size"])


def _limit(
    evaluator: Evaluator, cluster: str, variants: tuple[Variant, ...], threshold: float, start: int
) -> dict[str, Any]:
    """Where a curve falls below the threshold, by doubling and bisection on efficiencies without jitter.

    World sizes are multiples of the domain, or of 8. Between two sizes the curve is taken to fall; it ends before the
    first size beyond `start`, doubled again and again, that is invalid.
    """
    plain = Evaluator(grid=evaluator.grid, max_seeds=0)
    unit = variants[0].domain_size or _UNIT

    def at(size: int) -> Row | None:
        row = _best(plain, cluster, variants, size)
        return row if row["status"] == "ok" and row["scaling_efficiency"] is not None else None

    def below(size: int) -> bool:
        row = at(size)
        return row is not None and row["scaling_efficiency"] < threshold

    low = -(-start // unit)
    high = low
    while not below(high * unit):
        low, high = high, high * 2
        if high * unit > WORLD_SIZE_MAX or at(high * unit) is None:
            last = at(low * unit)
            return {"world_size": None, **_reasons(last, low * unit)}
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(middle * unit) else (middle, high)
    return {"world_size": high * unit, **_reasons(at(high * unit), high * unit)}


def _reasons(row: Row | None, size: int) -> dict[str, Any]:
    if row is None:
        return {"looked_at": size, "scaling_efficiency": None, "limit": None, "busiest": None, "busiest_share": None}
    return {
        "looked_at": size,
        "scaling_efficiency": row["scaling_efficiency"],
        "micro_batches": row["micro_batches"],
        "limit": row["limit"],
        "busiest": row["busiest"],
        "busiest_share": row["busiest_share"],
    }
