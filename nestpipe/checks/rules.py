"""The rules that a loop or program must obey to have a meaning, one small function and one message each.

They look at single ops and what these name; what follows from the order of ops is for the other checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from nestpipe.checks.report import Finding, Verdict, WitnessStep
from nestpipe.ir import (
    ACROSS,
    ALL,
    ALL_TO_ALLS,
    CACHES,
    GROUPS,
    KINDS,
    MICRO_DATA,
    STATES,
    Atom,
    Cost,
    Data,
    Loop,
    Meaning,
    Op,
    OpKind,
    Program,
    Resource,
    op_name,
    show_op,
)

__all__ = ["RULES", "Rule", "broken_rules"]

Schedule: TypeAlias = Loop | Program
Complaints: TypeAlias = Iterator[tuple[Op | None, str]]

_MAX_REACH: Final = 16
_MAX_SLOTS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule: its name, what it demands, and a function that yields the offending op and what is wrong with it."""

    name: str
    demands: str
    complaints: Callable[[Schedule], Complaints]


def broken_rules(schedule: Schedule) -> list[Finding]:
    """A finding for the first complaint of each broken rule; none for a well-formed schedule."""
    stream_of = {id(op): stream.name for stream in schedule.streams for op in stream.ops}
    found = []
    for rule in RULES:
        op, message = next(rule.complaints(schedule), (None, ""))
        if message:
            steps = () if op is None else (WitnessStep(op=op, stream=stream_of[id(op)], note=rule.demands),)
            name = schedule.name if op is None else f"{schedule.name}: {_shown(schedule, op)}"
            text = f"{name}: {message}"
            found.append(Finding(rule=rule.name, verdict=Verdict.MALFORMED, message=text, witness=steps))
    return found


def _shown(schedule: Schedule, op: Op) -> str:
    return " ".join(show_op(op, loop=True).split("  ")[0].split()) if isinstance(schedule, Loop) else op_name(op)


def _not_empty(schedule: Schedule) -> Complaints:
    if not schedule.ops:
        yield None, "there are no ops; write at least one op in a stream"


def _unique(schedule: Schedule) -> Complaints:
    seen = set()
    for op in schedule.ops:
        name = op.name if isinstance(schedule, Loop) else op.ref
        if name in seen:
            what = "this kind of op" if isinstance(schedule, Loop) else "this op"
            yield op, f"{what} occurs twice, so a wait for it would be ambiguous; keep one"
        seen.add(name)


def _complete(schedule: Schedule) -> Complaints:
    if isinstance(schedule, Loop):
        return
    known = {op.ref for op in schedule.ops}
    for op in schedule.ops:
        if not 0 <= op.batch < schedule.steps or not 0 <= (op.micro_batch or 0) < schedule.micro_batches:
            yield op, f"outside the program's {schedule.steps} batches of {schedule.micro_batches} micro-batches"
    for kind, per_batch in {op.name: op.micro_batch is None for op in schedule.ops}.items():
        micro_batches = (None,) if per_batch else tuple(range(schedule.micro_batches))
        wanted = [(batch, m) for batch in range(schedule.steps) for m in micro_batches]
        have = {(ref.batch, ref.micro_batch) for ref in known if ref.name == kind}
        for batch, m in wanted:
            if (batch, m) not in have:
                name = f"{kind} {batch}" + ("" if m is None else f".{m}")
                yield None, f"{name} is missing; every op runs once per batch and micro-batch"


def _references(schedule: Schedule) -> Complaints:
    if isinstance(schedule, Program):
        known = {op.ref for op in schedule.ops}
        for op in schedule.ops:
            for ref in op.after:
                if ref not in known:
                    yield op, f"waits for {op_name(ref)}, which does not exist; add it or drop the wait"
        return
    per_batch = {op.name: op.micro_batch is None for op in schedule.ops}
    for op in schedule.ops:
        for ref in op.after:
            if ref.name not in per_batch:
                yield op, f"waits for {ref.name}, which does not exist; add it or drop the wait"
            elif per_batch[ref.name] is not (ref.micro_batch is None):
                once = per_batch[ref.name]
                way_out = "runs once per batch; drop the micro-batch" if once else "runs per micro-batch; write * or m"
                yield op, f"waits for {ref.name}, which {way_out}"
            elif ref.micro_batch not in (None, ALL) and op.micro_batch is None:
                yield op, f"waits for one micro-batch of {ref.name} but has none itself; write * to wait for all"


