"""The tables of the report page: the same columns as printed tables, numbers plain so that they paste as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from nestpipe.base import ORIGINS, ns_to_ms
from nestpipe.timeline import METRICS, PARTS, Timeline, Window, step_ends
from reports.figures import stream_order
from reports.runs import Diff, SavedRun, cell

__all__ = [
    "Table",
    "assumptions",
    "changes",
    "cycle",
    "metrics",
    "parts",
    "provenance",
    "resources",
    "stream_use",
]

_NONE: Final = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table for the page: caption, heads, rows of text, and which columns hold numbers or a status."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = field(default_factory=frozenset)
    statuses: frozenset[int] = field(default_factory=frozenset)
    total: bool = False


def _number(value: float | None, digits: int, scale: float = 1.0, *, sign: bool = False) -> str:
    if value is None or pd.isna(value):
        return _NONE
    return cell(float(value), digits, scale=scale, sign=sign).replace(",", "")


def metrics(runs: Sequence[SavedRun]) -> Table:
    """Every metric of every run with its status; against what is published for one run, against the first for more."""
    values = [{row.metric: row for row in run.record.rows if row.value is not None} for run in runs]
    single = len(runs) == 1
    heads = ["metric", "unit"]
    for run in runs:
        heads += ["value" if single else run.name, "status"]
        if single:
            heads += ["published", "error (%)"]
        elif run is not runs[0]:
            heads += ["change (%)"]
    rows = []
    for name, metric in METRICS.items():
        if not any(name in each for each in values):
            continue
        line = [metric.title, metric.unit]
        for i, each in enumerate(values):
            row = each.get(name)
            value = None if row is None else row.value
            line += [_number(value, metric.digits, metric.scale), _NONE if row is None else row.status]
            if single:
                line += [_number(row.published if row else None, metric.digits, metric.scale)]
                line += [_change(row.published if row else None, value)]
            elif i:
                before = values[0].get(name)
                line += [_change(before.value if before else None, value)]
        rows.append(tuple(line))
    statuses = frozenset(i for i, head in enumerate(heads) if head == "status")
    numbers = frozenset(range(2, len(heads))) - statuses
    return Table(caption="Metrics", heads=tuple(heads), rows=tuple(rows), numbers=numbers, statuses=statuses)


def _change(before: float | None, after: float | None) -> str:
    if not before or after is None:
        return _NONE
    return _number(after / before - 1, 2, 100, sign=True)


def parts(runs: Sequence[SavedRun]) -> Table:
    """The partition of a step: milliseconds and share per run; the last row is the step."""
    present = [part for part in PARTS if any(run.record.parts_ms.get(part, 0) > 0 for run in runs)]
    totals = [sum(run.record.parts_ms.values()) for run in runs]
    heads = ["part", *(head for run in runs for head in (f"{run.name} (ms)", "(%)"))]
    rows = []
    for part in [*present, "step"]:
        line = [part]
        for run, total in zip(runs, totals, strict=True):
            value = total if part == "step" else run.record.parts_ms.get(part, 0.0)
            line += [_number(value, 3), _number(value / total if total else 0.0, 1, 100)]
        rows.append(tuple(line))
    return Table(
        caption="Step partition, mean over ranks",
        heads=tuple(heads),
        rows=tuple(rows),
        numbers=frozenset(range(1, len(heads))),
        total=True,
    )


def cycle(run: SavedRun) -> Table | None:
    """The critical cycle's ops in the order they run, ops without duration left out."""
    limit = run.record.limit
    if limit is None:
        return None
    total = sum(op.ns for op in limit.cycle) or 1
    rows = [
        (
            op.kind,
            "t" if op.batch == 0 else f"t{op.batch:+d}",
            _NONE if op.micro_batch is None else str(op.micro_batch),
            op.stream,
            _number(ns_to_ms(op.ns), 3),
            _number(op.ns / total, 1, 100),
        )
        for op in limit.cycle
        if op.ns
    ]
    heads = ("op", "batch", "micro-batch", "stream", "time (ms)", "share (%)")
    return Table(caption=f"Critical cycle of {run.name}", heads=heads, rows=tuple(rows), numbers=frozenset({2, 4, 5}))


