"""Costs from hardware: what is shared slows down, what is alike folds, and the paper's cluster stays what it was."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from nestpipe.base.errors import CaseError, TopologyError
from nestpipe.ir import Loop, Op, OpKind, Resource, unroll, with_micro_batches
from nestpipe.schedules import load, names
from sim.costs.case import CaseWorkload
from sim.costs.demand import Demand, demands_of_case, demands_of_preset
from sim.costs.hardware import HardwareCosts
from sim.costs.run import Run, run
from sim.costs.workload import OpCosts, Options, costs_of
from sim.engine.costs import Jitter
from sim.engine.engine import simulate
from sim.engine.folding import World
from sim.network.cost import Collectives, group_transfer, network_costs
from topologies.cluster import Cluster, load_cluster
from topologies.fabric import Fabric
from traces.workloads.case import Case, batch_times, growth_laws, load_case
from traces.workloads.models import preset

CASE = load_case("nestpipe_paper")
WORK = growth_laws(CASE)
ASCEND = load_cluster("ascend_910b")
H100 = load_cluster("dgx_h100")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A workload whose ops ask for what a test says."""

    demands: dict[OpKind, Demand]
    batch_per_worker: int = 1
    domain_size: int | None = None

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        return costs_of(self.demands, loop, cluster, options)


def case_run(loop: Loop, world_size: int, cluster: Cluster | None = None, case: Case = CASE, steps: int = 20) -> Run:
    return run(loop, CaseWorkload.of(case), cluster, Options(world_size=world_size, steps=steps))


def hardware_run(
    loop: Loop, cluster: Cluster, demands: dict[OpKind, Demand], world_size: int, communication_share: float = 0.0
) -> Run:
    options = Options(world_size=world_size, communication_share=communication_share)
    return run(loop, Asked(demands=demands), cluster, options)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("world_size", [128, 1536])
def test_the_paper_case_on_its_topology_is_the_paper_case(name: str, world_size: int) -> None:
    loop = load(name)
    plain = case_run(loop, world_size).metrics
    shared = case_run(loop, world_size, cluster=ASCEND).metrics
    assert shared.step_latency_ms == pytest.approx(plain.step_latency_ms, rel=1e-4)
    assert shared.communication_ms == pytest.approx(plain.communication_ms, rel=1e-3)


def _run(loop: Loop, demands: dict[OpKind, Demand], world: World, jitter: Jitter | None = None, *, folded: bool = True):
    costs = HardwareCosts(
        H100,
        demands,
        world_size=world.world_size,
        micro_batches=loop.micro_batches,
        domain_size=world.domain_size,
        jitter=jitter,
    )
    return simulate(unroll(loop, 8), costs, world, fold_ranks=folded)


@pytest.mark.parametrize("name", ["sync", "nestpipe", "2d_sp", "nestpipe_2d_sp", "async_prefetch"])
@pytest.mark.parametrize("stragglers", [{}, {3: 1.5}, {0: 2.0, 9: 1.25}])
def test_folded_equals_unfolded_with_shared_hardware(name: str, stragglers: dict[int, float]) -> None:
    loop = with_micro_batches(load(name), 2)
    world = World(world_size=32, domain_size=8)
    demands = demands_of_preset(preset("hstu"), H100, loop, batch=64, world_size=32)
    jitter = Jitter(stragglers=stragglers)
    folded = _run(loop, demands, world, jitter)
    unfolded = _run(loop, demands, world, jitter, folded=False)
    assert len(folded.ranks) < len(unfolded.ranks) == 32
    for row, rank in enumerate(folded.ranks):
        assert abs(folded.end_ns[row] - unfolded.end_ns[rank]).max() <= 64  # nanoseconds, rounding of rates


def test_a_case_on_other_hardware_takes_the_other_hardwares_time_and_says_so() -> None:
    slow = load_cluster("ethernet_25g")
    loop = load("sync")
    home = case_run(loop, 128, cluster=ASCEND)
    moved = case_run(loop, 128, cluster=slow)
    assert moved.metrics.communication_ms > 2 * home.metrics.communication_ms
    assert "fitted" in home.rests_on
    assert set(moved.rests_on) <= {"assumed", "extrapolated"}
    assert home.stages is not None
    assert moved.stages is not None
    there = moved.stages.set_index("kind")["origin"].to_dict()
    fitted = home.stages.set_index("kind")["origin"].eq("fitted").to_dict()
    assert there == {kind: "extrapolated" if is_fitted else "assumed" for kind, is_fitted in fitted.items()}
    assert fitted["forward"]
    assert not fitted["lookup"]
    with pytest.raises(CaseError, match="names no topology"):
        case_run(loop, 128, cluster=slow, case=msgspec.structs.replace(CASE, topology=None))


