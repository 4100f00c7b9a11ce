"""From a loop to the program of so many steps, and what one iteration of a loop consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from nestpipe.base import ScheduleError
from nestpipe.ir.model import ALL, Access, Loop, MicroBlock, Op, OpRef, Program, Stream

__all__ = ["OPS_MAX", "check_waits", "iteration", "targets", "unroll"]

#: The largest program that `unroll` makes; a steady state shows in far fewer ops.
OPS_MAX: Final = 2_000_000


def unroll(loop: Loop, steps: int) -> Program:
    """The program that trains batches 0 to `steps` - 1: prologue, steady state and epilogue of the loop.

    Ops on batches outside the range are left out, and so are waits for them; a wait for all micro-batches becomes one
    for each.

    Args:
        loop: a loop whose references name ops that exist.
        steps: number of batches, at least 1.

    Raises:
        ScheduleError: if `steps` is less than 1, a reference names an op that the loop does not have, or the program
            would have more than `OPS_MAX` ops.
    """
    if steps < 1:
        raise ScheduleError(f"steps must be at least 1, got {steps}")
    per_step = sum(1 if op.micro_batch is None else loop.micro_batches for op in loop.ops)
    if steps * per_step > OPS_MAX:
        raise ScheduleError(
            f"{steps:,} steps of {per_step:,} ops are more than {OPS_MAX:,}; take fewer steps or micro-batches"
        )
    check_waits(loop)
    iterations = sorted({batch - offset for offset in {op.batch for op in loop.ops} for batch in range(steps)})
    streams = tuple(replace(stream, body=tuple(_body(loop, stream, steps, iterations))) for stream in loop.streams)
    return Program(
        name=loop.name,
        steps=steps,
        micro_batches=loop.micro_batches,
        buffers=loop.buffers,
        streams=streams,
        parts=loop.parts,
        layers=loop.layers,
        states=loop.states,
    )


def iteration(stream: Stream, micro_batches: int) -> Iterator[tuple[Op, int | None, int | None]]:
    """The ops of one iteration of a loop's stream, in the order they run.

    Returns:
        Each op with the micro-batch it works on, and with the `m` from which its references count; None for an op of
        the whole batch.
    """
    for item in stream.body:
        if not isinstance(item, MicroBlock):
            yield item, None, None
            continue
        offsets = {op.micro_batch or 0 for op in item.ops}
        for m in sorted({micro_batch - offset for offset in offsets for micro_batch in range(micro_batches)}):
            for op in item.ops:
                micro_batch = m + (op.micro_batch or 0)
                if 0 <= micro_batch < micro_batches:
                    yield op, micro_batch, m


def targets(ref: OpRef, m: int | None, micro_batches: int) -> Sequence[int | None]:
    """The micro-batches that a loop's reference names, seen from `m`; none where it points past the ends of the batch.

    >>> from nestpipe.ir.kinds import OpKind
    >>> targets(OpRef(kind=OpKind.FORWARD, batch=0, micro_batch=-1), 3, 8)
    (2,)
    """
    if ref.micro_batch is None:
        return (None,)
    if ref.micro_batch == ALL:
        return range(micro_batches)
    micro_batch = (m or 0) + int(ref.micro_batch)
    return (micro_batch,) if 0 <= micro_batch < micro_batches else ()


def check_waits(loop: Loop) -> None:
    """Refuses a wait that names no op of the loop.

    Raises:
        ScheduleError: names the op that is not there, and the way out.
    """
    per_micro_batch = {op.name: op.micro_batch is not None for op in loop.ops}
    for op in loop.ops:
        for ref in op.after:
            known = per_micro_batch.get(ref.name)
            if known is None:
                raise ScheduleError(f"{loop.name}: no op of kind {ref.name} to wait for; add it or drop the wait")
            if known is (ref.micro_batch is None) or (isinstance(ref.micro_batch, int) and op.micro_batch is None):
                raise ScheduleError(
                    f"{loop.name}: cannot wait for {ref.name} with micro-batch {ref.micro_batch}: "
                    + (
                        "it runs per micro-batch; write * or m"
                        if known
                        else "it runs once per batch; drop the micro-batch"
                    )
                )


def _body(loop: Loop, stream: Stream, steps: int, iterations: Sequence[int]) -> Iterator[Op]:
    once = tuple(iteration(stream, loop.micro_batches))
    for t in iterations:
        for op, micro_batch, m in once:
            if 0 <= t + op.batch < steps:
                yield Op(
                    kind=op.kind,
                    part=op.part,
                    batch=t + op.batch,
                    micro_batch=micro_batch,
                    after=tuple(
                        OpRef(kind=ref.kind, batch=t + ref.batch, micro_batch=target, part=ref.part)
                        for ref in op.after
                        if 0 <= t + ref.batch < steps
                        for target in targets(ref, m, loop.micro_batches)
                    ),
                    reads=tuple(_placed(op.reads, t, m, steps, loop.micro_batches)),
                    writes=tuple(_placed(op.writes, t, m, steps, loop.micro_batches)),
                    step=t,
                )


def _placed(accesses: Sequence[Access], t: int, m: int | None, steps: int, micro_batches: int) -> Iterator[Access]:
    """Accesses with absolute indices, less those before the first and after the last batch or micro-batch."""
    for access in accesses:
        if access.batch is None:
            yield access
        elif 0 <= t + access.batch < steps:
            micro_batch = access.micro_batch
            if micro_batch is not None and m is not None:
                micro_batch += m
                if not 0 <= micro_batch < micro_batches:
                    continue
            yield Access(data=access.data, batch=t + access.batch, micro_batch=micro_batch, part=access.part)
