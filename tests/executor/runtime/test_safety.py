"""What happens when something goes wrong: every rank ends within seconds, or skips together, and says why."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor.data.batch import RawBatch
from executor.data.sources import SyntheticSource
from executor.runtime.buffers import Buffers
from executor.runtime.groups import ProcessGroups
from executor.runtime.numerics import NanPolicy
from executor.runtime.trainer import Settings, Trainer
from nestpipe.base.errors import ExecutorError, ScheduleError
from nestpipe.ir import Buffer, Data, Op, OpKind, Place, Resource
from nestpipe.schedules import load
from tests.executor.jobs import (
    Hold,
    Probe,
    change_op,
    hung,
    killed,
    pool,
    probe_source,
    raising,
    run_ranks,
    slow,
    stopped,
    without_wait,
)

SMALL = ["--steps", "4", "--batch", "8", "--num-rows", "40", "--dim", "4", "--num-tables", "2", "--hidden", "4"]
GUARDED = [*SMALL, "--micro-batches", "2", "--timeout-s", "6"]


# -- ranks that fail ---------------------------------------------------------------------------------------------------


def test_a_killed_rank_ends_the_others_and_is_named() -> None:
    ends = run_ranks(GUARDED, fault=(killed, 1, OpKind.BACKWARD, 2))
    assert ends[1].code == -9
    assert ends[0].code == 1
    failed = r"rank 0: all_\S+ 2\S* \(batch 2.*\) on stream \w+, group world failed: RuntimeError: .*Connection"
    assert re.search(failed, ends[0].stderr)
    assert "rank 1 gives no sign of life" in ends[0].stderr
    assert ends[0].stdout == ""


def test_a_hung_rank_is_named_with_what_the_others_wait_for() -> None:
    ends = run_ranks(GUARDED, fault=(hung, 1, OpKind.FORWARD, 1))
    assert [end.code for end in ends] == [1, 1]
    everything = ends[0].stderr + ends[1].stderr
    assert "no progress for 6 s" in everything
    assert "forward 1.0 (batch 1, micro-batch 0) on stream compute has been running" in everything or re.search(
        r"rank 1 was last seen in forward 1\.0 on stream compute, last completed", everything
    )
    assert re.search(r"stream comm, group world of ranks 0, 1, waits for rank 1|rank 1 failed", ends[0].stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "named"),
    [(0, "the store of rank 0 has not answered for 6 s; rank 0 is stopped"), (1, "rank 1 gives no sign of life")],
)
def test_a_stopped_rank_is_named_by_the_other(rank: int, named: str) -> None:
    ends = run_ranks(GUARDED, fault=(stopped, rank, OpKind.BACKWARD, 1), timeout_s=40)
    assert ends[rank].code is None
    assert ends[1 - rank].code == 1
    assert named in ends[1 - rank].stderr


def test_a_raising_rank_ends_the_others_with_its_message() -> None:
    ends = run_ranks(GUARDED, fault=(raising, 1, OpKind.LOOKUP, 1))
    assert [end.code for end in ends] == [1, 1]
    assert "rank 1: lookup 1 (batch 1) on stream host failed: ValueError: a bug in lookup" in ends[1].stderr
    assert "> lookup" in ends[1].stderr
    assert "a bug in lookup" in ends[0].stderr


def test_a_slow_rank_only_makes_everybody_slow() -> None:
    ends = run_ranks([*GUARDED, "--timeout-s", "20"], fault=(slow, 1, OpKind.FORWARD, 1))
    assert [end.code for end in ends] == [0, 0]
    assert ends[0].stdout.count("\n") == 1
    assert ends[1].stdout == ""


def test_a_port_in_use_is_bad_input_that_names_the_port() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ends = run_ranks([*SMALL, "--rendezvous-s", "3"], port=port)
    assert [end.code for end in ends] == [2, 2]
    assert f"port {port} on 127.0.0.1 is in use; set MASTER_PORT to a free port" in ends[0].stderr
    assert "could not meet the others" in ends[1].stderr


def test_a_rank_that_never_starts_ends_the_wait() -> None:
    ends = run_ranks([*SMALL, "--rendezvous-s", "2"], only=[0])
    assert ends[0].code == 2
    assert "rank 0: rank 1 of 2 did not come within 2 s; check that all of them were started" in ends[0].stderr
    assert "TCPStore" not in ends[0].stderr


def _no_file_over_2_kib() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))


def test_a_full_disk_at_a_checkpoint_ends_every_rank_and_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    arguments = [*SMALL, "--num-rows", "4000", "--checkpoint", str(directory)]
    ends = run_ranks(arguments, before=_no_file_over_2_kib)
    assert [end.code for end in ends] == [1, 1]
    for end in ends:
        assert "checkpoint at batch 4 failed on rank 0: File too large; rank 1: File too large" in end.stderr
        assert "there is no earlier one" in end.stderr
    assert list(directory.iterdir()) == []


def _killed_before_a_checkpoint_is_published() -> None:
    from executor.runtime import checkpoint

    publish = checkpoint._publish

    def killed_at_the_second(trainer: Trainer, *rest: Any) -> None:
        if trainer.next_batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(trainer, *rest)

    checkpoint._publish = killed_at_the_second


def test_a_run_killed_within_a_checkpoint_goes_on_from_the_last_and_leaves_nothing(tmp_path: Path) -> None:
    directory, timeline = tmp_path / "kept", tmp_path / "timeline.parquet"
    arguments = [*GUARDED, "--checkpoint", str(directory), "--checkpoint-every", "2", "--timeline", str(timeline)]
    ends = run_ranks([*arguments, "--steps", "6"], before=_killed_before_a_checkpoint_is_published)
    assert (ends[0].code, ends[1].code) == (-9, 1)
    assert sorted(path.name for path in directory.iterdir()) == [".batch-00000004.partial", "batch-00000002"]
    (tmp_path / ".timeline.parquet.abcd_123").touch()
    ends = run_ranks([*arguments, "--steps", "6", "--resume"])
    assert [end.code for end in ends] == [0, 0]
    assert sorted(path.name for path in directory.iterdir()) == [f"batch-0000000{batch}" for batch in (2, 4, 6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "timeline.parquet"]
    whole = run_ranks([*GUARDED, "--steps", "6"])
    digests = [json.loads(each[0].stdout.splitlines()[-1])["digests"] for each in (ends, whole)]
    assert digests[0] == digests[1]


def test_tables_that_do_not_fit_the_disk_are_bad_input(tmp_path: Path) -> None:
    arguments = [*SMALL, "--num-rows", "4000", "--storage", str(tmp_path / "tables")]
    (end,) = run_ranks(arguments, before=_no_file_over_2_kib, world_size=1)
    assert end.code == 2
    assert "cannot map 125.00 KiB there: [Errno 27] File too large; choose another --storage" in end.stderr
    assert [path for path in (tmp_path / "tables").rglob("*") if path.is_file()] == []


# -- collectives that disagree -----------------------------------------------------------------------------------------


def _disagree(
    world: ProcessGroups, kinds: tuple[OpKind, OpKind], dtypes: tuple[torch.dtype, torch.dtype], sizes: list[int]
) -> str:
    group = world.communicator("fingerprints", Resource.WORLD, world.world_size, debug=True)
    op = Op(kind=kinds[world.rank], batch=5, micro_batch=1)
    width = sizes[world.rank]
    send = torch.zeros(2 * width, dtype=dtypes[world.rank])
    out = torch.zeros(4, dtype=dtypes[world.rank])
    try:
        group.all_to_all(op, out, send, [2, 2], [width, width])
    except ExecutorError as error:
        return str(error)
    return ""


def test_swapped_collectives_are_named_before_the_backend_mixes_them_up() -> None:
    kinds = (OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS)
    messages = pool(2).run(_disagree, kinds, (torch.float32, torch.float32), [2, 2])
    assert "rank 0 has all_to_all[rows] 5.1 (float32), rank 1 has all_to_all[grads] 5.1 (float32)" in messages[0]
    assert "rank 1 has all_to_all[grads]" in messages[1]


def test_different_dtypes_are_named() -> None:
    kinds = (OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_ROWS)
    messages = pool(2).run(_disagree, kinds, (torch.float32, torch.float16), [2, 2])
    assert "(float32), rank 1 has all_to_all[rows] 5.1 (float16)" in messages[0]


def test_different_splits_are_named() -> None:
    kinds = (OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_ROWS)
    messages = pool(2).run(_disagree, kinds, (torch.float32, torch.float32), [2, 3])
    assert "the splits of all_to_all[rows] 5.1" in messages[1]
    assert "rank 1 sends 12 bytes to rank 0, which expects 8" in messages[1]


def test_equal_collectives_pass() -> None:
    kinds = (OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_ROWS)
    assert pool(2).run(_disagree, kinds, (torch.float32, torch.float32), [2, 2]) == ["", ""]


# -- buffers -----------------------------------------------------------------------------------------------------------


def test_a_buffer_is_poisoned_when_its_last_user_has_finished() -> None:
    buffer = Buffer(data=Data.ROWS, place=Place.DEVICE, slots=2)
    buffers = Buffers((buffer,), 1, torch.device("cpu"), {(Data.ROWS, 0): 1, (Data.ROWS, 1): 1})
    op = Op(kind=OpKind.LOOKUP, batch=0, writes=())
    slot = buffers.claim(Data.ROWS, op)
    slot.value = slot.tensor("0", (3, 2)).fill_(1.0)
    held = slot.value
    user = replace(op, reads=(_access(Data.ROWS, 0),))
    assert buffers.get(Data.ROWS, user) is held
    buffers.release(user)
    assert torch.isnan(held).all()
    with pytest.raises(ExecutorError, match="buffer rows: its slot holds nothing, instance 0 was wanted"):
        buffers.get(Data.ROWS, user)


def test_a_read_of_an_overwritten_slot_is_an_error_in_debug_mode_and_the_new_value_otherwise() -> None:
    buffer = Buffer(data=Data.ROWS, place=Place.DEVICE, slots=1)
    first, second = (Op(kind=OpKind.LOOKUP, batch=batch) for batch in (0, 1))
    for uses in (None, {(Data.ROWS, 0): 1, (Data.ROWS, 1): 1}):
        buffers = Buffers((buffer,), 1, torch.device("cpu"), uses)
        buffers.claim(Data.ROWS, first).value = "first"
        buffers.claim(Data.ROWS, second).value = "second"
        if uses is None:
            assert buffers.get(Data.ROWS, first) == "second"
        else:
            with pytest.raises(ExecutorError, match="holds instance 1, instance 0 was wanted"):
                buffers.get(Data.ROWS, first)


def test_memory_of_a_slot_is_reused_and_grows() -> None:
    buffer = Buffer(data=Data.EMBEDDINGS, place=Place.DEVICE, slots=1)
    buffers = Buffers((buffer,), 2, torch.device("cpu"))
    slot = buffers.claim(Data.EMBEDDINGS, Op(kind=OpKind.ALL_TO_ALL_ROWS, batch=0, micro_batch=0))
    small = slot.tensor("rows", (4, 2))
    assert slot.tensor("rows", (2, 2)).data_ptr() == small.data_ptr()
    assert slot.tensor("rows", (8, 2)).shape == (8, 2)
    assert buffers.size_bytes() == {"embeddings": 64}


def test_an_undeclared_buffer_is_named() -> None:
    buffers = Buffers((), 1, torch.device("cpu"))
    with pytest.raises(ScheduleError, match="no buffer rows; add 'buffer rows device slots=1'"):
        buffers.get(Data.ROWS, Op(kind=OpKind.UPDATE, batch=0))


def _access(data: Data, batch: int) -> object:
    from nestpipe.ir import Access

    return Access(data=data, batch=batch)


def _debug_run(world: ProcessGroups) -> str:
    loop = change_op(load("dbp"), OpKind.COPY_H2D, lambda op: without_wait(op, OpKind.BACKWARD))
    loop = replace(loop, buffers=tuple(replace(b, slots=1) if b.data == Data.BATCH else b for b in loop.buffers))
    # forward of a batch starts once the next batch has been copied over it, however fast each is
    hold = Hold(OpKind.FORWARD, OpKind.COPY_H2D, 1)
    trainer = Trainer(world, loop, Probe(), probe_source(), Settings(debug=True), wraps=(hold.wrap,))
    try:
        trainer.run(4)
    except ExecutorError as error:
        return str(error)
    return ""


def test_debug_mode_catches_a_schedule_that_overwrites_a_live_buffer() -> None:
    messages = pool(1).run(_debug_run)
    assert "buffer batch: its slot holds" in messages[0]
    assert "failed" in messages[0]


def _refused(world: ProcessGroups, kind: OpKind) -> str:
    loop = load("sync")
    dense = next(stream for stream in loop.streams if stream.name == "dense")
    more = replace(dense, body=(*dense.body, Op(kind=kind, batch=0)))
    loop = replace(loop, streams=tuple(more if stream is dense else stream for stream in loop.streams))
    try:
        Trainer(world, loop, Probe(), probe_source(), Settings())
    except ScheduleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [OpKind.SEND, OpKind.RECV, OpKind.REDUCE_SCATTER])
def test_kinds_that_no_schedule_of_the_catalogue_has_are_refused_by_name(kind: OpKind) -> None:
    assert f"sync: the executor has no implementation of {kind}; it runs" in pool(1).run(_refused, kind)[0]


# -- NaN ---------------------------------------------------------------------------------------------------------------


class _NanSource(SyntheticSource):
    """Rank 1's dense values of batch 2 are NaN."""

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:
        raw = super().read(batch, rank, world_size)
        return replace(raw, dense=np.full_like(raw.dense, np.nan)) if (batch, rank) == (2, 1) else raw


