"""Figures of results: efficiency and QPS against workers, speedups, and what a step's time is spent on.

Pure functions from tables to figures. A table of results is in long format: columns method, world_size, metric, value,
published (NaN if none) and status; optional columns low and high draw a band. Lines are solid where a number is
measured, fitted or predicted, dotted where it rests on assumptions and dashed where it is extrapolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from nestpipe.base import TraceError, unknown_name
from nestpipe.timeline import METRICS, PARTS
from reports.figures.sheet import note, save, sheet, styled
from reports.figures.style import INK, MUTED, PAPER, PARTS_MARKS, STATUSES, Mark, method_marks, text_colour
from reports.figures.timeline import timelines
from reports.runs import need_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["breakdown", "curve", "qps", "save", "scaling_efficiency", "speedups", "timelines"]

_COLUMNS: Final = ("method", "world_size", "metric", "value", "published", "status")
_ORDER: Final = tuple(STATUSES)
_DASHES: Final = {":": (0, (1, 1.4)), "--": (0, (4, 2)), "-": "-"}


def scaling_efficiency(frame: pd.DataFrame, *, base: int = 128, title: str = "Scaling efficiency") -> Figure:
    """Scaling efficiency in percent against workers, one line per method, published points crossed.

    Args:
        frame: results in long format; rows of other metrics are left out.
        base: the world size that efficiency is relative to, named on the axis.
        title: printed above the figure.
    """
    figure = curve(frame, "scaling_efficiency", title=title, y_label=f"QPS per worker, % of that at {base:,} workers")
    axes = figure.axes[0]
    with styled():
        axes.set_ylim(0, max(105.0, axes.get_ylim()[1]))
        axes.axhline(100, color=MUTED, linewidth=0.8, zorder=1)
        _end_labels(axes, _last_points(_pick(frame, "scaling_efficiency"), METRICS["scaling_efficiency"].scale))
    return figure


def qps(frame: pd.DataFrame, *, title: str = "Throughput") -> Figure:
    """Samples per second against workers, both on logarithmic axes, so that linear scaling is a straight line."""
    rows = _pick(frame, "qps")
    figure = curve(rows, "qps", title=title)
    axes = figure.axes[0]
    with styled():
        axes.set_yscale("log")
        sizes = np.array(sorted(rows["world_size"].unique()), dtype=float)
        first = rows[rows["world_size"] == sizes[0]]["value"].max()
        if len(sizes) > 1 and first > 0:
            axes.plot(sizes, first * sizes / sizes[0], color=MUTED, linewidth=0.8, zorder=1)
            middle = np.sqrt(sizes[0] * sizes[-1])
            axes.annotate(
                "linear scaling",
                (middle, first * middle / sizes[0]),
                xytext=(-4, 4),
                textcoords="offset points",
                ha="right",
                fontsize=7.5,
                color=MUTED,
            )
        low, high = axes.get_ylim()
        steps = (1, 2, 5) if high / low < 200 else (1,)
        ticks = [m * 10.0**e for e in range(int(np.floor(np.log10(low))), int(np.log10(high)) + 1) for m in steps]
        axes.set_yticks([tick for tick in ticks if low <= tick <= high], minor=False)
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _end_labels(axes, _last_points(rows, 1.0))
    return figure


def curve(frame: pd.DataFrame, metric: str, *, title: str = "", y_label: str = "") -> Figure:
    """One metric against workers, one line per method, named at its end.

    Args:
        frame: results in long format.
        metric: which rows to draw; a key of `nestpipe.timeline.METRICS`.
        title: printed above the figure.
        y_label: the axis label; by default the metric and its unit.

    Raises:
        TraceError: if a column is missing, the metric is unknown or no row has it.
    """
    rows = _pick(frame, metric)
    about = METRICS[metric]
    with styled():
        figure, (axes,) = sheet(6.8, 4.1)
        marks = method_marks(rows["method"].unique())
        for method, mark in marks.items():
            _line(axes, rows[rows["method"] == method].sort_values("world_size"), mark, about.scale)
        sizes = sorted(int(size) for size in rows["world_size"].unique())
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("workers")
        axes.set_ylabel(y_label or f"{about.title} ({about.unit})")
        axes.set_title(title or about.title)
        axes.grid(visible=False, axis="x")
        _end_labels(axes, _last_points(rows, about.scale))
        _status_legend(axes, rows)
    return figure


def _pick(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    need_columns(frame, _COLUMNS, "results")
    if metric not in METRICS:
        raise TraceError(f"results: {unknown_name('metric', metric, METRICS)}")
    rows = frame[(frame["metric"] == metric) & frame["value"].notna()]
    unknown = set(rows["status"]) - set(STATUSES)
    if unknown:
        raise TraceError(f"results: {unknown_name('status', str(min(unknown)), STATUSES)}")
    if rows.empty:
        raise TraceError(f"results: no row of metric {metric} to draw; found {', '.join(sorted(set(frame['metric'])))}")
    return rows


def _line(axes: Axes, rows: pd.DataFrame, mark: Mark, scale: float) -> None:
    """One method: segments in the style of their less certain end, points, published values, a band if known."""
    x = rows["world_size"].to_numpy(dtype=float)
    y = rows["value"].to_numpy(dtype=float) * scale
    ranks = [_ORDER.index(status) for status in rows["status"]]
    for i in range(len(x) - 1):
        style: Any = _DASHES[STATUSES[_ORDER[max(ranks[i], ranks[i + 1])]]]
        axes.plot(x[i : i + 2], y[i : i + 2], color=mark.colour, linestyle=style, zorder=3)
    if {"low", "high"} <= set(rows.columns) and rows["low"].notna().any():
        low, high = (rows[name].to_numpy(dtype=float) * scale for name in ("low", "high"))
        axes.fill_between(x, low, high, color=mark.colour, alpha=0.18, linewidth=0, zorder=2)
    for at, value, status in zip(x, y, rows["status"], strict=True):
        hollow = status in ("fitted", "extrapolated")
        axes.plot(
            at,
            value,
            marker=mark.marker,
            markerfacecolor=PAPER if hollow else mark.colour,
            markeredgecolor=mark.colour,
            markersize=6.5 if mark.marker == "*" else 5,
            zorder=4,
        )
    published = rows["published"].to_numpy(dtype=float) * scale
    axes.plot(x, published, linestyle="", marker="x", color=INK, markersize=8, markeredgewidth=1.3, zorder=5)


def _last_points(rows: pd.DataFrame, scale: float) -> list[tuple[str, float, float, str]]:
    marks = method_marks(rows["method"].unique())
    last = {row["method"]: row for row in rows.sort_values("world_size").to_dict("records")}
    return [
        (method, float(last[method]["world_size"]), float(last[method]["value"]) * scale, mark.colour)
        for method, mark in marks.items()
    ]


def _end_labels(axes: Axes, points: Sequence[tuple[str, float, float, str]], gap: float = 0.055) -> None:
    """Names each line beside its last point, pushed apart where lines end close together."""
    for old in [child for child in axes.texts if child.get_gid() == "end label"]:
        old.remove()
    heights = axes.transAxes.inverted().transform(axes.transData.transform([(x, y) for _, x, y, _ in points]))[:, 1]
    order = np.argsort(heights)
    placed = heights[order].clip(0.02, 0.98)
    for _ in range(200):
        overlap = gap - np.diff(placed)
        if not (overlap > 1e-6).any():
            break
        push = np.where(overlap > 0, overlap, 0) / 2
        placed[:-1] -= push
        placed[1:] += push
    for index, height in zip(order, placed, strict=True):
        method, x, y, colour = points[index]
        axes.annotate(
            method,
            (x, y),
            xytext=(1.025, float(height)),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=INK,
            gid="end label",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4},
        )


def _status_legend(axes: Axes, rows: pd.DataFrame) -> None:
    """Explains the marks that occur, in grey: they mean the same for every method."""
    from matplotlib.lines import Line2D

    def sample(label: str, line: Any, marker: str, face: str) -> Line2D:
        return Line2D(
            [], [], color=MUTED, linestyle=line, marker=marker, markerfacecolor=face, markeredgecolor=MUTED, label=label
        )

    present = [status for status in STATUSES if status in set(rows["status"])]
    handles = [
        sample(status, _DASHES[STATUSES[status]], "o", PAPER if status in ("fitted", "extrapolated") else MUTED)
        for status in present
    ]
    if rows["published"].notna().any():
        handles.append(Line2D([], [], linestyle="", marker="x", color=INK, markersize=7, label="published"))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(handles), handlelength=2.6)


def speedups(frame: pd.DataFrame, *, world_size: int | None = None, title: str = "") -> Figure:
    """Speedup of each method as a bar, the published one as a mark across it.

    Args:
        frame: results in long format; rows of other metrics are left out.
        world_size: which one to show; by default the largest with a published speedup, or else the largest.
        title: printed above the figure.
    """
    rows = _pick(frame, "speedup")
    if world_size is None:
        published = rows[rows["published"].notna()]
        world_size = int((rows if published.empty else published)["world_size"].max())
    rows = rows[rows["world_size"] == world_size].sort_values("value", ascending=True, kind="stable")
    if rows.empty:
        raise TraceError(f"results: no speedup at {world_size} workers to draw")
    with styled():
        figure, (axes,) = sheet(6.4, 1.3 + 0.36 * len(rows))
        marks = method_marks(rows["method"])
        unsure = [status in ("assumed", "extrapolated") for status in rows["status"]]
        values = rows["value"].to_numpy(dtype=float)
        bars = axes.barh(range(len(rows)), values, color=[m.colour for m in marks.values()], height=0.62, zorder=2)
        for bar, hatched in zip(bars, unsure, strict=True):
            bar.set(hatch="///" if hatched else "", edgecolor=PAPER, linewidth=0)
        known = rows["published"].to_numpy(dtype=float)
        axes.scatter(known, range(len(rows)), marker="D", s=26, color=PAPER, edgecolor=INK, linewidth=1.2, zorder=4)
        right = float(np.nanmax([*values, *known]))
        for place, (value, reference, status) in enumerate(zip(values, known, rows["status"], strict=True)):
            words = f"{value:.2f}x  {status}" + ("" if np.isnan(reference) else f", published {reference:.2f}x")
            axes.text(np.nanmax([value, reference]) + 0.025 * right, place, words, va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), labels=list(marks))
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.48 * right)
        axes.set_xticks([tick for tick in axes.get_xticks() if tick <= 1.05 * right])
        axes.set_xlabel("speedup: step latency of the baseline over that of the method (x)")
        axes.set_title(title or f"Speedup at {world_size:,} workers")
        axes.grid(visible=False, axis="y")
        marks_note = (["diamonds: published"] if not np.isnan(known).all() else []) + (
            ["hatched: rests on assumptions or is extrapolated"] if any(unsure) else []
        )
        if marks_note:
            note(figure, "; ".join(marks_note))
    return figure


def breakdown(parts_ms: Mapping[str, Mapping[str, float]], *, title: str = "Where the time of a step goes") -> Figure:
    """The partition of a step as one stacked bar per method; the parts sum to the step.

    Args:
        parts_ms: for each method the milliseconds of each part, as in `StepMetrics.parts_ms`.
        title: printed above the figure.
    """
    if not parts_ms:
        raise TraceError("step breakdown: no method to draw")
    longest = max(sum(each.values()) for each in parts_ms.values())
    present = [part for part in PARTS if any(each.get(part, 0.0) > 0.0005 * longest for each in parts_ms.values())]
    with styled():
        figure, (axes,) = sheet(7.0, 1.6 + 0.42 * len(parts_ms) + 0.18 * ((len(present) + 2) // 3))
        places = range(len(parts_ms))[::-1]
        left = np.zeros(len(parts_ms))
        for part in present:
            mark = PARTS_MARKS[part]
            widths = np.array([each.get(part, 0.0) for each in parts_ms.values()])
            edge = MUTED if part == "bubble" else PAPER
            axes.barh(
                places, widths, left=left, height=0.64, color=mark.colour, hatch=mark.hatch, edgecolor=edge, label=part
            )
            for place, start, width in zip(places, left, widths, strict=True):
                if width > 0.06 * longest:
                    _inside(axes, start + width / 2, place, f"{width:,.0f}", mark.colour)
            left = left + widths
        for place, total in zip(places, (sum(each.values()) for each in parts_ms.values()), strict=True):
            axes.text(total + 0.008 * longest, place, f"{total:,.0f} ms", va="center", fontsize=8.5, fontweight="bold")
        axes.set_yticks(list(places), labels=list(parts_ms))
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, 1.15 * longest)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if longest > 10 else f"{value:g}")
        axes.set_xlabel("time of one step, mean over ranks (ms)")
        axes.set_title(title)
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside lower left", ncols=3, handlelength=1.8, handleheight=1.1, columnspacing=1.4)
    return figure


def _inside(axes: Axes, x: float, y: float, words: str, fill: str) -> None:
    back = {"boxstyle": "square,pad=0.15", "facecolor": fill, "edgecolor": "none"}
    axes.text(x, y, words, ha="center", va="center", fontsize=8, color=text_colour(fill), bbox=back)
