"""What is computed from a Timeline: step latency, the partition of each rank's time, and the metrics of the field.

Every definition stands here once, and in docs/glossary.md in words. The same code serves simulated and measured
Timelines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from nestpipe.base import NS_PER_S, TraceError, ns_to_ms
from nestpipe.ir import COMPUTE, KINDS, OpKind, StepPart, kinds_of
from nestpipe.timeline.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "METRICS",
    "PARTS",
    "Metric",
    "StepMetrics",
    "Window",
    "measure",
    "metric_values",
    "partition",
    "scaling_efficiency",
    "speedup",
    "steady_window",
    "step_ends",
]


def _exposed(*parts: StepPart) -> tuple[str, ...]:
    """The parts of the step that these kinds have, in their order of precedence."""
    kinds = [kind for kind in OpKind if KINDS[kind].part in parts and KINDS[kind].counted_as is None]
    return tuple(f"exposed {kind.value}" for kind in sorted(kinds, key=lambda kind: KINDS[kind].precedence))


#: The parts of a step, in order of precedence: an instant belongs to the first part that is active. What occupies the
#: compute stream comes first, then what stalls it, then the lookup path that should hide behind it.
PARTS: Final = (
    "compute",
    *_exposed(StepPart.ROUTING),
    *_exposed(StepPart.EMBEDDINGS, StepPart.DENSE),
    "waiting for a peer",
    *_exposed(StepPart.LOOKUP),
    "bubble",
)
_PART_OF_KIND: Final[dict[str, int]] = {
    kind.value: PARTS.index("compute" if kind in COMPUTE else f"exposed {(KINDS[kind].counted_as or kind).value}")
    for kind in OpKind
    if KINDS[kind].part is not StepPart.OTHER
}
_STALLS: Final = kinds_of(StepPart.EMBEDDINGS, StepPart.DENSE)
_EMBEDDING_PARTS: Final = _exposed(StepPart.EMBEDDINGS)
_LOOKUP_PARTS: Final = _exposed(StepPart.ROUTING, StepPart.LOOKUP)
_WAITING: Final = PARTS.index("waiting for a peer")
_BUBBLE: Final = PARTS.index("bubble")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steady steps of a Timeline: `first` (exclusive) to `last` (inclusive) batch."""

    first: int
    last: int

    @classmethod
    def of(cls, num_steps: int, *, first: int, last: int, ahead: int) -> Window:
        """The second half of the steps from `first` to `last`, less the epilogue.

        Args:
            num_steps: how many steps ended.
            first, last: their numbers.
            ahead: batches that the pipeline prefetches.

        Raises:
            TraceError: if fewer than two steps are left.
        """
        last -= max(ahead, 0)
        first = max(last // 2, first)
        if last <= first:
            raise TraceError(
                f"{num_steps} steps leave no steady state behind a pipeline {ahead} batches deep; "
                f"run at least {2 * ahead + 4}"
            )
        return cls(first=first, last=last)

    def whole(self, period: int) -> Window:
        """The last steps of this window that are a multiple of a period; this window if it is shorter.

        >>> Window(first=9, last=16).whole(3)
        Window(first=10, last=16)
        """
        steps = self.steps // period * period
        return Window(first=self.last - steps, last=self.last) if steps else self

    @property
    def steps(self) -> int:
        """Number of steps in the window."""
        return self.last - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one run, averaged over ranks and steady steps; times in milliseconds, ratios as fractions of 1.

    Attributes:
        step_latency_ms: time between the ends of successive steps.
        qps: samples per second, global batch over step latency; None if the batch is not known.
        lookup_ms: exposed time of the lookup path.
        communication_ms: exposed time of embedding communication: row and gradient All2All and, where tables are
            replicated, the synchronisation of the replicas.
        utilization: share of the step in which forward, backward or update runs.
        exposed_communication_ratio: communication_ms over the total transfer time of the same collectives.
        parts_ms: the partition of the step; the parts sum to step_latency_ms.
        window: the steady steps that were averaged.
    """

    step_latency_ms: float
    qps: float | None
    lookup_ms: float
    communication_ms: float
    utilization: float
    exposed_communication_ratio: float | None
    parts_ms: dict[str, float]
    window: Window


def step_ends(timeline: Timeline) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """When each step ended: of its update or, without one, of its iteration's last op.

    Returns:
        int64 (steps,), and int64 (ranks, steps) in nanoseconds.
    """
    update = timeline.columns["kind"] == OpKind.UPDATE.value
    if update.any():
        steps = timeline.columns["batch"][update]
        order = np.argsort(steps, kind="stable")
        return steps[order], timeline.end_ns[:, update][:, order]
    of_op = timeline.columns["step"]
    steps = np.unique(of_op)
    ends = np.stack([timeline.end_ns[:, of_op == step].max(axis=1) for step in steps], axis=1)
    return steps, np.maximum.accumulate(ends, axis=1)


def steady_window(timeline: Timeline) -> Window:
    """The second half of the steps, less the epilogue, in which the pipeline no longer prefetches.

    Of a simulated Timeline whose steady state repeats every few steps, a multiple of them.

    Raises:
        TraceError: if fewer than two steps are left.
    """
    steps, _ = step_ends(timeline)
    ahead = int((timeline.columns["batch"] - timeline.columns["step"]).max())
    window = Window.of(len(steps), first=int(steps.min()), last=int(steps.max()), ahead=ahead)
    return window.whole(timeline.meta.get("period", 1))


def partition(timeline: Timeline, window: Window | None = None) -> pd.DataFrame:
    """How each rank spent its time per steady step, in nanoseconds: one row per rank, one column per part.

    At each instant a rank is in the first of `PARTS` that is active, so the parts of a rank sum to its step time
    exactly. A collective waits for its last peer before it transfers; only the transfer counts as communication.

    Args:
        timeline: simulated or measured.
        window: the steps to look at; by default `steady_window`.
    """
    import pandas as pd

    table = _partition(timeline, window or steady_window(timeline))
    return pd.DataFrame(table, columns=list(PARTS), index=pd.Index(timeline.ranks, name="rank"))


def _partition(timeline: Timeline, window: Window) -> npt.NDArray[np.float64]:
    """Nanoseconds per steady step; float64 (ranks, parts)."""
    steps, ends = step_ends(timeline)
    lows = ends[:, np.flatnonzero(steps == window.first)[-1]]
    highs = ends[:, np.flatnonzero(steps == window.last)[-1]]
    kinds = timeline.columns["kind"]
    parts = np.array([_PART_OF_KIND.get(kind, _BUBBLE) for kind in kinds])
    stalls = np.isin(kinds, [kind.value for kind in _STALLS])
    rows = []
    for row in range(len(timeline.ranks)):
        low, high = lows[row], highs[row]
        start, end = timeline.start_ns[row], timeline.end_ns[row]
        ready = start + timeline.wait_ns[row]
        inside = (end > low) & (start < high)
        waits = inside & stalls & (ready > start)
        begins = np.concatenate([ready[inside], start[waits]]).clip(low, high)
        stops = np.concatenate([end[inside], ready[waits]]).clip(low, high)
        which = np.concatenate([parts[inside], np.full(int(waits.sum()), _WAITING)])
        rows.append(_sweep(begins, stops, which, int(low), int(high)))
    return np.asarray(np.array(rows) / window.steps, dtype=np.float64)


def _sweep(
    begins: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], which: npt.NDArray[np.int64], low: int, high: int
) -> npt.NDArray[np.int64]:
    """Nanoseconds of [low, high) by the first active part; int64 (parts,)."""
    cuts = np.unique(np.concatenate([begins, stops, [low, high]]))
    change = np.zeros((len(PARTS), len(cuts)), dtype=np.int64)
    np.add.at(change, (which, np.searchsorted(cuts, begins)), 1)
    np.add.at(change, (which, np.searchsorted(cuts, stops)), -1)
    active = np.cumsum(change, axis=1)[:, :-1] > 0
    active[_BUBBLE] = True
    first = np.argmax(active, axis=0)
    return np.bincount(first, weights=np.diff(cuts), minlength=len(PARTS)).astype(np.int64)


def measure(timeline: Timeline, *, global_batch: int | None = None, window: Window | None = None) -> StepMetrics:
    """The metrics of one run.

    Args:
        timeline: simulated or measured.
        global_batch: samples per step over all ranks; needed for `qps`.
        window: the steps to average over; by default `steady_window`.

    Raises:
        TraceError: if no steady step is left, or steps take no time.
    """
    window = window or steady_window(timeline)
    weights = timeline.weights / timeline.weights.sum()
    weighted = np.ascontiguousarray((_partition(timeline, window) * weights[:, None]).T)
    parts = dict(zip(PARTS, weighted.sum(axis=1).tolist(), strict=True))  # pairwise sums: one part's ranks lie together
    step_ns = sum(parts.values())
    if not step_ns > 0:
        raise TraceError("the steady steps take no time: every op takes 0 ns; give at least one op a time")
    embedding = np.isin(timeline.columns["kind"], [kind.value for kind in kinds_of(StepPart.EMBEDDINGS)])
    batches = timeline.columns["batch"]
    mine = embedding & (batches > window.first) & (batches <= window.last)
    transfer = timeline.end_ns[:, mine] - timeline.start_ns[:, mine] - timeline.wait_ns[:, mine]
    total_ns = float((transfer.sum(axis=1) * weights).sum()) / window.steps
    exposed_ns = sum(parts[part] for part in _EMBEDDING_PARTS)
    return StepMetrics(
        step_latency_ms=ns_to_ms(step_ns),
        qps=None if global_batch is None else global_batch * NS_PER_S / step_ns,
        lookup_ms=ns_to_ms(sum(parts[part] for part in _LOOKUP_PARTS)),
        communication_ms=ns_to_ms(exposed_ns),
        utilization=parts["compute"] / step_ns,
        exposed_communication_ratio=exposed_ns / total_ns if total_ns else None,
        parts_ms={name: ns_to_ms(value) for name, value in parts.items()},
        window=window,
    )


def _own(name: str) -> Callable[[StepMetrics, float | None, float | None], float | None]:
    return lambda run, _baseline_ms, _base_ms: getattr(run, name)


def _speedup(run: StepMetrics, baseline_ms: float | None, _base_ms: float | None) -> float | None:
    return None if baseline_ms is None else speedup(baseline_ms, run.step_latency_ms)


def _scaling_efficiency(run: StepMetrics, _baseline_ms: float | None, base_ms: float | None) -> float | None:
    return None if base_ms is None else scaling_efficiency(base_ms, run.step_latency_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric that runs print and cases publish.

    Attributes:
        title, unit: as printed.
        digits: decimal places.
        formula: its definition in words.
        of: its value, from the metrics of the run, the step latency of the baseline at the same size, and that of the
            same method at the base size; None where it does not apply.
        scale: the factor into the unit.
    """

    title: str
    unit: str
    digits: int
    formula: str
    of: Callable[[StepMetrics, float | None, float | None], float | None]
    scale: float = 1.0


#: Every metric by name, in the order in which they are printed.
METRICS: Final[Mapping[str, Metric]] = {
    "step_latency_ms": Metric(
        title="step latency", unit="ms", digits=2, of=_own("step_latency_ms"), formula="time between ends of steps"
    ),
    "lookup_ms": Metric(
        title="exposed lookup", unit="ms", digits=2, of=_own("lookup_ms"), formula="exposed time of the lookup path"
    ),
    "communication_ms": Metric(
        title="exposed communication", unit="ms", digits=2, of=_own("communication_ms"),
        formula="exposed time of row and gradient All2All and of the synchronisation of replicas",
    ),
    "speedup": Metric(
        title="speedup", unit="x", digits=2, of=_speedup, formula="step latency of the baseline / step latency"
    ),
    "qps": Metric(title="QPS", unit="samples/s", digits=0, of=_own("qps"), formula="global batch / step latency"),
    "scaling_efficiency": Metric(
        title="scaling efficiency", unit="%", digits=2, scale=100, of=_scaling_efficiency,
        formula="(QPS at P / QPS at base) / (P / base)",
    ),
    "utilization": Metric(
        title="utilization", unit="%", digits=1, scale=100, of=_own("utilization"),
        formula="time in which forward, backward or update runs / step latency",
    ),
    "exposed_communication_ratio": Metric(
        title="exposed communication ratio", unit="%", digits=2, scale=100, of=_own("exposed_communication_ratio"),
        formula="exposed / total transfer time of the embedding collectives",
    ),
}  # fmt: skip


def metric_values(
    run: StepMetrics, *, baseline_ms: float | None = None, base_ms: float | None = None
) -> dict[str, float]:
    """The metrics of a run by name, those that do not apply left out.

    Args:
        run: its metrics.
        baseline_ms: step latency of the baseline at the same size; needed for `speedup`.
        base_ms: step latency of the same method at the base size; needed for `scaling_efficiency`.
    """
    found = {name: metric.of(run, baseline_ms, base_ms) for name, metric in METRICS.items()}
    return {name: value for name, value in found.items() if value is not None}


def speedup(baseline_step_ms: float, step_ms: float) -> float:
    """Step latency of the baseline over step latency of the method, at the same world size.

    >>> round(speedup(5793.83, 1895.98), 2)
    3.06
    """
    return baseline_step_ms / step_ms


def scaling_efficiency(base_step_ms: float, step_ms: float) -> float:
    """(QPS at P / QPS at base) / (P / base) of one method under weak scaling, which is step at base / step at P.

    With a fixed batch per worker QPS at P is P x batch / step at P, and the worker counts cancel.
    """
    return base_step_ms / step_ms
