"""The scaling curves of the report page: whose rows they are, their figures and their points as a table."""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.timeline import METRICS
from reports.figures import curve, qps, scaling_efficiency
from reports.html.svg import inline_svg
from reports.html.tables import Table
from reports.runs import ResultRow, SavedRun, cell, rows_frame

__all__ = ["figures_of", "merged", "table_of"]


def merged(runs: Sequence[SavedRun], more: Sequence[ResultRow]) -> list[ResultRow]:
    """The rows of all curves, each method, size and metric once."""
    rows: dict[tuple[str, int, str], ResultRow] = {}
    for row in (*more, *(row for run in runs for row in run.record.curve)):
        rows.setdefault((row.method, row.world_size, row.metric), row)
    return list(rows.values())


def figures_of(rows: Sequence[ResultRow], *, base: int | None = None) -> list[str]:
    """At most two metrics against workers as SVG: those with two sizes, efficiency and QPS before step latency.

    Args:
        rows: results.
        base: the world size that efficiency is relative to; by default the smallest.
    """
    frame = rows_frame(rows)
    figures: list[str] = []
    for metric in ("scaling_efficiency", "qps", "step_latency_ms"):
        mine = frame[(frame["metric"] == metric) & frame["value"].notna()]
        if mine["world_size"].nunique() < 2 or len(figures) == 2:
            continue
        if metric == "scaling_efficiency":
            figure = scaling_efficiency(frame, base=base or int(mine["world_size"].min()))
        else:
            figure = qps(frame) if metric == "qps" else curve(frame, metric)
        words = f"{METRICS[metric].title} against workers for {', '.join(mine['method'].unique())}"
        figures.append(inline_svg(figure, metric, words))
    return figures


def table_of(curve_rows: Sequence[ResultRow]) -> Table:
    """Every point of the curves in its metric's unit, with its status."""
    heads = ("method", "workers", "metric", "unit", "value", "published", "status")
    rows = []
    for row in curve_rows:
        metric = METRICS[row.metric]
        plain = [cell(v, metric.digits, scale=metric.scale).replace(",", "") for v in (row.value, row.published)]
        published = "" if row.published is None else plain[1]
        rows.append((row.method, str(row.world_size), metric.title, metric.unit, plain[0], published, row.status))
    return Table(
        caption="Points of the curve",
        heads=heads,
        rows=tuple(rows),
        numbers=frozenset({1, 4, 5}),
        statuses=frozenset({6}),
    )
