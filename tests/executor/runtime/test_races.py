"""What a stale or broken schedule does when it is run all the same: exactly the predicted rows are read stale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from executor.models.optimizers import OptimizerKind
from executor.runtime.wraps import Delay
from nestpipe.base.errors import ExecutorError
from nestpipe.base.units import NS_PER_MS
from nestpipe.checks.check import Verdict, check
from nestpipe.ir import Access, Data, Loop, Op, OpKind
from nestpipe.schedules import load
from tests.executor.jobs import Hold, Reads, change_op, observe_reads, pool, requested_keys, with_wait, without_wait

STEPS = 6


def reads(
    loop: Loop,
    optimizer: OptimizerKind = OptimizerKind.SGD,
    hold: Hold | None = None,
    delays: tuple[Delay, ...] = (),
) -> list[Reads]:
    return pool(2).run(observe_reads, loop, optimizer, hold, delays, STEPS)


def broken(loop: Loop) -> Loop:
    """The loop, which the checker must have rejected: what follows shows what it was right about."""
    assert check(loop).verdict in (Verdict.STALE, Verdict.RACE)
    return loop


@pytest.fixture(scope="module")
def exact() -> list[Reads]:
    return reads(load("sync"))


def stale_keys(seen: list[Reads], exact: list[Reads], column: int = 1) -> list[set[int]]:
    """For each batch the keys, over all owners, whose row (1) or moments (2) differ from the sequential run's."""
    stale: list[set[int]] = [set() for _ in range(STEPS)]
    for mine, right in zip(seen, exact, strict=True):
        for batch in range(STEPS):
            ids: Tensor = mine.batches[batch][0]
            assert torch.equal(ids, right.batches[batch][0])
            differs = (mine.batches[batch][column] != right.batches[batch][column]).any(dim=1)
            stale[batch] |= set(ids[differs].tolist())
    return stale


KEYS = requested_keys(2, STEPS)
ALL = [set.union(*batch) for batch in KEYS]
SHARED = [set[int](), *(ALL[t] & ALL[t - 1] for t in range(1, STEPS))]


def wrong_from_then_on(missed: list[set[int]]) -> list[set[int]]:
    """A row that was read stale is written back without the update that it missed, so every later read is wrong too."""
    lost: set[int] = set()
    wrong = []
    for t in range(STEPS):
        lost |= missed[t]
        wrong.append(ALL[t] & lost)
    return wrong


def test_every_class_of_keys_occurs_in_the_data() -> None:
    assert all(SHARED[1:])
    assert all(ALL[t] & ALL[t - 2] - ALL[t - 1] for t in range(2, STEPS))
    assert all(SHARED[t] - set.union(*(KEYS[t][r] & KEYS[t - 1][r] for r in (0, 1))) for t in range(1, STEPS))


@pytest.mark.parametrize("schedule", ["dbp", "nestpipe", "sparse_dist", "fwp"])
def test_synchronous_schedules_read_what_sequential_training_reads(schedule: str, exact: list[Reads]) -> None:
    kinds = (OpKind.WRITE_BACK, OpKind.LOOKUP, OpKind.SYNC)
    slow_host = tuple(Delay(kind=kind, rank=rank, delay_ns=3 * NS_PER_MS) for rank, kind in enumerate(kinds))
    assert stale_keys(reads(load(schedule), delays=slow_host), exact) == [set()] * STEPS


def test_async_prefetch_reads_exactly_the_keys_shared_with_the_batch_before_stale(exact: list[Reads]) -> None:
    assert dict(check(load("async_prefetch")).staleness) == {1: 1, 2: 0, 3: 0}
    seen = reads(load("async_prefetch"))
    assert stale_keys(seen, exact) == SHARED
    for mine, right in zip(seen, exact, strict=True):
        for t in range(1, STEPS):
            before = dict(zip(right.batches[t - 1][0].tolist(), right.batches[t - 1][1].tolist(), strict=True))
            for key, row in zip(*(part.tolist() for part in mine.batches[t][:2]), strict=True):
                # gradients do not depend on rows here, so stale by one is what the sequential run read a batch ago
                if key in SHARED[t] and key not in SHARED[t - 1]:
                    assert row == before[key]


def test_sync_before_the_update_reads_shared_keys_stale(exact: list[Reads]) -> None:
    loop = change_op(load("dbp"), OpKind.SYNC, lambda op: without_wait(op, OpKind.UPDATE))
    seen = reads(broken(loop), hold=Hold(OpKind.UPDATE, OpKind.SYNC, 1))
    assert stale_keys(seen, exact) == wrong_from_then_on(SHARED)


