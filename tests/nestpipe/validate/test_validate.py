"""Prediction from a cost table, the comparison with what was measured, its causes, and the figures."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import simpy
from typer.testing import CliRunner

from executor.compute import Compute, EmulatedDevice
from executor.profile.measure import full_plan, quick_plan
from executor.profile.run import RunConfig, loop_of, sizes_of_run
from executor.profile.samples import check_separate
from executor.testbed import namespaces as testbed
from nestpipe.base.errors import CaseError, NestPipeError, TraceError
from nestpipe.ir import OpKind, unroll
from nestpipe.timeline.metrics import measure
from nestpipe.validate.bench import BenchOptions, check_writable, open_bench
from nestpipe.validate.causes import CAUSES, split_error
from nestpipe.validate.compare import Outcome, compare, kind_errors, outcome_of, summarise
from nestpipe.validate.grid import Point, grid_names, load_grid
from nestpipe.validate.predict import Prediction, differences, machine_of, model_error, predict, rehearse
from nestpipe.validate.topology import topology_text
from reports.figures.sheet import save
from reports.figures.validation import history, predicted_against_measured, timeline_pair
from sim.costs.calibrated import CalibratedCosts, Machine, OpSizes
from sim.engine.engine import simulate
from sim.engine.folding import World
from topologies.cluster import parse_cluster
from traces.workloads.cost_table import COST_COLUMNS, CostFit, CostTable

CONFIG = RunConfig(schedule="nestpipe", micro_batches=2, batch_size=24, dim=8, num_rows=500, steps=12, seed=3)
MBIT = 1_000_000


def _fit(kind: OpKind, **coefficients: float) -> CostFit:
    sizes = dict.fromkeys(coefficients, 0.0)
    return CostFit(
        kind=kind,
        variant="v",
        coefficients=coefficients,
        low=sizes,
        high=dict.fromkeys(coefficients, 1e12),
        num_points=1,
        error=0.0,
        spread=0.0,
    )


def _table(config: RunConfig, *, handoff_ns: int = 10_000) -> CostTable:
    """Costs by hand: every local op 1 ms, keys 1 us each for lookup, collectives 100 us and their bytes on the wire."""
    rows = []
    for kind in OpKind:
        for scale in (1, 10, 100):
            values: dict[str, Any] = {
                "kind": kind.value,
                "variant": config.variant,
                "world_size": 2,
                "link_bits_per_s": 1,
            }
            values |= {"samples": scale, "keys": 10 * scale, "unique_keys": 0, "bytes": 0, "wire_ns": 0, "repeats": 5}
            local = 1e6 + (1e4 * scale if kind is OpKind.LOOKUP else 0)
            values |= {f"time_ns_{name}": local for name in ("mean", "min", "p50", "p75", "p95", "max")} | {
                "source": "by hand"
            }
            rows.append(values)
    meta = {"burst_bytes": 0, "cores": 8, "handoff": {"p50_ns": handoff_ns}, "issue": {"p50_ns": 1000}}
    meta |= {
        "turn_bytes": {},
        "rehearsal": [],
        "world_size": 2,
        "transfer_cores": 0.0,
        "repeatability_cv": {"real": 0.0, "emulated": 0.0},
        "configurations": [{"batch_size": 1, "dim": 1, "micro_batches": 1, "seed": 1}],
        "priority": "normal",
        "probe_ns": 1000,
    }
    return CostTable(rows=pd.DataFrame(rows, columns=list(COST_COLUMNS)), meta=meta)


def _simulated_transfers(machine: Machine, kinds: tuple[str, ...], *, first_bytes: float = 1000.0) -> dict[str, float]:
    """End of the first collective of each stream, in ns, for a loop of collectives that start at once.

    Each sends 1000 bytes both ways, the first one `first_bytes`.
    """
    lines = [f"  stream s{i} on world\n    {kind:<20}t" for i, kind in enumerate(kinds)]
    program = unroll(loop_of(replace(CONFIG, schedule="loop v1 t micro_batches=1\n" + "\n".join(lines) + "\n")), 1)
    both_ways = np.array([[0.0, 1000.0], [1000.0, 0.0]])
    traffic = {(OpKind(kind), 0, None): both_ways for kind in kinds}
    traffic[OpKind(kinds[0]), 0, None] = both_ways * first_bytes / 1000.0
    sizes = OpSizes(of=[{name: {"bytes": 2000.0} for name in traffic} for _ in range(2)], traffic=traffic)
    fits = {OpKind(kind): _fit(OpKind(kind), one=100.0, wire_ns=1.0) for kind in kinds}
    costs = CalibratedCosts(program=program, fits=fits, sizes=sizes, machine=machine)
    timeline = simulate(program, costs, World(world_size=2), fold_ranks=False)
    return dict(zip(timeline.ops["kind"], timeline.end_ns.max(axis=0).tolist(), strict=True))


def _links(**values: Any) -> Machine:
    return Machine(link_bytes_per_s=(1e9, 1e9), **values)  # 1 byte/ns


def test_a_transfer_takes_its_local_part_and_then_its_bytes_on_the_wire() -> None:
    assert _simulated_transfers(_links(), ("all_reduce",)) == {"all_reduce": 1100}


def test_a_rested_link_lets_its_burst_through_at_once() -> None:
    assert _simulated_transfers(_links(burst_bytes=400), ("all_reduce",)) == {"all_reduce": 700}
    assert _simulated_transfers(_links(burst_bytes=5000), ("all_reduce",)) == {"all_reduce": 100}


def test_two_transfers_at_once_share_the_links() -> None:
    ends = _simulated_transfers(_links(), ("all_reduce", "all_to_all[keys]"))
    assert ends == {"all_reduce": 2100, "all_to_all[keys]": 2100}


def test_local_parts_share_the_cores_or_queue_for_them() -> None:
    kinds = ("all_reduce", "all_to_all[keys]")
    # two ranks with two collectives each want four cores and have two
    shared = _simulated_transfers(_links(cores=2), kinds)
    assert shared == {"all_reduce": 2200, "all_to_all[keys]": 2200}
    queued = _simulated_transfers(_links(cores=2, run_to_completion=True), kinds)
    # the first in line starts its transfer after 50 ns, has the wire to itself for 50 ns, and needs a core for 50 after
    assert queued["all_reduce"] == 2050
    assert queued["all_to_all[keys]"] == 2100


@pytest.mark.parametrize(
    ("kind", "turn_bytes", "end_ns"),
    [
        ("all_reduce", 0, 120),  # 50 before, 10 bytes at half the rate, 50 after
        ("all_reduce", 300, 420),  # then 300 bytes of the other pass
        ("all_reduce", 5000, 1060),  # or all that the other has
        ("all_to_all[grads]", 300, 120),  # sends all it has at once, so has no turn to wait for
    ],
)
def test_a_small_collective_beside_a_large_one_waits_its_turns(kind: str, turn_bytes: float, end_ns: int) -> None:
    machine = _links(turn_bytes={OpKind(kind): turn_bytes})
    ends = _simulated_transfers(machine, (kind, "all_to_all[keys]"), first_bytes=10.0)
    assert ends == {kind: end_ns, "all_to_all[keys]": 1110}  # the large one loses only what the small one sends


def test_turns_cost_nothing_on_a_link_that_nobody_else_uses() -> None:
    machine = _links(turn_bytes={OpKind.ALL_REDUCE: 1e6})
    assert _simulated_transfers(machine, ("all_reduce",)) == {"all_reduce": 1100}


def test_costs_that_were_measured_in_a_crowd_hold_the_queue_already() -> None:
    alone = _simulated_transfers(_links(cores=4, run_to_completion=True), ("all_reduce",))
    crowd = _simulated_transfers(_links(cores=4, run_to_completion=True, crowding=2.0), ("all_reduce",))
    assert (alone["all_reduce"], crowd["all_reduce"]) == (1100, 1050)
    # and where two ranks share one core, the queue doubles them again
    again = _simulated_transfers(_links(cores=1, run_to_completion=True, crowding=2.0), ("all_reduce",))
    assert again["all_reduce"] == 1100
    with pytest.raises(CaseError, match=r"crowding must be 1 or more, got 0\.5"):
        _links(crowding=0.5)


def test_an_impossible_machine_is_refused() -> None:
    with pytest.raises(CaseError, match="link_bytes_per_s of rank 1 must be positive, got 0"):
        Machine(link_bytes_per_s=(1.0, 0.0))
    with pytest.raises(CaseError, match="handoff_ns must not be negative, got -1"):
        _links(handoff_ns=-1)
    with pytest.raises(CaseError, match="turn_bytes of all_reduce must not be negative, got -5"):
        _links(turn_bytes={OpKind.ALL_REDUCE: -5})


def test_a_schedule_with_ops_that_were_not_profiled_is_refused_by_kind() -> None:
    program = unroll(loop_of(CONFIG), 6)
    with pytest.raises(CaseError, match=r"the cost table has no cost of all_reduce, .*profile again"):
        CalibratedCosts(program=program, fits={}, sizes=OpSizes(of=(), traffic={}), machine=_links())


def test_a_prediction_needs_no_run_and_is_the_same_every_time() -> None:
    table = _table(CONFIG)
    machine = machine_of(table, [200 * MBIT] * 2)
    one, two = (predict(CONFIG, table, machine, draws=4, seed=1) for _ in range(2))
    assert one.timeline.frame().equals(two.timeline.frame())
    assert (one.step_ms_low, one.step_ms_high) == (two.step_ms_low, two.step_ms_high)
    # four computing ops of 1 ms, two dedups and an update on the compute stream bound the step from below
    assert one.metrics.step_latency_ms >= 7
    sync = predict(replace(CONFIG, schedule="sync"), table, machine, draws=0)
    assert sync.metrics.step_latency_ms > one.metrics.step_latency_ms


def test_a_faster_link_never_hurts_and_a_slower_one_never_helps() -> None:
    table = _table(CONFIG)
    sizes = sizes_of_run(CONFIG, 2)
    steps = [
        predict(CONFIG, table, machine_of(table, [rate * MBIT] * 2), draws=0, sizes=sizes).metrics.step_latency_ms
        for rate in (1, 5, 50)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[2]


def test_how_far_rehearsed_schedules_were_off_widens_the_interval() -> None:
    table = _table(CONFIG)
    machine = machine_of(table, [200 * MBIT] * 2)
    step_ms = predict(CONFIG, table, machine, draws=0).metrics.step_latency_ms
    row = {"config": asdict(CONFIG), "rate_bits_per_s": 200 * MBIT}
    rows = [{**row, "step_ms": step_ms / 1.03}, {**row, "step_ms": step_ms / 0.96}]
    rehearsed = rehearse(CostTable(rows=table.rows, meta={**table.meta, "world_size": 2, "rehearsal": rows}))
    assert [each.error for each in rehearsed] == pytest.approx([0.03, -0.04])
    bias = model_error(rehearsed, Compute.REAL)
    assert bias == pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2))
    assert model_error(rehearsed, Compute.EMULATED) == 0
    narrow, wide = (predict(CONFIG, table, machine, draws=0, bias=value) for value in (0.0, bias))
    assert narrow.step_ms_high == narrow.step_ms_low
    # normal: 1.645 standard deviations on either side hold 9 of 10
    assert wide.step_ms_high / step_ms - 1 == pytest.approx(1.645 * bias)


def test_a_table_without_rehearsed_schedules_is_refused() -> None:
    table = _table(CONFIG)
    meta = {name: value for name, value in table.meta.items() if name != "rehearsal"}
    with pytest.raises(TraceError, match="rehearsal"):
        rehearse(CostTable(rows=table.rows, meta=meta))


@pytest.mark.parametrize(
    "change",
    [
        {"config": "sync"},
        {"config": {}},
        {"rate_bits_per_s": float("inf")},
        {"step_ms": None},
        {"step_ms": 0},
        {"step_ms": float("nan")},
    ],
)
def test_a_damaged_rehearsal_is_refused_by_key(change: dict[str, Any]) -> None:
    row: dict[str, Any] = {"config": CONFIG.values(), "rate_bits_per_s": 200 * MBIT, "step_ms": 10.0}
    table = _table(CONFIG)
    for rows in ([{**row, **change}], [3]):
        with pytest.raises(TraceError, match=r"cost table: meta.rehearsal must have .*nestpipe profile"):
            rehearse(replace(table, meta={**table.meta, "world_size": 2, "rehearsal": rows}))


def test_a_cost_table_without_what_lanes_take_is_refused() -> None:
    table = _table(CONFIG)
    meta = {name: value for name, value in table.meta.items() if name != "handoff"}
    with pytest.raises(TraceError, match=r"cost table: meta\.handoff\.p50_ns is missing; write the table anew"):
        machine_of(CostTable(rows=table.rows, meta=meta), [MBIT] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cores": 0}, "meta.cores must be positive, got 0"),
        ({"cores": float("inf")}, "meta.cores must be a finite number"),
        ({"handoff": None}, "meta.handoff.p50_ns is missing"),
        ({"issue": {"p50_ns": float("inf")}}, "meta.issue.p50_ns must be a finite number"),
        ({"turn_bytes": None}, "meta.turn_bytes must be bytes by op kind, got None"),
        ({"turn_bytes": {"all_reduced": 1}}, "meta.turn_bytes must be bytes by op kind"),
        ({"turn_bytes": {"all_reduce": float("nan")}}, "meta.turn_bytes.all_reduce must be a finite number"),
        ({"priority": 3}, "meta.priority must be text, got 3"),
        ({"repeatability_cv": {"real": -1}}, "meta.repeatability_cv.real must be a finite number"),
        ({"repeatability_cv": {}}, "meta.repeatability_cv.real is missing"),
    ],
)
def test_a_machine_that_cannot_be_is_refused_by_key(change: dict[str, Any], message: str) -> None:
    table = _table(CONFIG)
    table = replace(table, meta={**table.meta, **change}, name="my.json")
    with pytest.raises(TraceError, match=f"my.json: {message}.*nestpipe profile"):
        predict(CONFIG, table, machine_of(table, [MBIT] * 2), draws=2)


def test_what_runs_otherwise_than_profiled_is_said() -> None:
    table = _table(CONFIG)
    assert differences(table, {"priority": "normal", "bench": "torchrun"}) == []
    assert differences(table, {"priority": "realtime"}) == ["priority is realtime here and was normal in the profile"]


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    table = _table(CONFIG)
    return predict(CONFIG, table, machine_of(table, [200 * MBIT] * 2), draws=4)


def test_the_causes_of_an_error_sum_to_it_and_nothing_is_left_for_equal_timelines(prediction: Prediction) -> None:
    program = unroll(loop_of(CONFIG), CONFIG.steps)
    causes = split_error(program, prediction.timeline, prediction.timeline)
    assert set(causes) == set(CAUSES)
    assert sum(causes.values()) == pytest.approx(0, abs=1e-9)
    assert all(abs(causes[name]) < 1e-9 for name in CAUSES)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [("forward", "op_cost"), ("all_to_all[rows]", "interference"), ("all_to_all[grads]", "interference")],
)
def test_an_op_that_takes_longer_than_predicted_is_found_as_the_cause(kind: str, cause: str) -> None:
    config = replace(CONFIG, schedule="sync")
    table = _table(config)
    machine = machine_of(table, [200 * MBIT] * 2)
    program = unroll(loop_of(config), config.steps)
    slower = table.rows.copy()
    mine = slower["kind"] == kind
    for name in ("mean", "min", "p50", "p75", "p95", "max"):
        slower.loc[mine, f"time_ns_{name}"] += 2_000_000
    before = predict(config, table, machine, draws=0)
    after = predict(config, CostTable(rows=slower, meta=table.meta), machine, draws=0)
    causes = split_error(program, before.timeline, after.timeline)
    assert causes[cause] == pytest.approx(4.0, rel=0.05)  # twice 2 ms, one for each micro-batch
    assert sum(causes.values()) == pytest.approx(after.metrics.step_latency_ms - before.metrics.step_latency_ms)


def test_slower_hand_overs_are_found_as_the_cause() -> None:
    config = replace(CONFIG, schedule="sync")
    machines = [machine_of(_table(config, handoff_ns=each), [200 * MBIT] * 2) for each in (10_000, 310_000)]
    before, after = (predict(config, _table(config), machine, draws=0) for machine in machines)
    causes = split_error(unroll(loop_of(config), config.steps), before.timeline, after.timeline)
    assert causes["hand_over"] == pytest.approx(sum(causes.values()), rel=0.05)


def _outcome(schedule: str, predicted: Prediction, factor: float) -> Outcome:
    """A point whose measured timeline is the predicted one, slower by a factor."""
    frame = predicted.timeline.frame()
    for name in ("start_ns", "end_ns", "wait_ns"):
        frame[name] = (frame[name] * factor).round().astype(np.int64)
    point = Point(config=replace(CONFIG, schedule=schedule), rate_bits_per_s=200 * MBIT)
    return outcome_of(point, predicted, [frame.assign(load=0.5, slowdown=1.0)])


def test_errors_speedups_and_rankings_follow_their_definitions() -> None:
    table = _table(CONFIG)
    machine = machine_of(table, [200 * MBIT] * 2)
    predicted = {
        name: predict(replace(CONFIG, schedule=name), table, machine, draws=4) for name in ("sync", "nestpipe")
    }
    outcomes = [_outcome("sync", predicted["sync"], 1.0), _outcome("nestpipe", predicted["nestpipe"], 1.1)]
    rows = compare(outcomes)
    assert rows["error"].tolist() == pytest.approx([0.0, 1 / 1.1 - 1], abs=1e-3)
    assert rows["speedup_error"].tolist() == pytest.approx([0.0, 0.1], abs=2e-3)
    assert rows["inside"].tolist() == [True, False]
    summary = summarise(rows)
    assert summary["mean_absolute_error"] == pytest.approx(0.1 / 2.2, abs=1e-3)
    assert summary["worst_absolute_error"] == pytest.approx(0.1 / 1.1, abs=1e-3)
    assert (summary["rankings_right"], summary["rankings_judged"]) == (1, 1)
    kinds = kind_errors(outcomes).set_index("kind")
    assert kinds.loc["forward", "error"] == pytest.approx(-0.1 / 2.2, abs=2e-3)  # one of two runs is slower


def test_no_grid_touches_what_any_profile_fits_on() -> None:
    rows = _table(CONFIG).rows
    for plan in (quick_plan, full_plan):
        profiled = [config.values() for config in plan((None, EmulatedDevice())).configs()]
        rates = set(plan((None,)).rates_bits_per_s)
        for name in grid_names():
            points = load_grid(name, EmulatedDevice())
            check_separate(CostTable(rows=rows, meta={"configurations": profiled}), [each.config for each in points])
            assert not rates & {point.rate_bits_per_s for point in points}
    assert all(
        len(load_grid(name, None)) == (35 if name.startswith(("held_out", "development")) else 5)
        for name in grid_names()
    )
    workloads = [{point.config.workload for point in load_grid(name, None)} for name in grid_names()]
    assert len(set.union(*workloads)) == sum(map(len, workloads)), "grids share no workload either"


def test_predicting_leaves_the_costs_as_they_are() -> None:
    table = _table(CONFIG)
    digest = table.digest
    predict(CONFIG, table, machine_of(table, [200 * MBIT] * 2), draws=3)
    assert table.digest == digest


def test_the_command_refuses_to_validate_on_what_was_profiled(tmp_path: Path) -> None:
    from nestpipe.cli.validate import validate

    table = _table(CONFIG)
    used = load_grid("quick", None)[0].config
    spoiled = CostTable(rows=table.rows, meta={**table.meta, "configurations": [used.values() | {"device": None}]})
    path = tmp_path / "costs.json"
    path.write_text(spoiled.to_json(), encoding="utf-8")
    with pytest.raises(CaseError, match="validate only on what no fit has seen"):
        validate(costs=path, grid="quick", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": float("nan")}, "--tolerance and --seed must not be negative, got nan and 0"),
        ({"seed": -1}, "--tolerance and --seed must not be negative, got 0.05 and -1"),
        ({"rate": 100.0}, "--rate-mbit-per-s is for torchrun; on a testbed links have the rates of the grid"),
        ({"timeout_s": 0.0}, "--timeout-s must be positive, got 0"),
        ({"patience_s": float("nan")}, "--patience-s must not be negative, got nan"),
        ({"world_size": 1}, "--world-size must be 2 to 250, got 1"),
        ({"world_size": 999}, "--world-size must be 2 to 250, got 999"),
        ({"device": "cuda"}, "--backend gloo --device cuda: a testbed has gloo and cpu only"),
    ],
)
def test_impossible_options_are_refused_before_anything_runs(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    from nestpipe.cli.validate import validate

    path = tmp_path / "costs.json"
    path.write_text(_table(CONFIG).to_json(), encoding="utf-8")
    with pytest.raises(CaseError, match=message):
        validate(**{"costs": path, "out": tmp_path / "out", **options})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": [float("nan")]}, "--rate-mbit-per-s must be a positive number, got nan"),
        ({"rate": [-5.0]}, "--rate-mbit-per-s must be a positive number, got -5"),
        ({"backend": "nccl"}, "--backend nccl --device cpu: a testbed has gloo and cpu only"),
        ({"device": "cuda", "topology": Path("node.yaml")}, "--topology describes ranks that are cores of a host"),
    ],
)
def test_impossible_options_of_a_profile_are_refused(options: dict[str, Any], message: str) -> None:
    from nestpipe.cli.profile import profile

    with pytest.raises(CaseError, match=message):
        profile(**options)


def test_what_could_not_be_written_after_minutes_is_refused_before(tmp_path: Path) -> None:
    check_writable(None, tmp_path / "new" / "costs.json")
    assert not (tmp_path / "new" / "costs.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(NestPipeError, match="file: cannot be made a folder"):
        check_writable(tmp_path / "file" / "costs.json")
    with pytest.raises(CaseError, match="it is a folder"):
        check_writable(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "line 1: not valid JSON"),
        (b"\xff", "byte 0 is not UTF-8 text"),
        (b"3\n", "entry 0 must be an object, got 3"),
        (b"\n{}\n", "entry 0 lacks commit, grid"),
    ],
)
def test_a_damaged_history_is_refused_before_anything_runs(tmp_path: Path, content: bytes, message: str) -> None:
    from nestpipe.cli.validate import validate

    costs, lines = tmp_path / "costs.json", tmp_path / "history.jsonl"
    costs.write_text(_table(CONFIG).to_json(), encoding="utf-8")
    lines.write_bytes(content)
    with pytest.raises(TraceError, match=f"history.jsonl: {message}"):
        validate(costs=costs, out=tmp_path / "out", history=lines)
    assert lines.read_bytes() == content
    with pytest.raises(TraceError, match="Is a directory"):
        validate(costs=costs, out=tmp_path / "out", history=tmp_path)


def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun would set for a world of one rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_under_torchrun_the_rate_of_the_links_must_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nestpipe.cli.profile import profile

    _torchrun(monkeypatch)
    with pytest.raises(CaseError, match="--rate-mbit-per-s is missing: under torchrun links are not shaped"):
        profile(out=tmp_path / "costs.json")


def test_the_ranks_of_torchrun_run_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    _torchrun(monkeypatch)
    with open_bench(BenchOptions(world_size=7, timeout_s=60)) as here:
        frame = here.run([replace(CONFIG, steps=6)], 1)
        assert (here.world_size, here.first, here.conditions["bench"]) == (1, True, "torchrun")
    assert set(frame["kind"].astype(str)) == {op.kind.value for op in unroll(loop_of(CONFIG), 6).ops}


def test_the_profiled_machine_is_a_topology_that_can_be_read() -> None:
    table = _table(replace(CONFIG, device=None))
    meta = {**table.meta, "world_size": 2, "rates_bits_per_s": [800_000_000]}
    cluster = parse_cluster(topology_text(CostTable(rows=table.rows, meta=meta)), "this_machine.yaml")
    assert cluster.host.cores.value == table.meta["cores"]
    assert cluster.tiers[0].bandwidth_bytes_per_s is not None
    assert cluster.tiers[0].bandwidth_bytes_per_s.value == 1e8
    assert cluster.accelerator.compute_flops_per_s.source.startswith("measured")


def test_an_unknown_grid_is_refused_with_a_suggestion() -> None:
    with pytest.raises(CaseError, match=r"unknown grid 'quik'.*did you mean 'quick'.*or give a \.yaml file"):
        load_grid("quik", None)


GRID = """\
format: nestpipe-grid-1
purpose: mine
seed: 3
steps: 6
schedules: [sync, dbp]
workloads:
  - {micro_batches: 2, batch_size: 24, dim: 8, rate_mbit_per_s: 0.5}
  - {micro_batches: 1, batch_size: 16, dim: 4, rate_mbit_per_s: 100}
