"""From the records of every rank to one Timeline on one clock, and the counters of each stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from executor.runtime.groups import ProcessGroups, partition_of
from executor.runtime.trainer import Trainer
from nestpipe.base import ns_to_ms
from nestpipe.ir import GROUPS, OpKind
from nestpipe.timeline import Span, Timeline, from_frame, with_waits

__all__ = ["clock_offset_ns", "counters", "gather_timeline", "step_times_ms"]

_ROUNDS = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def clock_offset_ns(world: ProcessGroups) -> int:
    """What to subtract from this rank's monotonic clock to get rank 0's. A collective call.

    0 where all ranks run on one host, whose monotonic clock they share. Otherwise rank 0 pings each rank and takes the
    midpoint of the fastest of several rounds, so the error is at most half of that round trip.
    """
    boots = world.gather(_BOOT_ID.read_text() if _BOOT_ID.exists() else str(world.rank))
    if len(set(boots)) == 1:
        return 0
    stamp = torch.zeros(1, dtype=torch.int64)
    offset_ns = 0
    for rank in range(1, world.world_size):
        best: tuple[int, int] | None = None
        for _ in range(_ROUNDS):
            if world.rank == 0:
                sent_ns = time.monotonic_ns()
                dist.send(stamp, rank)
                dist.recv(stamp, rank)
                back_ns = time.monotonic_ns()
                round_trip = (back_ns - sent_ns, int(stamp) - (sent_ns + back_ns) // 2)
                best = round_trip if best is None else min(best, round_trip)
            elif world.rank == rank:
                dist.recv(stamp, 0)
                stamp[0] = time.monotonic_ns()
                dist.send(stamp, 0)
        offsets = world.gather(0 if best is None else best[1])
        if world.rank == rank:
            offset_ns = offsets[0]
    return offset_ns


def gather_timeline(trainer: Trainer, meta: Mapping[str, Any] | None = None) -> Timeline:
    """The Timeline of all ranks so far, times from the start of the first op. A collective call."""
    world = trainer.world
    offset_ns = clock_offset_ns(world)
    names = {index: stream.name for index, stream in enumerate(trainer.loop.streams)}
    mine = [
        Span(
            step=record.op.step,
            batch=record.op.batch,
            micro_batch=record.op.micro_batch,
            rank=world.rank,
            stream=names[record.lane],
            kind=record.op.kind.value,
            start_ns=record.start_ns - offset_ns,
            end_ns=record.end_ns - offset_ns,
            bytes=record.cost.bytes,
            keys=record.cost.keys,
            unique_keys=record.cost.unique_keys,
        )
        for record in trainer.records
    ]
    frame = pd.DataFrame([span for spans in world.gather(mine) for span in spans], columns=Span._fields)
    start_ns = frame["start_ns"].min()
    frame[["start_ns", "end_ns"]] -= start_ns
    groups = {
        stream.name: _group_numbers(partition_of(stream.resource, world.world_size, trainer.domain_size))
        for stream in trainer.loop.streams
        if stream.resource in GROUPS
    }
    known = {
        "schedule": trainer.loop.name,
        "micro_batches": trainer.loop.micro_batches,
        "steps": trainer.next_batch,
        "source": "measured",
        "world_size": world.world_size,
        "backend": world.backend,
        "device": world.device.type,
    }
    return from_frame(with_waits(frame, groups), {**known, **(meta or {})})


def step_times_ms(trainer: Trainer) -> list[float]:
    """Milliseconds from one batch's last update to the next one's over all ranks; the first counts from the start of
    the run. A collective call."""
    offset_ns = clock_offset_ns(trainer.world)
    tally = trainer.tally
    ends = trainer.world.gather([end_ns - offset_ns for end_ns in tally.ends_ns])
    starts = trainer.world.gather(None if tally.start_ns is None else tally.start_ns - offset_ns)
    moments = [min(start for start in starts if start is not None), *map(max, zip(*ends, strict=True))]
    return [round(ns_to_ms(end_ns - start_ns), 6) for start_ns, end_ns in pairwise(moments)]


def _group_numbers(partition: Iterable[tuple[int, ...]]) -> list[int]:
    numbers = {rank: number for number, ranks in enumerate(partition) for rank in ranks}
    return [numbers[rank] for rank in sorted(numbers)]


def counters(trainer: Trainer) -> dict[str, Any]:
    """What this rank moved: bytes by stream, distinct share of looked-up keys, shared share of owned ids, memory."""
    tally = trainer.tally
    by_stream = {stream.name: tally.bytes.get(lane, 0) for lane, stream in enumerate(trainer.loop.streams)}
    keys = {kind: tally.keys.get(kind, (0, 0)) for kind in (OpKind.DEDUP, OpKind.SYNC)}
    ratios = {kind: unique / total if total else None for kind, (total, unique) in keys.items()}
    return {
        "bytes": by_stream,
        "unique_ratio": ratios[OpKind.DEDUP],
        "shared_ratio": ratios[OpKind.SYNC],
        "buffer_bytes_max": trainer.worker.buffers.size_bytes(),
    }
