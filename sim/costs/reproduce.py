"""Predicts the published rows of a case from the baseline alone, and says how far each assumption moves the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nestpipe.ir import Loop, Resource
from nestpipe.schedules import load
from nestpipe.timeline import scaling_efficiency, speedup
from sim.costs.case import Run, case_loop, case_run, case_step_ms, require_runnable
from traces.workloads import Case, GrowthLaws, growth_laws

__all__ = [
    "Reproduction",
    "Row",
    "Sensitivity",
    "metric_status",
    "reproduce",
    "run_metrics",
    "sensitivities",
    "status_of",
    "varied",
]

_SHARES = ("read_share", "copy_h2d_share", "keys_share", "lookup_share", "write_back_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of one method at one world size, beside what was published.

    `status` is fitted (the rows that were fitted), predicted, assumed (rests mainly on assumed numbers: every
    schedule with domains) or extrapolated (beyond the fitted world sizes).
    """

    method: str
    world_size: int
    metric: str
    published: float | None
    value: float
    relative_error: float | None
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Step latency in milliseconds of one method at the headline size with one assumption at its low and high end."""

    assumption: str
    method: str
    value: float
    low: float
    high: float
    step_ms: float
    step_ms_low: float
    step_ms_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """Everything `nestpipe reproduce` shows."""

    case: Case
    work: GrowthLaws
    rows: tuple[Row, ...]
    runs: Mapping[tuple[str, int], Run]
    sensitivities: tuple[Sensitivity, ...]


def reproduce(case: Case, *, steps: int = 20, progress: Callable[[str], None] = lambda _: None) -> Reproduction:
    """Simulates every method of a case at every world size and compares with what was published.

    Args:
        case: the case.
        steps: batches per run.
        progress: told of each run as it starts.
    """
    work = growth_laws(case)
    values = case.values()
    loops = {each.method: case_loop(case, load(each.schedule), values) for each in case.methods}
    for loop in loops.values():
        require_runnable(loop)
    sizes = case.sizes
    runs: dict[tuple[str, int], Run] = {}
    for each in case.methods:
        for world_size in sizes:
            progress(f"{each.method} at {world_size} workers")
            meta = {"method": each.method, "status": status_of(case, each.baseline, loops[each.method], world_size)}
            runs[each.method, world_size] = case_run(
                case, work, loops[each.method], world_size, values=values, steps=steps, check=False, meta=meta
            )
    published = {(row.method, row.world_size): row.metrics for row in case.published}
    rows = []
    for each in case.methods:
        for world_size in sizes:
            status = status_of(case, each.baseline, loops[each.method], world_size)
            metrics = run_metrics(
                runs[each.method, world_size],
                runs[case.baseline.method, world_size],
                runs[each.method, case.base_world_size],
            )
            known = published.get((each.method, world_size), {})
            run = runs[each.method, world_size]
            rows += [
                _row(each.method, world_size, name, known.get(name), value, metric_status(run, name, status))
                for name, value in metrics.items()
            ]
    return Reproduction(
        case=case, work=work, rows=tuple(rows), runs=runs, sensitivities=tuple(sensitivities(case, work, progress))
    )


def run_metrics(run: Run, baseline: Run, base: Run) -> dict[str, float]:
    """The metrics of a run by name; `baseline` is the baseline's at the same size, `base` the method's at the base."""
    metrics = run.metrics
    found = {
        "step_latency_ms": metrics.step_latency_ms,
        "lookup_ms": metrics.lookup_ms,
        "communication_ms": metrics.communication_ms,
        "speedup": speedup(baseline.metrics.step_latency_ms, metrics.step_latency_ms),
        "qps": metrics.qps,
        "scaling_efficiency": scaling_efficiency(base.metrics.step_latency_ms, metrics.step_latency_ms),
        "utilization": metrics.utilization,
        "exposed_communication_ratio": metrics.exposed_communication_ratio,
    }
    return {name: value for name, value in found.items() if value is not None}


def status_of(case: Case, is_baseline: bool, loop: Loop, world_size: int) -> str:
    """Where the numbers of a run come from: fitted, predicted, assumed or extrapolated; see `Row`."""
    sizes = [row.world_size for row in case.fit]
    if world_size > max(sizes) or world_size < min(sizes):
        return "extrapolated"
    if any(stream.resource is Resource.DOMAIN for stream in loop.streams):
        return "assumed"
    return "fitted" if is_baseline and world_size in sizes else "predicted"


def metric_status(run: Run, metric: str, status: str) -> str:
    """The status of one metric of a run: exposed lookup that consists of dedup and sync alone is what was assumed."""
    parts = run.metrics.parts_ms
    hidden = all(
        not parts[f"exposed {kind}"] for kind in ("lookup", "all_to_all[keys]", "copy_h2d", "read", "write_back")
    )
    return "assumed" if metric == "lookup_ms" and hidden and status == "predicted" else status


def _row(method: str, world_size: int, metric: str, published: float | None, value: float, status: str) -> Row:
    error = None if not published else value / published - 1
    return Row(
        method=method,
        world_size=world_size,
        metric=metric,
        published=published,
        value=value,
        relative_error=error,
        status=status,
    )


def varied(values: Mapping[str, float], name: str, to: float) -> dict[str, float]:
    """The assumptions with one changed; the other stages of the lookup path shrink or grow so that shares sum to 1."""
    changed = {**values, name: to}
    if name in _SHARES:
        rest = sum(values[other] for other in _SHARES if other != name)
        for other in _SHARES:
            if other != name:
                changed[other] = values[other] * (1 - to) / rest if rest else (1 - to) / (len(_SHARES) - 1)
    return changed


def sensitivities(case: Case, work: GrowthLaws, progress: Callable[[str], None] = lambda _: None) -> list[Sensitivity]:
    """Every assumption at both ends of its range, one at a time, for every method at the headline size."""
    values = case.values()
    world_size = case.headline_world_size
    found = []
    for name, assumption in case.assumptions.items():
        progress(f"varying {name}")
        for each in case.methods:
            loop = load(each.schedule)
            step_ms, low, high = (
                case_step_ms(case, work, loop, world_size, varied(values, name, to))
                for to in (assumption.value, assumption.low, assumption.high)
            )
            found.append(
                Sensitivity(
                    assumption=name,
                    method=each.method,
                    value=assumption.value,
                    low=assumption.low,
                    high=assumption.high,
                    step_ms=step_ms,
                    step_ms_low=low,
                    step_ms_high=high,
                )
            )
    return found
