"""Predicts the published rows of a case from the baseline alone, and says how far each assumption moves the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from nestpipe.base import ns_to_ms
from nestpipe.ir import Loop
from nestpipe.schedules import load
from nestpipe.timeline import metric_values
from sim.costs.case import CaseWorkload, status_of
from sim.costs.run import Run, require_runnable, run
from sim.costs.workload import Options
from traces.workloads import Case, GrowthLaws

__all__ = [
    "Reproduction",
    "Row",
    "Sensitivity",
    "metric_status",
    "reproduce",
    "sensitivities",
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
    workload = CaseWorkload.of(case)
    loops = {each.method: workload.loop(load(each.schedule)) for each in case.methods}
    for loop in loops.values():
        require_runnable(loop)
    sizes = case.sizes
    runs: dict[tuple[str, int], Run] = {}
    for each in case.methods:
        for world_size in sizes:
            progress(f"{each.method} at {world_size} workers")
            meta = {
                "case": case.case,
                "method": each.method,
                "status": status_of(case, each.baseline, loops[each.method], world_size),
            }
            options = Options(world_size=world_size, steps=steps)
            runs[each.method, world_size] = run(loops[each.method], workload, None, options, meta=meta)
    published = {(row.method, row.world_size): row.metrics for row in case.published}
    rows = []
    for each in case.methods:
        for world_size in sizes:
            status = status_of(case, each.baseline, loops[each.method], world_size)
            found = runs[each.method, world_size]
            metrics = metric_values(
                found.metrics,
                baseline_ms=runs[case.baseline.method, world_size].metrics.step_latency_ms,
                base_ms=runs[each.method, case.base_world_size].metrics.step_latency_ms,
            )
            known = published.get((each.method, world_size), {})
            rows += [
                _row(each.method, world_size, name, known.get(name), value, metric_status(found, name, status))
                for name, value in metrics.items()
            ]
    return Reproduction(
        case=case,
        work=workload.laws,
        rows=tuple(rows),
        runs=runs,
        sensitivities=tuple(sensitivities(workload, progress)),
    )


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


def sensitivities(workload: CaseWorkload, progress: Callable[[str], None] = lambda _: None) -> list[Sensitivity]:
    """Every assumption at both ends of its range, one at a time, for every method at the headline size."""
    case = workload.case
    options = Options(world_size=case.headline_world_size)

    def step_ms(loop: Loop, values: Mapping[str, float]) -> float:
        changed = replace(workload, values=values)
        return ns_to_ms(run(changed.loop(loop), changed, None, options).step_ns)

    found = []
    for name, assumption in case.assumptions.items():
        progress(f"varying {name}")
        for each in case.methods:
            loop = load(each.schedule)
            middle, low, high = (
                step_ms(loop, varied(workload.values, name, to))
                for to in (assumption.value, assumption.low, assumption.high)
            )
            found.append(
                Sensitivity(
                    assumption=name,
                    method=each.method,
                    value=assumption.value,
                    low=assumption.low,
                    high=assumption.high,
                    step_ms=middle,
                    step_ms_low=low,
                    step_ms_high=high,
                )
            )
    return found
