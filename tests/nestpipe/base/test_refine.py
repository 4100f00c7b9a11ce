"""Colour refinement: classes by hand and by force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.refine import Edges, equal_rows, refine


def test_rows_are_numbered_in_order_of_appearance() -> None:
    assert equal_rows(np.array([5.0, 2.0, 5.0, 2.0]), np.array([1, 1, 2, 1])).tolist() == [0, 1, 2, 1]


def test_a_path_is_refined_from_its_ends() -> None:
    follows = np.array([1, 2, 3, 4, -1])
    found = refine({"item": np.zeros(5, dtype=np.int64)}, [Edges("item", "item", follows[:, None])])
    assert found is not None
    assert found["item"].tolist() == [0, 1, 2, 3, 4]


def test_groups_of_equal_members_are_alike_and_one_odd_member_tells_its_group() -> None:
    group = np.array([0, 0, 1, 1, 2, 2])
    colours = {"rank": np.array([0, 0, 0, 7, 0, 0]), "group": np.zeros(3, dtype=np.int64)}
    found = refine(colours, [Edges("rank", "group", group[:, None])])
    assert found is not None
    assert found["rank"].tolist() == [0, 0, 1, 2, 0, 0]
    assert found["group"].tolist() == [0, 1, 0]


def test_gives_up_where_there_are_more_colours_or_rounds_than_asked_for() -> None:
    follows = [Edges("item", "item", np.append(np.arange(1, 9), -1)[:, None])]
    same = {"item": np.zeros(9, dtype=np.int64)}
    assert refine(same, follows, most={"item": 4}) is None
    assert refine(same, follows, most_rounds=2) is None
    assert refine(same, follows, most={"item": 9}, most_rounds=9) is not None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 4)), min_size=5, max_size=5))
def test_items_that_a_symmetry_exchanges_are_alike(rows: list[tuple[int, int]]) -> None:
    table = np.array(rows)
    found = refine({"item": np.zeros(5, dtype=np.int64)}, [Edges("item", "item", table)])
    assert found is not None
    edges = [sorted(row) for row in table.tolist()]
    for renamed in permutations(range(5)):
        name = [*renamed, -1]
        moved = {renamed[n]: sorted(name[to] for to in row) for n, row in enumerate(edges)}
        if all(moved[n] == edges[n] for n in range(5)):
            assert all(found["item"][n] == found["item"][renamed[n]] for n in range(5))
