"""Goodput: the expectation against simulated months, the best interval against all others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nestpipe.base.errors import CaseError
from sim.scenario.goodput import daly_interval_s, expected_goodput, goodput, optimal_interval_s, young_interval_s
from sim.scenario.sections import Failures


def _failures(**changes: float) -> Failures:
    values: dict[str, Any] = {"accelerator_mtbf_hours": 50_000, "restart_s": 600, "checkpoint_s": 60, **changes}
    return Failures(**values)


@pytest.mark.parametrize(("checkpoint_s", "mtbf_s"), [(1, 1e6), (60, 36_000), (600, 7_200), (5_000, 4_000)])
def test_the_best_interval_beats_every_other(checkpoint_s: float, mtbf_s: float) -> None:
    best = optimal_interval_s(checkpoint_s, mtbf_s)
    most = expected_goodput(best, checkpoint_s, 300, mtbf_s)
    others = [expected_goodput(best * factor, checkpoint_s, 300, mtbf_s) for factor in np.geomspace(0.05, 20, 301)]
    assert most >= max(others)
    assert most > others[0]
    assert most > others[-1]


def test_young_and_daly_are_close_where_checkpoints_are_short_and_daly_is_closer() -> None:
    for checkpoint_s in (1.0, 30.0, 300.0):
        exact = optimal_interval_s(checkpoint_s, 36_000)
        assert young_interval_s(checkpoint_s, 36_000) == pytest.approx(exact, rel=0.07)
        assert daly_interval_s(checkpoint_s, 36_000) == pytest.approx(exact, rel=1e-4)
    assert daly_interval_s(9_000, 4_000) == 4_000


@pytest.mark.parametrize(("world_size", "restart_s"), [(256, 60), (1536, 600), (12_000, 900)])
def test_the_expectation_is_the_mean_of_simulated_horizons(world_size: int, restart_s: float) -> None:
    failures = _failures(restart_s=restart_s, horizon_hours=7_300)
    runs = [goodput(failures, world_size, seeds=1, seed=seed).low for seed in range(120)]
    found = goodput(failures, world_size)
    error = 4 * np.std(runs) / np.sqrt(len(runs)) + 2e-4  # a horizon's last, unfinished segment counts as work
    assert np.mean(runs) == pytest.approx(found.expected, abs=error)


def test_more_accelerators_longer_restarts_and_dearer_checkpoints_cost_goodput() -> None:
    shares = [goodput(_failures(), size).expected for size in (8, 128, 1536, 16_384)]
    assert shares == sorted(shares, reverse=True)
    assert goodput(_failures(restart_s=3600), 1536).expected < shares[2]
    assert goodput(_failures(checkpoint_s=600), 1536).expected < shares[2]
    assert goodput(_failures(checkpoint_interval_s=60), 1536).expected < shares[2]


def test_the_interval_holds_the_expectation_and_repeats() -> None:
    found = goodput(_failures(), 1536, seeds=200, seed=7)
    assert found.low < found.expected < found.high
    assert found == goodput(_failures(), 1536, seeds=200, seed=7)
    assert found.failures == pytest.approx(730 * 1536 / 50_000)
    assert found.is_optimal


def test_free_checkpoints_have_no_best_interval() -> None:
    with pytest.raises(CaseError, match="give checkpoint_interval_s"):
        goodput(_failures(checkpoint_s=0), 8)
    assert goodput(_failures(checkpoint_s=0, checkpoint_interval_s=60), 8).expected > 0.99


def test_a_job_that_fails_faster_than_it_restarts_gets_nothing_done() -> None:
    assert goodput(_failures(accelerator_mtbf_hours=1, restart_s=1e6), 100_000).expected == 0


def test_the_spread_over_many_failures_is_the_simulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = _failures(horizon_hours=7_300)  # 1,800 failures: simulated whole, or by a fifth of it
    whole = goodput(failures, 12_000, seeds=300, seed=1)
    monkeypatch.setitem(goodput.__globals__, "_FAILURES_MAX", 350)
    short = goodput(failures, 12_000, seeds=300, seed=1)
    assert whole.expected == short.expected
    assert short.high - short.low == pytest.approx(whole.high - whole.low, rel=0.2)


@pytest.mark.parametrize(("mtbf_hours", "horizon_hours"), [(1e-300, 730.0), (5_000.0, 1e12), (1e15, 1e15)])
def test_extreme_failures_take_no_longer_than_usual_ones(mtbf_hours: float, horizon_hours: float) -> None:
    found = goodput(_failures(accelerator_mtbf_hours=mtbf_hours, horizon_hours=horizon_hours), 1536, seeds=20)
    assert 0 <= found.low <= found.high <= 1
    assert found.low <= found.expected + 1e-3
    assert found.expected == (0 if mtbf_hours < 1 else pytest.approx(1, abs=0.35))


def test_the_best_interval_is_steady_where_nothing_fails() -> None:
    for ratio in (0.01, 0.5, 0.99, 1.01, 2.0, 100.0):
        mtbf_s = 60 / (1e-10 * ratio)
        assert optimal_interval_s(60, mtbf_s) == pytest.approx(young_interval_s(60, mtbf_s), rel=1e-4)
