"""Dedup, owners and joins, as properties."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.data.routing import dedup, join_by_group, own, split_by_group, with_union
from executor.data.tables import make_layout
from tests.executor.data.test_tables import TABLES

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
