"""Figures say what the numbers say: positions, labels, units, styles; the same figure gives the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.ir import OpKind
from nestpipe.schedules import load, names
from nestpipe.timeline.metrics import measure
from nestpipe.timeline.timeline import Timeline
from reports.figures import plots, style
from reports.figures.lanes import lanes
from sim.engine.costs import Jitter
from tests.reports.examples import results, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@pytest.fixture(scope="module")
def runs() -> dict[str, Timeline]:
    return {name: timeline(name) for name in ("sync", "nestpipe")}


def _drawn(figure: Figure) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    return figure


def test_efficiency_is_drawn_in_percent_with_every_published_point() -> None:
    axes = plots.scaling_efficiency(results(), base=128).axes[0]
    assert "128 workers" in axes.get_ylabel()
    assert axes.get_xlabel() == "workers"
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    shown = sorted(float(y) for line in crosses for y in line.get_ydata() if not np.isnan(y))
    assert shown == pytest.approx([60.4, 96.4])


def test_segments_that_end_in_extrapolation_are_dashed_and_assumed_ones_dotted() -> None:
    axes = plots.scaling_efficiency(results()).axes[0]
    styles: dict[str, set[str]] = {"extrapolated": set(), "assumed": set(), "sure": set()}
    assumed_colour = style.method_marks(["2D-SP"])["2D-SP"].colour
    for line in axes.lines:
        x = np.asarray(line.get_xdata(), dtype=float)
        if len(x) == 2 and x[1] > x[0] >= 128:
            group = "extrapolated" if x[1] > 1536 else "assumed" if line.get_color() == assumed_colour else "sure"
            styles[group].add(str(line._dash_pattern))  # get_linestyle says "--" for every pattern
    assert [len(found) for found in styles.values()] == [1, 1, 1]
    assert len(set.union(*styles.values())) == 3


@pytest.mark.parametrize("draw", [plots.scaling_efficiency, plots.qps])
def test_method_names_at_line_ends_do_not_overlap(draw: Callable[[pd.DataFrame], Figure]) -> None:
    from matplotlib.text import Text

    frame = results()
    same = frame[frame["method"] == "NestPipe"]
    close = [same.assign(method=f"m {i}") for i in range(2)]
    figure = _drawn(draw(pd.concat([frame, *close])))
    labels = [text for text in figure.axes[0].texts if text.get_gid() == "end label"]
    assert sorted(text.get_text() for text in labels) == ["2D-SP", "NestPipe", "TorchRec", "m 0", "m 1"]
    boxes = sorted((Text.get_window_extent(text) for text in labels), key=lambda box: box.y0)  # without the arrow
    assert all(low.y1 <= high.y0 + 1.5 for low, high in pairwise(boxes))


def test_linear_scaling_is_a_straight_line_in_the_throughput_figure() -> None:
    axes = plots.qps(results()).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "samples/s" in axes.get_ylabel()


def test_a_band_is_drawn_where_an_interval_is_known() -> None:
    frame = results()
    without = plots.curve(frame, "qps").axes[0]
    within = plots.curve(frame.assign(low=frame["value"] * 0.9, high=frame["value"] * 1.1), "qps").axes[0]
    assert len(within.collections) == len(without.collections) + 3


def test_speedup_bars_have_their_values_and_the_published_ones_beside_them() -> None:
    axes = plots.speedups(results()).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["TorchRec", "2D-SP", "NestPipe"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([1.0, 1.2, 2.8])
    assert "1,536 workers" in axes.get_title(loc="left")
    assert "2.80x  predicted, published 3.06x" in [text.get_text() for text in axes.texts]


def test_stacked_bars_sum_to_the_step(runs: dict[str, Timeline]) -> None:
    metrics = {name: measure(run) for name, run in runs.items()}
    axes = plots.breakdown({name: each.parts_ms for name, each in metrics.items()}).axes[0]
    for row, name in ((1, "sync"), (0, "nestpipe")):
        width = sum(bar.get_width() for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row)
        assert width == pytest.approx(metrics[name].step_latency_ms, rel=2e-3)
    assert "(ms)" in axes.get_xlabel()


def test_timeline_boxes_add_up_to_the_time_of_each_kind(runs: dict[str, Timeline]) -> None:
    from matplotlib.colors import to_hex

    axes = plots.timelines(runs).axes
    assert [each.get_title(loc="left").split(":")[0] for each in axes] == ["sync", "nestpipe"]
    for panel, run in zip(axes, runs.values(), strict=True):
        spans = lanes(run).spans
        for kind in (OpKind.FORWARD, OpKind.LOOKUP, OpKind.ALL_TO_ALL_GRADS):
            mine = [each for each in panel.collections if to_hex(each.get_facecolor()[0]) == style.KINDS[kind].colour]
            width = sum(np.ptp(path.vertices[:, 0]) for each in mine for path in each.get_paths())
            rows = spans[spans["kind"] == kind.value]
            assert width == pytest.approx(float((rows["end_ns"] - rows["start_ns"]).sum()) / 1e6)


def test_names_in_a_timeline_fit_their_boxes(runs: dict[str, Timeline]) -> None:
    jittered = timeline("nestpipe", fold_ranks=False, jitter=Jitter(cv=0.2, seed=3))
    figure = _drawn(plots.timelines({**runs, "jittered": jittered}, shared_axis=False))
    named = 0
    for panel in figure.axes:
        boxes = [path.get_extents(panel.transData) for each in panel.collections for path in each.get_paths()]
        for text in panel.texts:
            if text.get_text().startswith("end of step"):
                continue
            extent = text.get_window_extent()
            assert any(box.x0 <= extent.x0 and extent.x1 <= box.x1 and box.y0 <= extent.y0 + 1 for box in boxes)
            named += 1
    assert named > 40


def test_waiting_for_a_peer_is_drawn_apart_from_the_transfer() -> None:
    run = timeline("nestpipe", fold_ranks=False, jitter=Jitter(stragglers={2: 1.5}))
    view = lanes(run, rank=0)
    panel = plots.timelines({"slow rank 2": run}, rank=0).axes[0]
    hatched = [each for each in panel.collections if each.get_hatch()]
    width = sum(np.ptp(path.vertices[:, 0]) for each in hatched for path in each.get_paths())
    assert width == pytest.approx(float(view.spans["wait_ns"].sum()) / 1e6)
    assert width > 0


def _lightness(colour: str) -> float:
    """L* of CIELAB, 0 black to 100 white."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.008856 else 903.3 * luminance


