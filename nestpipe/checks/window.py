"""How many batches and micro-batches to examine, so that the result holds for every number of them.

Let *reach* be the distance between the largest and the smallest batch offset
in the loop, of ops, waits and accesses, plus what its waits for ops of later iterations reach ahead. A shortest path
of the happens-before order between two ops runs forward through iterations but for such waits, each taken at most
once, and what iteration i does is about batches within reach of i; so whether two ops are ordered depends only on
batches within reach of either, or between them. Ops that meet in a slot are `slots` batches apart (the walk of
`nestpipe.checks.buffers` compares neighbours only), and ops that meet in a row while it is in flight at most `window`.
In a program of 2 reach + max(reach, slots, window) + 1 batches there is therefore a pair of each kind that sees neither
the first nor the last batch, pairs that see one end, and none that sees both: longer programs only repeat them. Of the
shorter programs all are checked in which a pair sees both ends, from one batch on, which finds the shortest witness.

How many batches back a row can be in flight is not the reach: a chain of waits adds up. `window` is the largest
distance at which the later batch may use a state before the earlier one has, one of them writing it, worked out on the
loop's graph, or that a sync copies across, whichever is more. What a batch finds of a row then depends on the `window`
batches before it and on nothing older, as long as each of them found what it should; so keys are followed through
window + 2 consecutive batches, in every subset of them. If reads are found stale, they may copy what was stale before
them: then the window is widened until nothing changes. Parts that are told apart by other batches widen it, too.

Micro-batches are a loop inside the batch, and the same argument bounds them: with more than 2 reach + slots + 1
micro-batches (reach and slots counted in micro-batches) it suffices to look at the next smaller number that falls
into the same slots from batch to batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf, lcm
from typing import Final

from nestpipe.checks.order import Order
from nestpipe.ir import CACHES, MICRO_DATA, Access, Loop, LoopGraph, Op, OpRef, Program, loop_graph, with_micro_batches

__all__ = [
    "FOLLOWED_MAX",
    "lengths_to_check",
    "num_batches_to_check",
    "num_micro_batches_to_check",
    "window_of_loop",
    "window_of_order",
]

FOLLOWED_MAX: Final = 18
"""The largest number of consecutive batches whose subsets are followed at once: 2^18 bits per set."""


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
    apart = {reach, window_of_loop(loop) + 1}
    for buffer in loop.buffers:
        apart.add(-(-buffer.slots // loop.micro_batches) if buffer.data in MICRO_DATA else buffer.slots)
    seeing_both = {length for distance in apart for length in range(distance + 1, distance + 2 * reach + 2)}
    return sorted({*range(1, 3 * reach + 2), *seeing_both})


def window_of_loop(loop: Loop) -> int:
    """How many batches back a row can still be in flight when a batch uses it; see above.

    Ops that are never ordered, at whatever distance, do not count: what they do is seen at the first distance that no
    sync covers.

    >>> from nestpipe.schedules import load
    >>> window_of_loop(load("sync")), window_of_loop(load("nestpipe"))
    (0, 1)
    """
    graph = loop_graph(with_micro_batches(loop, num_micro_batches_to_check(loop)))
    users = [i for i, op in enumerate(graph.ops) if _uses_state(op)]
    writers = {i for i in users if _writes_state(graph.ops[i])}
    found = 0
    for i in users:
        for j, iterations in enumerate(_iterations_after(graph, i)):
            if iterations < inf and (j in writers or (i in writers and j in users)):
                found = max(found, int(iterations) + graph.ops[j].batch - graph.ops[i].batch - 1)
    return max(found, _copied_across(loop.ops)) + _told_apart(loop)


def window_of_order(order: Order, program: Program) -> int:
    """The same of a program, from the order of its ops."""
    users = [i for i, op in enumerate(order.ops) if _uses_state(op)]
    writers = {i for i in users if _writes_state(order.ops[i])}
    in_flight = [
        order.ops[j].batch - order.ops[i].batch
        for i in users
        for j in (users if i in writers else writers)
        if not order.before(i, j)
    ]
    return max([0, *in_flight, _copied_across(order.ops)]) + _told_apart(program)


def _copied_across(ops: Iterable[Op]) -> int:
    caches = CACHES.values()
    return max(
        (op.batch - a.batch for op in ops for a in op.reads if a.data in caches and a.batch is not None), default=0
    )


def _told_apart(schedule: Loop | Program) -> int:
    """How far away the batches are by which parts of the keys are told apart."""
    return max((abs(part.offset) for part in schedule.parts if part.offset is not None), default=0)


def _uses_state(op: Op) -> bool:
    return any(access.data in CACHES for access in (*op.reads, *op.writes))


def _writes_state(op: Op) -> bool:
    return any(access.data in CACHES for access in op.writes)


def _iterations_after(graph: LoopGraph, source: int) -> list[float]:
    """For each op the fewest iterations after `source` in which it always comes after it; inf if it never does."""
    least = [inf] * len(graph.ops)
    least[source] = 0
    for _ in graph.ops:
        changed = False
        for first, second, distance in graph.edges:
            if least[first] + distance < least[second]:
                least[second], changed = least[first] + distance, True
        if not changed:
            break
    return least


def _ahead(loop: Loop, offset: Callable[[Op | OpRef], object]) -> int:
    """How many iterations waits reach ahead, in total; 0 if all are for ops of the same or earlier iterations."""
    at = {op.name: offset(op) for op in loop.ops}
    found = 0
    for op in loop.ops:
        for ref in op.after:
            waited, own = offset(ref), at[ref.name]
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
