"""Times of a scenario's ops: neutral factors change nothing, and each factor does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.ir import OpKind, unroll
from nestpipe.schedules import load, names
from nestpipe.timeline.metrics import measure
from sim.costs.anchored import anchored_trace
from sim.costs.case import CaseWorkload
from sim.costs.run import run
from sim.costs.workload import Options
from sim.engine.costs import Jitter, TimedCosts
from sim.engine.engine import simulate
from sim.engine.folding import World
from sim.engine.recursion import rank_step_ns
from sim.scenario.changes import Changed
from sim.scenario.evaluate import Evaluator
from sim.scenario.file import load_scenario
from sim.scenario.grid import Grid
from sim.scenario.memory import buffer_sizes, memory_need
from sim.scenario.sections import Factors, MicroBatching
from tests.sim.scenario.scenarios import PLAIN, PRICED, RANDOM, grid, scenario, write
from topologies.cluster import load_cluster
from traces.formats.importing import import_traces
from traces.workloads.case import batch_times, growth_laws, load_case

CASE = load_case("nestpipe_paper")


def _row(found: Grid, index: int = 0) -> dict[str, object]:
    return Evaluator(grid=found).row(found[index])


@pytest.mark.parametrize("name", names())
def test_without_factors_the_step_is_that_of_the_case(name: str) -> None:
    found = grid(PLAIN, schedules=(name,), micro_batches=None, world_sizes=(1536,))
    workload = CaseWorkload.of(CASE)
    expected = run(workload.loop(load(name)), workload, None, Options(world_size=1536)).step_ns / 1e6
    assert _row(found)["step_ms"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["nestpipe", "nestpipe_2d_sp", "sparse_dist"])
def test_the_bound_of_a_row_equals_the_simulation(name: str) -> None:
    found = grid(
        PLAIN, schedules=(name,), micro_batches=4, world_sizes=(256,), factors=Factors(lookup_cost=3, skew=1.4)
    )
    evaluator = Evaluator(grid=found)
    steps = evaluator.steps(found[0])
    loop = CaseWorkload.of(CASE).loop(load(name), found.variants[0].micro_batches)
    costs = TimedCosts(batch_ns=steps.plain.batch_ns, micro_batches=loop.micro_batches)
    timeline = simulate(unroll(loop, 48), costs, World(world_size=256, domain_size=128))
    assert measure(timeline).step_latency_ms * 1e6 == pytest.approx(float(steps.bound.step_ns), rel=1e-6)


@pytest.mark.parametrize("name", names())
def test_the_recursion_is_the_engine(name: str) -> None:
    loop = CaseWorkload.of(CASE).loop(load(name), 4 if load(name).micro_batches > 1 else None)
    costs = TimedCosts(
        batch_ns=batch_times(growth_laws(CASE), CASE.values(), loop, 12),
        micro_batches=loop.micro_batches,
        jitter=Jitter(cv=0.2, stragglers={3: 1.7, 5: 1.2}, seed=5),
    )
    world = World(world_size=12, domain_size=4)
    expected = measure(simulate(unroll(loop, 16), costs, world)).step_latency_ms * 1e6
    assert rank_step_ns(loop, 16, costs, world).mean() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("factor", "kinds"),
    [
        ("link_bandwidth", {"all_to_all[keys]", "all_to_all[rows]", "all_to_all[grads]"}),
        ("lookup_cost", {"lookup", "write_back"}),
        ("compute_time", {"forward", "backward", "update", "dedup"}),
        ("communication_time", {"all_to_all[keys]", "all_to_all[rows]", "all_to_all[grads]"}),
        ("skew", {"lookup", "write_back", "all_to_all[keys]", "all_to_all[rows]", "all_to_all[grads]"}),
    ],
)
def test_a_factor_moves_what_it_names_and_that_counts_as_assumed(factor: str, kinds: set[str]) -> None:
    plain = Evaluator(grid=grid(PLAIN, schedules=("sync",)))
    changed = Evaluator(grid=grid(PLAIN, schedules=("sync",), factors=Factors(**{factor: 2.0})))
    before, after = (each.steps(each.grid[0]).plain for each in (plain, changed))
    moved = {kind.value for kind, ns in after.batch_ns.items() if ns != before.batch_ns[kind]}
    assert moved == kinds
    assert {after.ops.origin[OpKind(kind)] for kind in kinds} == {"assumed"}
    rests = plain.row(plain.grid[0]), changed.row(changed.grid[0])
    assert rests[1]["assumed"] >= rests[0]["assumed"]
    assert sum(rests[1][name] for name in ("fitted", "interpolated", "extrapolated", "assumed")) == pytest.approx(1)


def test_bandwidth_leaves_the_part_per_peer_and_peer_cost_leaves_the_bytes() -> None:
    law = growth_laws(CASE).communication
    fast = Evaluator(grid=grid(PLAIN, schedules=("sync",), world_sizes=(1536,), factors=Factors(link_bandwidth=1e12)))
    times = fast.steps(fast.grid[0]).plain.batch_ns
    sent = (times[OpKind.ALL_TO_ALL_ROWS] + times[OpKind.ALL_TO_ALL_GRADS]) / 1e6
    assert sent == pytest.approx(law.b * 1535, rel=1e-6)
    free = Evaluator(grid=grid(PLAIN, schedules=("sync",), world_sizes=(1536,), factors=Factors(peer_cost=0)))
    times = free.steps(free.grid[0]).plain.batch_ns
    assert (times[OpKind.ALL_TO_ALL_ROWS] + times[OpKind.ALL_TO_ALL_GRADS]) / 1e6 == pytest.approx(law.a, rel=1e-6)


def test_half_the_batch_takes_half_the_compute_and_is_assumed() -> None:
    whole, half = (_row(grid(PLAIN, schedules=("sync",), batch_per_worker=batch)) for batch in (512, 256))
    assert half["step_ms"] < whole["step_ms"] < 2 * half["step_ms"]
    assert half["assumed"] == pytest.approx(1)


def test_a_fixed_global_batch_is_shared_and_efficiency_counts_qps_per_worker() -> None:
    found = grid(PLAIN, schedules=("sync",), world_sizes=(128, 256), global_batch=128 * 512, micro_batches=None)
    rows = [_row(found, i) for i in range(2)]
    assert [row["batch_per_worker"] for row in rows] == [512, 256]
    assert rows[1]["scaling_efficiency"] == pytest.approx(rows[1]["qps"] / rows[0]["qps"] / 2)


def test_overhead_and_duplication_make_many_micro_batches_dear() -> None:
    text = PRICED.replace("overhead_us: 800", "overhead_us: 4000")
    found = grid(text, schedules=("nestpipe",), world_sizes=(1536,), micro_batches="auto", clusters={}, objective=None)
    steps = {each.variant.micro_batches: _row(found, each.index)["step_ms"] for each in found}
    best = min(steps, key=lambda each: steps[each])
    assert 1 < best < max(steps)


def test_seeds_give_an_interval_that_holds_the_mean_and_repeats() -> None:
    found = grid(RANDOM)
    rows = [_row(found, i) for i in range(len(found))]
    assert rows == [_row(grid(RANDOM), i) for i in range(len(found))]
    for row in rows:
        assert row["step_ms_low"] < row["step_ms"] < row["step_ms_high"]
        assert row["how"] == "6 seeds"


def test_each_cause_of_randomness_widens_alone() -> None:
    for name in ("jitter: {cv: 0.1}", "stragglers: {share: 0.1, slowdown: 1.5, cv: 0.2}", "vary_assumptions: true"):
        text = f"{PLAIN}seeds: 4\n{name}\n"
        row = _row(grid(text, schedules=("nestpipe",), world_sizes=(32,), micro_batches=4))
        assert row["step_ms_low"] < row["step_ms_high"], name


def test_memory_counts_tables_both_buffers_messages_and_activations_in_flight() -> None:
    memory = scenario(PRICED).memory
    assert memory is not None
    sizes = buffer_sizes(memory, 512, 8)
    plain, nested = (
        memory_need(memory, load(name), world_size=1024, batch_per_worker=512) for name in ("fwp", "nestpipe")
    )
    assert nested.device["rows x 2"] == 2 * plain.device["rows x 1"]
    assert nested.device["embeddings x 2"] == 2 * sizes[next(d for d in sizes if d == "embeddings")]
    assert nested.device["All2All send buffers"] == sizes[next(d for d in sizes if d == "row_grads")]
    assert nested.device["activations x 1"] == 512 * 60_000_000 // 8
    assert nested.host["tables"] == 8_000_000_000 * 512 // 1024
    assert nested.host["optimiser rows"] == 8_000_000_000 * 4 // 1024
    domains = memory_need(memory, load("nestpipe_2d_sp"), world_size=1024, batch_per_worker=512, domain_size=128)
    assert domains.host["tables"] == 8 * nested.host["tables"]
    assert nested.host_bytes(8) == 8 * sum(nested.host.values())


def test_a_case_on_its_own_topology_keeps_its_times() -> None:
    text = PLAIN.replace("scenario: plain", "scenario: plain\nclusters: {own: {topology: ascend_910b}}")
    own, plain = grid(text), grid(PLAIN)
    for index in range(len(own)):
        assert _row(own, index)["step_ms"] == pytest.approx(_row(plain, index)["step_ms"], rel=1e-4)
    row = _row(own)
    options = Options(world_size=128)
    at_home = run(load("sync"), CaseWorkload.of(CASE), load_cluster("ascend_910b"), options).rests_on
    assert {name: row[name] for name in at_home} == pytest.approx(at_home)
    assert at_home["fitted"] > 0.5
    assert row["how"] == "cycle bound"


def test_a_model_takes_its_times_from_the_hardware_and_contention_never_helps() -> None:
    text = """
