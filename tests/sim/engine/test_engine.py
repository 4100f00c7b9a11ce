"""The simulator: closed forms, the cycle bound, folding, jitter, deadlock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestpipe.base.errors import CaseError, DeadlockError, ScheduleError, TopologyError
from nestpipe.ir import Loop, Op, OpKind, OpRef, Resource, unroll, with_micro_batches
from nestpipe.schedules import load, names
from nestpipe.timeline.metrics import measure
from sim.engine.bound import max_cycle_ratio
from sim.engine.costs import Jitter, TimedCosts
from sim.engine.engine import simulate
from sim.engine.folding import World, fold
from tests.strategies import loops

MS = 1_000_000
BATCH_NS = {
    OpKind.READ: 40 * MS,
    OpKind.COPY_H2D: 10 * MS,
    OpKind.DEDUP: 2 * MS,
    OpKind.ALL_TO_ALL_KEYS: 60 * MS,
    OpKind.LOOKUP: 70 * MS,
    OpKind.SYNC: 1 * MS,
    OpKind.ALL_TO_ALL_ROWS: 48 * MS,
    OpKind.FORWARD: 60 * MS,
    OpKind.BACKWARD: 120 * MS,
    OpKind.ALL_TO_ALL_GRADS: 48 * MS,
    OpKind.ALL_REDUCE: 5 * MS,
    OpKind.ALL_REDUCE_TABLES: 7 * MS,
    OpKind.UPDATE: 3 * MS,
    OpKind.WRITE_BACK: 9 * MS,
}
WORLD = World(world_size=8, domain_size=4)


def run(loop: Loop, steps: int = 20, world: World = WORLD, jitter: Jitter | None = None, **options):
    costs = TimedCosts(batch_ns=BATCH_NS, micro_batches=loop.micro_batches, jitter=jitter or Jitter())
    return simulate(unroll(loop, steps), costs, world, **options)


def test_without_overlap_a_step_is_the_sum_of_its_ops() -> None:
    step_ms = measure(run(load("sync"))).step_latency_ms
    absent = {OpKind.SYNC, OpKind.ALL_REDUCE_TABLES}
    assert step_ms == sum(ns for kind, ns in BATCH_NS.items() if kind not in absent) / MS


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_fwp_exposes_one_share_of_the_all_to_all(micro_batches: int) -> None:
    metrics = measure(run(with_micro_batches(load("fwp"), micro_batches)))
    assert metrics.exposed_communication_ratio == pytest.approx(1 / micro_batches, rel=1e-12)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_the_cycle_bound_is_the_simulated_step(name: str, micro_batches: int) -> None:
    loop = with_micro_batches(load(name), micro_batches)
    costs = TimedCosts(batch_ns=BATCH_NS, micro_batches=micro_batches)
    bound = max_cycle_ratio(loop, costs.op_ns)
    assert measure(run(loop, steps=40)).step_latency_ms * MS == pytest.approx(float(bound.step_ns), rel=1e-12)


@settings(max_examples=60)
@given(loops(), st.integers(0, 2**32))
def test_the_cycle_bound_is_the_simulated_step_of_any_loop(loop: Loop, seed: int) -> None:
    durations = np.random.default_rng(seed).integers(0, 50, len(OpKind))
    costs = TimedCosts(batch_ns=dict(zip(OpKind, map(int, durations), strict=True)), micro_batches=loop.micro_batches)
    bound = max_cycle_ratio(loop, costs.op_ns)
    steps, settled, span = 170, 96, 60  # 60 is a multiple of every period up to 6
    timeline = simulate(unroll(loop, steps), costs, World(world_size=2))
    of_step = timeline.ops["step"].to_numpy()
    ends = [int(timeline.end_ns[:, of_step <= step].max()) for step in (settled, settled + span)]
    assert ends[1] - ends[0] == bound.step_ns * span


@given(loops(), st.integers(0, 2**32))
def test_busiest_stream_and_critical_cycle_never_exceed_the_makespan(loop: Loop, seed: int) -> None:
    durations = np.random.default_rng(seed).integers(0, 50, len(OpKind))
    costs = TimedCosts(batch_ns=dict(zip(OpKind, map(int, durations), strict=True)), micro_batches=loop.micro_batches)
    timeline = simulate(unroll(loop, 12), costs, World(world_size=2))
    busy = timeline.end_ns - timeline.start_ns - timeline.wait_ns
    per_stream = [
        busy[:, (timeline.ops["stream"] == name).to_numpy()].sum() / 2 for name in timeline.ops["stream"].unique()
    ]
    assert max(per_stream) <= timeline.makespan_ns


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("stragglers", [{}, {3: 1.5}, {0: 2.0, 5: 2.0, 6: 1.25}])
def test_folded_equals_unfolded(name: str, stragglers: dict[int, float]) -> None:
    loop = with_micro_batches(load(name), 2)
    jitter = Jitter(stragglers=stragglers)
    folded = run(loop, 8, jitter=jitter)
    unfolded = run(loop, 8, jitter=jitter, fold_ranks=False)
    assert len(folded.ranks) <= len(unfolded.ranks) == 8
    for row, rank in enumerate(folded.ranks):
        for ours, theirs in ((folded.start_ns, unfolded.start_ns), (folded.end_ns, unfolded.end_ns)):
            assert (ours[row] == theirs[rank]).all()
    assert measure(folded) == measure(unfolded)


def test_alike_ranks_fold_to_one_and_a_straggler_to_what_it_touches() -> None:
    world = World(world_size=12, domain_size=4)
    resources = frozenset({Resource.WORLD, Resource.DOMAIN})
    assert fold(world, resources).weights.tolist() == [12]
    colours = np.array([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    actors = fold(world, resources, colours)
    assert dict(zip(actors.ranks.tolist(), actors.weights.tolist(), strict=True)) == {0: 8, 4: 3, 5: 1}


@given(st.permutations(range(8)))
def test_renaming_the_ranks_of_a_symmetric_cluster_changes_nothing(order: list[int]) -> None:
    factors = {0: 1.5, 1: 1.25, 2: 2.0}
    renamed = {order[rank]: factor for rank, factor in factors.items()}
    first, second = (run(load("dbp"), 10, World(world_size=8), Jitter(stragglers=each)) for each in (factors, renamed))
    assert measure(first).step_latency_ms == measure(second).step_latency_ms


def test_the_same_seed_gives_the_same_timeline_and_another_seed_does_not() -> None:
    first, again, other = (run(load("nestpipe"), 8, jitter=Jitter(cv=0.05, seed=seed)) for seed in (1, 1, 2))
    assert (first.end_ns == again.end_ns).all()
    assert (first.end_ns != other.end_ns).any()
    assert first.frame().equals(again.frame())


@given(st.dictionaries(st.sampled_from(sorted(BATCH_NS)), st.integers(0, 200 * MS), max_size=4))
@example({OpKind.LOOKUP: 0})
def test_a_faster_op_never_makes_the_step_longer(changes: dict[OpKind, int]) -> None:
    for name in ("nestpipe", "sparse_dist"):
        loop = with_micro_batches(load(name), 2)
        faster = {kind: min(ns, changes.get(kind, ns)) for kind, ns in BATCH_NS.items()}
        step_ns = [
            max_cycle_ratio(loop, TimedCosts(batch_ns=each, micro_batches=2).op_ns).step_ns
            for each in (BATCH_NS, faster)
        ]
        assert step_ns[1] <= step_ns[0]


def test_ranks_that_are_alike_are_simulated_once() -> None:
    program = unroll(with_micro_batches(load("nestpipe"), 8), 20)
    timeline = run(with_micro_batches(load("nestpipe"), 8))
    assert timeline.end_ns.shape == (1, len(program.ops))


def _swap(loop: Loop, first: OpKind, second: OpKind) -> Loop:
    """The loop with two neighbouring ops of a stream in the other order."""
    streams = []
    for stream in loop.streams:
        body = list(stream.body)
        for i in range(len(body) - 1):
            kinds = [getattr(item, "kind", None) for item in body[i : i + 2]]
            if kinds == [first, second]:
                body[i], body[i + 1] = body[i + 1], body[i]
        streams.append(replace(stream, body=tuple(body)))
    return replace(loop, streams=tuple(streams))


def test_a_deadlock_names_each_stuck_stream_its_op_and_what_it_waits_for(golden) -> None:
    loop = _swap(load("sync"), OpKind.LOOKUP, OpKind.WRITE_BACK)
    with pytest.raises(DeadlockError) as caught:
        run(loop, 2)
    golden(str(caught.value) + "\n")
    with pytest.raises(DeadlockError, match="wait for each other in a circle"):
        max_cycle_ratio(loop, lambda _: 1)


def test_impossible_input_is_refused() -> None:
    with pytest.raises(TopologyError, match="world_size must be at least 1, got 0"):
        World(world_size=0)
    with pytest.raises(TopologyError, match="10 is not divisible by domain_size 4"):
        World(world_size=10, domain_size=4)
    with pytest.raises(TopologyError, match="give a domain size"):
        run(load("2d_sp"), 2, World(world_size=4))
    with pytest.raises(CaseError, match="straggler rank 9 is not below world_size 8"):
        run(load("sync"), 2, jitter=Jitter(stragglers={9: 2.0}))
    with pytest.raises(CaseError, match="coefficient of variation"):
        Jitter(cv=-1)
    with pytest.raises(CaseError, match="must not be negative"):
        TimedCosts(batch_ns={OpKind.READ: -1})

    def rename(op: Op) -> Op:
        return replace(op, after=(OpRef(kind=OpKind.READ, batch=7),)) if op.kind is OpKind.UPDATE else op

    program = unroll(load("sync"), 2)
    broken = replace(program, streams=tuple(replace(s, body=tuple(map(rename, s.ops))) for s in program.streams))
    with pytest.raises(ScheduleError, match="waits for read 7, which the program does not have"):
        simulate(broken, TimedCosts(batch_ns={}), WORLD)
