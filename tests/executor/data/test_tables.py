"""Sharded tables: every id in one shard, keys mapped into their table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from executor.data.tables import HostStore, TableSpec, make_layout
from nestpipe.base.errors import ExecutorError
from nestpipe.ir import Data

TABLES = (
    TableSpec(name="a", num_rows=5, dim=4),
    TableSpec(name="b", num_rows=3, dim=8),
    TableSpec(name="c", num_rows=7, dim=4, hashed=False),
)


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


def test_hashed_keys_map_into_their_table_negative_ones_too() -> None:
    layout = make_layout(TABLES, 2)
    keys = np.array([-5, 0, 3, 1 << 62])
    for index, table in enumerate(layout.tables[:2]):
        ids = layout.ids(index, keys)
        assert (ids >= layout.first_ids[index]).all()
        assert (ids < layout.first_ids[index] + table.num_rows).all()


def test_keys_that_are_rows_are_refused_outside_their_table() -> None:
    layout = make_layout(TABLES, 2)
    assert (layout.ids(2, np.array([0, 6])) - layout.first_ids[2]).tolist() == [0, 6]
    for key in (-1, 7, 1 << 62):
        with pytest.raises(ExecutorError, match=f"table c: key {key} is not a row of it; it has 7, from 0"):
            layout.ids(2, np.array([3, key]))


def test_unknown_tables_and_impossible_sizes_are_named() -> None:
    with pytest.raises(ExecutorError, match="unknown table 'aa'"):
        make_layout(TABLES, 2).table_index("aa")
    with pytest.raises(ExecutorError, match="table x: num_rows must be at least 1, got 0"):
        TableSpec(name="x", num_rows=0, dim=4)
