"""What comes before what, on every run: stream order, waits and rendezvous, closed transitively.

The order is that of one rank. All ranks run the same program, and a collective ends on no rank before it has started
on all of them; so a chain of events that leaves a rank through collective X and comes back through collective Z passes,
on the other rank, from X to Z by stream order and waits, which are the same here. Nothing that another rank does can
therefore order two ops of this rank that its own streams and waits leave unordered, and for the same reason ranks that
run the same program can only be stuck together, on a cycle of this order. That is why the checks know nothing of world
size. Ranks with different programs are the subject of `nestpipe.checks.rendezvous`.

An op is an interval: `a` before `b` means that `a` has ended when `b` starts. Of two ops that are not ordered there is
always a run in which both are in progress at the same time: start everything that either needs, then both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from nestpipe.ir import Op, OpRef, Program, op_name, program_graph

__all__ = ["Order", "Stuck", "StuckStream", "order_of", "why_stuck"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The partial order of a program's ops, which are named by their index in `ops`."""

    ops: tuple[Op, ...]
    streams: tuple[str, ...]
    sequence: tuple[int, ...]
    preceding: tuple[tuple[int, ...], ...]
    ancestors: tuple[int, ...]

    def before(self, first: int, second: int) -> bool:
        """Whether op `first` has ended when op `second` starts, on every run."""
        return bool(self.ancestors[second] >> first & 1)

    def ordered(self, first: int, second: int) -> bool:
        """Whether the two ops never overlap."""
        return first == second or self.before(first, second) or self.before(second, first)

    def path(self, first: int, second: int) -> tuple[int, ...]:
        """A shortest chain of direct predecessors that shows `before(first, second)`; empty if there is none."""
        if not self.before(first, second):
            return ()
        follower: dict[int, int] = {}
        queue = deque([second])
        while first not in follower:
            op = queue.popleft()
            for earlier in self.preceding[op]:
                if earlier not in follower and (earlier == first or self.before(first, earlier)):
                    follower[earlier] = op
                    queue.append(earlier)
        chain = [first]
        while chain[-1] != second:
            chain.append(follower[chain[-1]])
        return tuple(chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class StuckStream:
    """A stream that is stuck: the op at its head and why."""

    stream: str
    op: Op
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """A program that cannot finish; `num_done` of its ops can."""

    heads: tuple[StuckStream, ...]
    num_done: int
    num_ops: int


def order_of(program: Program) -> Order | Stuck:
    """The order of a program whose references name its ops, or where it gets stuck.

    `sequence` is one possible run, in which each op is taken as early as its step allows, so that it reads naturally.
    """
    graph = program_graph(program)
    sequence = graph.run()
    if len(sequence) < len(graph.ops):
        return _stuck(program, {graph.ops[i].ref for i in sequence})
    ancestors = [0] * len(graph.ops)
    for op in sequence:
        for before in graph.preceding[op]:
            ancestors[op] |= ancestors[before] | 1 << before
    return Order(
        ops=graph.ops,
        streams=tuple(program.streams[number].name for number in graph.streams),
        sequence=sequence,
        preceding=graph.preceding,
        ancestors=tuple(ancestors),
    )


def why_stuck(program: Program, done: set[OpRef], op: Op) -> str:
    """What a stuck op waits for: the ops themselves, and what blocks the streams in which they queue."""
    reasons = []
    for ref in op.after:
        if ref in done:
            continue
        stream = next(s for s in program.streams if any(other.ref == ref for other in s.ops))
        head = next(other for other in stream.ops if other.ref not in done)
        queued = "" if head.ref == ref else f" (behind {op_name(head)} on {stream.name})"
        reasons.append(f"{op_name(ref)}{queued}")
    return f"waits for {', '.join(reasons)}"


def _stuck(program: Program, done: set[OpRef]) -> Stuck:
    heads = []
    for stream in program.streams:
        head = next((op for op in stream.ops if op.ref not in done), None)
        if head is not None:
            heads.append(StuckStream(stream=stream.name, op=head, reason=why_stuck(program, done, head)))
    return Stuck(heads=tuple(heads), num_done=len(done), num_ops=len(program.ops))