def test_sync_after_the_first_read_reads_shared_keys_stale(exact: list[Reads]) -> None:
    def early(op: Op) -> Op:
        return with_wait(without_wait(op, OpKind.SYNC), OpKind.LOOKUP, 0)

    loop = change_op(load("dbp"), OpKind.ALL_TO_ALL_ROWS, early)
    # the update has waited for sync through the rows; on a busy machine it would now and then be first
    loop = change_op(loop, OpKind.UPDATE, lambda op: with_wait(op, OpKind.SYNC, 0))
    seen = reads(broken(loop), hold=Hold(OpKind.SYNC, OpKind.ALL_TO_ALL_ROWS, 0))
    # what was sent is stale; what is written back is not, for sync does come before the update
    assert stale_keys(seen, exact) == SHARED


def test_intersection_per_rank_misses_keys_that_another_rank_looked_up(exact: list[Reads]) -> None:
    def per_rank(op: Op) -> Op:
        accesses = tuple(replace(a, data=Data.KEYS) if a.data == Data.OWNED else a for a in op.reads)
        return replace(op, reads=accesses)

    seen = reads(broken(change_op(load("dbp"), OpKind.SYNC, per_rank)))
    missed = [set[int]()]
    for t in range(1, STEPS):
        local = (KEYS[t][owner] & KEYS[t - 1][owner] for owner in (0, 1))
        missed.append(SHARED[t] - {key for owner, keys in enumerate(local) for key in keys if key % 2 == owner})
    assert stale_keys(seen, exact) == wrong_from_then_on(missed)


def test_optimiser_state_left_behind_leaves_moments_stale_and_rows_fresh() -> None:
    def rows_only(op: Op) -> Op:
        def keep(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
            return tuple(access for access in accesses if access.data != Data.MOMENTS)

        return replace(op, reads=keep(op.reads), writes=keep(op.writes))

    right = reads(load("sync"), OptimizerKind.ROWWISE_ADAGRAD)
    seen = reads(broken(change_op(load("dbp"), OpKind.SYNC, rows_only)), OptimizerKind.ROWWISE_ADAGRAD)
    assert stale_keys(seen, right)[1] == set()
    assert stale_keys(seen, right, column=2) == wrong_from_then_on(SHARED)


def test_write_back_racing_with_the_lookup_after_next_reads_skipped_keys_stale(exact: list[Reads]) -> None:
    loop = load("dbp")
    host = next(stream for stream in loop.streams if stream.name == "host")
    apart = [
        replace(host, name=kind.value, body=tuple(op for op in host.ops if op.kind == kind))
        for kind in (OpKind.LOOKUP, OpKind.WRITE_BACK)
    ]
    streams = (*(stream for stream in loop.streams if stream is not host), *apart)
    # more slots, so that the only thing that goes wrong is the order of write_back and lookup
    buffers = tuple(replace(b, slots=8) if b.data in (Data.ROWS, Data.MOMENTS, Data.OWNED) else b for b in loop.buffers)
    racing = replace(loop, streams=streams, buffers=buffers)
    skipped = [set[int](), set[int](), *(ALL[t] & ALL[t - 2] - ALL[t - 1] for t in range(2, STEPS))]
    seen = reads(broken(racing), hold=Hold(OpKind.WRITE_BACK, OpKind.LOOKUP, 2))
    assert stale_keys(seen, exact)[2] == skipped[2]
    assert all(skipped[t] <= stale for t, stale in enumerate(stale_keys(seen, exact)))


def test_rows_in_one_slot_instead_of_two_are_corrupted(exact: list[Reads]) -> None:
    loop = change_op(load("dbp"), OpKind.LOOKUP, lambda op: without_wait(op, OpKind.SYNC))
    buffers = tuple(replace(b, slots=1) if b.data in (Data.ROWS, Data.MOMENTS) else b for b in loop.buffers)
    loop = change_op(replace(loop, buffers=buffers), OpKind.SYNC, lambda op: replace(op, reads=(), writes=()))
    # every batch is looked up over the batch before, which has not been trained yet
    try:
        corrupted = any(stale_keys(reads(broken(loop), hold=Hold(OpKind.ALL_TO_ALL_ROWS, OpKind.LOOKUP, 1)), exact))
    except ExecutorError as error:
        corrupted = "index" in str(error)
    assert corrupted