def _streams(schedule: Schedule) -> Complaints:
    for stream in schedule.streams:
        for op in stream.ops:
            kind = KINDS[op.kind]
            if not kind.any_stream and kind.collective is not (stream.resource in GROUPS):
                wanted = f"a group: {', '.join(sorted(GROUPS))}" if kind.collective else "no group"
                yield op, f"stream {stream.name} is bound to {stream.resource}, but {op.kind} needs {wanted}; move it"


def _one_device(schedule: Schedule) -> Complaints:
    on_device = [stream for stream in schedule.streams if stream.resource is Resource.COMPUTE]
    for stream in on_device[1:]:
        message = (
            f"streams {on_device[0].name} and {stream.name} are both on compute, but a rank has one device and neither "
            "has all of it; put the ops into one stream, copies on d2d"
        )
        yield next(iter(stream.ops), None), message
    for stream in schedule.streams:
        for op in stream.ops:
            if KINDS[op.kind].cost is Cost.ARITHMETIC and stream.resource is not Resource.COMPUTE:
                yield op, f"{op.kind} runs on the device, stream {stream.name} on {stream.resource}; move it to compute"


def _groups(schedule: Schedule) -> Complaints:
    """Ownership: the ranks among which a table is sharded; its replicas hold the same shard elsewhere."""
    on = [(op, stream.resource) for stream in schedule.streams for op in stream.ops]
    owners = next(((op, group) for op, group in on if op.kind in ALL_TO_ALLS), None)
    if owners is None:
        return
    first, group = owners
    replicas = ACROSS.get(group)
    for op, resource in on:
        if op.kind in ALL_TO_ALLS and resource is not group:
            yield (
                op,
                f"goes over {resource}, but {first.kind} over {group}; all exchanges of a table go over its owners",
            )
        elif KINDS[op.kind].meaning is Meaning.AVERAGE or (
            KINDS[op.kind].meaning is Meaning.EXTEND and any(access.data is Data.OWNED for access in op.writes)
        ):
            if replicas is None:
                yield op, f"{first.kind} goes over {group}, so that a table has no replicas; drop the op"
            elif resource is not replicas:
                yield (
                    op,
                    f"runs over {resource}, whose ranks own different rows; the replicas of a shard are on {replicas}",
                )


def _granularity(schedule: Schedule) -> Complaints:
    for op in schedule.ops:
        per_micro_batch = KINDS[op.kind].per_micro_batch
        if per_micro_batch is False and op.micro_batch is not None:
            yield op, f"{op.kind} runs once per batch; move it out of 'for m'"
        elif per_micro_batch is True and op.micro_batch is None:
            yield op, f"{op.kind} runs once per micro-batch; put it under 'for m'"


def _accesses(schedule: Schedule) -> Complaints:
    for op in schedule.ops:
        kind = KINDS[op.kind]
        for verb, used, may in (("read", op.reads, kind.reads), ("write", op.writes, kind.writes)):
            for access in used:
                if access.data not in may:
                    allowed = ", ".join(sorted(may)) or "nothing"
                    yield op, f"{op.kind} must not {verb} {access.data}; it may {verb} {allowed}"


