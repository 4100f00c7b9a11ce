"""Times that no clock of whole nanoseconds can count."""

import pytest

from nestpipe import api
from nestpipe.base import CaseError
from nestpipe.ir import OpKind
from nestpipe.schedules import load
from sim.engine.costs import Jitter, TimedCosts
from sim.engine.folding import World
from sim.engine.recursion import rank_step_ns


@pytest.mark.parametrize("factor", [1e11, 1e30, 1e300])
def test_times_beyond_the_clock_are_refused(factor: float) -> None:
    with pytest.raises(CaseError, match="later than the clock can count"):
        api.simulate("sync", world_size=8, stragglers={3: factor})
    costs = TimedCosts(batch_ns={OpKind.FORWARD: 10**9}, jitter=Jitter(stragglers={1: factor}))
    with pytest.raises(CaseError, match="later than the clock can count"):
        rank_step_ns(load("sync"), 20, costs, World(world_size=2))


def test_an_endless_straggler_is_refused() -> None:
    with pytest.raises(CaseError, match="finite factor"):
        Jitter(stragglers={3: float("inf")})
