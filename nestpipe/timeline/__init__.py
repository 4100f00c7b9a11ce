"""Timelines, simulated or measured: the table, its files, the metrics."""

from nestpipe.timeline.files import read_timeline, write_timeline
from nestpipe.timeline.metrics import (
    METRICS,
    PARTS,
    Metric,
    StepMetrics,
    Window,
    measure,
    metric_values,
    partition,
    scaling_efficiency,
    speedup,
    steady_window,
    step_ends,
)
from nestpipe.timeline.timeline import COLUMNS, Span, Timeline, build, from_frame, with_waits

__all__ = [
    "COLUMNS",
    "METRICS",
    "PARTS",
    "Metric",
    "Span",
    "StepMetrics",
    "Timeline",
    "Window",
    "build",
    "from_frame",
    "measure",
    "metric_values",
    "partition",
    "read_timeline",
    "scaling_efficiency",
    "speedup",
    "steady_window",
    "step_ends",
    "with_waits",
    "write_timeline",
]
