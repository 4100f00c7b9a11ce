"""The schedules of a profile: one in which every op runs alone, and variants in which some ops meet.

`serial.txt` has every op of the catalogue's schedules on `world`, one after the other. So each op is seen alone, done
by the very code that trains. The variants are edits of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Final

from nestpipe.ir import ALL, Access, Data, Op, OpKind, OpRef, map_ops, parse, show

__all__ = ["PAIRS", "SERIAL", "TURNS"]

_FILE: Final = "serial.txt"
_LOOP: Final = replace(parse((files("executor.profile") / _FILE).read_text(encoding="utf-8"), source=_FILE), doc="")
#: The text of the serial schedule.
SERIAL: Final = show(_LOOP)

_Edit = Callable[[Op], Op]


def _edited(edits: Mapping[OpKind, _Edit], slots: Mapping[Data, int] | None = None) -> str:
    """The text of the serial schedule with some kinds of op edited and some buffers of another size."""
    loop = map_ops(_LOOP, lambda op: edits[op.kind](op) if op.kind in edits else op)
    sized = tuple(replace(buffer, slots=(slots or {}).get(buffer.data, buffer.slots)) for buffer in loop.buffers)
    return show(replace(loop, buffers=sized))


def _moved(*after: OpRef, batches: int = 0, micro_batches: int = 0) -> _Edit:
    """Work on a later batch or micro-batch, after these ops and no others."""

    def accesses(before: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(
            replace(
                each,
                batch=None if each.batch is None else each.batch + batches,
                micro_batch=None if each.micro_batch is None else each.micro_batch + micro_batches,
            )
            for each in before
        )

    def move(op: Op) -> Op:
        micro_batch = None if op.micro_batch is None else op.micro_batch + micro_batches
        return replace(
            op,
            batch=op.batch + batches,
            micro_batch=micro_batch,
            after=after,
            reads=accesses(op.reads),
            writes=accesses(op.writes),
        )

    return move


_BACKWARDS: Final = OpRef(kind=OpKind.BACKWARD, batch=0, micro_batch=ALL)
_REDUCE_BESIDE_GRADS: Final = _edited({OpKind.ALL_REDUCE: _moved(_BACKWARDS)})
_ROWS_BESIDE_COMPUTE: Final = _edited(
    {OpKind.ALL_TO_ALL_ROWS: _moved(OpRef(kind=OpKind.SYNC, batch=0), micro_batches=1)},
    {Data.EMBEDDINGS: 2, Data.ROW_GRADS: 2},
)
_READ_BESIDE_WRITE_BACK: Final = _edited({OpKind.READ: _moved(OpRef(kind=OpKind.UPDATE, batch=-1))})
_KEYS_BESIDE_GRADS: Final = _edited(
    {
        OpKind.READ: _moved(OpRef(kind=OpKind.WRITE_BACK, batch=-1), batches=1),
        OpKind.COPY_H2D: _moved(OpRef(kind=OpKind.READ, batch=1), batches=1),
        OpKind.DEDUP: _moved(OpRef(kind=OpKind.COPY_H2D, batch=1), batches=1),
        OpKind.ALL_TO_ALL_KEYS: _moved(_BACKWARDS, OpRef(kind=OpKind.DEDUP, batch=1, micro_batch=ALL), batches=1),
    },
    {Data.SAMPLES: 2, Data.BATCH: 2, Data.KEYS: 2, Data.OWNED: 3},
)

#: Interference: for each pair of ops a schedule in which they run at the same time, and the kinds to look at.
PAIRS: Final[Mapping[str, tuple[str, tuple[OpKind, ...]]]] = {
    "all_reduce with all_to_all[grads]": (_REDUCE_BESIDE_GRADS, (OpKind.ALL_REDUCE, OpKind.ALL_TO_ALL_GRADS)),
    "forward and backward with all_to_all[rows]": (
        _ROWS_BESIDE_COMPUTE,
        (OpKind.FORWARD, OpKind.BACKWARD, OpKind.ALL_TO_ALL_ROWS),
    ),
    "write_back with read and copy_h2d": (
        _READ_BESIDE_WRITE_BACK,
        (OpKind.WRITE_BACK, OpKind.READ, OpKind.COPY_H2D),
    ),
    "lookup with forward and backward": ("dbp", (OpKind.LOOKUP, OpKind.FORWARD, OpKind.BACKWARD)),
}

#: Turns on a busy link: schedules in which a small collective starts together with a large one, which outlasts it.
TURNS: Final[Mapping[OpKind, str]] = {
    OpKind.ALL_REDUCE: _REDUCE_BESIDE_GRADS,
    OpKind.ALL_TO_ALL_KEYS: _KEYS_BESIDE_GRADS,
}
