"""From spans to samples, gaps and costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from executor.profile.measure import full_plan, quick_plan
from executor.profile.run import loop_of
from executor.profile.samples import ShapedLinks, check_separate, cost_rows, gaps, op_samples
from nestpipe.base.errors import CaseError, TraceError
from nestpipe.ir import COLLECTIVES, unroll
from tests.executor.profile.common import CONFIG, profiled
from tests.traces.workloads.test_cost_table import rows_by_hand
from traces.workloads.cost_table import (
    CostTable,
)


def test_every_op_of_a_run_becomes_a_sample_and_every_kind_a_cost(measured: pd.DataFrame) -> None:
    run = profiled(measured, CONFIG)
    samples = op_samples(run, {})
    steady = measured[measured["batch"] >= 2]
    assert len(samples) == len(steady)
    assert (samples["time_ns"] >= 0).all()
    rows = cost_rows([run], source="test")
    assert set(rows["kind"]) == set(measured["kind"].astype(str))
    # a world of one rank has nothing to send
    assert (rows.loc[rows["kind"].isin([kind.value for kind in COLLECTIVES]), "wire_ns"] == 0).all()


def test_gaps_count_from_the_last_op_that_was_waited_for(measured: pd.DataFrame) -> None:
    from executor.profile.samples import _gaps_of_rank

    program = unroll(loop_of(CONFIG), CONFIG.steps)
    late = measured.copy()
    mine = (late["kind"] == "lookup").to_numpy()
    late.loc[mine, "start_ns"] += 10**15
    found: dict[str, list[int]] = {"handoff": [], "issue": []}
    _gaps_of_rank(late, program, found)
    # lookup waits for another stream, so only hand-overs grow: one for each steady batch
    assert sum(gap > 10**14 for gap in found["handoff"]) == CONFIG.steps - 2
    assert not any(gap > 10**14 for gap in found["issue"])
    assert gaps(measured, CONFIG)["handoff"]["count"] == len(found["handoff"])


def test_what_a_rested_link_lets_through_at_once_takes_no_time_on_the_wire() -> None:
    from executor.profile.samples import _Wire

    wire = _Wire(ShapedLinks(bits_per_s=(8_000_000_000,) * 2, burst_bytes=1000))  # 1 byte/ns
    traffic = np.array([[0.0, 1500.0], [200.0, 0.0]])
    assert wire.transfer(traffic, 0.0, 500.0) == 500.0  # 1000 of the 1500 bytes were saved
    assert wire.transfer(traffic, 700.0, 2000.0) == 1300.0  # 200 ns of rest save 200 bytes
    assert wire.transfer(traffic * 0, 2000.0, 2000.0) == 0.0


def test_what_was_profiled_cannot_be_validated_on() -> None:
    configs = [config.values() for plan in (quick_plan, full_plan) for config in plan((None,)).configs()]
    profiled = CostTable(rows=rows_by_hand([(10, 4, 100)]), meta={"configurations": configs})
    used = full_plan((None,)).configs()[0]
    with pytest.raises(CaseError, match="was used in the profile; validate only on what no fit has seen"):
        check_separate(profiled, [replace(used, schedule="nestpipe", seed=5)])
    with pytest.raises(CaseError, match="was used in the profile"):
        check_separate(profiled, [replace(used, schedule="nestpipe", dim=7)])
    check_separate(profiled, [replace(used, schedule="nestpipe", dim=7, seed=5)])


@pytest.mark.parametrize("configurations", [None, [], {}, 3, [3], [{"dim": 8}], [{"dim": "8", "seed": 1}]])
def test_a_table_that_does_not_say_what_was_profiled_validates_nothing(configurations: object) -> None:
    table = CostTable(rows=rows_by_hand([(10, 4, 100)]), meta={"configurations": configurations}, name="my.json")
    with pytest.raises(TraceError, match=r"my.json: meta.configurations must say batch_size, dim, micro_batches, seed"):
        check_separate(table, [CONFIG])
    with pytest.raises(TraceError, match=r"my.json: meta.configurations is missing"):
        check_separate(replace(table, meta={}), [CONFIG])
