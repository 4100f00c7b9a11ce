"""The pure parts: plans, the address space of tables, dedup and bucketing, optimisers, batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.data.batch import Feature, Jagged, RawBatch, cut, to_device
from executor.data.routing import dedup, join_by_group, own, split_by_group, with_union
from executor.data.sources import KeyStreamSource, SequenceSource, SyntheticSource
from executor.data.tables import HostStore, TableSpec, make_layout
from executor.models.optimizers import DenseOptimizer, OptimizerKind, sparse_optimizer
from executor.runtime.cursor import plan_lanes, uses_of
from executor.runtime.groups import partition_of
from nestpipe.base.errors import ExecutorError, ScheduleError
from nestpipe.ir import Data, Op, OpKind, OpRef, Program, Resource, Stream, unroll, with_micro_batches
from nestpipe.schedules import load, names
from traces.keys.stream import KeyStream

TABLES = (
    TableSpec(name="a", num_rows=5, dim=4),
    TableSpec(name="b", num_rows=3, dim=8),
    TableSpec(name="c", num_rows=7, dim=4, hashed=False),
)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_following_a_plan_one_ready_op_at_a_time_runs_everything_in_order(name: str) -> None:
    program = unroll(with_micro_batches(load(name), 2), 6)
    lanes = plan_lanes(program)
    finished = [0] * len(lanes)
    order: dict[OpRef, int] = {}
    while any(done < len(lane.tasks) for done, lane in zip(finished, lanes, strict=True)):
        before = len(order)
        for index, lane in enumerate(lanes):
            if finished[index] < len(lane.tasks):
                task = lane.tasks[finished[index]]
                if all(finished[other] >= count for other, count in task.waits):
                    order[task.op.ref] = len(order)
                    finished[index] += 1
        assert len(order) > before, "no op is ready"
    for op in program.ops:
        assert all(order[ref] < order[op.ref] for ref in op.after)


def _program(*ops: Op) -> Program:
    stream = Stream(name="compute", resource=Resource.COMPUTE, body=ops)
    return Program(name="test", steps=1, micro_batches=1, buffers=(), streams=(stream,))


def test_plans_refuse_double_unknown_and_backward_waits() -> None:
    first = Op(kind=OpKind.READ, batch=0)
    with pytest.raises(ScheduleError, match="read 0 appears twice"):
        plan_lanes(_program(first, first))
    with pytest.raises(ScheduleError, match="waits for update 0, which the program does not have"):
        plan_lanes(_program(replace(first, after=(OpRef(kind=OpKind.UPDATE, batch=0),))))
    late = Op(kind=OpKind.UPDATE, batch=0)
    with pytest.raises(ScheduleError, match="its own stream compute runs later"):
        plan_lanes(_program(replace(first, after=(late.ref,)), late))


def test_every_use_of_a_buffer_is_counted_once_per_op() -> None:
    uses = uses_of(unroll(load("sync"), 1))
    assert uses[Data.ROWS, 0] == 4
    assert uses[Data.SAMPLES, 0] == 2


@pytest.mark.parametrize(("resource", "groups"), [(Resource.WORLD, 1), (Resource.DOMAIN, 3), (Resource.REPLICA, 2)])
def test_every_rank_is_in_exactly_one_group(resource: Resource, groups: int) -> None:
    partition = partition_of(resource, 6, 2)
    assert len(partition) == groups
    assert sorted(rank for ranks in partition for rank in ranks) == list(range(6))


def test_a_domain_must_divide_the_world() -> None:
    with pytest.raises(ExecutorError, match="must divide the world size 6, got 4"):
        partition_of(Resource.DOMAIN, 6, 4)


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 8, 20])
def test_every_id_lies_in_one_shard_and_its_initial_row_does_not_depend_on_the_shards(num_shards: int) -> None:
    whole = HostStore(make_layout(TABLES, 1), 0, (1, 1), seed=3)
    layout = make_layout(TABLES, num_shards)
    assert layout.groups[-1].end == 15
    for group, spec in enumerate(layout.groups):
        seen: list[int] = []
        for shard in range(num_shards):
            store = HostStore(layout, shard, (1, 1), seed=3)
            ids = list(layout.shard_ids(group, shard))
            assert all(id % num_shards == shard for id in ids)
            seen += ids
            rows = torch.empty(len(ids), spec.dim)
            store.gather(Data.TABLE, group, torch.tensor(ids, dtype=torch.int64), rows)
            assert torch.equal(rows, whole.rows[group][[id - spec.first for id in ids]])
        assert sorted(seen) == list(range(spec.first, spec.end))


def test_scattered_rows_are_gathered_again(tmp_path: Path) -> None:
    layout = make_layout(TABLES, 2)
    for directory in (None, tmp_path):
        store = HostStore(layout, 1, (0, 0), directory=directory)
        ids = torch.tensor(list(layout.shard_ids(0, 1))[:2])
        store.scatter(Data.TABLE, 0, ids, torch.tensor([[1.0] * 4, [2.0] * 4]))
        out = torch.empty(2, 4)
        store.gather(Data.TABLE, 0, ids.flip(0), out)
        assert out.tolist() == [[2.0] * 4, [1.0] * 4]


def test_keys_map_into_their_table_negative_ones_too() -> None:
    layout = make_layout(TABLES, 2)
    keys = np.array([-5, 0, 3, 1 << 62])
    for index, table in enumerate(layout.tables):
        ids = layout.ids(index, keys)
        assert (ids >= layout.first_ids[index]).all()
        assert (ids < layout.first_ids[index] + table.num_rows).all()
    assert (layout.ids(2, np.array([-1, 8])) - layout.first_ids[2]).tolist() == [6, 1]


def test_unknown_tables_and_impossible_sizes_are_named() -> None:
    with pytest.raises(ExecutorError, match="unknown table 'aa'"):
        make_layout(TABLES, 2).table_index("aa")
    with pytest.raises(ExecutorError, match="table x: num_rows must be at least 1, got 0"):
        TableSpec(name="x", num_rows=0, dim=4)


# -- routing -----------------------------------------------------------------------------------------------------------

lookups = st.lists(st.integers(0, 14), max_size=30)


@given(lookups, st.integers(1, 5))
def test_dedup_gives_every_lookup_its_row_back(ids: list[int], num_shards: int) -> None:
    layout = make_layout(TABLES, num_shards)
    routed = dedup(torch.tensor(ids, dtype=torch.int64), layout)
    assert routed.ids.tolist() == sorted(set(ids), key=lambda id: (id % num_shards, id))
    assert sum(map(sum, routed.counts)) == len(set(ids))
    groups = [[id for id in routed.ids.tolist() if spec.first <= id < spec.end] for spec in layout.groups]
    found = [groups[0 if id < layout.groups[1].first else 1][at] for id, at in zip(ids, routed.inverse, strict=True)]
    assert found == ids
    for shard, row in enumerate(routed.counts):
        for group, count in enumerate(row):
            assert count == sum(id % num_shards == shard for id in groups[group])


@given(st.lists(lookups, min_size=2, max_size=3), st.integers(1, 3))
def test_the_owner_finds_every_requested_row(batches: list[list[int]], num_shards: int) -> None:
    layout = make_layout(TABLES, num_shards)
    sources = [dedup(torch.tensor(ids, dtype=torch.int64), layout) for ids in batches]
    for shard in range(num_shards):
        asked = [[id for id in source.ids.tolist() if id % num_shards == shard] for source in sources]
        counts = [source.counts[shard] for source in sources]
        ids = torch.tensor([id for part in asked for id in part], dtype=torch.int64)
        owned = own([ids], [counts], [[]], 7, layout)
        assert owned.ids.tolist() == sorted({id for part in asked for id in part})
        for group in range(2):
            wanted = [id for part in asked for id in part if (id >= layout.groups[1].first) == bool(group)]
            assert owned.of_group(group)[owned.requests[0][group]].tolist() == wanted
        union = torch.unique(torch.cat([owned.ids, torch.tensor([shard, shard + num_shards])]))
        wider = with_union(owned, union, 9, layout)
        for group in range(2):
            assert torch.equal(
                wider.of_group(group)[wider.requests[0][group]], owned.of_group(group)[owned.requests[0][group]]
            )
            assert wider.mine is not None
            assert torch.equal(wider.of_group(group)[wider.mine[group]], owned.of_group(group))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_joining_by_group_undoes_splitting(pairs: list[tuple[int, int]]) -> None:
    counts = [list(pair) for pair in pairs]
    size = sum(4 * first + 8 * second for first, second in pairs)
    flat = torch.arange(size, dtype=torch.float32)
    parts = split_by_group(flat, counts, [4, 8])
    assert [len(part) for part in parts] == [sum(column) for column in zip(*pairs, strict=True)]
    assert torch.equal(join_by_group(parts, counts, torch.empty(size)), flat)


# -- optimisers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_optimisers_agree_with_torch_on_parameters_of_one_value(kind: OptimizerKind) -> None:
    rows, moments = torch.tensor([[1.0], [-2.0]]), torch.zeros(2, sparse_optimizer(kind, lr=0.1).width(1))
    parameter = torch.nn.Parameter(rows.clone())
    reference: torch.optim.Optimizer = {
        OptimizerKind.SGD: lambda: torch.optim.SGD([parameter], lr=0.1),
        OptimizerKind.ROWWISE_ADAGRAD: lambda: torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8),
        OptimizerKind.LAZY_ADAM: lambda: torch.optim.Adam([parameter], lr=0.1),
    }[kind]()
    dense = DenseOptimizer(kind, [torch.nn.Parameter(rows.clone())], lr=0.1)
    for step in range(1, 6):
        grads = torch.tensor([[0.5 * step], [-1.0 / step]])
        parameter.grad = grads.clone()
        reference.step()
        sparse_optimizer(kind, lr=0.1).apply(rows, moments, grads, step)
        dense.step(grads.view(-1), step)
        torch.testing.assert_close(rows, parameter.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(dense.values, rows.view(-1))


def test_rowwise_adagrad_takes_the_mean_of_squares_of_a_row() -> None:
    rows, moments = torch.zeros(1, 2), torch.zeros(1, 1)
    sparse_optimizer(OptimizerKind.ROWWISE_ADAGRAD, lr=1.0, eps=0.0).apply(rows, moments, torch.tensor([[3.0, 1.0]]), 1)
    assert moments.item() == 5.0
    torch.testing.assert_close(rows, -torch.tensor([[3.0, 1.0]]) / 5.0**0.5)


def test_dense_parameters_become_views_of_one_vector() -> None:
    model = torch.nn.Linear(3, 2)
    dense = DenseOptimizer(OptimizerKind.SGD, model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    dense.step(torch.ones(8), 1)
    assert torch.equal(model.weight.detach(), before - 1)


def test_a_learning_rate_must_be_positive() -> None:
    with pytest.raises(ExecutorError, match="learning rate must be positive, got 0"):
        sparse_optimizer(OptimizerKind.SGD, lr=0)


# -- batches -----------------------------------------------------------------------------------------------------------


def _raw(lengths: list[int]) -> RawBatch:
    values = np.arange(sum(lengths), dtype=np.int64)
    count = len(lengths)
    return RawBatch(
        features={
            "x": Jagged(values=values, lengths=np.array(lengths, dtype=np.int64), weights=values.astype(np.float32))
        },
        dense=np.arange(count, dtype=np.float32)[:, None],
        labels=np.arange(count, dtype=np.float32),
        terms=np.arange(count, dtype=np.int64),
    )


@given(st.lists(st.integers(0, 3), max_size=9), st.integers(1, 4), st.booleans())
def test_micro_batches_hold_every_sample_once_with_its_keys(lengths: list[int], parts: int, backwards: bool) -> None:
    layout = make_layout((TableSpec(name="t", num_rows=100, dim=1, hashed=False),), 2)

    def reverse(raw: RawBatch, micro_batches: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        return list(np.array_split(np.arange(raw.num_samples)[::-1], micro_batches))

    raw = _raw(lengths)
    features = [Feature(name="x", table="t", weighted=True), Feature(name="x", table="t")]
    batch = cut(raw, features, layout, parts, reverse if backwards else None)
    batch = to_device(batch, lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
    ends = np.cumsum(lengths)
    seen = []
    for m in range(parts):
        micro = batch.micro_batch(m)
        wanted = [
            key for label in micro.labels.int().tolist() for key in range(ends[label] - lengths[label], ends[label])
        ]
        assert micro.ids.tolist() == wanted * 2
        assert micro.weights is not None
        assert micro.weights.tolist() == [*wanted, *[1.0] * len(wanted)]
        assert micro.lengths.tolist() == [[lengths[label] for label in micro.labels.int().tolist()]] * 2
        assert micro.num_terms == int(micro.labels.sum())
        assert torch.equal(micro.dense[:, 0], micro.labels)
        seen += micro.labels.int().tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_weights_that_a_source_does_not_give_are_missed() -> None:
    layout = make_layout((TableSpec(name="t", num_rows=9, dim=1),), 1)
    raw = SyntheticSource(features=("x",), batch_size=3, num_keys=5).read(0, 0, 1)
    with pytest.raises(ExecutorError, match="feature x is weighted, but its source gives keys without weights"):
        cut(raw, [Feature(name="x", table="t", weighted=True)], layout, 2)


def test_synthetic_batches_depend_on_batch_rank_and_seed_alone() -> None:
    source = SyntheticSource(features=("a",), batch_size=6, num_keys=50, mean_length=2.0, empty_share=0.3)
    again = SyntheticSource(features=("a",), batch_size=6, num_keys=50, mean_length=2.0, empty_share=0.3)
    first, second = (s.read(3, 1, 2).features["a"] for s in (source, again))
    assert first.values.tolist() == second.values.tolist()
    assert first.lengths.tolist() == second.lengths.tolist()
    assert source.read(4, 1, 2).features["a"].values.tolist() != first.values.tolist()


def test_a_rank_that_has_run_out_gives_empty_batches() -> None:
    source = SyntheticSource(features=("a",), batch_size=6, num_keys=50, batches=lambda rank: 2 - rank)
    assert source.read(1, 0, 2).num_samples == 6
    assert source.read(1, 1, 2).num_samples == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_key_file_samples_are_dealt_once_whatever_the_world_size(world_size: int) -> None:
    values = np.arange(22, dtype=np.uint64)
    stream = KeyStream(features=("a", "b"), values=values, offsets=np.arange(23, dtype=np.int64), source="test")
    source = KeyStreamSource(stream=stream, batch_size=2)
    keys = [
        source.read(batch, rank, world_size).features["a"].values.tolist()
        for batch in range(source.num_batches(0, world_size))
        for rank in range(world_size)
    ]
    assert [key for part in keys for key in part] == list(range(0, 22, 2))
    whole, part = KeyStreamSource(stream=stream, batch_size=11).read(0, 0, 1), source.read(0, 0, 1)
    assert np.array_equal(whole.dense[:2], part.dense)


def test_sequences_are_dealt_once_per_epoch_in_another_order_each_time() -> None:
    sequences = tuple(np.array([i, i + 1]) for i in range(7))
    source = SequenceSource(sequences=sequences, num_items=9, batch_size=2, num_negatives=3, epochs=2)
    assert source.num_batches(0, 2) == 4
    epochs = [
        [
            key
            for b in range(first, first + 2)
            for r in (0, 1)
            for key in source.read(b, r, 2).features["items"].values[::2]
        ]
        for first in (0, 2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))
    assert epochs[0] != epochs[1]
    assert source.read(4, 0, 2).num_samples == 0
    raw = source.read(0, 0, 2)
    assert raw.terms.tolist() == [1] * raw.num_samples
    assert raw.features["negatives"].lengths.tolist() == [3] * raw.num_samples
