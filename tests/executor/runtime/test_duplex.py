"""The All2All of receives, then sends moves what torch's own moves."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from executor.runtime.duplex import all_to_all_duplex
from executor.runtime.groups import ProcessGroups
from nestpipe.ir import Op, OpKind, Resource
from tests.executor.jobs import pool


def _agree(world: ProcessGroups, rounds: int) -> bool:
    """Whether both give the same bits for random splits, many of them 0, of every dtype and of one and two axes."""
    group = world.communicator("duplex", Resource.WORLD, world.world_size)
    draw = torch.Generator().manual_seed(7)
    same = True
    for number in range(rounds):
        splits = torch.randint(-3, 6, (world.world_size, world.world_size), generator=draw).clamp(min=0).tolist()
        sent, received = splits[world.rank], [row[world.rank] for row in splits]
        dtype = (torch.float32, torch.float16, torch.bfloat16, torch.int64)[number % 4]
        tail = (3,) if number % 3 else ()
        send = torch.randint(0, 99, (sum(sent), *tail), dtype=dtype) + world.rank
        mine, theirs = (torch.full((sum(received), *tail), -1, dtype=dtype) for _ in range(2))
        all_to_all_duplex(group.handle, group.index, mine, send, received, sent)
        dist.all_to_all_single(theirs, send, received, sent, group=group.handle)
        same = same and torch.equal(mine, theirs)
    return same


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_exchanges_agree_with_torch_bit_for_bit(world_size: int) -> None:
    assert pool(world_size).run(_agree, 60) == [True] * world_size


def _uses_duplex(world: ProcessGroups) -> bool:
    """Whether an exchange of the executor leaves torch's own All2All alone."""
    group = world.communicator("duplex", Resource.WORLD, world.world_size, debug=True)
    send, out = torch.tensor([float(world.rank)] * 2), torch.empty(2)
    with patch.object(dist, "all_to_all_single", side_effect=AssertionError("half duplex")):
        group.all_to_all(Op(kind=OpKind.ALL_TO_ALL_ROWS, batch=0, micro_batch=0), out, send, [1, 1], [1, 1])
    return out.tolist() == [0.0, 1.0]


def test_the_executor_exchanges_this_way_on_gloo() -> None:
    assert pool(2).run(_uses_duplex) == [True, True]