def stream_use(timeline: Timeline, window: Window) -> pd.DataFrame:
    """Share of the steady steps in which each stream works and in which it waits for peers, mean over ranks.

    Returns:
        one row per stream in pipeline order, columns stream, busy, waiting, as fractions of 1.
    """
    steps, ends = step_ends(timeline)
    low, high = (ends[:, np.flatnonzero(steps == step)[-1]][:, None] for step in (window.first, window.last))
    ready = timeline.start_ns + timeline.wait_ns
    ran = timeline.end_ns >= 0
    busy = np.where(ran, timeline.end_ns.clip(low, high) - ready.clip(low, high), 0)
    waits = np.where(ran, ready.clip(low, high) - timeline.start_ns.clip(low, high), 0)
    weights = timeline.weights / timeline.weights.sum()
    streams = timeline.ops["stream"].to_numpy()
    rows = []
    for stream in stream_order([str(name) for name in np.unique(streams.astype(str))]):
        mine = streams == stream
        shares = [float((each[:, mine].sum(axis=1) / (high - low)[:, 0] * weights).sum()) for each in (busy, waits)]
        rows.append((stream, *shares))
    return pd.DataFrame(rows, columns=["stream", "busy", "waiting"])


def resources(run: SavedRun, window: Window) -> Table:
    """How busy each stream and each modelled resource of a run is in steady state."""
    use = stream_use(run.timeline, window)
    status = run.record.status
    rows = [
        (f"stream {row['stream']}", _number(row["busy"], 1, 100), _number(row["waiting"], 1, 100), _NONE, _NONE, status)
        for row in use.to_dict("records")
    ]
    rows += [
        (
            each.resource,
            _number(each.busy, 1, 100),
            _NONE,
            _NONE if each.capacity is None else f"{each.capacity:.12g}",
            each.unit,
            each.status,
        )
        for each in run.record.resources
    ]
    heads = ("resource", "busy (%)", "waiting for a peer (%)", "capacity", "unit", "status")
    kept = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    return Table(
        caption=f"Resources of {run.name}",
        heads=tuple(heads[i] for i in kept),
        rows=tuple(tuple(row[i] for i in kept) for row in rows),
        numbers=frozenset(kept.index(i) for i in (1, 2, 3) if i in kept),
        statuses=frozenset({kept.index(5)}),
    )


def assumptions(runs: Sequence[SavedRun]) -> Table | None:
    """What the runs rest on; an assumption that several runs share is listed once."""
    found: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        for each in run.record.assumptions:
            value = each.value if isinstance(each.value, str) else f"{each.value:g}"
            between = _NONE if each.low is None or each.high is None else f"{each.low:g} to {each.high:g}"
            found.setdefault((each.name, value, between, each.effect, each.why), []).append(run.name)
    if not found:
        return None
    several = len(runs) > 1
    heads = ("assumption", "value", "varied over", "effect", "why")
    rows = [(*key, ", ".join(names)) if several else key for key, names in found.items()]
    return Table(
        caption="Assumptions",
        heads=(*heads, "runs") if several else heads,
        rows=tuple(rows),
        numbers=frozenset({1}),
    )


def provenance(runs: Sequence[SavedRun]) -> Table:
    """How to get the runs again, one column each."""
    facts = [_facts(run) for run in runs]
    fields = list(dict.fromkeys(key for each in facts for key in each))
    rows = tuple((key, *(each.get(key, _NONE) for each in facts)) for key in fields)
    return Table(caption="Provenance", heads=("field", *(run.name for run in runs)), rows=rows)


def _facts(run: SavedRun) -> dict[str, str]:
    facts = {str(key): _plain(value) for key, value in run.record.provenance.items() if value is not None}
    rests = run.record.critical_cycle_rests_on
    if rests:
        order = sorted(rests, key=lambda status: list(ORIGINS).index(status))
        facts["critical cycle rests on"] = ", ".join(f"{100 * rests[status]:.1f} % {status}" for status in order)
    return facts


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(each) for each in value)
    return str(value)


def changes(diff: Diff) -> Table:
    """The op kinds of two runs side by side."""
    names = ("a_ms", "b_ms", "change_ms", "a_slowest_ms", "b_slowest_ms", "a_wait_ms", "b_wait_ms")
    rows = [
        (str(row["kind"]), *(_number(row[name], 3, sign=name == "change_ms") for name in names))
        for row in diff.kinds.to_dict("records")
    ]
    a, b = diff.a.name, diff.b.name
    heads = (
        "op kind",
        f"{a} (ms)",
        f"{b} (ms)",
        "change (ms)",
        f"slowest rank, {a} (ms)",
        f"slowest rank, {b} (ms)",
        f"waits, {a} (ms)",
        f"waits, {b} (ms)",
    )
    return Table(
        caption=f"Time per step by op kind, {a} and {b}",
        heads=heads,
        rows=tuple(rows),
        numbers=frozenset(range(1, len(heads))),
    )
