"""Timelines and the metrics computed from them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.errors import TraceError
from nestpipe.ir import with_micro_batches
from nestpipe.schedules import load, names
from nestpipe.timeline.metrics import PARTS, Window, measure, partition, steady_window
from nestpipe.timeline.timeline import COLUMNS, Span, from_frame, with_waits
from sim.engine.costs import Jitter
from sim.engine.folding import World
from tests.sim.engine.test_engine import run


@pytest.mark.parametrize("name", names())
def test_a_timeline_survives_its_own_table(name: str) -> None:
    timeline = run(with_micro_batches(load(name), 2), 6, jitter=Jitter(cv=0.1))
    frame = timeline.frame()
    assert list(frame.columns) == list(COLUMNS)
    again = from_frame(frame)
    assert again.frame().drop(columns="stream").equals(frame.drop(columns="stream"))


@given(st.floats(0, 0.5), st.sampled_from(names()), st.integers(0, 5))
def test_the_parts_of_a_step_sum_to_the_step(cv: float, name: str, seed: int) -> None:
    timeline = run(with_micro_batches(load(name), 2), 14, jitter=Jitter(cv=cv, seed=seed))
    window = steady_window(timeline)
    parts = partition(timeline, window)
    update = (timeline.ops["kind"] == "update").to_numpy()
    batches = timeline.ops["batch"].to_numpy()
    ends = [timeline.end_ns[:, update & (batches == batch)][:, 0] for batch in (window.first, window.last)]
    assert np.allclose(parts.sum(axis=1) * window.steps, ends[1] - ends[0], rtol=0, atol=1e-3)
    assert (parts >= 0).all(axis=None)


def test_time_spent_waiting_for_a_slow_rank_is_not_communication() -> None:
    alone = measure(run(load("sync"), 10))
    slowed = run(load("sync"), 10, World(world_size=4), Jitter(stragglers={1: 2.0}))
    parts = partition(slowed)
    assert parts.loc[0, "waiting for a peer"] > 0
    slow = slowed.ranks.tolist().index(1)
    assert parts["waiting for a peer"].iloc[slow] == 0
    assert measure(slowed).communication_ms == pytest.approx(alone.communication_ms)


def test_waits_of_a_measured_timeline_are_worked_out_from_the_starts() -> None:
    simulated = run(load("nestpipe"), 6, World(world_size=4), Jitter(cv=0.2), fold_ranks=False)
    frame = simulated.frame()
    streams = frame.loc[frame["kind"].astype(str).str.startswith("all_"), "stream"].unique()
    again = with_waits(frame, {stream: [0, 0, 0, 0] for stream in streams})
    assert again["wait_ns"].equals(frame["wait_ns"])


def test_a_rank_is_in_one_part_at_a_time_and_compute_comes_first() -> None:
    spans = [
        Span(0, 0, None, 0, "c", "update", 0, 10),
        Span(1, 1, 0, 0, "n", "all_to_all[rows]", 10, 40, wait_ns=5),
        Span(1, 1, 0, 0, "c", "forward", 30, 60),
        Span(1, 1, None, 0, "h", "lookup", 55, 70),
        Span(1, 1, None, 0, "c", "update", 75, 80),
    ]
    parts = partition(from_frame(pd.DataFrame(spans)), Window(first=0, last=1)).loc[0]
    spent = {name: int(value) for name, value in parts.items() if value}
    assert spent == {
        "compute": 35,
        "exposed all_to_all[rows]": 15,
        "waiting for a peer": 5,
        "exposed lookup": 10,
        "bubble": 5,
    }
    assert list(parts.index) == list(PARTS)


def test_broken_tables_are_refused() -> None:
    frame = run(load("sync"), 3).frame()
    with pytest.raises(TraceError, match="missing column start_ns"):
        from_frame(frame.drop(columns="start_ns"))
    with pytest.raises(TraceError, match="lies before start_ns"):
        from_frame(frame.assign(end_ns=frame["start_ns"] - 1))
    with pytest.raises(TraceError, match="appears twice"):
        from_frame(pd.concat([frame, frame.iloc[:1]], ignore_index=True))
    with pytest.raises(TraceError, match="leave no steady state"):
        steady_window(run(load("nestpipe"), 2))