def test_a_case_runs_on_more_ranks_than_its_own_cluster_can_have() -> None:
    loop = load("sync")
    found = case_run(loop, 8192, cluster=load_cluster("dgx_h100"), steps=4)
    assert found.metrics.step_latency_ms > 0
    assert "fitted" not in found.rests_on
    with pytest.raises(TopologyError, match=r"ascend_910b: world_size must be 1 to 4,096 \(ranks_max\), got 8,192"):
        case_run(loop, 8192, cluster=ASCEND)


@pytest.mark.parametrize("topology", ["ascend_910b", "dgx_h100", "dgx_a100", "ethernet_25g", "zionex_a100"])
def test_an_op_alone_takes_its_fitted_time_on_the_cluster_it_was_fitted_on(topology: str) -> None:
    cluster = load_cluster(topology)
    loop = load("sync")
    times = batch_times(WORK, CASE.values(), loop, 64)
    costs = HardwareCosts(cluster, demands_of_case(WORK, CASE.values(), loop, cluster, 64), world_size=64)
    for kind, ns in times.items():
        assert costs.op_ns(Op(kind=kind, batch=0)) == pytest.approx(ns, rel=1e-3, abs=1e5), kind


def test_ranks_of_a_host_share_its_memory() -> None:
    loop = load("sync")
    demands = {OpKind.LOOKUP: Demand(dram_bytes=1e9)}
    times = []
    for ranks in (1, 2, 8, 16):
        timeline = _run(loop, demands, World(world_size=ranks))
        lookup = (timeline.ops["kind"] == "lookup").to_numpy()
        times.append(int((timeline.end_ns - timeline.start_ns)[0, lookup][0]))
    alone = 1e9 / H100.host.dram_bandwidth_bytes_per_s.value * 1e9
    assert times == pytest.approx([alone, 2 * alone, 8 * alone, 8 * alone], rel=1e-6)


def test_collectives_that_overlap_share_the_links() -> None:
    loop = load("nestpipe")
    steps = {}
    for share in (0.001, 0.5):
        demands = demands_of_case(WORK, {**CASE.values(), "key_bytes_share": share}, loop, ASCEND, 128)
        found = hardware_run(loop, ASCEND, demands, 128)
        steps[share] = found.metrics.step_latency_ms
        bound_ms = float(found.bound.step_ns) / 1e6
        assert found.metrics.step_latency_ms >= bound_ms * (1 - 1e-6)
    assert steps[0.5] > steps[0.001] + 1


def test_communication_slows_compute_only_where_a_share_is_given() -> None:
    loop = load("nestpipe")
    demands = demands_of_case(WORK, CASE.values(), loop, ASCEND, 128)
    steps = [
        hardware_run(loop, ASCEND, demands, 128, communication_share=share).metrics.step_latency_ms
        for share in (0.0, 1e-9, 0.2, 0.4)
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)
    assert steps[1] < steps[2] < steps[3]
    alone = hardware_run(
        load("sync"),
        ASCEND,
        demands_of_case(WORK, CASE.values(), load("sync"), ASCEND, 128),
        128,
        communication_share=0.4,
    )
    assert alone.metrics.step_latency_ms == pytest.approx(2569.0, rel=1e-4)  # nothing overlaps, so nothing slows


def test_time_of_its_own_stays_where_collectives_take_a_share_of_the_device() -> None:
    demands = {OpKind.FORWARD: Demand(fixed_ns=1_000_000, flops=1e12), OpKind.UPDATE: Demand(fixed_ns=500)}
    plain, shared = (hardware_run(load("sync"), H100, demands, 8, communication_share=share) for share in (0.0, 0.2))
    assert shared.metrics.step_latency_ms == pytest.approx(plain.metrics.step_latency_ms, abs=2e-6)