@pytest.mark.parametrize("schedule", names())
def test_kinds_that_share_a_stream_differ_in_grey(schedule: str) -> None:
    for stream in load(schedule).streams:
        kinds = sorted({op.kind for op in stream.ops})
        shades = sorted(_lightness(style.KINDS[kind].colour) for kind in kinds)
        assert all(high - low >= 10 for low, high in pairwise(shades)), stream.name


def test_every_kind_and_part_has_a_colour_and_kinds_never_share_one() -> None:
    assert set(style.KINDS) == set(OpKind)
    assert len({mark.colour for mark in style.KINDS.values()}) == len(OpKind)
    assert set(measure(timeline("sync")).parts_ms) == set(style.PARTS_MARKS)


def test_methods_keep_their_marks_and_new_ones_are_told_apart() -> None:
    marks = style.method_marks(["a", "NestPipe", "b", "sync", "TorchRec"])
    assert marks["NestPipe"] == style.method_marks(["nestpipe"])["nestpipe"]
    assert len({(mark.colour, mark.marker) for mark in marks.values()}) == 5


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_figure_is_saved_as_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    saved = [plots.save(plots.speedups(results()), tmp_path / f"{i}{suffix}").read_bytes() for i in range(2)]
    assert saved[0] == saved[1]
    assert len(saved[0]) > 2000


def test_a_figure_that_cannot_be_saved_leaves_nothing_behind(tmp_path: Path) -> None:
    figure = plots.speedups(results())
    with pytest.raises(TraceError, match=r"unknown figure format '.gif'.*expected one of .pdf, .png, .svg"):
        plots.save(figure, tmp_path / "x.gif")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        plots.save(figure, tmp_path / "taken.png")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


def test_what_cannot_be_drawn_is_refused_with_the_reason(runs: dict[str, Timeline]) -> None:
    frame = results()
    with pytest.raises(TraceError, match=r"no row of metric utilization.*found qps, scaling_efficiency, speedup"):
        plots.curve(frame, "utilization")
    with pytest.raises(TraceError, match="unknown status 'guessed'"):
        plots.qps(frame.assign(status="guessed"))
    with pytest.raises(TraceError, match="no speedup at 7 workers"):
        plots.speedups(frame, world_size=7)
    with pytest.raises(TraceError, match="rank 9 is not shown; expected one of 0"):
        plots.timelines(runs, rank=9)
    with pytest.raises(TraceError, match="no method"):
        plots.breakdown({})


def test_catalogue_names_and_published_names_share_their_marks() -> None:
    published = ["TorchRec", "2D-SP", "UniEmb", "DBP only", "FWP only", "NestPipe", "NestPipe + 2D-SP", "SparseDist"]
    catalogue = ["sync", "2d_sp", "async_prefetch", "dbp", "fwp", "nestpipe", "nestpipe_2d_sp", "sparse_dist"]
    assert sorted(catalogue) == sorted(names())
    marks = style.method_marks(published).values(), style.method_marks(catalogue).values()
    assert list(marks[0]) == list(marks[1])
    assert len({mark.marker for mark in marks[0]}) == len(published)
