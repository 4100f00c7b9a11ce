"""Two Timelines side by side: aligned by op, explained by part, the same for text, JSON and CSV."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.ir import OpKind
from reports.runs.diff import as_csv, as_json, as_text, compare, summary
from sim.engine.costs import Jitter
from tests.reports.examples import BATCH_MS, timeline


def test_a_faster_lookup_is_found_and_named(golden: Callable[[str], None]) -> None:
    before = timeline("sync", steps=10)
    after = timeline("sync", steps=10, faster={OpKind.LOOKUP: 2.0})
    golden(as_text(compare(before, after, names=("today", "twice the lookup rate"))) + "\n")


def test_a_timeline_does_not_differ_from_itself() -> None:
    run = timeline("nestpipe", fold_ranks=False, jitter=Jitter(cv=0.1, seed=2))
    diff = compare(run, run)
    assert (diff.parts["change_ms"] == 0).all()
    assert (diff.kinds["change_ms"] == 0).all()
    assert (diff.ops["change_ms"] == 0).all()
    assert summary(diff) == "B takes as long per step as A; no part of it changed"
    assert "No op of batches" in as_text(diff)


def test_folded_and_unfolded_runs_do_not_differ() -> None:
    diff = compare(timeline("nestpipe", fold_ranks=True), timeline("nestpipe", fold_ranks=False))
    assert diff.parts["change_ms"].abs().max() < 1e-9
    assert diff.ops["change_ms"].abs().max() < 1e-9
    assert (diff.a.num_ranks, diff.b.num_ranks) == (4, 4)


@pytest.mark.parametrize("kind", [OpKind.FORWARD, OpKind.ALL_TO_ALL_ROWS, OpKind.READ])
def test_only_the_kind_that_was_made_faster_changes(kind: OpKind) -> None:
    diff = compare(timeline("nestpipe"), timeline("nestpipe", faster={kind: 2.0}))
    changes = diff.kinds.set_index("kind")["change_ms"]
    assert changes[kind.value] == pytest.approx(-BATCH_MS[kind] / 2)
    assert changes.drop(kind.value).abs().max() < 1e-9


def test_parts_explain_the_change_of_the_step() -> None:
    diff = compare(timeline("sync"), timeline("nestpipe"))
    change = diff.b.metrics.step_latency_ms - diff.a.metrics.step_latency_ms
    assert diff.parts["change_ms"].sum() == pytest.approx(change)
    assert summary(diff).startswith(
        "the step of B is 394.50 ms (67.4 %) shorter than that of A: exposed lookup -120.00 ms"
    )


def test_the_slowest_rank_shows_a_straggler_that_the_mean_hides() -> None:
    slow = timeline("nestpipe", ranks=64, fold_ranks=False, jitter=Jitter(stragglers={17: 1.5}))
    diff = compare(timeline("nestpipe", ranks=64), slow)
    row = diff.kinds.set_index("kind").loc[OpKind.BACKWARD.value]
    assert row["b_slowest_ms"] == pytest.approx(1.5 * BATCH_MS[OpKind.BACKWARD])
    assert row["b_ms"] == pytest.approx(BATCH_MS[OpKind.BACKWARD] * (1 + 0.5 / 64))


def test_batches_split_differently_are_compared_whole() -> None:
    diff = compare(timeline("nestpipe", micro_batches=4), timeline("nestpipe", micro_batches=8))
    assert diff.ops["micro_batch"].isna().all()
    forward = diff.ops[diff.ops["kind"] == OpKind.FORWARD.value]
    assert forward["change_ms"].abs().max() < 1e-9
    assert len(forward) == diff.window.steps if diff.window else False


def test_runs_without_a_common_steady_batch_are_compared_by_kind_only() -> None:
    late = timeline("nestpipe", steps=40)
    early = timeline("nestpipe", steps=12)
    diff = compare(early, late)
    assert diff.window is None
    assert diff.ops.empty
    assert diff.parts["change_ms"].abs().max() < 1e-9
    assert "no batch in common" in as_text(diff)


def test_json_holds_what_text_shows_and_every_op() -> None:
    diff = compare(timeline("sync"), timeline("nestpipe"), names=("sync", "nestpipe"))
    read = json.loads(json.dumps(as_json(diff), allow_nan=False))
    assert read["step_latency_change_ms"] == pytest.approx(-394.5)
    assert {row["part"] for row in read["parts"]} == set(diff.parts["part"])
    assert len(read["ops"]) == len(diff.ops)
    sync = next(row for row in read["ops"] if row["kind"] == "sync")
    assert sync["a_ms"] is None
    assert sync["b_ms"] == 1.0
    assert set(read["a"]) == {"name", "schedule", "source", "num_ranks", "window", "metrics"}


def test_csv_is_one_table_with_a_section_column() -> None:
    diff = compare(timeline("sync"), timeline("nestpipe"))
    frame = pd.read_csv(io.StringIO(as_csv(diff)))
    assert list(frame.columns) == ["section", "name", "batch", "micro_batch", "a_ms", "b_ms", "change_ms"]
    assert set(frame["section"]) == {"metric", "part", "kind", "op"}
    assert np.isclose(frame[frame["section"] == "part"]["change_ms"].sum(), -394.5)


def test_a_measured_side_is_called_measured() -> None:
    run = timeline("nestpipe")
    measured = replace(run, meta={**run.meta, "source": "measured"})
    first, second = as_text(compare(run, measured)).splitlines()[:2]
    assert ", simulated, " in first
    assert ", measured, " in second


def test_a_run_too_short_for_a_steady_state_is_named() -> None:
    with pytest.raises(TraceError, match="short one: 5 steps leave no steady state"):
        compare(timeline("nestpipe"), timeline("nestpipe", steps=5), names=("long one", "short one"))
