"""Emulated compute: every local op does its real work, then waits until a device of chosen speed would have done it.

Results stay what they are, and communication stays real; only durations are those of the emulated device. Waiting takes
no CPU, so that more ranks than cores, or a device of another speed, can be scheduled for real. What is measured this
way is always labelled emulated.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from executor.runtime.lanes import Cost, Implementation, OpTable
from executor.runtime.worker import Worker
from nestpipe.base import NS_PER_S, NS_PER_US, CaseError, unknown_name
from nestpipe.ir import COLLECTIVES, Data, Op, OpKind, Program

__all__ = ["EmulatedDevice", "emulated_from", "emulating", "fine_timers"]

_PR_SET_TIMERSLACK: Final = 29


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """How fast the emulated device and host memory are. All are assumed, none measured.

    Attributes:
        launch_us: what every op costs at least.
        forward_us_per_sample: forward; backward takes twice as long.
        dedup_ns_per_key: dedup, per looked-up key.
        lookup_ns_per_row: lookup in host memory, per distinct row that the rank owns.
        write_back_ns_per_row: write_back, per row.
        sync_ns_per_row: sync, per row of the buffer.
        update_ns_per_row: update, per row.
        copy_bytes_per_s: copy_h2d.
        read_ns_per_key: read.
    """

    launch_us: float = 200.0
    forward_us_per_sample: float = 50.0
    dedup_ns_per_key: float = 400.0
    lookup_ns_per_row: float = 4000.0
    write_back_ns_per_row: float = 2000.0
    sync_ns_per_row: float = 500.0
    update_ns_per_row: float = 2000.0
    copy_bytes_per_s: float = 1e9
    read_ns_per_key: float = 1000.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 0 or (name == "copy_bytes_per_s" and value == 0):
                raise CaseError(f"emulated device: {name} must be positive, got {value}")

    def time_ns(self, kind: OpKind, cost: Cost, samples: int) -> int:
        """Nanoseconds of an op that moved `cost` for `samples` samples; collectives are real and take none."""
        if kind in COLLECTIVES or kind is OpKind.WAIT:
            return 0
        work = {
            OpKind.READ: self.read_ns_per_key * cost.keys,
            OpKind.COPY_H2D: cost.bytes / self.copy_bytes_per_s * NS_PER_S,
            OpKind.DEDUP: self.dedup_ns_per_key * cost.keys,
            OpKind.LOOKUP: self.lookup_ns_per_row * cost.unique_keys,
            OpKind.SYNC: self.sync_ns_per_row * cost.keys,
            OpKind.FORWARD: self.forward_us_per_sample * NS_PER_US * samples,
            OpKind.BACKWARD: 2 * self.forward_us_per_sample * NS_PER_US * samples,
            OpKind.UPDATE: self.update_ns_per_row * cost.keys,
            OpKind.WRITE_BACK: self.write_back_ns_per_row * cost.keys,
        }
        return round(self.launch_us * NS_PER_US + work.get(kind, 0.0))


def emulated_from(values: Mapping[str, Any]) -> EmulatedDevice:
    """The device of a mapping of its attributes; those left out have their defaults.

    Raises:
        CaseError: for an unknown name or an impossible value.
    """
    known = EmulatedDevice.__slots__
    for name in values:
        if name not in known:
            raise CaseError(f"emulated device: {unknown_name('attribute', name, known)}")
    return EmulatedDevice(**values)


def emulating(device: EmulatedDevice, table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
    """The op table with every local op as slow as the device; used as a `Wrap` of the trainer."""

    def wrapped(kind: OpKind, implementation: Implementation) -> Implementation:
        def run(op: Op) -> Cost:
            start_ns = time.monotonic_ns()
            cost = implementation(op)
            left_ns = start_ns + device.time_ns(kind, cost, _samples(worker, op)) - time.monotonic_ns()
            if left_ns > 0:
                time.sleep(left_ns / NS_PER_S)
            return cost

        return run

    return {kind: function if kind in COLLECTIVES else wrapped(kind, function) for kind, function in table.items()}


def _samples(worker: Worker, op: Op) -> int:
    """Samples of a micro-batch's forward or backward; only these depend on them."""
    if op.kind not in (OpKind.FORWARD, OpKind.BACKWARD) or op.micro_batch is None:
        return 0
    return int(worker.buffers.get(Data.BATCH, op).samples[op.micro_batch])


def fine_timers() -> None:
    """Let waits of this thread, and of threads that it starts, end within microseconds, not the usual 50."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)
