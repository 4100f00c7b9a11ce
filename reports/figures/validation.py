"""How good predictions are: predicted against measured, both timelines one above the other, accuracy over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd

from nestpipe.base import TraceError
from nestpipe.timeline import Timeline
from reports.figures.sheet import sheet, styled
from reports.figures.style import GRID, INK, MUTED, Mark, method_marks
from reports.figures.timeline import timelines
from reports.runs import need_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BAND", "check_history", "history", "predicted_against_measured", "timeline_pair"]

#: The half-width of the band around the diagonal.
BAND: Final = 0.05
_ENTRY_IN: Final = 0.6  # as wide as its label
_ENTRY: Final = ("commit", "grid", "world_size", "compute", "mean_absolute_error", "worst_absolute_error")


def predicted_against_measured(
    table: pd.DataFrame, *, title: str = "Step latency, predicted against measured"
) -> Figure:
    """Each configuration as a point, with its predicted interval; the diagonal and a band of 5 % around it.

    Args:
        table: columns schedule, predicted_ms, low_ms, high_ms, measured_ms, error.
        title: above the figure.
    """
    need_columns(table, ["schedule", "predicted_ms", "low_ms", "high_ms", "measured_ms", "error"], "validation")
    if table.empty:
        raise TraceError("validation: no configuration to draw")
    marks = method_marks(list(dict.fromkeys(table["schedule"])))
    values = table[["predicted_ms", "measured_ms"]].to_numpy(dtype=np.float64)
    low, high = values.min() * 0.9, values.max() * 1.1
    with styled():
        figure, (axes, errors) = _two(9.0, 4.4)
        line = np.array([low, high])
        axes.fill_between(line, line * (1 - BAND), line * (1 + BAND), color=GRID, label="±5 %", linewidth=0)
        axes.plot(line, line, color=MUTED, linewidth=1.0, label="predicted = measured")
        for schedule, rows in table.groupby("schedule", sort=False):
            _points(axes, errors, rows, str(schedule), marks[str(schedule)])
        axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
        axes.set_xlabel("measured step latency (ms)")
        axes.set_ylabel("predicted step latency (ms)")
        axes.legend(fontsize=8, loc="upper left")
        errors.axhspan(-100 * BAND, 100 * BAND, color=GRID, linewidth=0)
        errors.axhline(0, color=MUTED, linewidth=1.0)
        reach = max(float(table["error"].abs().max()) * 110, 100 * BAND * 1.4)
        errors.set(xscale="log", xlim=(low, high), ylim=(-reach, reach))
        errors.set_xlabel("measured step latency (ms)")
        errors.set_ylabel("error of the prediction (%)")
        for panel in (axes, errors):
            _plain_log_ticks(panel, low, high)
        worst, mean = table["error"].abs().max(), table["error"].abs().mean()
        axes.set_title(title, loc="left")
        errors.set_title(f"mean |error| {mean:.1%}, worst {worst:.1%}, {len(table)} configurations", loc="left")
    return figure


def _points(axes: Any, errors: Any, rows: pd.DataFrame, schedule: str, mark: Mark) -> None:
    """The configurations of a schedule, with intervals left and as errors right."""
    style = {"color": mark.colour, "marker": mark.marker, "linestyle": "", "markersize": 5}
    center = rows["predicted_ms"].to_numpy()
    bars = np.abs(rows[["low_ms", "high_ms"]].to_numpy().T - center)
    axes.errorbar(rows["measured_ms"], center, yerr=bars, elinewidth=0.8, label=schedule, **style)
    errors.plot(rows["measured_ms"], rows["error"] * 100, **style)


def timeline_pair(predicted: Timeline, measured: Timeline, *, name: str, steps: int = 2) -> Figure:
    """The predicted timeline above the measured one, on one time axis."""
    return timelines({f"{name} predicted": predicted, f"{name} measured": measured}, steps=steps)


def history(entries: Sequence[Mapping[str, Any]]) -> Figure:
    """The mean and worst absolute error of every validation so far, oldest first.

    Args:
        entries: mappings with at least `commit`, `grid`, `world_size`, `compute`, `mean_absolute_error` and
            `worst_absolute_error`.
    """
    if not entries:
        raise TraceError("validation history: no entry to draw; run 'nestpipe validate' first")
    check_history(entries)
    x = np.arange(len(entries))
    with styled():
        figure, (axes,) = sheet(max(8.0, _ENTRY_IN * len(entries)), 3.6)
        for name, words, marker in (
            ("worst_absolute_error", "worst", "v"),
            ("mean_absolute_error", "mean", "o"),
        ):
            values = [100 * float(entry[name]) for entry in entries]
            axes.plot(
                x, values, marker=marker, color=INK if name.startswith("mean") else MUTED, label=f"{words} |error|"
            )
        axes.axhline(100 * BAND, color=MUTED, linewidth=1.0, linestyle="--", label="5 %")
        labels = [
            f"{each['commit']}\n{each['grid']}\n{each['world_size']} ranks\n{each['compute']}" for each in entries
        ]
        axes.set_xticks(x, labels, fontsize=7)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("error of the step latency (%)")
        axes.set_xlabel("commit, grid, ranks and compute, oldest first")
        axes.legend(fontsize=8)
    return figure


def check_history(entries: Sequence[object], name: str = "validation history") -> None:
    """Refuse a history that cannot be drawn.

    Raises:
        TraceError: if an entry is not a mapping, lacks a value, or has an impossible error; says which entry of `name`.
    """
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise TraceError(f"{name}: entry {number} must be an object, got {entry!r:.40}")
        missing = [key for key in _ENTRY if key not in entry]
        if missing:
            raise TraceError(f"{name}: entry {number} lacks {', '.join(missing)}")
        for key in ("mean_absolute_error", "worst_absolute_error"):
            value = entry[key]
            if not isinstance(value, int | float) or not 0 <= value < np.inf:
                raise TraceError(f"{name}: entry {number}: {key} must be a number that is not negative, got {value!r}")


def _two(width_in: float, height_in: float) -> tuple[Figure, tuple[Any, Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    left, right = figure.subplots(1, 2)
    return figure, (left, right)


def _plain_log_ticks(axes: Any, low: float, high: float) -> None:
    """Ticks at round multiples of powers of ten, more of them on a short axis, written as plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    steps = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    ticks = [m * 10.0**e for e in range(-3, 7) for m in steps if low <= m * 10.0**e <= high]
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_locator(FixedLocator(ticks))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
