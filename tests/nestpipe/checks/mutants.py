"""Small damages to a schedule: a dependency gone, two ops swapped, an offset off by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nestpipe.ir import Loop, MicroBlock, Op, Stream

__all__ = ["damaged_buffers", "mutants", "shifted_micro_batches"]


def mutants(loop: Loop) -> Iterator[tuple[str, Loop]]:
    """Every single dependency removed, every adjacent pair swapped, every batch offset changed by one, with names."""
    yield from _without_a_wait(loop)
    yield from _swapped(loop)
    yield from _shifted(loop)


def damaged_buffers(loop: Loop) -> Iterator[tuple[str, Loop]]:
    """Every buffer with one slot more or less, every single access removed."""
    for i, buffer in enumerate(loop.buffers):
        for slots in (buffer.slots - 1, buffer.slots + 1):
            if slots:
                buffers = (*loop.buffers[:i], replace(buffer, slots=slots), *loop.buffers[i + 1 :])
                yield f"{buffer.data} in {slots} slots", replace(loop, buffers=buffers)
    for op in loop.ops:
        for verb in ("reads", "writes"):
            accesses = getattr(op, verb)
            for i, access in enumerate(accesses):
                name = f"{op.kind} without {verb} {access.data} t{(access.batch or 0):+d}"
                yield name, _with_op(loop, op, replace(op, **{verb: (*accesses[:i], *accesses[i + 1 :])}))


def shifted_micro_batches(loop: Loop) -> Iterator[tuple[str, Loop]]:
    """Every micro-batch offset of an op or a wait changed by one; an op takes its own accesses along."""
    for op in loop.ops:
        if op.micro_batch is None:
            continue
        for by in (-1, 1):
            micro_batch = op.micro_batch + by
            own = {
                verb: tuple(
                    a if a.micro_batch is None else replace(a, micro_batch=micro_batch) for a in getattr(op, verb)
                )
                for verb in ("reads", "writes")
            }
            yield f"{op.kind} m{micro_batch:+d}", _with_op(loop, op, replace(op, micro_batch=micro_batch, **own))
            for i, ref in enumerate(op.after):
                if isinstance(ref.micro_batch, int):
                    new = replace(ref, micro_batch=ref.micro_batch + by)
                    name = f"{op.kind} after {ref.kind} m{ref.micro_batch + by:+d}"
                    yield name, _with_op(loop, op, replace(op, after=(*op.after[:i], new, *op.after[i + 1 :])))


def _with_op(loop: Loop, old: Op, new: Op) -> Loop:
    def item_of(item: Op | MicroBlock) -> Op | MicroBlock:
        if isinstance(item, MicroBlock):
            return MicroBlock(ops=tuple(new if op is old else op for op in item.ops))
        return new if item is old else item

    return replace(loop, streams=tuple(replace(s, body=tuple(map(item_of, s.body))) for s in loop.streams))


def _without_a_wait(loop: Loop) -> Iterator[tuple[str, Loop]]:
    for op in loop.ops:
        for i, ref in enumerate(op.after):
            after = (*op.after[:i], *op.after[i + 1 :])
            yield f"{op.kind} without after {ref.kind} t{ref.batch:+d}", _with_op(loop, op, replace(op, after=after))


def _swapped(loop: Loop) -> Iterator[tuple[str, Loop]]:
    for s, stream in enumerate(loop.streams):
        for name, body in _swapped_bodies(stream):
            streams = (*loop.streams[:s], replace(stream, body=body), *loop.streams[s + 1 :])
            yield f"{stream.name}: {name}", replace(loop, streams=streams)


def _swapped_bodies(stream: Stream) -> Iterator[tuple[str, tuple[Op | MicroBlock, ...]]]:
    def name(item: Op | MicroBlock) -> str:
        return "block" if isinstance(item, MicroBlock) else str(item.kind)

    body = stream.body
    for i in range(len(body) - 1):
        yield f"{name(body[i])} and {name(body[i + 1])} swapped", (*body[:i], body[i + 1], body[i], *body[i + 2 :])
    for b, block in enumerate(body):
        ops = block.ops if isinstance(block, MicroBlock) else ()
        for i in range(len(ops) - 1):
            new = MicroBlock(ops=(*ops[:i], ops[i + 1], ops[i], *ops[i + 2 :]))
            yield f"{ops[i].kind} and {ops[i + 1].kind} swapped", (*body[:b], new, *body[b + 1 :])


def _shifted(loop: Loop) -> Iterator[tuple[str, Loop]]:
    """Offsets as they stand in the text: an op takes the accesses to its own batch along."""
    for op in loop.ops:
        for by in (-1, 1):
            batch = op.batch + by
            own = {
                verb: tuple(replace(a, batch=batch) if a.batch == op.batch else a for a in getattr(op, verb))
                for verb in ("reads", "writes")
            }
            yield f"{op.kind} shifted by {by:+d}", _with_op(loop, op, replace(op, batch=batch, **own))
            for i, ref in enumerate(op.after):
                after = (*op.after[:i], replace(ref, batch=ref.batch + by), *op.after[i + 1 :])
                yield f"{op.kind} after {ref.kind} t{ref.batch + by:+d}", _with_op(loop, op, replace(op, after=after))
            for i, access in enumerate(op.reads):
                if access.batch is not None and access.batch != op.batch:
                    reads = (*op.reads[:i], replace(access, batch=access.batch + by), *op.reads[i + 1 :])
                    name = f"{op.kind} reads {access.data} t{access.batch + by:+d}"
                    yield name, _with_op(loop, op, replace(op, reads=reads))
