"""Any synchronous schedule trains to the same bits as the sequential one, on real gloo ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.app.equality import Comparison, DataShape, EqualityCase, compare, full_grid, train_case
from executor.models.optimizers import OptimizerKind
from executor.runtime.groups import ProcessGroups
from nestpipe.ir import with_micro_batches
from nestpipe.schedules import load, names
from tests.executor.jobs import pool

SYNCHRONOUS = ("sparse_dist", "dbp", "fwp", "nestpipe", "2d_sp", "nestpipe_2d_sp")
STEPS = 13


def problems(outcomes: list[Comparison]) -> list[str]:
    return [f"{outcome.case}: {outcome.differing}" for outcome in outcomes if not outcome.equal]


def test_every_schedule_of_the_catalogue_is_compared_or_known_to_be_stale() -> None:
    assert set(names()) == {*SYNCHRONOUS, "sync", "async_prefetch"}


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_schedules_equal_sequential_training_on_two_ranks(optimizer: OptimizerKind, micro_batches: int) -> None:
    cases = [
        EqualityCase(
            schedule=schedule, micro_batches=micro_batches, optimizer=optimizer, steps=STEPS, domain_size=domain
        )
        for schedule in SYNCHRONOUS
        for domain in ((1, 2) if "2d" in schedule else (None,))
    ]
    for outcomes in pool(2).run(compare, cases):
        assert problems(outcomes) == []


@pytest.mark.parametrize("shape", list(DataShape))
def test_schedules_equal_sequential_training_on_four_ranks(shape: DataShape) -> None:
    cases = [
        EqualityCase(schedule="nestpipe", micro_batches=8, shape=shape, steps=8, debug=True),
        EqualityCase(schedule="nestpipe_2d_sp", micro_batches=2, shape=shape, steps=8, domain_size=2, debug=True),
        EqualityCase(schedule="dbp", micro_batches=2, optimizer=OptimizerKind.LAZY_ADAM, shape=shape, steps=8),
    ]
    assert problems(pool(4).run(compare, cases)[0]) == []


@settings(max_examples=12)
@given(
    st.builds(
        EqualityCase,
        schedule=st.sampled_from(SYNCHRONOUS),
        micro_batches=st.sampled_from([1, 2, 3, 5, 8]),
        optimizer=st.sampled_from(OptimizerKind),
        shape=st.sampled_from(DataShape),
        steps=st.integers(1, 9),
        seed=st.integers(0, 1000),
        debug=st.booleans(),
    ),
    st.sampled_from([1, 2]),
)
def test_random_configurations_equal_sequential_training(case: EqualityCase, domain_size: int) -> None:
    case = replace(case, domain_size=domain_size) if "2d" in case.schedule else case
    assert problems(pool(2).run(compare, [case])[0]) == []


def test_a_single_domain_is_the_world() -> None:
    case = EqualityCase(schedule="2d_sp", micro_batches=2, steps=6, domain_size=2)
    states = [pool(2).run(_state, case, name)[0] for name in ("2d_sp", "sync")]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def _state(world: ProcessGroups, case: EqualityCase, schedule: str) -> dict[str, torch.Tensor]:
    return train_case(world, case, load(schedule)).state()


def _paused(world: ProcessGroups, case: EqualityCase, pauses: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The state after the case's steps, with the tables read, as for an evaluation, after each part."""
    trainer = train_case(world, replace(case, steps=pauses[0]))
    for steps in pauses[1:]:
        trainer.state()
        trainer.run(steps)
    return trainer.state()


def test_a_pause_for_evaluation_changes_nothing() -> None:
    case = EqualityCase(schedule="nestpipe", micro_batches=4, shape=DataShape.IDLE_RANK)
    whole, parts = (pool(2).run(_paused, case, pauses)[0] for pauses in ((9,), (1, 2, 6)))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_asynchronous_prefetch_does_not_equal_sequential_training() -> None:
    case = EqualityCase(schedule="async_prefetch", micro_batches=2, steps=STEPS)
    assert not pool(2).run(compare, [case])[0][0].equal


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_micro_batches_change_the_result_by_no_more_than_rounding(micro_batches: int) -> None:
    case = EqualityCase(schedule="nestpipe", micro_batches=1, steps=STEPS)
    whole = pool(2).run(_state, case, "sync")[0]
    parts = pool(2).run(_state, replace(case, micro_batches=micro_batches), "nestpipe")[0]
    assert max(float((whole[key] - parts[key]).abs().max()) for key in whole if whole[key].numel()) < 2e-5


def test_more_ranks_give_the_same_model_up_to_rounding() -> None:
    """Losses are normalised by the global count, so one rank and two on the same samples agree."""
    states = [pool(size).run(_dealt, with_micro_batches(load("nestpipe"), 2).micro_batches)[0] for size in (1, 2, 4)]
    for other in states[1:]:
        assert max(float((states[0][key] - other[key]).abs().max()) for key in other if other[key].numel()) < 1e-5


def _dealt(world: ProcessGroups, micro_batches: int) -> dict[str, torch.Tensor]:
    import numpy as np

    from executor.data.batch import Feature
    from executor.data.sources import KeyStreamSource
    from executor.data.tables import TableSpec
    from executor.models.dlrm import DLRM
    from executor.runtime.trainer import Settings, Trainer
    from traces.keys.stream import KeyStream

    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 4, size=101 * 2)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = rng.integers(0, 50, size=int(offsets[-1])).astype(np.uint64)
    stream = KeyStream(features=("a", "b"), values=values, offsets=offsets, source="test")
    torch.manual_seed(1)
    tables = [TableSpec(name=name, num_rows=40, dim=4) for name in ("a", "b")]
    model = DLRM(tables, [Feature(name=n, table=n) for n in ("a", "b")], num_dense=4, hidden=(8,))
    source = KeyStreamSource(stream=stream, batch_size=24 // world.world_size)
    trainer = Trainer(world, with_micro_batches(load("nestpipe"), micro_batches), model, source, Settings())
    trainer.run(source.num_batches(world.rank, world.world_size))
    assert trainer.next_batch == 5
    assert sum(trainer.tally.terms) == 101
    return trainer.state()


def test_the_full_grid_covers_what_it_says() -> None:
    grid = list(full_grid(2, 100))
    assert len(grid) == len(set(grid)) == len(DataShape) * 3 * 4 * 5
