"""Runs the programs of ranks together, without durations, to see whether they finish.

A communicator is a stream bound to a group; its ranks meet in the order in which each of them has its collectives in
that stream. A collective ends when all its ranks have come to the very same op; a `send` and the `recv` of the same
batch and micro-batch on another rank of its group end together, on whichever streams they are. Ops never compete
for anything else, so that starting an op early never keeps another from running: whatever can run does, and programs
that get stuck this way get stuck on every run. Source: confluence of marked graphs (Commoner, Holt, Even and Pnueli,
1971).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from nestpipe.base import ScheduleError
from nestpipe.checks.order import Stuck, StuckStream, why_stuck
from nestpipe.ir import (
    COLLECTIVES,
    GROUPS,
    OPS_MAX,
    Op,
    OpKind,
    OpRef,
    Program,
    Resource,
    Stream,
    group_of,
    group_ranks,
    op_name,
)

__all__ = ["messages_meet", "run_together"]

_PARTNER: Final = {OpKind.SEND: OpKind.RECV, OpKind.RECV: OpKind.SEND}


def messages_meet(program: Program) -> Stuck | None:
    """Where two ranks that both run the program get stuck, or None; a program without messages never does."""
    on = {stream.resource for stream in program.streams for op in stream.ops if op.kind in _PARTNER}
    if not on:
        return None
    both = [replace(program, name=f"{program.name}.{rank}", ranks=(rank,)) for rank in (0, 1)]
    return run_together(both, 1 if {Resource.REPLICA, Resource.RAIL} & on else 2)


def run_together(programs: Sequence[Program], domain_size: int | None = None) -> Stuck | None:
    """Where the ranks get stuck, or None if all finish.

    Raises:
        ScheduleError: if a program does not say its ranks, if ranks are given twice, missing, or not whole domains, or
            if they run more than `OPS_MAX` ops in all.
    """
    num_ops = sum(len(program.ops) * len(program.ranks or ()) for program in programs)
    if num_ops > OPS_MAX:
        raise ScheduleError(f"the ranks run {num_ops:,} ops, more than {OPS_MAX:,}; take fewer ranks or steps")
    by_rank = _by_rank(programs)
    if domain_size is not None and (domain_size < 1 or len(by_rank) % domain_size):
        raise ScheduleError(f"domain_size must divide the number of ranks, {len(by_rank)}, got {domain_size}")
    run = _Run(by_rank, domain_size or len(by_rank))
    while run.advance():
        pass
    return run.stuck()


def _by_rank(programs: Sequence[Program]) -> dict[int, Program]:
    found: dict[int, Program] = {}
    for program in programs:
        if program.ranks is None:
            raise ScheduleError(f"{program.name}: with several programs each needs its ranks; write ranks=0,2-5")
        for rank in program.ranks:
            if rank in found:
                raise ScheduleError(f"{program.name}: rank {rank} is given two programs; give it one")
            found[rank] = program
    if sorted(found) != list(range(len(found))):
        missing = min(set(range(max(found) + 1)) - set(found))
        raise ScheduleError(f"{programs[0].name}: rank {missing} has no program; ranks must be 0 to {max(found)}")
    return found


class _Run:
    """The state of all ranks: what is done, and how far each stream has come."""

    def __init__(self, by_rank: dict[int, Program], domain_size: int) -> None:
        self.by_rank, self.domain_size = by_rank, domain_size
        self.done: dict[int, set[OpRef]] = {rank: set() for rank in by_rank}
        self.at = {(rank, stream.name): 0 for rank, program in by_rank.items() for stream in program.streams}
        self.streams = {(rank, s.name): s for rank, program in by_rank.items() for s in program.streams}

    def head(self, rank: int, stream: str) -> Op | None:
        """The op that a stream of a rank has come to; None at its end, or if the rank has no such stream."""
        at = self.at.get((rank, stream))
        ops = () if at is None else self.streams[rank, stream].body
        head = ops[at] if at is not None and at < len(ops) else None
        return head if isinstance(head, Op) else None

    def started(self, rank: int, stream: str) -> Op | None:
        """The head, if everything that it waits for is done."""
        head = self.head(rank, stream)
        return head if head is not None and all(ref in self.done[rank] for ref in head.after) else None

    def advance(self) -> bool:
        """Ends every op that can end; False if there was none."""
        moved = False
        for rank, program in self.by_rank.items():
            for stream in program.streams:
                while (op := self.started(rank, stream.name)) is not None:
                    if op.kind in _PARTNER:
                        if (partner := self.partner(rank, stream, op)) is None:
                            break
                        self.end(rank, stream.name, op)
                        self.end(*partner)
                        moved = True
                        continue
                    peers = self.peers(rank, stream, op)
                    if any(not self.arrived(peer, stream.name, op) for peer in peers):
                        break
                    for peer in peers:
                        self.end(peer, stream.name, op)
                    moved = True
        return moved

    def end(self, rank: int, stream: str, op: Op) -> None:
        self.done[rank].add(op.ref)
        self.at[rank, stream] += 1

    def partner(self, rank: int, stream: Stream, op: Op) -> tuple[int, str, Op] | None:
        """Rank, stream and op at the other end of a message, if that has come to it."""
        resource = stream.resource if stream.resource in GROUPS else Resource.WORLD
        group = group_of(resource, rank, self.domain_size, self.domain_size)
        wanted = replace(op.ref, kind=_PARTNER[op.kind])
        for peer in group_ranks(resource, group, len(self.by_rank), self.domain_size, self.domain_size):
            for other in self.by_rank[peer].streams if peer != rank else ():
                head = self.started(peer, other.name)
                if head is not None and head.ref == wanted:
                    return peer, other.name, head
        return None

    def arrived(self, rank: int, stream: str, op: Op) -> bool:
        other = self.started(rank, stream)
        return other is not None and other.ref == op.ref

    def peers(self, rank: int, stream: Stream, op: Op) -> Sequence[int]:
        """The ranks that an op has to meet: its group for a collective, else the rank alone."""
        if op.kind not in COLLECTIVES:
            return (rank,)
        group = group_of(stream.resource, rank, self.domain_size, self.domain_size)
        return group_ranks(stream.resource, group, len(self.by_rank), self.domain_size, self.domain_size)

    def stuck(self) -> Stuck | None:
        heads = []
        for rank, program in self.by_rank.items():
            for stream in program.streams:
                op = self.head(rank, stream.name)
                if op is not None:
                    heads.append(
                        StuckStream(stream=stream.name, op=op, reason=self.reason(rank, stream, op), rank=rank)
                    )
        if not heads:
            return None
        num_ops = sum(len(program.ops) for program in self.by_rank.values())
        # what explains it comes first: collectives that meet another op, then waits
        heads.sort(key=lambda head: not head.reason.startswith("meets"))
        return Stuck(heads=tuple(heads), num_done=sum(map(len, self.done.values())), num_ops=num_ops)

    def reason(self, rank: int, stream: Stream, op: Op) -> str:
        if self.started(rank, stream.name) is None:
            return why_stuck(self.by_rank[rank], self.done[rank], op)
        if op.kind in _PARTNER:
            return f"meets no {op_name(replace(op.ref, kind=_PARTNER[op.kind]))} on another rank"
        for peer in self.peers(rank, stream, op):
            other = self.head(peer, stream.name)
            if other is None:
                return f"meets nothing on rank {peer}, whose {stream.name} has ended"
            if other.ref != op.ref:
                return f"meets {op_name(other)} on rank {peer}"
        late = [peer for peer in self.peers(rank, stream, op) if not self.arrived(peer, stream.name, op)]
        return f"waits for rank {late[0]} to come to it"
