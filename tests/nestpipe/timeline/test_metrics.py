"""Metrics where there is nothing to divide by."""

import pytest

from nestpipe.base import TraceError
from nestpipe.ir import unroll
from nestpipe.schedules import load
from nestpipe.timeline.metrics import Window, measure
from sim.engine import TimedCosts, World, simulate


def test_a_program_that_takes_no_time_has_no_metrics() -> None:
    timeline = simulate(unroll(load("sync"), 6), TimedCosts(batch_ns={}), World(world_size=2))
    with pytest.raises(TraceError, match="the steady steps take no time"):
        measure(timeline)


def test_the_window_is_the_second_half_less_what_the_pipeline_no_longer_prefetches() -> None:
    assert Window.of(20, first=0, last=21, ahead=2) == Window(first=9, last=19)
    with pytest.raises(TraceError, match="run at least 8"):
        Window.of(2, first=0, last=2, ahead=2)