def _inputs(schedule: Schedule) -> Complaints:
    written = {access.data for op in schedule.ops for access in op.writes}
    for op in schedule.ops:
        read = {access.data for access in op.reads}
        uses = KINDS[op.kind].uses
        if op.part in schedule.layers:  # a layer works with rows and samples only if it says so
            touched = read | {access.data for access in op.writes}
            uses -= {Data.BATCH} if touched & {Data.EMBEDDINGS, Data.ROW_GRADS} else {Data.BATCH, Data.KEYS}
        for used in sorted(uses & written - read):
            yield op, f"works with {used} without reading it; add it: what is not named is not checked"
        for access in op.writes:
            for needed in KINDS[op.kind].needs.get(access.data, ()):
                fed = op.part in schedule.layers and read & {Data.BATCH, Data.ACTIVATIONS}
                if needed not in read and not (needed is Data.EMBEDDINGS and fed):
                    yield (
                        op,
                        f"writes {access.data} without reading {needed}; add it: what is not named is not checked",
                    )


def _own_instance(schedule: Schedule) -> Complaints:
    parts = schedule.splits.parts
    for op in schedule.ops:
        for access in (*op.writes, *(() if KINDS[op.kind].meaning is Meaning.SYNC else op.reads)):
            own = access.batch is None or (
                access.batch == op.batch and (access.data not in MICRO_DATA or access.micro_batch == op.micro_batch)
            )
            part = parts.get(op.part or "")
            told = part is not None and access.data is Data.OWNED and access.batch == op.batch + (part.offset or 0)
            if not own and not told:
                yield (
                    op,
                    f"uses {access.data} of another batch or micro-batch; only sync may read an earlier batch's",
                )


def _parts(schedule: Schedule) -> Complaints:
    splits = schedule.splits
    known = {*splits.parts, *schedule.layers}
    for op in schedule.ops:
        for name, used in ((op.part, (*op.reads, *op.writes)), *((a.part, (a,)) for a in (*op.reads, *op.writes))):
            if name is not None and name not in known:
                yield op, f"part {name} is not declared; add 'part {name} ...' or 'layer {name}' at the head"
            if name is not None and used and not any(name in atom for a in used for atom in splits.atoms_of(a.data)):
                what = "dense work" if name in schedule.layers else "keys"
                yield op, f"{name} is a part of {what}, but {op.name} uses nothing that has it; drop the part"
        part = splits.parts.get(op.part or "")
        if part is not None and part.offset is not None:
            lists = {access.batch for access in op.reads if access.data is Data.OWNED}
            inside = isinstance(schedule, Loop) or 0 <= op.batch + part.offset < schedule.steps
            if not {op.batch, *([op.batch + part.offset] if inside else [])} <= lists:
                yield op, f"does not read which keys are {part.name}; let it read owned and owned t{part.offset:+d}"


def _layers(schedule: Schedule) -> Complaints:
    """Gradients flow back where activations flow forward."""
    ops = {op.name: op for op in reversed(schedule.ops)}
    for op in ops.values():
        for access in op.reads if op.kind is OpKind.FORWARD and op.part is not None else ():
            below = ops.get(f"{OpKind.BACKWARD}.{access.part}")
            if access.data is not Data.ACTIVATIONS or access.part is None or below is None:
                continue
            above = ops.get(f"{OpKind.BACKWARD}.{op.part}")
            if not any(a.data is Data.ACTIVATION_GRADS and a.part == op.part for a in below.reads):
                yield below, f"{op.name} reads {access.data}.{access.part}; let it read activation_grads.{op.part}"
            elif above is not None and all(a.data is not Data.ACTIVATION_GRADS for a in above.writes):
                yield above, f"{op.name} reads {access.data}.{access.part}; let it write activation_grads"


def _coverage(schedule: Schedule) -> Complaints:
    """Every key and layer once: by no two ops of a kind, and by some op for each buffer."""
    writers: dict[tuple[OpKind, Data, Atom], Op] = {}
    splits = schedule.splits
    ops = schedule.ops if isinstance(schedule, Loop) else tuple({op.name: op for op in schedule.ops}.values())
    for op in ops:
        for access in op.writes:
            for atom in splits.touched(op, access):
                other = writers.setdefault((op.kind, access.data, atom), op)
                if other.name != op.name:
                    yield op, f"writes {access.data} of keys for which {other.name} does already; let each have its own"
    written = {(data, atom) for _, data, atom in writers}
    for data in sorted({data for data, _ in written} - STATES - {Data.ACTIVATION_GRADS}):
        for atom in splits.atoms_of(data):
            if (data, atom) not in written:
                writer = next(op for (_, of, _), op in writers.items() if of is data)
                yield writer, f"{data} of {' and '.join(atom)} are written by no op; add {writer.kind} for them"


