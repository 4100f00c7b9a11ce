"""Disturbances that the command line offers as wrappers of the op table: injected delays and an emulated device.

A wrapper takes the table and returns one of the same shape, so the runtime and the ops know nothing of it. What they
do shows in the Timeline as it would if the device were like that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from executor.runtime.emulate import EmulatedDevice, emulated_from
from executor.runtime.lanes import Cost, Implementation, OpTable
from executor.runtime.trainer import Wrap
from executor.runtime.worker import Worker
from nestpipe.base import ExecutorError, ms_to_ns, ns_to_s, unknown_name
from nestpipe.ir import Op, OpKind, Program

__all__ = ["Delay", "delayed", "parse_delay", "parse_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Wait before every op of a kind on a rank, or on every rank."""

    kind: OpKind
    rank: int | None
    delay_ns: int


def _float(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ExecutorError(f"{what}: expected a number that is not negative, got {text!r}")
    return value


def parse_delay(text: str) -> Delay:
    """A delay from KIND:RANK:MS, RANK being a number or `*`.

    >>> parse_delay("update:1:2.5")
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
    return Delay(kind=kinds[parts[0]], rank=rank, delay_ns=ms_to_ns(_float(parts[2], what)))


def parse_device(texts: Sequence[str]) -> EmulatedDevice | None:
    """An emulated device from NAME=VALUE of the attributes that are not at their default; None from nothing.

    >>> parse_device(["forward_us_per_sample=80"]).forward_us_per_sample
    80.0
    """
    values = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ExecutorError(f"--emulate {text}: expected NAME=VALUE such as forward_us_per_sample=80")
        values[name] = _float(value, f"--emulate {text}")
    return emulated_from(values) if values else None


def delayed(delays: Sequence[Delay]) -> Wrap:
    """Wait before the named ops, outside what they compute but inside their span."""

    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        waits: dict[OpKind, int] = {}
        for delay in delays:
            if delay.rank in (None, worker.rank):
                waits[delay.kind] = waits.get(delay.kind, 0) + delay.delay_ns

        def slow(implementation: Implementation, wait_ns: int) -> Implementation:
            def run(op: Op) -> Cost:
                time.sleep(ns_to_s(wait_ns))
                return implementation(op)

            return run

        return {kind: slow(run, waits[kind]) if kind in waits else run for kind, run in table.items()}

    return wrap
