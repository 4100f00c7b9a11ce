"""A run of this process that several tests look at."""

from __future__ import annotations

import pandas as pd
import pytest

from executor.profile.run import run_configs
from executor.runtime.groups import join_world
from tests.executor.profile.common import CONFIG


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    """The spans of the serial schedule on one rank, in this process."""
    world = join_world()
    try:
        return run_configs(world, [CONFIG])
    finally:
        world.leave()