def _train_on_nan(world: ProcessGroups, policy: NanPolicy, schedule: str) -> tuple[str, list[int], bool]:
    from executor.data.batch import Feature
    from executor.data.tables import TableSpec
    from executor.models.dlrm import DLRM

    torch.manual_seed(0)
    source = _NanSource(features=("f",), batch_size=8, num_keys=50, mean_length=2.0)
    model = DLRM([TableSpec(name="t", num_rows=30, dim=4)], [Feature(name="f", table="t")], num_dense=4, hidden=(4,))
    trainer = Trainer(world, load(schedule), model, source, Settings(nan=policy))
    message = ""
    try:
        trainer.run(5)
    except ExecutorError as error:
        return str(error), trainer.worker.numerics.bad_batches, False
    finite = all(bool(torch.isfinite(value).all()) for value in trainer.state().values())
    return message, trainer.worker.numerics.bad_batches, finite


def test_nan_on_one_rank_stops_every_rank_in_the_same_batch() -> None:
    results = pool(2).run(_train_on_nan, NanPolicy.STOP, "nestpipe")
    assert [bad for _, bad, _ in results] == [[2], [2]]
    assert "NaN or infinity in batch 2; this rank's own tensors are finite" in results[0][0]
    assert "first bad tensor here: loss of batch 2, micro-batch 0" in results[1][0]
    assert all("update 2 (batch 2) on stream compute failed" in message for message, _, _ in results)


def test_a_bad_batch_is_skipped_on_every_rank_alike() -> None:
    results = pool(2).run(_train_on_nan, NanPolicy.SKIP, "nestpipe")
    assert results == [("", [2], True), ("", [2], True)]


def test_counting_lets_nan_through_and_counts_it() -> None:
    results = pool(2).run(_train_on_nan, NanPolicy.COUNT, "dbp")
    assert [(message, bad[0], finite) for message, bad, finite in results] == [("", 2, False)] * 2


def test_a_schedule_that_applies_rows_early_cannot_skip() -> None:
    with pytest.raises(ExecutorError, match="async_prefetch applies row gradients before all ranks know of a NaN"):
        pool(2).run(_train_on_nan, NanPolicy.SKIP, "async_prefetch")
