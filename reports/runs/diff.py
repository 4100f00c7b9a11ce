"""Two Timelines side by side: step latency, parts, kinds and single ops, and what changed. Simulated or measured alike.

Ops are aligned by kind, batch and micro-batch over the steady steps that both Timelines have; where they split batches
into different numbers of micro-batches, whole batches are compared. Times are means over ranks, weighted by how many
ranks each stands for; a collective's time is its transfer, its wait is kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from nestpipe.base import TraceError, ns_to_ms
from nestpipe.ir import OpKind
from nestpipe.timeline import METRICS, PARTS, StepMetrics, Timeline, Window, measure, metric_values, steady_window
from reports.runs.tables import Column, csv, text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Diff", "Side", "as_csv", "as_json", "as_text", "compare", "summary"]

_KEY: Final = ["kind", "batch", "micro_batch"]
#: A change smaller than this share of the step is not worth a line.
_NEGLIGIBLE: Final = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: its name, what it is, and its metrics over its own steady steps."""

    name: str
    schedule: str
    source: str
    num_ranks: int
    metrics: StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Diff:
    """What differs between two Timelines.

    Attributes:
        a, b: the two sides.
        window: the steady steps, common to both, whose ops are compared; None if they share none.
        parts: per part of the step a_ms, b_ms, change_ms.
        kinds: per op kind and step a_ops, a_ms, a_wait_ms and a_slowest_ms (of the rank that takes longest), the same
            for b, and change_ms.
        ops: per aligned op kind, batch, micro_batch, a_ms, b_ms, change_ms; NaN where one side has no such op.
    """

    a: Side
    b: Side
    window: Window | None
    parts: pd.DataFrame
    kinds: pd.DataFrame
    ops: pd.DataFrame


def compare(a: Timeline, b: Timeline, *, names: tuple[str, str] = ("A", "B")) -> Diff:
    """What changed from `a` to `b`.

    Raises:
        TraceError: if one of them has no steady state; names which.
    """
    import pandas as pd

    left, right = _side(a, names[0]), _side(b, names[1])
    kinds = _join(_kinds(a, left.metrics.window), _kinds(b, right.metrics.window), ["kind"]).fillna(0.0)
    kinds = kinds.sort_values("kind", key=_kind_order).reset_index(drop=True)
    first = max(left.metrics.window.first, right.metrics.window.first)
    last = min(left.metrics.window.last, right.metrics.window.last)
    window = Window(first=first, last=last) if last > first else None
    ops = pd.DataFrame(columns=[*_KEY, "a_ms", "b_ms", "change_ms"])
    if window is not None:
        of_a, of_b = _ops(a, window), _ops(b, window)
        if of_a["micro_batch"].max() != of_b["micro_batch"].max():
            of_a, of_b = _whole_batches(of_a), _whole_batches(of_b)
        ops = _join(of_a, of_b, _KEY)[[*_KEY, "a_ms", "b_ms", "change_ms"]]
        ops = ops.sort_values(_KEY, key=_kind_order, kind="stable").reset_index(drop=True)
    return Diff(a=left, b=right, window=window, parts=_parts(left, right), kinds=kinds, ops=ops)


def _kind_order(column: pd.Series[Any]) -> pd.Series[Any]:
    """Sorts kinds as the IR lists them; other columns by value."""
    order = {kind.value: place for place, kind in enumerate(OpKind)}
    return column.map(order) if column.name == "kind" else column


def _whole_batches(ops: pd.DataFrame) -> pd.DataFrame:
    """The ops of a batch with its micro-batches summed, for sides that split their batches differently."""
    import pandas as pd

    totals = ops.groupby(["kind", "batch"], sort=False)[["ms", "wait_ms"]].sum().reset_index()
    return totals.assign(micro_batch=pd.array([pd.NA] * len(totals), dtype="Int64"))


def _side(timeline: Timeline, name: str) -> Side:
    try:
        metrics = measure(timeline, window=steady_window(timeline))
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    return Side(
        name=name,
        schedule=str(timeline.meta.get("schedule", "unknown schedule")),
        source=str(timeline.meta.get("source", "unknown source")),
        num_ranks=int(timeline.weights.sum()),
        metrics=metrics,
    )


def _parts(a: Side, b: Side) -> pd.DataFrame:
    import pandas as pd

    rows = [(part, a.metrics.parts_ms[part], b.metrics.parts_ms[part]) for part in PARTS]
    frame = pd.DataFrame(rows, columns=["part", "a_ms", "b_ms"])
    frame["change_ms"] = frame["b_ms"] - frame["a_ms"]
    return frame[(frame["a_ms"] > 0) | (frame["b_ms"] > 0)].reset_index(drop=True)


