"""Small damages to a schedule: a dependency gone, two ops swapped, an offset off by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nestpipe.ir import ALL, GROUPS, Access, Data, Loop, MicroBlock, Op, OpKind, OpRef, Resource, Stream, map_ops

__all__ = ["damaged_buffers", "damaged_collectives", "mutants", "shifted_micro_batches"]


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
                name = f"{op.name} without {verb} {access.data} t{(access.batch or 0):+d}"
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
                    name = f"{op.name} after {ref.kind} m{ref.micro_batch + by:+d}"
                    yield name, _with_op(loop, op, replace(op, after=(*op.after[:i], new, *op.after[i + 1 :])))


def damaged_collectives(loop: Loop) -> Iterator[tuple[str, Loop]]:
    """Every op dropped, every stream moved to every other group, dense gradients summed in every other way."""
    for op in loop.ops:
        yield f"without {op.name}", _without(loop, op)
    for s, stream in enumerate(loop.streams):
        for group in sorted(GROUPS - {stream.resource}) if stream.resource in GROUPS else ():
            streams = (*loop.streams[:s], replace(stream, resource=group), *loop.streams[s + 1 :])
            yield f"{stream.name} on {group}", replace(loop, streams=streams)
    if any(op.kind is OpKind.ALL_REDUCE for op in loop.ops):
        yield "summed per micro-batch", _summed_per_micro_batch(loop)
        for group in sorted(GROUPS):
            yield f"summed again over {group}, a shard left", _summed_again(loop, group, gathered=False)
            if all(op.kind is not OpKind.ALL_GATHER for op in loop.ops):
                yield f"summed again over {group}", _summed_again(loop, group, gathered=True)
                for first in sorted(GROUPS - {Resource.WORLD}):
                    again = _summed_again(loop, group, gathered=True)
                    yield f"summed over {first}, then {group}", _on_group(again, OpKind.ALL_REDUCE, first)


def _without(loop: Loop, dropped: Op) -> Loop:
    def change(op: Op) -> Op | None:
        after = tuple(ref for ref in op.after if ref.name != dropped.name)
        return None if op.name == dropped.name else replace(op, after=after)

    return map_ops(loop, change)


def _on_group(loop: Loop, kind: OpKind, group: Resource) -> Loop:
    def moved(stream: Stream) -> Stream:
        return replace(stream, resource=group) if any(op.kind is kind for op in stream.ops) else stream

    return replace(loop, streams=tuple(map(moved, loop.streams)))


def _summed_again(loop: Loop, group: Resource, *, gathered: bool) -> Loop:
    """A reduce_scatter after all_reduce, and an all_gather after it; who waited for all_reduce waits for the last."""
    grads = (Access(data=Data.DENSE_GRADS, batch=0),)
    kinds = [OpKind.REDUCE_SCATTER] + [OpKind.ALL_GATHER] * gathered

    def change(op: Op) -> Op:
        return replace(op, after=tuple(OpRef(kind=kinds[-1], batch=r.batch) if is_sum(r) else r for r in op.after))

    def is_sum(ref: OpRef) -> bool:
        return ref.kind is OpKind.ALL_REDUCE

    ops, last = [], OpKind.ALL_REDUCE
    for kind in kinds:
        ops.append(Op(kind=kind, batch=0, after=(OpRef(kind=last, batch=0),), reads=grads, writes=grads))
        last = kind
    again = Stream(name="again", resource=group, body=tuple(ops))
    changed = map_ops(loop, change)
    return replace(changed, streams=(*changed.streams, again))


def _summed_per_micro_batch(loop: Loop) -> Loop:
    """The all_reduce inside `for m`, right after the backward of its micro-batch, which waits for the one before."""
    backward = OpRef(kind=OpKind.BACKWARD, batch=0, micro_batch=0)

    def change(op: Op) -> Op:
        waits = tuple(replace(r, micro_batch=ALL) if r.kind is OpKind.ALL_REDUCE else r for r in op.after)
        if op.kind is OpKind.BACKWARD:
            waits = (*waits, OpRef(kind=OpKind.ALL_REDUCE, batch=0, micro_batch=-1))
        return replace(op, after=waits)

    def body(item: Op | MicroBlock) -> Op | MicroBlock:
        if isinstance(item, Op) and item.kind is OpKind.ALL_REDUCE:
            return MicroBlock(ops=(replace(item, micro_batch=0, after=(backward,)),))
        return item

    changed = map_ops(loop, change)
    return replace(changed, streams=tuple(replace(s, body=tuple(map(body, s.body))) for s in changed.streams))


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
            yield f"{op.name} without after {ref.name} t{ref.batch:+d}", _with_op(loop, op, replace(op, after=after))


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
            yield f"{op.name} shifted by {by:+d}", _with_op(loop, op, replace(op, batch=batch, **own))
            for i, ref in enumerate(op.after):
                after = (*op.after[:i], replace(ref, batch=ref.batch + by), *op.after[i + 1 :])
                yield f"{op.name} after {ref.name} t{ref.batch + by:+d}", _with_op(loop, op, replace(op, after=after))
            for i, access in enumerate(op.reads):
                if access.batch is not None and access.batch != op.batch:
                    reads = (*op.reads[:i], replace(access, batch=access.batch + by), *op.reads[i + 1 :])
                    name = f"{op.kind} reads {access.data} t{access.batch + by:+d}"
                    yield name, _with_op(loop, op, replace(op, reads=reads))
