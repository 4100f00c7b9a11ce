"""The schedule IR: what runs on which stream, in which order, on which batch, after what.

A schedule comes in two forms, both made of the same `Op`:

- a `Loop` is the body of one steady-state iteration, as in software pipelining. Iteration `t` trains batch `t`; an op
  that works on batch `t+2` carries the offset 2. Inside a `MicroBlock` ops are repeated for the micro-batches of the
  batch and carry a second offset (`m`, `m+1`): the inner pipeline nested in the outer one.
- a `Program` is the loop unrolled for a number of steps (`unroll`): prologue, steady state, epilogue, with absolute
  batches and micro-batches. It is what both interpreters run. Every rank runs the same program unless `ranks` says
  otherwise.

Program order within a stream is the order of its ops: a stream is an in-order queue. Everything else that must be in
order is a dependency (`after`). Nothing here knows durations, sizes, addresses, devices or clocks.

What an op does to data is part of the schedule, so that it can be checked: `reads` and `writes` name `Data`.

- *States* live as long as the training: `table` and `optimizer` (rows and optimiser rows in host memory, sharded over
  the ranks of the row All2All's group) and `dense` (replicated dense parameters on the device).
- *Buffers* hold one batch (or one micro-batch, see `MICRO_DATA`) per instance, in `slots` physical copies used in turn:
  instance `i` lives in slot `i % slots`, where `i` is the batch or, per micro-batch, `batch * micro_batches +
  micro_batch`. The two `rows` slots of dual-buffer pipelining are the active and the
  prefetch buffer. `rows` caches `table` and `moments` caches `optimizer` for the keys that this rank owns.

Meaning of the ops on rows, the same for every interpreter and for the checks:

- `lookup` copies the rows of the batch's owned keys from each state it reads into the buffer that caches that state
- `sync` copies rows of keys that the batch shares with an earlier one from that batch's buffer into its own. Reading
  `owned` of both batches means the intersection is taken at the owner, over the union of all ranks
- `update` applies the batch's gradients (`owned_grads`, `dense_grads`) to what it writes
- `write_back` copies buffered rows into the states it writes. If it reads `owned_grads` it instead applies the
  gradients to the states themselves, as an asynchronous parameter server does
- `all_gather` on the replicas of a shard extends `owned` to the keys that any replica owns in this batch, and
  `all_reduce[tables]` averages those rows over the replicas after the update (2D sparse parallelism)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias

from nestpipe.base import ScheduleError
from nestpipe.ir.kinds import STATES, Data, OpKind
from nestpipe.ir.parts import Part, Split, Splits

__all__ = [
    "ACROSS",
    "ALL",
    "GROUPS",
    "NUMBER_MAX",
    "RANKS_MAX",
    "Access",
    "All",
    "Buffer",
    "Loop",
    "MicroBlock",
    "MicroIndex",
    "Op",
    "OpRef",
    "Place",
    "Program",
    "Resource",
    "State",
    "Stream",
    "map_ops",
    "op_name",
    "refuse_parts",
    "with_micro_batches",
]


class Resource(StrEnum):
    """What a stream is bound to: a device or host engine, or the ranks of a communicator."""

    HOST_IO = "host_io"
    HOST_MEMORY = "host_memory"
    H2D = "h2d"
    D2D = "d2d"
    COMPUTE = "compute"
    WORLD = "world"
    DOMAIN = "domain"
    REPLICA = "replica"
    NODE = "node"
    RAIL = "rail"


class Place(StrEnum):
    """Where a state or a buffer lives; buffers are in host or device memory."""

    HOST = "host"
    DEVICE = "device"
    SSD = "ssd"


class All(StrEnum):
    """The micro-batch index that stands for every micro-batch of the batch."""

    ALL = "*"


ALL: Final = All.ALL
#: The largest number in a schedule, and one more than the largest rank.
NUMBER_MAX: Final = 2_000_000
RANKS_MAX: Final = 1_000_000
MicroIndex: TypeAlias = int | All | None

GROUPS: Final = frozenset({Resource.WORLD, Resource.DOMAIN, Resource.REPLICA, Resource.NODE, Resource.RAIL})
#: The groups whose ranks hold what one rank of the other group holds: one step of each connects all ranks.
ACROSS: Final = {
    Resource.DOMAIN: Resource.REPLICA,
    Resource.REPLICA: Resource.DOMAIN,
    Resource.NODE: Resource.RAIL,
    Resource.RAIL: Resource.NODE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRef:
    """Names an op: offsets from `t` and `m` in a loop, absolute indices in a program.

    `micro_batch` is None for an op of the whole batch and `ALL` for an op of every micro-batch.
    """

    kind: OpKind
    batch: int
    micro_batch: MicroIndex = None
    part: str | None = None

    @property
    def name(self) -> str:
        """Kind and part, as the text writes them: what an op is, whatever batch it works on."""
        return _name(self.kind, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Data that an op reads or writes: a state (no batch) or the buffer instance of a batch or micro-batch.

    `part` names a part or layer of the data; without it the access is to what the op's own part is about.
    """

    data: Data
    batch: int | None = None
    micro_batch: int | None = None
    part: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One op: kind, part, batch, micro-batch where it has one, what it waits for, reads and writes.

    In a loop `batch` and `micro_batch` are offsets and `step` is 0; in a program they are absolute and `step` is the
    iteration that issues the op (negative in the prologue).
    """

    kind: OpKind
    batch: int
    micro_batch: int | None = None
    after: tuple[OpRef, ...] = ()
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    step: int = 0
    part: str | None = None

    @property
    def ref(self) -> OpRef:
        """The reference that names this op."""
        return OpRef(kind=self.kind, batch=self.batch, micro_batch=self.micro_batch, part=self.part)

    @property
    def name(self) -> str:
        """Kind and part, as the text writes them: what an op is, whatever batch it works on."""
        return _name(self.kind, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBlock:
    """Ops of a loop repeated for each micro-batch, in this order: the inner pipeline's body."""

    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An in-order queue bound to a resource. A program's streams hold no `MicroBlock`."""

    name: str
    resource: Resource
    body: tuple[Op | MicroBlock, ...]

    def __post_init__(self) -> None:
        _check_name("stream", self.name)

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops in line order, blocks flattened."""
        return tuple(op for item in self.body for op in (item.ops if isinstance(item, MicroBlock) else (item,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer and its number of physical copies: instance `i` lives in slot `i % slots`."""

    data: Data
    place: Place
    slots: int

    def __post_init__(self) -> None:
        if self.data in STATES:
            raise ScheduleError(f"{self.data} is a state and needs no buffer; drop it")
        if self.place is Place.SSD:
            raise ScheduleError(f"buffer {self.data}: buffers live in host or device memory, got {self.place}")
        if self.slots < 1:
            raise ScheduleError(f"buffer {self.data}: slots must be at least 1, got {self.slots}")


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a state, or a part of it, lives, for schedules that say so.

    Rows of an `atomic` state are read and updated one at a time as a whole: a lookup that is not ordered with an update
    sees the row before it or after it, never half of each.
    """

    data: Data
    place: Place
    part: str | None = None
    atomic: bool = False

    def __post_init__(self) -> None:
        if self.data not in STATES:
            raise ScheduleError(f"{self.data} is no state; declare it as a buffer")
        if self.atomic and self.data is Data.DENSE:
            raise ScheduleError("dense has no rows to be atomic; drop atomic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A schedule in loop form. `doc` holds the comment lines at the head of its text."""

    name: str
    micro_batches: int
    buffers: tuple[Buffer, ...]
    streams: tuple[Stream, ...]
    doc: str = ""
    parts: tuple[Part, ...] = ()
    layers: tuple[str, ...] = ()
    states: tuple[State, ...] = ()

    def __post_init__(self) -> None:
        _check_name("loop", self.name)
        _check_counts(micro_batches=self.micro_batches)
        _check_parts(self.parts, self.layers)
        _check_states(self.states)

    @property
    def splits(self) -> Splits:
        """How keys and dense work are split."""
        return Splits(self.parts, self.layers)

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, stream by stream, in line order."""
        return tuple(op for stream in self.streams for op in stream.ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule unrolled for `steps` batches; `ranks` are the ranks that run it, None for every rank."""

    name: str
    steps: int
    micro_batches: int
    buffers: tuple[Buffer, ...]
    streams: tuple[Stream, ...]
    ranks: tuple[int, ...] | None = None
    parts: tuple[Part, ...] = ()
    layers: tuple[str, ...] = ()
    states: tuple[State, ...] = ()

    @property
    def splits(self) -> Splits:
        """How keys and dense work are split."""
        return Splits(self.parts, self.layers)

    def __post_init__(self) -> None:
        _check_name("program", self.name)
        _check_parts(self.parts, self.layers)
        _check_states(self.states)
        _check_counts(steps=self.steps, micro_batches=self.micro_batches)
        if self.ranks is not None and not self.ranks:
            raise ScheduleError(f"program {self.name}: ranks must name at least one rank; leave it out for every rank")
        if self.ranks and (min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks)):
            raise ScheduleError(f"program {self.name}: ranks must be different numbers from 0 on, got {self.ranks}")

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops, stream by stream, in program order."""
        return tuple(op for stream in self.streams for op in stream.ops)


def _check_name(what: str, name: str) -> None:
    if re.fullmatch(r"[^\s,#]+", name) is None:
        raise ScheduleError(f"a {what} needs a name without spaces, commas and '#', got {name!r}")


def _check_parts(parts: tuple[Part, ...], layers: tuple[str, ...]) -> None:
    names = [*(part.name for part in parts), *layers]
    for name in names:
        if re.fullmatch(r"[a-z][a-z0-9_]*", name) is None:
            raise ScheduleError(f"a part or layer needs a name of small letters, digits and _, got {name!r}")
        if names.count(name) > 1:
            raise ScheduleError(f"part or layer {name} is declared twice; keep one")
    alone = [part for part in parts if part.split is not Split.STATIC]
    for part in alone:
        if sum((part.split, part.offset) == (other.split, other.offset) for other in alone) > 1:
            raise ScheduleError(f"part {part.name} holds the same keys as another; keep one of them")


def _name(kind: OpKind, part: str | None) -> str:
    return str(kind) if part is None else f"{kind}.{part}"


def _check_states(states: tuple[State, ...]) -> None:
    seen: set[tuple[Data, str | None]] = set()
    for state in states:
        if (state.data, state.part) in seen:
            raise ScheduleError(f"state {state.data} is declared twice; keep one")
        seen.add((state.data, state.part))


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"{name} must be at least 1, got {count}")


def op_name(op: Op | OpRef) -> str:
    """The short text name of a program's op.

    >>> op_name(OpRef(kind=OpKind.FORWARD, batch=3, micro_batch=1))
    'forward 3.1'
    """
    micro_batch = "" if op.micro_batch is None else f".{op.micro_batch}"
    return f"{op.name} {op.batch}{micro_batch}"


def refuse_parts(loop: Loop, who: str) -> None:
    """Refuses parts and layers, streams on node or rail, and declared states, for who does not know them.

    Raises:
        ScheduleError: names the first op or stream.
    """
    for stream in loop.streams:
        if stream.resource in (Resource.NODE, Resource.RAIL):
            raise ScheduleError(f"{loop.name}: {who} does not run streams on {stream.resource}, such as {stream.name}")
    for state in loop.states:
        raise ScheduleError(f"{loop.name}: {who} does not know where states live, such as state {state.data}; drop it")
    for op in loop.ops:
        if op.part is not None:
            raise ScheduleError(f"{loop.name}: {who} does not run parts of ops, such as {op.name}; use whole ops")


def with_micro_batches(loop: Loop, micro_batches: int) -> Loop:
    """The same loop with another number of micro-batches."""
    return replace(loop, micro_batches=micro_batches)


def map_ops(loop: Loop, change: Callable[[Op], Op | None]) -> Loop:
    """The loop with `change` applied to every op; None drops the op. The pass from which others are made."""

    def body(stream: Stream) -> Iterator[Op | MicroBlock]:
        for item in stream.body:
            if isinstance(item, MicroBlock):
                ops = tuple(new for op in item.ops if (new := change(op)) is not None)
                if ops:
                    yield MicroBlock(ops=ops)
            elif (new := change(item)) is not None:
                yield new

    return replace(loop, streams=tuple(replace(stream, body=tuple(body(stream))) for stream in loop.streams))
