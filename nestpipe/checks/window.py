"""How many batches and micro-batches to examine, so that the result holds for every number of them.

Let *reach* be the distance between the largest and the smallest batch offset
in the loop, of ops, waits and accesses, plus what its waits for ops of later iterations reach ahead. A shortest path
of the happens-before order between two ops runs forward through iterations but for such waits, each taken at most
once, and what iteration i does is about batches within reach of i; so whether two ops are ordered depends only on
batches within reach of either. Ops that meet in a slot are `slots` batches apart (the walk of `nestpipe.checks.buffers`
compares neighbours only), and ops that meet in a row while it is in flight at most reach. In a program of 2 reach +
max(reach, slots) + 1 batches there is therefore a pair of each kind that sees neither the first nor the last batch,
pairs that see one end, and none that sees both: longer programs only repeat them. Of the shorter programs all are
checked in which a pair sees both ends, from one batch on. That also finds the shortest witness.

Micro-batches are a loop inside the batch, and the same argument bounds them: with more than 2 reach + slots + 1
micro-batches (reach and slots counted in micro-batches) it suffices to look at the next smaller number that falls
into the same slots from batch to batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import lcm

from nestpipe.ir import MICRO_DATA, Access, Loop, Op, OpRef

__all__ = ["lengths_to_check", "num_batches_to_check", "num_micro_batches_to_check"]


def num_batches_to_check(loop: Loop) -> int:
    """The number of batches after which nothing new can happen; see above.

    >>> from nestpipe.schedules import load
    >>> num_batches_to_check(load("sync")), num_batches_to_check(load("nestpipe"))
    (4, 16)
    """
    return lengths_to_check(loop)[-1]


def lengths_to_check(loop: Loop) -> list[int]:
    """The lengths of programs in which two ops that can meet may see both ends, and the first in which none does."""
    offsets = [item.batch for item in _named(loop) if item.batch is not None]
    reach = max(offsets) - min(offsets) + _ahead(loop, lambda item: item.batch)
    apart = {reach}
    for buffer in loop.buffers:
        apart.add(-(-buffer.slots // loop.micro_batches) if buffer.data in MICRO_DATA else buffer.slots)
    seeing_both = {length for distance in apart for length in range(distance + 1, distance + 2 * reach + 2)}
    return sorted({*range(1, 3 * reach + 2), *seeing_both})


def _ahead(loop: Loop, offset: Callable[[Op | OpRef], object]) -> int:
    """How many iterations waits reach ahead, in total; 0 if all are for ops of the same or earlier iterations."""
    at = {op.kind: offset(op) for op in loop.ops}
    found = 0
    for op in loop.ops:
        for ref in op.after:
            waited, own = offset(ref), at[ref.kind]
            if isinstance(waited, int) and isinstance(own, int):
                found += max(0, waited - own)
    return found


def num_micro_batches_to_check(loop: Loop) -> int:
    """The smallest number of micro-batches that shows what the loop's own number shows; see above.

    >>> from nestpipe.schedules import load
    >>> num_micro_batches_to_check(load("nestpipe"))
    6
    """
    offsets = [item.micro_batch for item in _named(loop) if isinstance(item.micro_batch, int)] or [0]
    slots = [b.slots for b in loop.buffers if b.data in MICRO_DATA] or [1]
    reach = max(offsets) - min(offsets) + _ahead(loop, lambda item: item.micro_batch)
    period, enough = lcm(*slots), 2 * reach + max(slots) + 1
    small = (n for n in range(enough, loop.micro_batches) if n % period == loop.micro_batches % period)
    return next(small, loop.micro_batches)


def _named(loop: Loop) -> Iterator[Op | OpRef | Access]:
    """Everything in the loop that carries offsets."""
    for op in loop.ops:
        yield op
        yield from op.after
        yield from op.reads
        yield from op.writes
