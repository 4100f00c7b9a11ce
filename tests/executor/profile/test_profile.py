"""The cost table and its fits, the sizes of a run, and what is read off measured spans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from executor.compute import EmulatedDevice
from executor.profile.driver import run_on_testbed
from executor.profile.measure import full_plan, quick_plan
from executor.profile.run import RunConfig, loop_of, run_configs, sizes_of_run
from executor.profile.samples import ProfiledRun, ShapedLinks, check_separate, cost_rows, gaps, op_samples
from executor.profile.schedules import PAIRS, SERIAL, TURNS
from executor.profile.sizes import ring_traffic
from executor.runtime.groups import join_world
from executor.testbed import namespaces as testbed
from nestpipe.base.errors import CaseError, TraceError
from nestpipe.checks.check import require_safe
from nestpipe.ir import COLLECTIVES, Op, OpKind, unroll
from traces.workloads.cost_table import (
    COST_COLUMNS,
    CostTable,
    costs_of,
    fit_kind,
    read_cost_table,
    resample,
    summarise,
)

CONFIG = RunConfig(schedule=SERIAL, micro_batches=2, batch_size=24, dim=8, num_rows=500, steps=6, seed=3)


def _rows(points: list[tuple[float, float, float]], kind: OpKind = OpKind.LOOKUP) -> pd.DataFrame:
    """Rows of a table: keys, bytes, time_ns."""
    rows = []
    for keys, size, time_ns in points:
        values = {"kind": kind.value, "variant": "v", "world_size": 2, "link_bits_per_s": 1e9, "samples": 0.0}
        values |= {"keys": keys, "unique_keys": 0.0, "bytes": size, "wire_ns": 0.0, "repeats": 10, "source": "by hand"}
        values |= {f"time_ns_{name}": time_ns for name in ("mean", "min", "p50", "p75", "p95", "max")}
        rows.append(values)
    return pd.DataFrame(rows, columns=list(COST_COLUMNS))


def test_a_fit_finds_the_cost_per_key_and_per_byte() -> None:
    points = [(keys, size, 1000 + 20 * keys + 0.5 * size) for keys in (10, 100, 1000) for size in (400, 4000)]
    fit = fit_kind(_rows(points), OpKind.LOOKUP, "v")
    assert fit.coefficients == pytest.approx({"one": 1000, "keys": 20, "bytes": 0.5}, rel=1e-6)
    assert fit.error < 1e-6
    assert fit.time_ns({"keys": 50, "bytes": 100}) == pytest.approx(2050)


def test_a_fit_says_when_it_is_asked_outside_of_what_it_has_seen() -> None:
    fit = fit_kind(_rows([(10, 0, 110), (100, 0, 1010)]), OpKind.LOOKUP, "v")
    assert fit.status({"keys": 50}) == "interpolated"
    assert fit.status({"keys": 500}) == "extrapolated"


def test_time_on_the_wire_is_its_rate_and_not_a_matter_of_fit() -> None:
    rows = _rows([(0, size, 5000 + size + 2.0 * size) for size in (1000, 2000, 4000)], OpKind.ALL_TO_ALL_ROWS)
    fit = fit_kind(rows.assign(wire_ns=2.0 * rows["bytes"]), OpKind.ALL_TO_ALL_ROWS, "v")
    assert fit.coefficients == pytest.approx({"one": 5000, "bytes": 1.0, "wire_ns": 1.0}, rel=1e-6)


def test_no_cost_is_negative_even_where_noise_says_so() -> None:
    fit = fit_kind(_rows([(10, 0, 1000), (100, 0, 990), (1000, 0, 980)]), OpKind.LOOKUP, "v")
    assert all(value >= 0 for value in fit.coefficients.values())


def test_a_missing_variant_is_named_with_those_there_are() -> None:
    with pytest.raises(TraceError, match="no rows of lookup for variant 'other'; it has v"):
        fit_kind(_rows([(1, 1, 1)]), OpKind.LOOKUP, "other")


def test_a_cost_table_survives_its_file(tmp_path: Path) -> None:
    table = CostTable(rows=_rows([(10, 4, 100), (20, 8, 200)]), meta={"cores": 2})
    (tmp_path / "costs.json").write_text(table.to_json(), encoding="utf-8")
    again = read_cost_table(tmp_path / "costs.json")
    assert again.digest == table.digest
    assert again.meta == table.meta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "cost table version 9 is not known"),
        ({"columns": ["kind"], "rows": [["lookup"]]}, "missing column variant"),
        ({"columns": "kind"}, "columns must be a list of names, got 'kind'"),
        ({"columns": ["kind", "kind"]}, "columns must differ, got kind, kind"),
        ({"rows": "x"}, "rows must be a list, got 'x'"),
        ({"rows": []}, "no rows; write the table anew"),
        ({"rows": [[1, 2]]}, "row 0 must be a list of 17 values"),
        ({"meta": None}, "meta must be an object, got None"),
    ],
)
def test_a_damaged_cost_table_is_refused_by_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    value = json.loads(CostTable(rows=_rows([(10, 4, 100)])).to_json()) | change
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(TraceError, match=f"costs.json: .*{message}"):
        read_cost_table(path)


def test_a_negative_time_and_an_unknown_kind_are_refused_by_row() -> None:
    rows = _rows([(10, 4, 100), (20, 8, -1)])
    with pytest.raises(TraceError, match="row 1: time_ns_mean must be a number that is not negative, got -1"):
        CostTable(rows=rows)
    with pytest.raises(TraceError, match=r"row 0: unknown kind 'lookups'.*did you mean 'lookup'"):
        CostTable(rows=_rows([(10, 4, 100)]).assign(kind="lookups"))
    with pytest.raises(TraceError, match=r"row 0: unknown kind \"\['lookup'\]\""):
        CostTable(rows=_rows([(10, 4, 100)]).assign(kind=[["lookup"]]))
    with pytest.raises(TraceError, match="row 0: bytes must be a number that is not negative, got '12'"):
        CostTable(rows=_rows([(10, 4, 100)]).assign(bytes="12"))
    with pytest.raises(TraceError, match=r"row 0: time_ns_p50 must be a number.*got 1e\+300"):
        CostTable(rows=_rows([(10, 4, 100)]).assign(time_ns_p50=1e300))


@pytest.mark.parametrize("value", [None, "2", [], True, -1, float("nan"), float("inf")])
def test_a_number_of_the_meta_is_refused_by_table_and_key(value: object) -> None:
    table = CostTable(rows=_rows([(10, 4, 100)]), meta={"issue": {"p50_ns": value}}, name="my.json")
    with pytest.raises(TraceError, match=r"my.json: meta.issue.p50_ns must be a finite number.*profile"):
        table.number("issue", "p50_ns")
    with pytest.raises(TraceError, match=r"my.json: meta.issue.p50_ns.more is missing"):
        table.number("issue", "p50_ns", "more")


def test_redrawn_means_stay_within_their_sampling_error() -> None:
    rows = _rows([(10, 4, 1000.0)] * 400).assign(time_ns_p75=1067.45)
    drawn = resample(rows, np.random.default_rng(1))["time_ns_mean"]
    # sigma = 100 and 10 repeats: standard error 100 / sqrt(10)
    assert drawn.std() == pytest.approx(31.6, rel=0.1)
    assert drawn.mean() == pytest.approx(1000, abs=8)


def test_samples_of_one_point_become_one_row_of_medians() -> None:
    samples = pd.DataFrame({"point": "p", "kind": "lookup", "variant": "v", "time_ns": [10, 20, 30, 1000]})
    samples = samples.assign(
        world_size=2, link_bits_per_s=1, samples=1, keys=[1, 1, 3, 3], unique_keys=0, bytes=4, wire_ns=0
    )
    row = summarise(samples, source="by hand").iloc[0]
    assert (row["keys"], row["repeats"], row["time_ns_p50"], row["time_ns_max"]) == (2, 4, 25, 1000)


@pytest.mark.parametrize("text", [SERIAL, *(schedule for schedule, _ in PAIRS.values()), *TURNS.values()])
def test_profiled_schedules_pass_every_check(text: str) -> None:
    require_safe(loop_of(replace(CONFIG, schedule=text, micro_batches=3)))


def test_the_serial_schedule_has_every_op_and_overlaps_none() -> None:
    program = unroll(loop_of(CONFIG), 4)
    catalogue = {op.kind for name in ("sync", "sparse_dist", "dbp", "fwp", "nestpipe") for op in _ops(name)}
    assert catalogue <= {op.kind for op in program.ops}
    with pytest.raises(CaseError, match="ops run alone; got dbp"):
        _profiled(pd.DataFrame(), replace(CONFIG, schedule="dbp"))


def _ops(name: str) -> tuple[Op, ...]:
    return unroll(loop_of(replace(CONFIG, schedule=name)), 4).ops


def _profiled(frame: pd.DataFrame, config: RunConfig, world_size: int = 1) -> ProfiledRun:
    links = ShapedLinks(bits_per_s=(8_000_000_000,) * world_size, burst_bytes=1000)
    return ProfiledRun(frame=frame, config=config, sizes=sizes_of_run(config, world_size), links=links, name="run")


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """The spans of the serial schedule on one rank, in this process."""
    world = join_world()
    try:
        return run_configs(world, [CONFIG])
    finally:
        world.leave()


def test_sizes_are_known_before_the_run_to_the_byte(measured: pd.DataFrame) -> None:
    sizes = sizes_of_run(CONFIG, 1)
    _assert_sizes_match(measured, sizes.table)


def _assert_sizes_match(spans: pd.DataFrame, table: pd.DataFrame) -> None:
    key = ["rank", "kind", "batch", "micro_batch"]
    both = spans.astype({"kind": str}).merge(table, on=key, suffixes=("", "_known"))
    assert len(both) == len(spans)
    for kinds, name in (
        (("read", "copy_h2d", "all_to_all[keys]", "lookup", "sync", "write_back", "all_reduce"), "bytes"),
        (("all_to_all[rows]", "all_to_all[grads]"), "bytes"),
        (("read", "dedup", "all_to_all[keys]", "lookup", "sync", "forward", "write_back"), "keys"),
        (("dedup", "lookup", "sync", "write_back"), "unique_keys"),
    ):
        some = both[both["kind"].isin(kinds)]
        assert some[name].astype(float).tolist() == some[f"{name}_known"].astype(float).tolist(), name


def test_every_op_of_a_run_becomes_a_sample_and_every_kind_a_cost(measured: pd.DataFrame) -> None:
    run = _profiled(measured, CONFIG)
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


def test_a_ring_all_reduce_sends_twice_the_share_to_the_next_rank() -> None:
    assert ring_traffic(2, 100.0).tolist() == [[0.0, 100.0], [100.0, 0.0]]
    assert ring_traffic(4, 100.0).sum() == pytest.approx(4 * 150.0)
    assert ring_traffic(1, 100.0).sum() == 0


def test_an_emulated_device_takes_its_time_by_kind_and_size() -> None:
    from executor.runtime.lanes import Cost

    device = EmulatedDevice(launch_us=10, forward_us_per_sample=2, lookup_ns_per_row=5)
    assert device.time_ns(OpKind.FORWARD, Cost(), 100) == 210_000
    assert device.time_ns(OpKind.BACKWARD, Cost(), 100) == 410_000
    assert device.time_ns(OpKind.LOOKUP, Cost(keys=7, unique_keys=4), 0) == 10_020
    assert device.time_ns(OpKind.ALL_REDUCE, Cost(bytes=1 << 20), 0) == 0
    with pytest.raises(CaseError, match=r"unknown attribute 'lunch_us'.*did you mean 'launch_us'"):
        EmulatedDevice.parse(["lunch_us=1"])


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(CaseError, match="dim must be at least 1, got 0"):
        replace(CONFIG, dim=0)
    with pytest.raises(CaseError, match="micro_batches 32 is more than the batch of 24 samples"):
        replace(CONFIG, micro_batches=32)


def test_what_was_profiled_cannot_be_validated_on() -> None:
    configs = [config.values() for plan in (quick_plan, full_plan) for config in plan((None,)).configs()]
    profiled = CostTable(rows=_rows([(10, 4, 100)]), meta={"configurations": configs})
    used = full_plan((None,)).configs()[0]
    with pytest.raises(CaseError, match="was used in the profile; validate only on what no fit has seen"):
        check_separate(profiled, [replace(used, schedule="nestpipe", seed=5)])
    with pytest.raises(CaseError, match="was used in the profile"):
        check_separate(profiled, [replace(used, schedule="nestpipe", dim=7)])
    check_separate(profiled, [replace(used, schedule="nestpipe", dim=7, seed=5)])


@pytest.mark.parametrize("configurations", [None, [], {}, 3, [3], [{"dim": 8}], [{"dim": "8", "seed": 1}]])
def test_a_table_that_does_not_say_what_was_profiled_validates_nothing(configurations: object) -> None:
    table = CostTable(rows=_rows([(10, 4, 100)]), meta={"configurations": configurations}, name="my.json")
    with pytest.raises(TraceError, match=r"my.json: meta.configurations must say batch_size, dim, micro_batches, seed"):
        check_separate(table, [CONFIG])
    with pytest.raises(TraceError, match=r"my.json: meta.configurations is missing"):
        check_separate(replace(table, meta={}), [CONFIG])


def test_costs_depend_on_what_their_kind_touches() -> None:
    assert costs_of(OpKind.FORWARD) == ("samples", "keys", "bytes")
    assert "wire_ns" not in costs_of(OpKind.LOOKUP)


def test_two_ranks_on_a_testbed_move_what_was_worked_out_for_them() -> None:
    reason = testbed.refusal()
    if reason is not None:
        pytest.skip(reason)
    config = replace(CONFIG, schedule="nestpipe", device=EmulatedDevice(forward_us_per_sample=1.0))
    spans = run_on_testbed([config], [200_000_000] * 2, burst_bytes=262_144, realtime=False, timeout_s=120)
    sizes = sizes_of_run(config, 2)
    _assert_sizes_match(spans, sizes.table)
    # who sends what: rows and columns of the traffic, and each rank's own share, make up the bytes
    rows = sizes.table[(sizes.table["kind"] == "all_to_all[rows]") & (sizes.table["batch"] == 3)]
    for rank, micro_batch, sent in rows[["rank", "micro_batch", "bytes"]].itertuples(index=False):
        assert 0 < sizes.traffic[OpKind.ALL_TO_ALL_ROWS, 3, int(micro_batch)][rank].sum() < sent