def _mean(timeline: Timeline, values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Mean over the ranks that ran each op, weighted; float64 (ops,)."""
    weights = np.where(timeline.end_ns >= 0, timeline.weights[:, None], 0)
    total: npt.NDArray[np.float64] = (values * weights).sum(axis=0).astype(np.float64)
    mean: npt.NDArray[np.float64] = total / np.maximum(weights.sum(axis=0), 1)
    return mean


def _ops(timeline: Timeline, window: Window) -> pd.DataFrame:
    """Mean transfer and wait of each op whose batch lies in the window, in milliseconds."""
    frame = timeline.ops[_KEY].astype({"kind": str})
    frame["ms"] = ns_to_ms(1) * _mean(timeline, timeline.end_ns - timeline.start_ns - timeline.wait_ns)
    frame["wait_ms"] = ns_to_ms(1) * _mean(timeline, timeline.wait_ns)
    return frame[(frame["batch"] > window.first) & (frame["batch"] <= window.last)]


def _kinds(timeline: Timeline, window: Window) -> pd.DataFrame:
    """Per op kind and step: how many ops, their time, the time of the rank that takes longest, and their wait."""
    grouped = _ops(timeline, window).groupby("kind", sort=False)
    totals = grouped[["ms", "wait_ms"]].sum() / window.steps
    totals["ops"] = grouped.size() / window.steps
    transfer = np.where(timeline.end_ns >= 0, timeline.end_ns - timeline.start_ns - timeline.wait_ns, 0)
    totals["slowest_ms"] = [
        ns_to_ms(float(transfer[:, rows.index.to_numpy()].sum(axis=1).max())) / window.steps for _, rows in grouped
    ]
    return totals.reset_index()


def _join(a: pd.DataFrame, b: pd.DataFrame, on: list[str]) -> pd.DataFrame:
    values = [name for name in a.columns if name not in on]
    sides = [
        side.rename(columns={name: f"{letter}_{name}" for name in values}) for letter, side in (("a", a), ("b", b))
    ]
    joined = sides[0].merge(sides[1], on=on, how="outer")
    joined["change_ms"] = joined["b_ms"].fillna(0.0) - joined["a_ms"].fillna(0.0)
    return joined


def summary(diff: Diff, most: int = 4) -> str:
    """The difference in one sentence: how much longer or shorter the step is, and the parts that make it so."""
    before, after = diff.a.metrics.step_latency_ms, diff.b.metrics.step_latency_ms
    change = after - before
    if abs(change) < _NEGLIGIBLE * before:
        head = f"{diff.b.name} takes as long per step as {diff.a.name}"
    else:
        word = "shorter" if change < 0 else "longer"
        head = (
            f"the step of {diff.b.name} is {abs(change):,.2f} ms ({100 * abs(change) / before:.1f} %) {word} "
            f"than that of {diff.a.name}"
        )
    parts = diff.parts[diff.parts["change_ms"].abs() > _NEGLIGIBLE * max(before, after)]
    order = parts["change_ms"].abs().sort_values(ascending=False, kind="stable").index[:most]
    rows = parts.loc[order].to_dict("records")
    named = [f"{row['part']!s} {row['change_ms']:+,.2f} ms" for row in rows]
    return head + (": " + ", ".join(named) if named else "; no part of it changed")


def as_text(diff: Diff, *, most: int = 12) -> str:
    """The difference as aligned tables for people.

    Args:
        diff: from `compare`.
        most: how many of the ops that changed most to list.
    """
    numbers = [
        Column(name="a_ms", header="A (ms)", digits=3),
        Column(name="b_ms", header="B (ms)", digits=3),
        Column(name="change_ms", header="change (ms)", digits=3, sign=True),
        Column(name="percent", header="(%)", digits=1, sign=True),
    ]
    waits = [
        Column(name="a_slowest_ms", header="A slowest rank", digits=3),
        Column(name="b_slowest_ms", header="B slowest rank", digits=3),
        Column(name="a_wait_ms", header="A waits", digits=3),
        Column(name="b_wait_ms", header="B waits", digits=3),
    ]
    lines = [_describe(letter, side) for letter, side in (("A", diff.a), ("B", diff.b))]
    lines += ["", f"In short: {summary(diff)}", ""]
    lines.append(text(_percent(_metrics(diff)), [Column(name="metric"), *numbers]))
    lines += ["", text(_percent(diff.parts), [Column(name="part"), *numbers], title="Where the step goes"), ""]
    title = "Time per step by op kind: mean over ranks, slowest rank, and time spent waiting for peers (ms)"
    lines.append(text(_percent(diff.kinds), [Column(name="kind"), *numbers, *waits], title=title))
    return "\n".join([*lines, "", _changed_ops(diff, numbers, most)])


def _changed_ops(diff: Diff, numbers: list[Column], most: int) -> str:
    """The ops of a batch that changed most, their times as means over the aligned batches."""
    if diff.window is None:
        return "The steady steps of the two have no batch in common, so single ops cannot be aligned"
    batches = f"batches {diff.window.first + 1} to {diff.window.last}"
    grouped = diff.ops.groupby(["kind", "micro_batch"], dropna=False, sort=False)
    mean = grouped[["a_ms", "b_ms", "change_ms"]].mean().reset_index()
    largest, smallest = grouped["change_ms"].max().to_numpy(), grouped["change_ms"].min().to_numpy()
    mean["largest_ms"] = np.where(np.abs(largest) >= np.abs(smallest), largest, smallest)
    changed = mean[mean["largest_ms"].abs() > _NEGLIGIBLE * diff.a.metrics.step_latency_ms]
    if changed.empty:
        return f"No op of {batches} changed by more than 0.01 % of the step"
    order = changed["change_ms"].abs().sort_values(ascending=False, kind="stable").index[:most]
    columns = [
        Column(name="kind"),
        Column(name="micro_batch", header="micro-batch"),
        *numbers,
        Column(name="largest_ms", header="largest in a batch (ms)", digits=3, sign=True),
    ]
    title = f"Ops that changed most: mean over {batches} ({min(most, len(changed))} of {len(changed)} shown)"
    return text(_percent(changed.loc[order]), columns, title=title)


def _describe(letter: str, side: Side) -> str:
    window = side.metrics.window
    ranks = f"{side.num_ranks:,} rank{'' if side.num_ranks == 1 else 's'}"
    steps = f"steady steps {window.first + 1} to {window.last}"
    return f"{letter}  {side.name}: {side.schedule}, {side.source}, {ranks}, {steps}"


def _metrics(diff: Diff) -> pd.DataFrame:
    import pandas as pd

    a, b = metric_values(diff.a.metrics), metric_values(diff.b.metrics)
    rows = [(metric.title, a[name], b[name]) for name, metric in METRICS.items() if name in a and metric.unit == "ms"]
    frame = pd.DataFrame(rows, columns=["metric", "a_ms", "b_ms"])
    frame["change_ms"] = frame["b_ms"] - frame["a_ms"]
    return frame


def _percent(frame: pd.DataFrame) -> pd.DataFrame:
    base = frame["a_ms"].astype(float)
    return frame.assign(percent=(100 * frame["change_ms"].astype(float) / base).where(base > 0))


def as_csv(diff: Diff) -> str:
    """Metrics, parts, kinds and ops in one long table: section, name, batch, micro_batch, a_ms, b_ms, change_ms."""
    import pandas as pd

    sections = [
        ("metric", _metrics(diff).rename(columns={"metric": "name"})),
        ("part", diff.parts.rename(columns={"part": "name"})),
        ("kind", diff.kinds.rename(columns={"kind": "name"})),
        ("op", diff.ops.rename(columns={"kind": "name"})),
    ]
    names = ["section", "name", "batch", "micro_batch", "a_ms", "b_ms", "change_ms"]
    rows = [
        row for section, frame in sections for row in frame.assign(section=section).reindex(columns=names).to_numpy()
    ]
    return csv(pd.DataFrame(rows, columns=names))


def as_json(diff: Diff) -> dict[str, Any]:
    """The difference as plain values: sides, metrics, parts, kinds, every aligned op; null where a side lacks it."""

    import pandas as pd

    def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
        return [
            {str(name): None if pd.isna(value) else value for name, value in row.items()}
            for row in frame.astype(object).to_dict("records")
        ]

    def side(each: Side) -> dict[str, Any]:
        window = {"first_exclusive": each.metrics.window.first, "last_inclusive": each.metrics.window.last}
        names = ("step_latency_ms", "lookup_ms", "communication_ms", "utilization", "exposed_communication_ratio")
        return {
            **{name: getattr(each, name) for name in ("name", "schedule", "source", "num_ranks")},
            "window": window,
            "metrics": {name: getattr(each.metrics, name) for name in names},
        }

    return {
        "a": side(diff.a),
        "b": side(diff.b),
        "summary": summary(diff),
        "step_latency_change_ms": diff.b.metrics.step_latency_ms - diff.a.metrics.step_latency_ms,
        "parts": records(diff.parts),
        "kinds": records(diff.kinds),
        "aligned_batches": None if diff.window is None else [diff.window.first + 1, diff.window.last],
        "ops": records(diff.ops),
    }
