"""What comes before what on one rank."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nestpipe.checks.check import check
from nestpipe.checks.order import Order, order_of
from nestpipe.checks.report import Verdict
from nestpipe.ir import unroll, with_micro_batches
from nestpipe.schedules import load, names
from tests.nestpipe.checks.edits import Golden, changed, report_of


def test_waits_in_a_circle_are_a_deadlock(golden: Golden) -> None:
    loop = changed(
        "dbp",
        (
            "lookup              t+1    after all_to_all[keys] t+1, sync t",
            "lookup              t+1    after all_to_all[keys] t+1, write_back t",
        ),
    )
    assert check(loop).verdict is Verdict.DEADLOCK
    golden(report_of(loop))


@pytest.mark.parametrize("name", names())
def test_an_op_is_before_another_if_a_path_leads_there(name: str) -> None:
    loop = load(name)
    order = order_of(unroll(with_micro_batches(loop, min(2, loop.micro_batches)), 3))
    assert isinstance(order, Order)
    for first in range(0, len(order.ops), 5):
        for second in range(len(order.ops)):
            path = order.path(first, second)
            assert bool(path) is order.before(first, second)
            assert all(a in order.preceding[b] for a, b in pairwise(path))
            assert not path or (path[0], path[-1]) == (first, second)
