"""Figures with matplotlib."""

from reports.figures.break_even import front, gain_curve, gain_map
from reports.figures.lanes import choose_ranks, stream_order
from reports.figures.load import has_places, load_figure
from reports.figures.plots import breakdown, curve, qps, scaling_efficiency, speedups
from reports.figures.sheet import FORMATS, save, styled
from reports.figures.style import GRID, INK, KINDS, MUTED, PAPER, PARTS_MARKS, text_colour
from reports.figures.timeline import timelines
from reports.figures.topology import topology_figure
from reports.figures.validation import check_history, history, predicted_against_measured, timeline_pair

__all__ = [
    "FORMATS",
    "GRID",
    "INK",
    "KINDS",
    "MUTED",
    "PAPER",
    "PARTS_MARKS",
    "breakdown",
    "check_history",
    "choose_ranks",
    "curve",
    "front",
    "gain_curve",
    "gain_map",
    "has_places",
    "history",
    "load_figure",
    "predicted_against_measured",
    "qps",
    "save",
    "scaling_efficiency",
    "speedups",
    "stream_order",
    "styled",
    "text_colour",
    "timeline_pair",
    "timelines",
    "topology_figure",
]