scenario: model
workload: {model: hstu, compute_efficiency: 0.5}
clusters: {h100: {topology: dgx_h100, accelerator_hour: 3}, a100: {topology: dgx_a100, accelerator_hour: 2}}
schedules: [sync, nestpipe]
world_sizes: [32]
base_world_size: 8
batch_per_worker: 256
micro_batches: 4
steps: 12
"""
    alone, shared = grid(text), grid(text + "contention: true\n")
    for index in range(len(alone)):
        assert _row(shared, index)["step_ms"] >= _row(alone, index)["step_ms"] * (1 - 1e-6)
    h100, a100 = (row for row in (_row(alone, 0), _row(alone, 2)))
    assert h100["cluster"] == "h100"
    assert a100["cluster"] == "a100"
    assert h100["step_ms"] < a100["step_ms"]
    assert _row(shared)["how"] == "simulation"
    capacity = alone.hardware["h100"].accelerator.memory_capacity_bytes.value
    assert alone.scenario.clusters["h100"].device_memory_bytes == capacity


def test_a_trace_plans_from_what_was_recorded(tmp_path: Path) -> None:
    recorded = simulate(
        unroll(load("sync"), 8),
        TimedCosts(batch_ns=batch_times(growth_laws(CASE), CASE.values(), load("sync"), 16)),
        World(world_size=16),
    )
    frame = recorded.frame().astype({"stream": str, "kind": str, "op": str})
    frame = frame.assign(duration_ns=frame["end_ns"] - frame["start_ns"], group_size=16, source="measured: test")
    frame.to_csv(tmp_path / "recorded.csv", index=False)
    text = PLAIN.replace("[128, 1536]", "[16, 64]")
    text = text.replace("{case: nestpipe_paper}", "{trace: recorded.csv, recorded_batch_per_worker: 512}")
    found = Grid.of(load_scenario(write(tmp_path, text)))
    rows = [Evaluator(grid=found).row(configuration) for configuration in found]
    assert rows[0]["step_ms"] == pytest.approx(measure(recorded).step_latency_ms, rel=1e-6)
    assert rows[0]["measured"] == pytest.approx(1)
    assert rows[1]["status"] != "ok"
    assert "recorded on 16 ranks and says nothing of a network that joins 64" in rows[1]["reason"]
    nested = next(row for row in rows if row["schedule"] == "nestpipe")
    assert nested["step_ms"] < rows[0]["step_ms"]


def test_a_recorded_job_keeps_its_host_in_a_scenario(shared_data: Path) -> None:
    frame = import_traces(sorted((shared_data / "real/kineto/dlrm_v100x8").glob("*.json.gz"))).table.frame
    workload, _ = anchored_trace(frame)
    changed = Changed(workload=workload, factors=Factors(), micro_batching=MicroBatching())
    options = Options(world_size=8)
    for name in ("sparse_dist", "dbp"):
        own = run(load(name), workload, None, options)
        within = run(load(name), changed, None, options)
        assert within.step_ns == own.bound.step_ns
        assert within.metrics.step_latency_ms == own.metrics.step_latency_ms
        assert "host of backward" in within.bound.text()
