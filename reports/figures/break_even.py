"""Figures for decisions: where a schedule pays, as a heat map with its edge, and the front of cost, QPS and memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from nestpipe.base import GIB, TraceError
from reports.figures.sheet import note, sheet, styled
from reports.figures.style import INK, MUTED, method_marks
from reports.runs import need_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["front", "gain_curve", "gain_map"]

_ACROSS: Final = 3


def gain_map(gains: pd.DataFrame, x: str, y: str, *, baseline: str = "sync", pays_at: float = 1.0) -> Figure:
    """One heat map per schedule: its gain over the baseline, with the edge where it stops paying.

    Args:
        gains: columns schedule, x, y and gain, one row per schedule and point of a full grid.
        x: the column along the horizontal axis.
        y: the column along the vertical axis.
        baseline: what the gain refers to, for the title.
        pays_at: the gain at the edge.

    Raises:
        TraceError: if a column is missing, or an axis has fewer than two values.
    """
    need_columns(gains, ("schedule", x, y, "gain"), "break-even map")
    for axis in (x, y):
        if gains[axis].nunique() < 2:
            raise TraceError(f"break-even map: {axis} has one value; a map needs two or more on each axis")
    schedules = list(dict.fromkeys(gains["schedule"]))
    across = min(_ACROSS, len(schedules))
    down = math.ceil(len(schedules) / across)
    scale = float(np.abs(np.log2(gains["gain"].to_numpy(dtype=np.float64) / pays_at)).max()) or 0.1
    with styled():
        figure, _ = sheet(3.1 * across + 1.1, 2.9 * down + 0.7)
        figure.clear()
        grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        image = None
        for place, axes in enumerate(grid.flat):
            if place >= len(schedules):
                axes.set_visible(False)
                continue
            image = _heat(axes, gains[gains["schedule"] == schedules[place]], x, y, pays_at, scale)
            axes.set_title(schedules[place])
        for axes in grid[:, 0]:
            axes.set_ylabel(y)
        for axes in grid[-1, :]:
            axes.set_xlabel(x)
        _gain_bar(figure, image, list(grid.flat), pays_at, scale, baseline)
        note(figure, f"black line: gain {pays_at:g}x, the edge at which a schedule stops paying; best N at each point")
    return figure


def _heat(axes: Axes, rows: pd.DataFrame, x: str, y: str, pays_at: float, scale: float) -> Any:
    wide = rows.pivot(index=y, columns=x, values="gain").sort_index().sort_index(axis=1)
    across, down = wide.columns.to_numpy(dtype=np.float64), wide.index.to_numpy(dtype=np.float64)
    levels = np.log2(wide.to_numpy(dtype=np.float64) / pays_at)
    image = axes.pcolormesh(
        _edges(across), _edges(down), levels, cmap="RdBu", vmin=-scale, vmax=scale, rasterized=True, zorder=1
    )
    if np.nanmin(levels) < 0 < np.nanmax(levels):
        axes.contour(across, down, levels, levels=[0.0], colors=[INK], linewidths=1.4, zorder=3)
    for name, values in (("x", across), ("y", down)):
        if _is_log(values):
            getattr(axes, f"set_{name}scale")("log")
        getattr(axes, f"set_{name}lim")(*_edges(values)[[0, -1]])
        _plain_ticks(axes, name, values)
    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
        value = wide.to_numpy(dtype=np.float64)[corner]
        axes.annotate(
            f"{value:.2f}x",
            (across[corner[1]], down[corner[0]]),
            ha="left" if corner[1] == 0 else "right",
            va="bottom" if corner[0] == 0 else "top",
            fontsize=7.5,
            color=INK,
            zorder=4,
            bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )
    axes.grid(visible=False)
    return image


def _is_log(values: np.ndarray[Any, np.dtype[np.float64]]) -> bool:
    """Whether positive values span a decade or are spaced by a factor, so that a logarithmic axis shows them best."""
    return bool((values > 0).all() and values[-1] / values[0] >= 8)


def _edges(values: np.ndarray[Any, np.dtype[np.float64]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Borders of cells around values: middles, in the logarithm on a logarithmic axis, ends as far as the middles."""
    places = np.log(values) if _is_log(values) else values
    middles = (places[1:] + places[:-1]) / 2
    borders = np.concatenate([[2 * places[0] - middles[0]], middles, [2 * places[-1] - middles[-1]]])
    return np.exp(borders) if _is_log(values) else borders


