"""Wrappers of the op table: injected delays, and ops that take as long as on an emulated device.

A wrapper takes the table and returns one of the same shape, so the runtime and the ops know nothing of it. What it does
shows in the Timeline as it would if the device were like that. Results stay what they are, and communication stays
real; only durations change. Waiting takes no CPU, so that more ranks than cores, or a device of another speed, can be
scheduled for real. What is measured on an emulated device is always labelled emulated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from executor.compute import EmulatedDevice, parse_number
from executor.runtime.lanes import Cost, Implementation, OpTable
from executor.runtime.worker import Worker
from nestpipe.base import ExecutorError, ms_to_ns, ns_to_s, unknown_name
from nestpipe.ir import COLLECTIVES, Data, Op, OpKind, Program

__all__ = ["Delay", "Wrap", "delayed", "emulating"]

Wrap: TypeAlias = Callable[[OpTable, Worker, Program], OpTable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Wait before every op of a kind on a rank, or on every rank."""

    kind: OpKind
    rank: int | None
    delay_ns: int

    @classmethod
    def parse(cls, text: str) -> Delay:
        """A delay from KIND:RANK:MS, RANK being a number or `*`.

        Raises:
            ExecutorError: if it is something else.

        >>> Delay.parse("update:1:2.5")
        Delay(kind=<OpKind.UPDATE: 'update'>, rank=1, delay_ns=2500000)
        """
        what = f"--delay {text}"
        parts = text.split(":")
        if len(parts) != 3 or not (parts[1] == "*" or parts[1].isdigit()):
            raise ExecutorError(f"{what}: expected KIND:RANK:MS such as update:0:5 or update:*:5")
        kinds = {kind.value: kind for kind in OpKind}
        if parts[0] not in kinds:
            raise ExecutorError(f"{what}: {unknown_name('op kind', parts[0], list(kinds))}")
        rank = None if parts[1] == "*" else int(parts[1])
        return cls(kind=kinds[parts[0]], rank=rank, delay_ns=ms_to_ns(parse_number(parts[2], what)))


def delayed(delays: Sequence[Delay]) -> Wrap:
    """Wait before the named ops, outside what they compute but inside their span."""

    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        waits_ns: Counter[OpKind] = Counter()
        for delay in delays:
            if delay.rank in (None, worker.rank):
                waits_ns[delay.kind] += delay.delay_ns

        def slow(implementation: Implementation, wait_ns: int) -> Implementation:
            def run(op: Op) -> Cost:
                time.sleep(ns_to_s(wait_ns))
                return implementation(op)

            return run

        return {kind: slow(run, waits_ns[kind]) if kind in waits_ns else run for kind, run in table.items()}

    return wrap


def emulating(device: EmulatedDevice) -> Wrap:
    """Let every local op do its real work, then wait until the device would have done it."""

    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        def slow(kind: OpKind, implementation: Implementation) -> Implementation:
            def run(op: Op) -> Cost:
                start_ns = time.monotonic_ns()
                cost = implementation(op)
                left_ns = start_ns + device.time_ns(kind, cost, _samples(worker, op)) - time.monotonic_ns()
                if left_ns > 0:
                    time.sleep(ns_to_s(left_ns))
                return cost

            return run

        return {kind: run if kind in COLLECTIVES else slow(kind, run) for kind, run in table.items()}

    return wrap


def _samples(worker: Worker, op: Op) -> int:
    """Samples of a micro-batch's forward or backward; only these depend on them."""
    if op.kind not in (OpKind.FORWARD, OpKind.BACKWARD) or op.micro_batch is None:
        return 0
    return int(worker.buffers.get(Data.BATCH, op).samples[op.micro_batch])
