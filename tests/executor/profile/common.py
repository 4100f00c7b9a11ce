"""What the tests of the profile share: a configuration, and a run of it."""

from __future__ import annotations

import pandas as pd

from executor.profile.run import RunConfig, sizes_of_run
from executor.profile.samples import ProfiledRun, ShapedLinks
from executor.profile.schedules import SERIAL

CONFIG = RunConfig(schedule=SERIAL, micro_batches=2, batch_size=24, dim=8, num_rows=500, steps=6, seed=3)


def profiled(frame: pd.DataFrame, config: RunConfig, world_size: int = 1) -> ProfiledRun:
    links = ShapedLinks(bits_per_s=(8_000_000_000,) * world_size, burst_bytes=1000)
    return ProfiledRun(frame=frame, config=config, sizes=sizes_of_run(config, world_size), links=links, name="run")
