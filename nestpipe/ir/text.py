"""The schedule as text: `show` prints a loop or a program, `parse` reads it back, exactly.

The grammar, one op per line, `#` starts a comment (kept only at the head of a loop, as its `doc`):

    loop v1 NAME micro_batches=N
      part NAME in t-1 | not t-1 | static | cached | uncached
      layer NAME, NAME, ...
      state DATA ssd|host|device [atomic]
      buffer DATA host|device slots=N
      stream NAME on RESOURCE
        KIND BATCH [after KIND BATCH, ...] [reads DATA [BATCH], ...] [writes DATA [BATCH], ...]
        for m
          KIND BATCH MICRO [after KIND BATCH [MICRO|*], ...] [reads ...] [writes ...]

KIND and DATA may carry a part or layer: `lookup.old`, `activations.bottom`.
In a loop BATCH is `t`, `t+1`, `t-1`, ... and MICRO is `m`, `m+1`, ...; `*` waits for every micro-batch. Data without a
batch is the op's own instance, or a state. A program is headed `program v1 NAME steps=S micro_batches=N`, with
`ranks=0,2-5` where it is not for every rank; its ops stand under `step I` lines and carry absolute indices: `forward 3`
or, with a micro-batch, `forward 3.1`.

Canonical text has one spelling: `show(parse(text)) == text` for canonical `text`, and `parse(show(s)) == s` always.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from nestpipe.ir.kinds import MICRO_DATA
from nestpipe.ir.model import Access, Loop, MicroBlock, Op, Program, State
from nestpipe.ir.parts import Part
from nestpipe.ir.reader import VERSION, read_documents

__all__ = ["parse", "parse_programs", "show", "show_op"]


def show(schedule: Loop | Program) -> str:
    """The canonical text of a loop or program, ending in a newline."""
    if isinstance(schedule, Loop):
        lines = [f"# {line}".rstrip() for line in schedule.doc.splitlines()]
        lines.append(f"loop {VERSION} {schedule.name} micro_batches={schedule.micro_batches}")
    else:
        ranks = "" if schedule.ranks is None else f" ranks={_show_ranks(schedule.ranks)}"
        lines = [
            f"program {VERSION} {schedule.name} steps={schedule.steps} micro_batches={schedule.micro_batches}{ranks}"
        ]
    lines += [f"  part {part.name} {part.split}{_batch_of(part)}" for part in schedule.parts]
    lines += [f"  layer {', '.join(schedule.layers)}"] if schedule.layers else []
    lines += [_show_state(state) for state in schedule.states]
    lines += [f"  buffer {buffer.data} {buffer.place} slots={buffer.slots}" for buffer in schedule.buffers]
    for stream in schedule.streams:
        lines.append(f"  stream {stream.name} on {stream.resource}")
        if isinstance(schedule, Loop):
            for item in stream.body:
                if isinstance(item, MicroBlock):
                    lines.append("    for m")
                    lines += [f"      {show_op(op, loop=True)}" for op in item.ops]
                else:
                    lines.append(f"    {show_op(item, loop=True)}")
        else:
            for step, ops in groupby(stream.ops, key=lambda op: op.step):
                lines.append(f"    step {step}")
                lines += [f"      {show_op(op, loop=False)}" for op in ops]
    return "\n".join(lines) + "\n"


def show_op(op: Op, *, loop: bool) -> str:
    """The canonical line of one op, without indentation."""
    width = 9 if op.micro_batch is not None and loop else 5
    line = f"{_padded(op.name)}{_index(op.batch, op.micro_batch, loop):<{width}}"
    if op.after:
        line += "  after " + ", ".join(f"{ref.name} {_index(ref.batch, ref.micro_batch, loop)}" for ref in op.after)
    for clause, accesses in (("reads", op.reads), ("writes", op.writes)):
        if accesses:
            line += f"  {clause} " + ", ".join(_show_access(access, op, loop) for access in accesses)
    return line.rstrip()


def parse(text: str, *, source: str = "schedule") -> Loop:
    """The loop that `text` describes.

    Args:
        text: a loop in the grammar above.
        source: what to call the text in errors, for example its file name.

    Raises:
        ScheduleError: with line, column and what was expected.
    """
    (loop,) = read_documents(text, source, loop=True)
    assert isinstance(loop, Loop), "the reader refuses what is no loop"
    return loop


def parse_programs(text: str, *, source: str = "schedule") -> tuple[Program, ...]:
    """The programs of `text`: one for every rank, or several, each with its `ranks`.

    Raises:
        ScheduleError: with line, column and what was expected.
    """
    documents = read_documents(text, source, loop=False)
    return tuple(document for document in documents if isinstance(document, Program))


def _batch_of(part: Part) -> str:
    return "" if part.offset is None else f" {_offset('t', part.offset)}"


def _show_state(state: State) -> str:
    name = state.data if state.part is None else f"{state.data}.{state.part}"
    return f"  state {name} {state.place}" + (" atomic" if state.atomic else "")


def _padded(name: str) -> str:
    """An op's name, with room for the longest kind; a part that makes it longer leaves two spaces."""
    return f"{name:<20}" if len(name) < 20 else f"{name}  "


def _index(batch: int, micro_batch: object, loop: bool) -> str:
    if not loop:
        return str(batch) if micro_batch is None else f"{batch}.{micro_batch}"
    if micro_batch is None:
        return _offset("t", batch)
    return _offset("t", batch) + " " + (_offset("m", micro_batch) if isinstance(micro_batch, int) else str(micro_batch))


def _offset(letter: str, value: int) -> str:
    return letter if value == 0 else f"{letter}{value:+d}"


def _show_access(access: Access, op: Op, loop: bool) -> str:
    own = access.batch is None or (
        access.batch == op.batch and access.micro_batch == (op.micro_batch if access.data in MICRO_DATA else None)
    )
    name = access.data if access.part is None else f"{access.data}.{access.part}"
    if own or access.batch is None:
        return name
    return f"{name} {_index(access.batch, access.micro_batch, loop)}"


def _show_ranks(ranks: Iterable[int]) -> str:
    parts = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(parts)
