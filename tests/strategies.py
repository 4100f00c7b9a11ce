"""Hypothesis strategies: random loops that are well-formed and free of deadlock by construction."""

from __future__ import annotations

from hypothesis import strategies as st

from nestpipe.ir import ALL, COLLECTIVES, Loop, MicroBlock, Op, OpKind, OpRef, Resource, Stream

_LOCAL = sorted(set(OpKind) - COLLECTIVES)
_COLLECTIVE = sorted(COLLECTIVES)


@st.composite
def loops(draw: st.DrawFn, *, max_micro_batches: int = 3) -> Loop:
    """A loop of random ops on random streams.

    Units (single ops or micro-blocks) get a random total order; within an iteration an op only waits for earlier units,
    and for any op of an earlier iteration, so no circle can close.
    """
    micro_batches = draw(st.integers(1, max_micro_batches))
    num_streams = draw(st.integers(1, 4))
    resources = draw(
        st.lists(st.sampled_from([Resource.COMPUTE, Resource.WORLD]), min_size=num_streams, max_size=num_streams)
    )
    local, collective = iter(draw(st.permutations(_LOCAL))), iter(draw(st.permutations(_COLLECTIVE)))
    bodies: list[list[Op | MicroBlock]] = [[] for _ in range(num_streams)]
    placed: list[tuple[OpKind, int, bool, int]] = []
    for unit in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, num_streams - 1))
        kinds = collective if resources[at] is Resource.WORLD else local
        in_block = draw(st.booleans())
        ops = []
        for _ in range(draw(st.integers(1, 2)) if in_block else 1):
            kind = next(kinds, None)
            if kind is None:
                continue
            batch = draw(st.integers(0, 2))
            after = tuple(draw(_refs(placed, unit, in_block)))
            ops.append(Op(kind=kind, batch=batch, micro_batch=0 if in_block else None, after=after))
        placed += [(op.kind, op.batch, in_block, unit) for op in ops]
        if ops:
            bodies[at].append(MicroBlock(ops=tuple(ops)) if in_block else ops[0])
    streams = tuple(
        Stream(name=f"s{i}", resource=resource, body=tuple(body))
        for i, (resource, body) in enumerate(zip(resources, bodies, strict=True))
        if body
    )
    return Loop(name="random", micro_batches=micro_batches, buffers=(), streams=streams)


@st.composite
def _refs(draw: st.DrawFn, placed: list[tuple[OpKind, int, bool, int]], unit: int, in_block: bool) -> list[OpRef]:
    if not placed:
        return []
    chosen = draw(st.lists(st.sampled_from(placed), max_size=2, unique=True))
    refs = []
    for kind, batch, is_micro, of_unit in chosen:
        distance = draw(st.integers(0 if of_unit < unit else 1, 2))
        micro = None if not is_micro else draw(st.sampled_from([0, ALL])) if in_block else ALL
        refs.append(OpRef(kind=kind, batch=batch - distance, micro_batch=micro))
    return refs