def _sync_keys(schedule: Schedule) -> Complaints:
    for op in schedule.ops:
        if KINDS[op.kind].meaning is not Meaning.SYNC:
            continue
        listed = {data: {a.batch for a in op.reads if a.data is data} for data in (Data.KEYS, Data.OWNED)}
        for access in op.reads:
            if access.data in CACHES.values() and not any({access.batch, op.batch} <= b for b in listed.values()):
                yield (
                    op,
                    (
                        f"copies {access.data} but does not read which keys the two batches share; "
                        "let it read owned of both batches"
                    ),
                )


def _buffers(schedule: Schedule) -> Complaints:
    declared = {buffer.data for buffer in schedule.buffers}
    written = {access.data for op in schedule.ops for access in op.writes}
    for op in schedule.ops:
        for access in (*op.reads, *op.writes):
            if access.data in STATES:
                continue
            if access.data not in declared:
                yield op, f"uses {access.data}, which is not declared; add 'buffer {access.data} device slots=1'"
            if access.data not in written:
                yield op, f"reads {access.data}, which no op writes; add an op that does, or drop the read"


def _depth(schedule: Schedule) -> Complaints:
    for buffer in schedule.buffers:
        if buffer.slots > _MAX_SLOTS:
            yield (
                None,
                f"buffer {buffer.data} has {buffer.slots} slots; the checks follow at most {_MAX_SLOTS}; use fewer",
            )
    if isinstance(schedule, Program):
        return
    lowest = min((batch for op in schedule.ops for batch in _batches(op)), default=0)
    for op in schedule.ops:
        if max(_batches(op)) - lowest > _MAX_REACH:
            yield (
                op,
                f"spans more than {_MAX_REACH} batches, the most that the checks follow; bring the offsets closer",
            )


def _batches(op: Op) -> list[int]:
    """The batch offsets that an op names."""
    return [
        op.batch,
        *(ref.batch for ref in op.after),
        *(a.batch for a in (*op.reads, *op.writes) if a.batch is not None),
    ]


RULES: Final = (
    Rule(name="not-empty", demands="a schedule has ops", complaints=_not_empty),
    Rule(name="unique-op", demands="every op runs once per batch and micro-batch", complaints=_unique),
    Rule(name="complete", demands="every op runs for each batch and micro-batch", complaints=_complete),
    Rule(name="references", demands="a wait names an op that exists", complaints=_references),
    Rule(name="streams", demands="collectives, and nothing else, run on the stream of a group", complaints=_streams),
    Rule(name="one-device", demands="a rank has one device, on which forward and backward run", complaints=_one_device),
    Rule(
        name="groups", demands="a table is sharded over one group, and averaged over its replicas", complaints=_groups
    ),
    Rule(name="granularity", demands="the kind says: per batch or per micro-batch", complaints=_granularity),
    Rule(name="accesses", demands="an op uses only data that its kind may use", complaints=_accesses),
    Rule(name="inputs", demands="an op reads what it needs for what it writes", complaints=_inputs),
    Rule(
        name="own-instance", demands="an op works on its own batch; sync reads earlier ones", complaints=_own_instance
    ),
    Rule(name="parts", demands="a part is declared, and known to the op whose part it is", complaints=_parts),
    Rule(name="layers", demands="gradients flow back where activations flow forward", complaints=_layers),
    Rule(name="coverage", demands="every key and every layer is in exactly one of the ops", complaints=_coverage),
    Rule(name="sync-keys", demands="sync knows which keys two batches share", complaints=_sync_keys),
    Rule(name="depth", demands="a pipeline is no deeper than the checks follow", complaints=_depth),
    Rule(name="buffers", demands="buffers are declared and written", complaints=_buffers),
)
"""All rules, in the order in which they are reported."""
