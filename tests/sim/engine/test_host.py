"""The host as a lane: ops start no earlier than they are issued, and the bound knows it as the simulation does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from nestpipe.ir import OpKind, unroll
from nestpipe.schedules import load
from nestpipe.timeline.metrics import measure
from sim.costs.anchored import anchored_trace
from sim.costs.run import run
from sim.costs.trace import Mode, TraceCosts
from sim.costs.workload import Options
from sim.engine.bound import max_cycle_ratio
from sim.engine.engine import simulate
from sim.engine.folding import World
from sim.engine.host import Awaited, HostLane, issue_order
from traces.formats.importing import import_traces

KINDS = list(OpKind)
RECORDED = [OpKind.COPY_H2D, OpKind.LOOKUP, OpKind.FORWARD, OpKind.DEDUP, OpKind.BACKWARD, OpKind.UPDATE]
AWAITS = {
    OpKind.DEDUP: (Awaited(OpKind.DEDUP, 0, True, 0.5),),
    OpKind.FORWARD: (Awaited(OpKind.FORWARD, 0, False, 0.25), Awaited(OpKind.LOOKUP, 0, True)),
    OpKind.BACKWARD: (Awaited(OpKind.ALL_TO_ALL_KEYS, 1, False),),
}


def _costs(name: str, seed: int, scale: float) -> TraceCosts:
    draw = np.random.default_rng(seed)
    loop = load(name)
    batch_ns = {kind: np.array([float(draw.integers(1, 9)) * 800]) for kind in KINDS}
    work = {kind: int(scale * draw.integers(1, 9) * 100) for kind in KINDS if kind is not OpKind.READ}
    return TraceCosts(
        batch_ns=batch_ns,
        mode=Mode.MEAN,
        micro_batches=loop.micro_batches,
        seed=0,
        origin={},
        host=HostLane(order=issue_order(loop, RECORDED), work_ns=[work], awaits=AWAITS),
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("name", ["sync", "sparse_dist", "dbp", "fwp", "nestpipe", "async_prefetch"])
def test_the_bound_is_the_simulated_step(name: str, scale: float) -> None:
    for seed in range(4):
        loop, costs = load(name), _costs(name, seed, scale)
        timeline = simulate(unroll(loop, 40), costs, World(world_size=2))
        bound = max_cycle_ratio(loop, costs.op_ns, costs.host)
        assert measure(timeline).step_latency_ms * 1e6 == pytest.approx(float(bound.step_ns), rel=1e-3)
        plain = max_cycle_ratio(loop, costs.op_ns)
        assert bound.step_ns >= plain.step_ns


def test_a_slow_host_is_named_and_sets_the_step() -> None:
    loop, costs = load("sync"), _costs("sync", 1, 1000.0)
    assert costs.host is not None
    own = sum(costs.host.of_rank(0).get(op.kind, 0) for op in loop.ops)
    bound = max_cycle_ratio(loop, costs.op_ns, costs.host)
    assert float(bound.step_ns) == pytest.approx(own, rel=0.01)
    assert "host of backward" in bound.text()


def test_no_op_starts_before_the_host_has_come_to_it() -> None:
    costs = _costs("sparse_dist", 3, 50.0)
    frame = simulate(unroll(load("sparse_dist"), 10), costs, World(world_size=1)).frame()
    assert costs.host is not None
    for kind in ("forward", "backward", "update"):
        starts = frame.loc[frame["kind"] == kind, "start_ns"].tolist()
        work = costs.host.of_rank(0)[OpKind(kind)]
        assert all(later - sooner >= work for sooner, later in pairwise(starts))


@pytest.mark.parametrize(
    ("name", "host_matters"),
    [
        ("dlrm_v100x8/*", True),
        ("recsys_a100x8*", False),
        ("torchrec_sparsedist_v100x4_sst5/*", False),
        ("torchrec_sparsedist_v100x4_sst2_slow/*", True),
    ],
)
def test_the_recorded_schedule_comes_out_from_its_text(shared_data: Path, name: str, host_matters: bool) -> None:
    frame = import_traces(sorted((shared_data / "real/kineto").glob(name))).table.frame
    workload, found = anchored_trace(frame)
    assert found.anchored
    assert found.schedule == "sparse_dist"
    assert found.as_schedule_error is not None
    assert abs(found.as_schedule_error) < 0.05
    # without the host nothing makes up for it
    options = Options(world_size=workload.world_size)
    without = run(load("sparse_dist"), replace(workload, use=None), None, options).metrics.step_latency_ms
    assert abs(without / found.steady_ms - 1) > (0.5 if host_matters else 0.05)


def test_without_the_rank_that_stalls_the_others_keep_their_pace(shared_data: Path) -> None:
    folder = shared_data / "real/kineto/torchrec_sparsedist_v100x4_sst2_slow"
    workload, found = anchored_trace(import_traces(sorted(folder.glob("*"))).table.frame)
    late = next(iter(found.late_ms))
    assert late == 2
    even = run(load("sparse_dist"), workload.without_rank(late), None, Options(world_size=4))
    assert even.metrics.step_latency_ms < 0.2 * found.steady_ms
