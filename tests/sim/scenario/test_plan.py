"""The plan against brute force, the front against its definition, and what is said when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.base.errors import CaseError
from sim.scenario.constraints import violations
from sim.scenario.evaluate import Evaluator
from sim.scenario.file import warnings
from sim.scenario.grid import Grid
from sim.scenario.infeasible import InfeasibleError
from sim.scenario.pareto import pareto
from sim.scenario.plan import plan
from sim.scenario.sections import METRICS, Constraints, Failures, Objective
from sim.scenario.sensitivity import Move
from sim.sweep.sweep import sweep
from tests.sim.scenario.scenarios import PLAIN, PRICED, grid, scenario

GRID = grid(PRICED)
RESULTS = sweep(GRID)


def _with(**changes: object) -> Grid:
    return Grid(
        scenario=msgspec.structs.replace(GRID.scenario, **changes),
        workload=GRID.workload,
        loops=GRID.loops,
        staleness=GRID.staleness,
    )


def _meets(row: dict[str, object], constraints: Constraints) -> bool:
    """The constraints, written out once more."""
    checks = [
        row["status"] == "ok",
        row["staleness"] <= constraints.staleness_max,
        row["device_bytes"] <= row["device_bytes_max"],
        constraints.qps_min is None or row["qps"] >= constraints.qps_min,
        constraints.step_ms_max is None or row["step_ms"] <= constraints.step_ms_max,
        constraints.cost_per_hour_max is None or row["cost_per_hour"] <= constraints.cost_per_hour_max,
        constraints.scaling_efficiency_min is None or row["scaling_efficiency"] >= constraints.scaling_efficiency_min,
    ]
    return all(checks)


constraint_sets = st.builds(
    Constraints,
    qps_min=st.none() | st.floats(5e4, 4.5e5),
    step_ms_max=st.none() | st.floats(1500, 6000),
    cost_per_hour_max=st.none() | st.floats(300, 4500),
    scaling_efficiency_min=st.none() | st.floats(0.3, 1.0),
    staleness_max=st.integers(0, 1),
)


@settings(max_examples=60)
@given(constraints=constraint_sets, metric=st.sampled_from(sorted(METRICS)))
def test_the_best_row_is_that_of_brute_force(constraints: Constraints, metric: str) -> None:
    objective = Objective(**{"minimise" if METRICS[metric] else "maximise": metric})
    chosen = _with(constraints=constraints, objective=objective)
    evaluator = Evaluator(grid=GRID)
    rows = RESULTS.astype(object).where(RESULTS.notna(), None).to_dict("records")
    fine = [row for row in rows if _meets(row, constraints)]
    broken = [row for row in rows if row["status"] == "ok" and not violations(row, chosen.scenario)]
    assert [row["index"] for row in fine] == [row["index"] for row in broken]
    if not fine:
        with pytest.raises(InfeasibleError):
            plan(chosen, RESULTS)
        return
    values = [evaluator.row(GRID[row["index"]])[metric] for row in fine[:1]]
    assert values[0] == fine[0][metric]
    best = min if METRICS[metric] else max
    found = _planned(chosen)
    assert found.best[metric] == best(row[metric] for row in fine)
    assert found.feasible == len(fine)


def _planned(chosen: Grid):
    """The plan without its slow part, the sensitivity, which has its own test."""
    from unittest.mock import patch

    with patch("sim.scenario.plan.moves", return_value=[]):
        return plan(chosen, RESULTS)


@given(
    st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=40),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_the_front_is_exact(points: list[tuple[int, int, int]], less: tuple[bool, bool, bool]) -> None:
    frame = pd.DataFrame(points, columns=["a", "b", "c"])
    signs = np.where(less, 1, -1)

    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        a, b = np.array(one) * signs, np.array(other) * signs
        return bool((a <= b).all() and (a < b).any())

    expected = {i for i, point in enumerate(points) if not any(beats(each, point) for each in points)}
    found = pareto(frame, list(zip(["a", "b", "c"], less, strict=True)))
    assert set(found.index) == expected


def test_a_plan_says_what_it_rests_on_the_runner_up_and_what_moves_it() -> None:
    found = plan(GRID, RESULTS)
    assert found.best["status"] == "ok"
    assert found.best["qps"] >= 150_000
    assert sum(found.rests_on().values()) == pytest.approx(1)
    assert found.runner_up is not None
    one, other = (GRID[int(row["index"])] for row in (found.best, found.runner_up))
    assert one.variant.schedule != other.variant.schedule or (one.cluster, one.world_size) != (
        other.cluster,
        other.world_size,
    )
    assert found.runner_up["cost_per_million_samples"] >= found.best["cost_per_million_samples"]
    spans = [move.span for move in found.moves]
    assert spans == sorted(spans, reverse=True)
    assert found.moves[0].input == "factors.compute_time"
    assert found.goodput is not None
    assert found.goodput.low <= found.goodput.expected <= found.goodput.high
    assert found.need is not None
    assert found.need.device_bytes == found.best["device_bytes"]
    assert set(found.by_micro_batches["micro_batches"]) == {2, 4, 8, 16}
    assert int(found.best["index"]) in set(found.front["index"])


def test_a_close_race_is_reported_as_one() -> None:
    """Priced so that both clusters cost nearly the same, whatever touches one of them more changes the choice."""
    one = {"world_sizes": (1536,), "schedules": ("nestpipe",), "micro_batches": 8}
    cheap, fast = sweep(grid(PRICED, **one))["step_ms"]
    price = 2.6 * fast / cheap * 0.9999
    close = grid(PRICED.replace("cheap: {accelerator_hour: 1.5", f"cheap: {{accelerator_hour: {price}"), **one)
    found = plan(close, sweep(close))
    assert any(move.changes_choice for move in found.moves)
    steady = plan(GRID, RESULTS)
    assert not all(move.changes_choice for move in steady.moves)


def test_an_unreachable_target_names_the_constraint_and_the_nearest_point() -> None:
    chosen = _with(constraints=Constraints(qps_min=900_000))
    with pytest.raises(InfeasibleError) as caught:
        plan(chosen, RESULTS)
    most = RESULTS[(RESULTS["staleness"] == 0) & (RESULTS["device_bytes"] <= RESULTS["device_bytes_max"])]["qps"].max()
    assert "constraints.qps_min binds: qps must be at least 900,000" in str(caught.value)
    assert f"the most that meets the rest is {most:,.0f}" in str(caught.value)
    assert "nearest: nestpipe with" in str(caught.value)


def test_two_constraints_that_exclude_each_other_are_named_together() -> None:
    chosen = _with(constraints=Constraints(qps_min=400_000, cost_per_hour_max=500))
    with pytest.raises(InfeasibleError) as caught:
        plan(chosen, RESULTS)
    for name in ("constraints.qps_min", "constraints.cost_per_hour_max"):
        assert name in str(caught.value)


def test_memory_that_is_too_small_binds() -> None:
    text = PRICED.replace("64 GiB", "1 GiB").replace("24 GiB", "1 GiB")
    small = grid(text, world_sizes=(1536,))
    with pytest.raises(InfeasibleError, match=r"device_memory_bytes binds: device_bytes must be at most 1\.00 GiB"):
        plan(small, sweep(small))


def test_a_plan_needs_an_objective() -> None:
    plain = Grid.of(scenario(PLAIN))
    with pytest.raises(CaseError, match="plan needs an objective"):
        plan(plain, sweep(plain))


def test_an_objective_that_is_0_moves_by_nothing() -> None:
    move = Move(input="x", low=1, high=2, objective_low=0.0, objective=0.0, objective_high=3.0, changes_choice=False)
    assert move.span == 0
    assert replace(move, objective=2.0).span == 1


def test_a_job_that_never_trains_is_infeasible_with_the_reason() -> None:
    found = grid(PRICED, failures=Failures(accelerator_mtbf_hours=1e-9, restart_s=900, checkpoint_s=60))
    with pytest.raises(InfeasibleError, match=r"every configuration is invalid: failures: .* nothing is ever trained"):
        plan(found, sweep(found))


def test_a_cluster_without_a_feasible_configuration_is_named_with_the_reason() -> None:
    found = grid(PRICED.replace("device_memory_bytes: 64 GiB", "device_memory_bytes: 64"))
    assert warnings(found.scenario) == (
        "clusters.cheap.device_memory_bytes is 64 B, less than 1 GiB; is a unit missing? Write 64 GiB, for example",
    )
    assert warnings(grid(PRICED).scenario) == ()
    made = plan(found, sweep(found))
    assert list(made.excluded) == ["cheap"]
    assert "clusters.cheap.device_memory_bytes binds: device_bytes must be at most 64 B" in made.excluded["cheap"]
    assert not plan(grid(PRICED), sweep(grid(PRICED))).excluded
