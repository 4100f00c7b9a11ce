"""Buffers: which slot an op touches, whether what it finds there is what it expects, and how many are live at once.

Two ops that touch the same slot, at least one of them writing, must be ordered; and what an op reads must be the
instance it names, not one that has already taken over its slot. Both are decided with one walk over one possible run:
if every access is ordered after the last write to its cell, and every write after all reads since, then all conflicting
pairs are ordered, every run finds the same, and it suffices to look at this one. (Source: Flanagan and Freund,
FastTrack, PLDI 2009, whose argument this is.)

A buffer of a batch that is written micro-batch by micro-batch (`keys`, `owned_grads`, `dense_grads`) consists of one
piece per micro-batch; an op of one micro-batch touches its piece, an op of the batch touches all of them. Parts of the
keys and layers are pieces, too: see `nestpipe.ir.parts`.

`table` and `optimizer` are left to `nestpipe.checks.staleness`: two batches only conflict there in the keys they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from nestpipe.base import ScheduleError
from nestpipe.checks.order import Order
from nestpipe.checks.report import Finding, Verdict, WitnessStep
from nestpipe.ir import (
    CACHES,
    KINDS,
    MICRO_DATA,
    STATES,
    Access,
    Atom,
    Buffer,
    Data,
    Meaning,
    Op,
    Place,
    Program,
    op_name,
)

__all__ = ["buffer_bytes", "buffer_findings", "instance_name", "instance_of", "peak_buffers", "slot_of"]

Cell: TypeAlias = tuple[Data, int, int | None, Atom]


@dataclass(frozen=True, slots=True)
class _Touch:
    cell: Cell
    instance: int
    writes: bool
    whole: bool
    named: bool  # the instance must be there


@dataclass(slots=True)
class _CellState:
    content: int | None = None
    writer: int | None = None
    readers: list[int] = field(default_factory=list)


def instance_of(access: Access, micro_batches: int) -> int:
    """The number of the buffer instance that an access names: its batch, or its micro-batch counted over all batches.

    Which of the two is a matter of the data: an op of one micro-batch that uses data of the batch names the batch.

    Raises:
        ScheduleError: if data of a micro-batch are named without one.

    >>> instance_of(Access(data=Data.EMBEDDINGS, batch=2, micro_batch=1), 4)
    9
    >>> instance_of(Access(data=Data.KEYS, batch=2, micro_batch=1), 4)
    2
    """
    assert access.batch is not None, "states have no instances"
    if access.data not in MICRO_DATA:
        return access.batch
    if access.micro_batch is None:
        raise ScheduleError(f"{access.data} is per micro-batch; only an op with a micro-batch can use it")
    return access.batch * micro_batches + access.micro_batch


def slot_of(access: Access, buffer: Buffer, micro_batches: int) -> int:
    """The slot in which an instance lives.

    >>> rows = Buffer(data=Data.ROWS, place=Place.DEVICE, slots=2)
    >>> slot_of(Access(data=Data.ROWS, batch=3), rows, 8)
    1
    """
    return instance_of(access, micro_batches) % buffer.slots


def instance_name(data: Data, instance: int, micro_batches: int) -> str:
    """The name of an instance, as people write it.

    >>> instance_name(Data.EMBEDDINGS, 9, 8)
    'embeddings 1.1'
    """
    if data in MICRO_DATA:
        return f"{data} {instance // micro_batches}.{instance % micro_batches}"
    return f"{data} {instance}"


def buffer_findings(program: Program, order: Order) -> list[Finding]:
    """The first fault in the use of buffers, or nothing.

    One finding suffices: what an op finds after a race is not defined.
    """
    walk = _Walk(program, order)
    for op in order.sequence:
        for touch in walk.touches(order.ops[op]):
            finding = walk.write(op, touch) if touch.writes else walk.read(op, touch)
            if finding is not None:
                return [finding]
    return []


def peak_buffers(program: Program, order: Order) -> dict[Data, int]:
    """For each buffer the largest number of instances that can be live at the same time, on any run.

    An instance is live from its first write until its last use has ended. Starting only what the first write of
    instance y needs, and that write, leaves every earlier instance live that has a use not ordered before it. Streams
    work on instances in order, so that the instances before a dead one are dead too.
    """
    first_write: dict[tuple[Data, int], int] = {}
    uses: dict[tuple[Data, int], int] = {}
    for i in order.sequence:
        op = order.ops[i]
        for access in _used(op):
            if access.data is Data.DENSE:
                continue
            instance = (access.data, instance_of(access, program.micro_batches))
            uses[instance] = uses.get(instance, 0) | 1 << i
            if access in op.writes:
                first_write.setdefault(instance, i)
    peaks = {buffer.data: 0 for buffer in program.buffers}
    for (data, number), write in first_write.items():
        live, earlier = 1, number - 1
        while uses.get((data, earlier), 0) & ~order.ancestors[write]:
            live, earlier = live + 1, earlier - 1
        peaks[data] = max(peaks.get(data, 0), live)
    return peaks


def buffer_bytes(buffers: tuple[Buffer, ...], size_bytes: Mapping[Data, int]) -> dict[Place, int]:
    """Bytes that one rank allocates in host and device memory: slots times the size of an instance of each buffer.

    Raises:
        KeyError: if a buffer has no size; check it before.
    """
    return {
        place: sum(buffer.slots * size_bytes[buffer.data] for buffer in buffers if buffer.place is place)
        for place in (Place.HOST, Place.DEVICE)
    }


def _used(op: Op) -> Iterator[Access]:
    """The buffer accesses of an op. A sync without an earlier batch copies nothing, so it writes nothing."""
    copies = any(access.data in CACHES.values() and access.batch != op.batch for access in op.reads)
    idle = KINDS[op.kind].meaning is Meaning.SYNC and not copies
    for access in dict.fromkeys((*op.reads, *(() if idle else op.writes))):
        if access.data not in STATES or access.data is Data.DENSE:
            yield access


class _Walk:
    """What each cell holds along one possible run."""

    def __init__(self, program: Program, order: Order) -> None:
        self.order, self.micro_batches, self.splits = order, program.micro_batches, program.splits
        self.buffers = {buffer.data: buffer for buffer in program.buffers}
        self.in_pieces = {
            access.data
            for op in program.ops
            if op.micro_batch is not None
            for access in op.writes
            if access.data not in STATES and access.data not in MICRO_DATA
        }
        self.cells: dict[Cell, _CellState] = {}

    def touches(self, op: Op) -> Iterator[_Touch]:
        """Reads before writes."""
        used = tuple(_used(op))
        for access in used:
            if access in op.reads:
                yield from self.touch(op, access, writes=False)
        for access in used:
            if access in op.writes:
                yield from self.touch(op, access, writes=True)

    def touch(self, op: Op, access: Access, *, writes: bool) -> Iterator[_Touch]:
        data, instance, slot = access.data, 0, 0
        if data is not Data.DENSE:
            instance = instance_of(access, self.micro_batches)
            slot = slot_of(access, self.buffers[data], self.micro_batches)
        whole = writes and not KINDS[op.kind].in_place
        # dense gradients accumulate over the micro-batches: whoever sums them over ranks takes all there are
        everything = op.micro_batch is None or KINDS[op.kind].meaning is Meaning.REDUCE
        pieces: Sequence[int | None] = range(self.micro_batches) if everything else (op.micro_batch,)
        for piece in pieces if data in self.in_pieces else (None,):
            named = piece is None or op.micro_batch in (None, piece)
            for atom in self.splits.touched(op, access):
                yield _Touch((data, slot, piece, atom), instance, writes, whole, named)

    def read(self, op: int, touch: _Touch) -> Finding | None:
        cell = self.cells.setdefault(touch.cell, _CellState())
        if cell.writer is not None and not self.order.ordered(cell.writer, op):
            return self.race(cell.writer, op, touch, cell)
        cell.readers.append(op)
        if touch.named and touch.cell[0] is not Data.DENSE and cell.content != touch.instance:
            return self.overwritten(op, touch, cell)
        return None

    def write(self, op: int, touch: _Touch) -> Finding | None:
        cell = self.cells.setdefault(touch.cell, _CellState())
        for other in (*cell.readers, *(() if cell.writer is None else (cell.writer,))):
            if not self.order.ordered(other, op):
                return self.race(other, op, touch, cell)
        if touch.whole:
            cell.content = touch.instance
        elif touch.named and touch.cell[0] is not Data.DENSE and cell.content != touch.instance:
            return self.overwritten(op, touch, cell)
        cell.writer, cell.readers = op, []
        return None

    def step(self, op: int, note: str) -> WitnessStep:
        return WitnessStep(op=self.order.ops[op], stream=self.order.streams[op], note=note)

    def does(self, op: int, touch: _Touch) -> str:
        """What an op does to the slot of `touch`, in words."""
        data, slot, *_ = touch.cell
        found = [t for t in self.touches(self.order.ops[op]) if t.cell[:2] == (data, slot)]
        verb = "writes" if any(t.writes for t in found) else "reads"
        if data is Data.DENSE:
            return f"{verb} dense"
        return f"{verb} {instance_name(data, found[0].instance, self.micro_batches)}"

    def where(self, touch: _Touch) -> str:
        data, slot, *_ = touch.cell
        return "" if data is Data.DENSE else f" (slot {slot} of {self.buffers[data].slots})"

    def race(self, first: int, second: int, touch: _Touch, cell: _CellState) -> Finding:
        names = [op_name(self.order.ops[op]) for op in (first, second)]
        did, does = self.does(first, touch), self.does(second, touch)
        held = cell.content
        reuse = touch.cell[0] is not Data.DENSE and held is not None and held != touch.instance
        way_out = "let one wait for the other" + (", or give the buffer more slots" if reuse else "")
        message = f"{names[0]} {did} while {names[1]} {does}{self.where(touch)}: no order between them; {way_out}"
        return Finding(
            rule="buffer-reuse" if reuse else "unordered",
            verdict=Verdict.RACE,
            message=message,
            witness=(
                self.step(first, f"starts, {did}{self.where(touch)}"),
                self.step(second, f"may start before 1 has ended, {does}{self.where(touch)}"),
            ),
        )

    def overwritten(self, op: int, touch: _Touch, cell: _CellState) -> Finding:
        data = touch.cell[0]
        name, wanted = op_name(self.order.ops[op]), instance_name(data, touch.instance, self.micro_batches)
        wanted += f" of {' and '.join(touch.cell[3])}" if touch.cell[3] else ""
        if cell.content is None or cell.writer is None:
            found, steps = "nothing has been written there yet", []
        else:
            found = f"it holds {instance_name(data, cell.content, self.micro_batches)}"
            steps = [self.step(cell.writer, f"writes {instance_name(data, cell.content, self.micro_batches)}")]
        early = cell.content is None or cell.content < touch.instance
        way_out = "wait for the op that writes it" if early else "delay the later write, or give the buffer more slots"
        return Finding(
            rule="not-yet-written" if early else "overwritten",
            verdict=Verdict.RACE,
            message=f"{name} needs {wanted}{self.where(touch)}, but {found}; {way_out}",
            witness=(*steps, self.step(op, f"needs {wanted}, but {found}")),
        )
