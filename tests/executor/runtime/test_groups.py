"""The groups of ranks that a resource cuts the world into."""

from __future__ import annotations

import pytest

from executor.runtime.groups import partition_of
from nestpipe.base.errors import ExecutorError
from nestpipe.ir import Resource


@pytest.mark.parametrize(("resource", "groups"), [(Resource.WORLD, 1), (Resource.DOMAIN, 3), (Resource.REPLICA, 2)])
def test_every_rank_is_in_exactly_one_group(resource: Resource, groups: int) -> None:
    partition = partition_of(resource, 6, 2)
    assert len(partition) == groups
    assert sorted(rank for ranks in partition for rank in ranks) == list(range(6))


def test_a_domain_must_divide_the_world() -> None:
    with pytest.raises(ExecutorError, match="must divide the world size 6, got 4"):
        partition_of(Resource.DOMAIN, 6, 4)