"""


def test_a_grid_may_be_a_file_and_runs_every_schedule_on_every_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GRID)
    found = [(p.config.schedule, p.config.batch_size, p.rate_bits_per_s) for p in load_grid(path, None)]
    assert found == [("sync", 24, 500_000), ("dbp", 24, 500_000), ("sync", 16, 100 * MBIT), ("dbp", 16, 100 * MBIT)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dim: 8", "dim: 0", r"workloads\[0\]\.dim"),
        ("steps: 6", "steps: 3", "steps"),
        ("seed: 3", "seeds: 3", r"unknown key 'seeds' \(did you mean 'seed'\?\)"),
        ("batch_size: 24", "batch_size: 1", r"workloads\[0\]: configuration sync: micro_batches 2 is more than"),
        ("[sync, dbp]", "[sync, dpb]", r"workloads\[0\]: unknown schedule 'dpb'"),
        ("nestpipe-grid-1", "nestpipe-grid-2", "format"),
    ],
)
def test_an_invalid_grid_file_is_refused_by_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GRID.replace(old, new))
    with pytest.raises(CaseError, match=f"mine.yaml: .*{message}"):
        load_grid(path, None)


def test_figures_show_every_configuration(prediction: Prediction, tmp_path: Path) -> None:
    rows = compare([_outcome("sync", prediction, 1.0), _outcome("nestpipe", prediction, 1.02)])
    figure = predicted_against_measured(rows)
    assert {text.get_text() for text in figure.axes[0].get_legend().get_texts()} >= {"sync", "nestpipe", "±5 %"}
    assert save(figure, tmp_path / "points.png").stat().st_size > 10_000
    pair = timeline_pair(prediction.timeline, prediction.timeline, name="nestpipe")
    assert [axes.get_title("left").split(":")[0] for axes in pair.axes] == ["nestpipe predicted", "nestpipe measured"]


def test_an_axis_of_less_than_a_decade_has_ticks_enough() -> None:
    steps = np.array([33.0, 48.0, 92.0])
    table = pd.DataFrame({"schedule": "sync", "predicted_ms": steps, "low_ms": steps, "high_ms": steps})
    figure = predicted_against_measured(table.assign(measured_ms=steps, error=0.0))
    assert figure.axes[0].get_xticks().tolist() == [30, 40, 50, 60, 80, 100]


def test_the_history_is_drawn_in_order_and_a_damaged_one_is_refused() -> None:
    entry = {
        "commit": "abc",
        "grid": "quick",
        "world_size": 2,
        "compute": "real",
        "mean_absolute_error": 0.04,
        "worst_absolute_error": 0.1,
    }
    figure = history([entry, {**entry, "commit": "def"}])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == [
        "abc\nquick\n2 ranks\nreal",
        "def\nquick\n2 ranks\nreal",
    ]
    many = history([entry] * 40)
    assert many.get_figwidth() / 40 >= 0.6, "labels would cover each other"
    with pytest.raises(TraceError, match="entry 0 lacks grid"):
        history([{name: value for name, value in entry.items() if name != "grid"}])
    with pytest.raises(
        TraceError, match="entry 1: worst_absolute_error must be a number that is not negative, got '1'"
    ):
        history([entry, {**entry, "worst_absolute_error": "1"}])
    with pytest.raises(TraceError, match="no entry to draw"):
        history([])


def test_measured_metrics_come_from_the_same_code_as_predicted(prediction: Prediction) -> None:
    outcome = _outcome("nestpipe", prediction, 2.0)
    assert outcome.step_ms == pytest.approx(2 * measure(prediction.timeline).step_latency_ms, rel=1e-6)


def test_costs_that_vary_have_a_mean_factor_of_one() -> None:
    fits = {OpKind.FORWARD: _fit(OpKind.FORWARD, one=1e6)}
    program = unroll(
        loop_of(replace(CONFIG, schedule="loop v1 t micro_batches=1\n  stream s on compute\n    forward t\n")), 400
    )
    sizes = OpSizes(of=[{(OpKind.FORWARD, batch, None): {} for batch in range(400)}], traffic={})
    costs = CalibratedCosts(
        program=program, fits=fits, sizes=sizes, machine=_links(), spread={OpKind.FORWARD: 0.2}, seed=1
    )
    times = [work.time_ns for work in costs.local(program.ops, 0)]
    assert np.mean(times) == pytest.approx(1e6, rel=0.03)
    assert np.std(times) == pytest.approx(2e5, rel=0.15)
    assert isinstance(costs.start(simpy.Environment(), costs.local(program.ops, 0)[0]), simpy.Event)


def test_profile_and_validate_close_the_loop_on_a_testbed(tmp_path: Path) -> None:
    """The reduced loop, under a minute on two cores; a wrong unit or a missing wait would be off by more than half."""
    reason = testbed.refusal()
    if reason is not None:
        pytest.skip(reason)
    from nestpipe.cli import app

    costs, out = str(tmp_path / "costs.json"), tmp_path / "out"
    profiled = CliRunner().invoke(app, ["profile", "--quick", "--out", costs, "--patience-s", "1"])
    assert profiled.exit_code == 0, profiled.output
    command = ["validate", "--costs", costs, "--grid", "quick", "--out", str(out), "--tolerance", "0.5"]
    command += ["--repeats", "1", "--draws", "2", "--patience-s", "1", "--history", str(tmp_path / "history.jsonl")]
    validated = CliRunner().invoke(app, command)
    assert validated.exit_code == 0, validated.output
    result = json.loads((out / "validation.json").read_text())
    written = json.loads((out / "predictions.json").read_text())
    assert [row["predicted_ms"] for row in result["rows"]] == [row["predicted_ms"] for row in written["rows"]]
    assert result["summary"]["configurations"] == 5
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1
