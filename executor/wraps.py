"""Wrappers of the op table: injected delays, paced host memory, and emulated compute.

A wrapper takes the table and returns one of the same shape, so the runtime and the ops know nothing of it. What they
do shows in the Timeline as it would if the device were like that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from executor.lanes import Cost, Implementation, OpTable
from executor.ops_train import Activations
from executor.worker import Worker
from nestpipe.errors import ExecutorError, unknown_name
from nestpipe.ir import Data, Op, OpKind, Program
from nestpipe.units import NS_PER_S, NS_PER_US, ms_to_ns, ns_to_s

__all__ = ["Delay", "Emulation", "Pace", "delayed", "emulated", "paced", "parse_delay", "parse_emulation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Wait before every op of a kind on a rank, or on every rank."""

    kind: OpKind
    rank: int | None
    delay_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Host memory that takes `latency_ns` per access plus `ns_per_row` for each row, as long as that is slower."""

    latency_ns: int
    ns_per_row: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """An op that takes `fixed_ns` plus `ns_per_key` for each lookup instead of computing."""

    kind: OpKind
    fixed_ns: int
    ns_per_key: float


def _kind(text: str, what: str) -> OpKind:
    try:
        return OpKind(text)
    except ValueError:
        raise ExecutorError(f"{what}: {unknown_name('op kind', text, [kind.value for kind in OpKind])}") from None


def _float(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ExecutorError(f"{what}: expected a number that is not negative, got {text!r}")
    return value


def parse_delay(text: str) -> Delay:
    """A delay from KIND:RANK:MS, RANK being a number or `*`.

    >>> parse_delay("update:1:2.5")
    Delay(kind=<OpKind.UPDATE: 'update'>, rank=1, delay_ns=2500000)
    """
    parts = text.split(":")
    if len(parts) != 3 or not (parts[1] == "*" or parts[1].isdigit()):
        raise ExecutorError(f"--delay {text}: expected KIND:RANK:MS such as update:0:5 or update:*:5")
    rank = None if parts[1] == "*" else int(parts[1])
    what = f"--delay {text}"
    return Delay(kind=_kind(parts[0], what), rank=rank, delay_ns=ms_to_ns(_float(parts[2], what)))


def parse_emulation(text: str) -> Emulation:
    """An emulated op from KIND:MS or KIND:MS:US_PER_KEY.

    >>> parse_emulation("forward:3:0.5").ns_per_key
    500.0
    """
    parts = text.split(":")
    what = f"--emulate {text}"
    if len(parts) not in (2, 3):
        raise ExecutorError(f"{what}: expected KIND:MS or KIND:MS:US_PER_KEY such as forward:3:0.5")
    kind = _kind(parts[0], what)
    if kind not in _EMULATED:
        raise ExecutorError(f"{what}: only {', '.join(sorted(_EMULATED))} can be emulated; the others move real data")
    per_key = _float(parts[2], what) * NS_PER_US if len(parts) == 3 else 0.0
    return Emulation(kind=kind, fixed_ns=ms_to_ns(_float(parts[1], what)), ns_per_key=per_key)


def _sleep_until(moment_ns: int) -> None:
    left_ns = moment_ns - time.monotonic_ns()
    if left_ns > 0:
        time.sleep(ns_to_s(left_ns))


def delayed(delays: Sequence[Delay]) -> Callable[[OpTable, Worker, Program], OpTable]:
    """Wait before the named ops, outside what they compute but inside their span."""

    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        waits: dict[OpKind, int] = {}
        for delay in delays:
            if delay.rank in (None, worker.rank):
                waits[delay.kind] = waits.get(delay.kind, 0) + delay.delay_ns

        def slow(implementation: Implementation, wait_ns: int) -> Implementation:
            def run(op: Op) -> Cost:
                time.sleep(wait_ns / NS_PER_S)
                return implementation(op)

            return run

        return {kind: slow(run, waits[kind]) if kind in waits else run for kind, run in table.items()}

    return wrap


def paced(pace: Pace) -> Callable[[OpTable, Worker, Program], OpTable]:
    """Make lookup and write_back take at least the paced time for the distinct rows that they touch."""

    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        def slow(implementation: Implementation) -> Implementation:
            def run(op: Op) -> Cost:
                start_ns = time.monotonic_ns()
                cost = implementation(op)
                _sleep_until(start_ns + pace.latency_ns + round(cost.unique_keys * pace.ns_per_row))
                return cost

            return run

        kinds = (OpKind.LOOKUP, OpKind.WRITE_BACK)
        return {kind: slow(run) if kind in kinds else run for kind, run in table.items()}

    return wrap


def _emulated_forward(worker: Worker, op: Op) -> Cost:
    micro = worker.buffers.get(Data.BATCH, op).micro_batch(op.micro_batch)
    rows = worker.buffers.get(Data.EMBEDDINGS, op)
    worker.buffers.claim(Data.ACTIVATIONS, op).value = Activations(loss=None, leaves=[part.float() for part in rows])
    return Cost(keys=len(micro.ids))


_EMULATED: Mapping[OpKind, Callable[[Worker, Op, Implementation], Cost]] = {
    OpKind.FORWARD: lambda worker, op, _: _emulated_forward(worker, op),
    # a forward without a loss makes backward send zeros, which costs next to nothing
    OpKind.BACKWARD: lambda _, op, implementation: implementation(op),
    OpKind.UPDATE: lambda _worker, _op, _implementation: Cost(),
}


def emulated(emulations: Sequence[Emulation]) -> Callable[[OpTable, Worker, Program], OpTable]:
    """Replace computing by waiting: the ops move zeros of the right shapes and take the given time, not the CPU's.

    Forward, backward and update are emulated together, or the model would train on what was never computed; those not
    named take no time.
    """
    times = {emulation.kind: emulation for emulation in emulations}

    def wrap(table: OpTable, worker: Worker, program: Program) -> OpTable:  # noqa: ARG001
        def slow(kind: OpKind, implementation: Implementation) -> Implementation:
            named = times.get(kind)

            def run(op: Op) -> Cost:
                start_ns = time.monotonic_ns()
                cost = _EMULATED[kind](worker, op, implementation)
                if named is not None:
                    _sleep_until(start_ns + named.fixed_ns + round(cost.keys * named.ns_per_key))
                return cost

            return run

        return {kind: slow(kind, run) if kind in _EMULATED else run for kind, run in table.items()}

    return wrap