def _plain_ticks(axes: Axes, name: str, values: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Numbers without exponents, at the ends and a few places in between."""
    axis = getattr(axes, f"{name}axis")
    if _is_log(values):
        low, high = values[0], values[-1]
        steps = (1, 2, 5) if high / low < 200 else (1,)
        ticks = [
            m * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in steps
        ]
        axis.set_ticks([tick for tick in ticks if low * 0.999 <= tick <= high * 1.001])
        axis.set_ticks([], minor=True)
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")


def _gain_bar(figure: Figure, image: Any, axes: list[Axes], pays_at: float, scale: float, baseline: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.02)
    gains = [gain for gain in (0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8) if gain / pays_at <= 2**scale]
    gains = [gain for gain in gains if gain / pays_at >= 2**-scale]
    bar.set_ticks([math.log2(gain / pays_at) for gain in gains], labels=[f"{gain:g}x" for gain in gains])
    bar.set_label(f"gain: step of {baseline} over step of schedule")
    bar.outline.set_visible(False)


def gain_curve(gains: pd.DataFrame, x: str, *, baseline: str = "sync", pays_at: float = 1.0) -> Figure:
    """The gain of each schedule along one swept key, with the level at which it stops paying.

    Args:
        gains: columns schedule, x and gain.
        x: the column along the axis.
        baseline: what the gain refers to.
        pays_at: where the line is drawn.
    """
    need_columns(gains, ("schedule", x, "gain"), "break-even curve")
    with styled():
        figure, (axes,) = sheet(6.4, 3.8)
        marks = method_marks(list(dict.fromkeys(gains["schedule"])))
        for schedule, mark in marks.items():
            rows = gains[gains["schedule"] == schedule].sort_values(x)
            axes.plot(rows[x], rows["gain"], color=mark.colour, marker=mark.marker, markersize=4, label=schedule)
        axes.axhline(pays_at, color=MUTED, linewidth=1.0, zorder=1)
        axes.annotate(
            f"pays from {pays_at:g}x", (1, pays_at), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", fontsize=8, color=MUTED,
        )  # fmt: skip
        values = np.sort(gains[x].unique().astype(np.float64))
        if _is_log(values):
            axes.set_xscale("log")
        _plain_ticks(axes, "x", values)
        axes.set_xlabel(x)
        axes.set_ylabel(f"gain over {baseline} (x)")
        axes.set_title("Where it stops paying")
        axes.legend()
    return figure


def front(
    feasible: pd.DataFrame, on_front: pd.DataFrame, *, best: int, runner_up: int | None = None, currency: str = "USD"
) -> Figure:
    """Cost per hour against QPS of every feasible configuration, those that no other beats filled, memory as size.

    Args:
        feasible: columns index, schedule, qps, device_bytes and cost_per_hour (or, without prices, world_size).
        on_front: those rows of it that are on the front.
        best: index of the recommendation.
        runner_up: index of the runner-up.
        currency: of the prices.
    """
    from matplotlib.lines import Line2D

    cost = "cost_per_hour" if feasible.get("cost_per_hour", pd.Series(dtype=float)).notna().any() else "world_size"
    need_columns(feasible, ("index", "schedule", "qps", cost), "front")
    with styled():
        figure, (axes,) = sheet(6.8, 4.3)
        chosen = set(on_front["index"].astype(int))
        sizes = _dots(feasible)
        marks = method_marks(list(dict.fromkeys(feasible["schedule"])))
        for schedule, mark in marks.items():
            rows = feasible[feasible["schedule"] == schedule]
            filled = rows["index"].astype(int).isin(chosen).to_numpy()
            for part, alpha, face in ((~filled, 0.45, "none"), (filled, 1.0, mark.colour)):
                axes.scatter(
                    rows[cost].to_numpy(dtype=np.float64)[part],
                    rows["qps"].to_numpy(dtype=np.float64)[part],
                    s=sizes.loc[rows.index].to_numpy()[part],
                    facecolor=face,
                    edgecolor=mark.colour,
                    alpha=alpha,
                    marker=mark.marker,
                    linewidth=1.0,
                    zorder=3 if face != "none" else 2,
                )
        handles = [
            Line2D([], [], linestyle="", marker=mark.marker, color=mark.colour, label=schedule)
            for schedule, mark in marks.items()
        ]
        for index, words in ((best, "recommended"), (runner_up, "runner-up")):
            _point_out(axes, feasible, index, cost, words)
        axes.set_xlabel(f"cost ({currency} per hour)" if cost == "cost_per_hour" else "workers")
        axes.set_ylabel("QPS (samples/s)")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_title("Feasible configurations and their front")
        axes.legend(handles=handles, loc="lower right")
        words = "filled: no other one is cheaper, faster and smaller"
        if feasible.get("device_bytes", pd.Series(dtype=float)).notna().any():
            low, high = (feasible["device_bytes"].astype(float).agg(each) / GIB for each in ("min", "max"))
            words += f"; area: device memory, {low:.1f} to {high:.1f} GiB"
        note(figure, words)
    return figure


def _dots(feasible: pd.DataFrame) -> pd.Series[float]:
    """Areas by device memory, 20 to 90 points."""
    if "device_bytes" not in feasible or feasible["device_bytes"].isna().any():
        return pd.Series(36.0, index=feasible.index)
    need = feasible["device_bytes"].astype(float)
    span = float(need.max() - need.min()) or 1.0
    return 20.0 + 70.0 * (need - need.min()) / span


def _point_out(axes: Axes, rows: pd.DataFrame, index: int | None, cost: str, words: str) -> None:
    row = rows[rows["index"].astype(int) == index]
    if index is None or row.empty:
        return
    axes.annotate(
        words,
        (float(row[cost].iloc[0]), float(row["qps"].iloc[0])),
        xytext=(6, 18 if words == "recommended" else -22),
        textcoords="offset points",
        ha="left",
        fontsize=8.5,
        fontweight="bold" if words == "recommended" else "normal",
        color=INK,
        arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.7},
        zorder=5,
    )