def test_a_faster_network_does_not_make_the_step_longer() -> None:
    loop = load("sync")
    demands = demands_of_preset(preset("dlrm"), H100, loop, batch=512, world_size=64)
    tiers = tuple(
        replace(t, bandwidth_bytes_per_s=replace(t.bandwidth_bytes_per_s, value=2 * t.bandwidth_bytes_per_s.value))
        if t.bandwidth_bytes_per_s is not None
        else t
        for t in H100.tiers
    )
    slow, fast = (
        hardware_run(loop, cluster, demands, 64).metrics.step_latency_ms
        for cluster in (H100, replace(H100, tiers=tiers))
    )
    assert fast < slow


def test_stages_name_the_busiest_resource_and_loads_are_shares() -> None:
    loop = load("nestpipe")
    demands = demands_of_preset(preset("hstu"), H100, loop, batch=512, world_size=512)
    found = hardware_run(loop, H100, demands, 512)
    assert found.stages is not None
    assert found.load is not None
    busiest = dict(zip(found.stages["kind"], found.stages["busiest_resource"], strict=True))
    assert busiest["lookup"].startswith("h2d")
    assert busiest["all_to_all[rows]"].startswith("rail")
    assert found.stages["utilisation"].between(0, 1 + 1e-9).all()
    assert found.load["utilisation"].between(0, 1 + 1e-9).all()
    assert sum(found.rests_on.values()) == pytest.approx(1)


_COLLECTIVES = {
    OpKind.ALL_TO_ALL_ROWS: "all_to_all",
    OpKind.ALL_REDUCE: "all_reduce",
    OpKind.ALL_REDUCE_TABLES: "all_reduce",
    OpKind.ALL_GATHER: "all_gather",
}


@pytest.mark.parametrize("topology", ["dgx_h100", "ethernet_25g", "ascend_910b"])
@pytest.mark.parametrize("name", ["sync", "2d_sp"])
@pytest.mark.parametrize("size", [1e4, 256e6])
def test_every_user_charges_a_collective_the_same(topology: str, name: str, size: float) -> None:
    """A run, the bound, replayed traces and `topology measured`, on world, domain and replica groups."""
    cluster, loop, world = load_cluster(topology), load(name), World(world_size=64, domain_size=16)
    fabric, replayed = Fabric(cluster, 64), network_costs(cluster, loop, 16)
    groups = {"world": range(64), "domain": range(16), "replica": range(0, 64, 16)}
    streams = [(op.kind, stream.resource) for stream in loop.streams for op in stream.ops if op.kind in _COLLECTIVES]
    assert streams
    for kind, resource in streams:
        ranks = groups[resource.value]
        whole = size * len(ranks) if kind is OpKind.ALL_GATHER else size
        alone_ns = Collectives.predicting(fabric).cost(_COLLECTIVES[kind], whole, ranks=ranks).time_ns
        assert round(replayed(kind, size, 64)) == alone_ns
        asked, on = {kind: Demand(sent_bytes=size)}, {kind: resource}
        costs = HardwareCosts(cluster, asked, world_size=64, domain_size=16, resources=on)
        assert costs.op_ns(Op(kind=kind, batch=0)) == alone_ns
        timeline = simulate(unroll(loop, 2), costs, world)
        run_ns = (timeline.end_ns - timeline.start_ns)[0, (timeline.ops["kind"] == kind.value).to_numpy()]
        if resource is not Resource.REPLICA:  # the replicas of a node share its links to the others
            assert abs(run_ns - alone_ns).max() <= 2


def test_an_all_reduce_over_slow_links_is_hierarchical() -> None:
    fabric = Fabric(load_cluster("ethernet_25g"), 256)
    found = group_transfer(fabric, OpKind.ALL_REDUCE, Resource.WORLD, None, 10e6).time_s
    assert found == Collectives(fabric).cost("all_reduce", 10e6, algorithm="hierarchical").time_s
    assert group_transfer(Fabric(H100, 64), OpKind.ALL_REDUCE_TABLES, Resource.REPLICA, 64, 1e9).time_s == 0


def test_impossible_hardware_is_refused() -> None:
    with pytest.raises(CaseError, match="compute_efficiency"):
        HardwareCosts(H100, {}, world_size=8, compute_efficiency=0)
    with pytest.raises(CaseError, match="communication_share"):
        HardwareCosts(H100, {}, world_size=8, communication_share=1)
    with pytest.raises(TopologyError, match="ranks_max"):
        HardwareCosts(H100, {}, world_size=10**9)
