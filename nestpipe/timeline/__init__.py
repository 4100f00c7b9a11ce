"""Timelines, simulated or measured: the table, its files, the metrics."""

from nestpipe.timeline.files import read_timeline, write_timeline
from nestpipe.timeline.metrics import (
    PARTS,
    StepMetrics,
    Window,
    measure,
    partition,
    scaling_efficiency,
    speedup,
    steady_window,
    step_ends,
)
from nestpipe.timeline.timeline import COLUMNS, Span, Timeline, build, from_frame, with_waits

__all__ = [
    "COLUMNS",
    "PARTS",
    "Span",
    "StepMetrics",
    "Timeline",
    "Window",
    "build",
    "from_frame",
    "measure",
    "partition",
    "read_timeline",
    "scaling_efficiency",
    "speedup",
    "steady_window",
    "step_ends",
    "with_waits",
    "write_timeline",
]
