"""A timeline as a figure: one lane per stream, ops coloured by kind, named where the name fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import pandas as pd

from nestpipe.base import TraceError, ns_to_ms
from nestpipe.ir import OpKind
from nestpipe.timeline import Timeline
from reports.figures.lanes import Lanes, lanes
from reports.figures.sheet import sheet, styled
from reports.figures.style import INK, KINDS, MUTED, PAPER, kind_mark, text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["timelines"]

_WIDTH_IN: Final = 10.0
_LANE_IN: Final = 0.27
_FONT_PT: Final = 7.0
#: Width of a character over the font size, for DejaVu Sans; a label is drawn only where it fits.
_CHARACTER: Final = 0.62


def timelines(
    runs: Mapping[str, Timeline], *, rank: int | None = None, steps: int = 2, shared_axis: bool = True
) -> Figure:
    """Steady steps of one or several runs, one panel each, stream by stream.

    Args:
        runs: Timelines by the name to print above each.
        rank: which rank to show; by default the first of each.
        steps: how many steady steps.
        shared_axis: whether all panels have the same time axis, so that lengths compare.
    """
    if not runs:
        raise TraceError("timeline: no run to draw")
    views = {name: lanes(timeline, rank=rank, steps=steps) for name, timeline in runs.items()}
    longest_ns = max(view.end_ns - view.start_ns for view in views.values())
    with styled():
        heights = [len(view.streams) for view in views.values()]
        figure, axes = sheet(
            _WIDTH_IN,
            0.85 * len(views) + _LANE_IN * sum(heights) + 0.55,
            rows=len(views),
            height_ratios=heights,
        )
        for (name, view), panel in zip(views.items(), axes, strict=True):
            _panel(panel, view, longest_ns if shared_axis else view.end_ns - view.start_ns)
            mean_ms = ns_to_ms((view.end_ns - view.start_ns) / len(view.step_ends_ns))
            panel.set_title(f"{name}: {mean_ms:,.1f} ms per step, rank {view.rank}", pad=15)
        axes[-1].set_xlabel("time since the start of the first step shown (ms); ops are named by batch.micro-batch")
        _legend(figure, views)
    return figure


def _panel(axes: Axes, view: Lanes, width_ns: int) -> None:
    """The lanes of one rank: boxes, waiting time in outline, names where they fit, step ends as lines."""
    place = {stream: len(view.streams) - 1 - i for i, stream in enumerate(view.streams)}
    points_per_ns = 72 * _WIDTH_IN * 0.88 / width_ns
    for kind, spans in view.spans.groupby("kind", observed=True, sort=False):
        mark = kind_mark(str(kind))
        for stream, rows in spans.groupby("stream", observed=True, sort=False):
            y = place[str(stream)] - 0.41
            ready = rows["start_ns"] + rows["wait_ns"]
            _boxes(axes, view, rows["start_ns"], ready, y, {"facecolor": PAPER, "edgecolor": MUTED, "hatch": "...."})
            _boxes(axes, view, ready, rows["end_ns"], y, {"facecolor": mark.colour, "edgecolor": PAPER})
        for row in spans.itertuples(index=False):
            _name(axes, view, row, place[str(row.stream)], points_per_ns)
    for batch, end_ns in view.step_ends_ns.items():
        x = ns_to_ms(end_ns - view.start_ns)
        axes.axvline(x, color=INK, linewidth=0.8, linestyle=(0, (3, 2)), zorder=5)
        axes.text(x, len(place) - 0.45, f"end of step {batch} ", ha="right", va="bottom", fontsize=7, color=MUTED)
    axes.set_xlim(0, ns_to_ms(width_ns))
    axes.set_ylim(-0.55, len(place) - 0.45)
    axes.set_yticks(list(place.values()), labels=list(place))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if ns_to_ms(width_ns) > 10 else f"{value:g}")


def _boxes(
    axes: Axes, view: Lanes, start_ns: pd.Series[Any], end_ns: pd.Series[Any], y: float, look: dict[str, Any]
) -> None:
    shown = end_ns > start_ns
    if shown.any():
        bars = [
            (ns_to_ms(start - view.start_ns), ns_to_ms(end - start))
            for start, end in zip(start_ns[shown], end_ns[shown], strict=True)
        ]
        axes.broken_barh(bars, (y, 0.82), linewidth=0.4, zorder=3, **look)


def _name(axes: Axes, view: Lanes, row: Any, y: float, points_per_ns: float) -> None:
    """The longest of an op's names that fits its box: kind and batch, the batch, the micro-batch, or none."""
    begin_ns = row.start_ns + row.wait_ns
    room = (row.end_ns - begin_ns) * points_per_ns / (_CHARACTER * _FONT_PT) - 0.6
    whole = pd.isna(row.micro_batch) or not view.micro_batches
    batch = str(row.batch) if whole else f"{row.batch}.{row.micro_batch}"
    mark = KINDS[OpKind(row.kind)]
    names = (f"{row.kind} {batch}", f"{mark.short} {batch}", batch, "" if whole else f".{row.micro_batch}")
    words = next((name for name in names if len(name) <= room), "")
    if words:
        middle = ns_to_ms((begin_ns + row.end_ns) / 2 - view.start_ns)
        axes.text(
            middle,
            y,
            words,
            ha="center",
            va="center_baseline",
            fontsize=_FONT_PT,
            color=text_colour(mark.colour),
            zorder=4,
        )


def _legend(figure: Figure, views: Mapping[str, Lanes]) -> None:
    from matplotlib.patches import Patch

    seen = {str(kind) for view in views.values() for kind in view.spans["kind"].unique()}
    handles = [Patch(facecolor=mark.colour, label=kind.value) for kind, mark in KINDS.items() if kind.value in seen]
    if any(bool((view.spans["wait_ns"] > 0).any()) for view in views.values()):
        handles.append(Patch(facecolor=PAPER, edgecolor=MUTED, hatch="....", linewidth=0.4, label="waiting for a peer"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 7), handlelength=1.2)
