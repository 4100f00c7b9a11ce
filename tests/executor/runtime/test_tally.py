"""What a run keeps does not grow with its ops."""

from __future__ import annotations

import gc
import tracemalloc

from executor.runtime.groups import ProcessGroups
from executor.runtime.trainer import Settings, Trainer
from nestpipe.schedules import load
from tests.executor.jobs import Probe, pool, probe_source


def _growth_per_step(world: ProcessGroups, keeps_records: bool) -> float:
    """Bytes of Python's memory that a step leaves behind."""
    trainer = Trainer(world, load("nestpipe"), Probe(), probe_source(), Settings())
    trainer.keeps_records = keeps_records
    trainer.run(40)
    tracemalloc.start()
    trainer.run(40)
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(3):
        trainer.run(40)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / 120


def test_a_step_leaves_a_few_numbers_behind_unless_its_ops_are_kept() -> None:
    (bounded,), (kept,) = (pool(1).run(_growth_per_step, keeps_records) for keeps_records in (False, True))
    # what differs without records is the size of the batches that are in the buffers at either moment
    assert bounded < kept / 10


def _sums(world: ProcessGroups) -> tuple[list[float], list[float], dict[int, int]]:
    found = []
    for parts in ((6,), (2, 3, 1)):
        trainer = Trainer(world, load("sync"), Probe(), probe_source(), Settings())
        trainer.keeps_records = len(parts) == 1
        for steps in parts:
            trainer.run(steps)
        found.append((trainer.losses(), trainer.tally.bytes))
        assert len(trainer.tally.ends_ns) == 6
    return found[0][0], found[1][0], {lane: found[1][1][lane] - count for lane, count in found[0][1].items()}


def test_losses_and_bytes_add_up_over_segments() -> None:
    for whole, parts, difference in pool(2).run(_sums):
        assert whole == parts
        assert set(difference.values()) == {0}
