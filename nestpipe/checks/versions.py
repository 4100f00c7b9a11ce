"""One run of a program on versions instead of rows: who copies what to where, and what is seen where it matters.

Every op works on the keys of its batch only, that is in the histories that contain it (`nestpipe.checks.histories`). So
a lookup, a sync, an update and a write-back are a few operations on bitsets each, and the run is exact for every key
there can be, not for a sample.

One run stands for all: `nestpipe.checks.buffers` has shown that the accesses to buffers are ordered. Lookups and
write-backs touch `table` and `optimizer` only in the keys of their batch; where two of them are not ordered, what the
one reads is undefined in the histories that contain both batches, and that follows the row until it is overwritten or
used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nestpipe.checks.histories import Version, all_histories, blank, containing, most_missing
from nestpipe.checks.order import Order
from nestpipe.checks.reduction import Reductions
from nestpipe.ir import (
    ALL_TO_ALLS,
    CACHES,
    KINDS,
    Access,
    Atom,
    Data,
    Meaning,
    Op,
    Part,
    Program,
    Resource,
    Split,
)

__all__ = ["Scenario", "Sighting", "VersionRun", "means", "op_reads", "op_writes", "scenarios"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who asks for a key, as far as a schedule can tell the difference.

    `same_rank`: an intersection per rank finds the keys that batches share. `remote_parity`: batches of this parity ask
    for the key on the other replica of the shard only; None where there is one replica or it asks for all. `static` is
    the part to which the key's table belongs.
    """

    name: str
    same_rank: bool = True
    remote_parity: int | None = None
    static: str | None = None


def scenarios(ops: Iterable[Op], parts: Sequence[Part] = ()) -> tuple[Scenario, ...]:
    """The scenarios in which the schedule may behave differently; one unless it intersects per rank or has replicas."""
    ops = tuple(ops)
    found = [Scenario(name="")]
    if any(means(op, Meaning.SYNC) and op_reads(op, Data.KEYS) for op in ops):
        found.append(Scenario(name="asked for by different ranks", same_rank=False))
    if any(means(op, Meaning.AVERAGE) for op in ops):
        found += [Scenario(name="asked for by different replicas", remote_parity=parity) for parity in (0, 1)]
    static = [part.name for part in parts if part.split is Split.STATIC]
    if static:
        found = [
            replace(each, name=", ".join(filter(None, (each.name, f"of {name}"))), static=name)
            for each in found
            for name in static
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """Op number `op` meets something wrong with `state` or its cache: in which histories, about which update."""

    rule: str
    op: int
    state: Data
    histories: int
    update: int


class VersionRun:
    """Runs the ops one by one; `sightings`, `rows`, `optimizer` and `dense_stale` say what was seen.

    Staleness is kept by distance to the batch that touched the key last, None for a first touch.
    """

    def __init__(self, program: Program, order: Order, scenario: Scenario, batches: range) -> None:
        self.program, self.order, self.scenario, self.steps = program, order, scenario, program.steps
        self.batches, followed = batches, len(batches)
        self.splits = program.splits
        self.resources = {stream.name: stream.resource for stream in program.streams}
        # a bit per batch that may touch the key, and one per batch that may find it in a cache
        cached = any(part.split in (Split.CACHED, Split.UNCACHED) for part in program.parts)
        self.full = all_histories(followed * (1 + cached))
        self.hit = [self.bit_of(batch, followed, cached) for batch in range(self.steps)]
        self.touch = [
            containing(batches.index(batch), followed * (1 + cached)) if batch in batches else 0
            for batch in range(self.steps)
        ]
        self.averaged = any(means(op, Meaning.AVERAGE) for op in order.ops)
        self.replicated = any(
            op.kind in ALL_TO_ALLS and self.resources[stream] is not Resource.WORLD
            for op, stream in zip(order.ops, order.streams, strict=True)
        )
        self.applies = _applied(order.ops)
        self.clashes = self.find_clashes()
        self.blank = blank(self.steps)
        self.nothing = self.blank.undefined_in(self.full)
        self.states = dict.fromkeys(CACHES, self.blank)
        self.cached: dict[tuple[Data, int], Version] = {}
        self.embeddings: dict[tuple[int, int | None], Version] = {}
        self.dense: dict[Atom, set[int]] = {atom: set() for atom in self.splits.atoms_of(Data.DENSE)}
        self.extended: set[int] = set()
        self.dense_grads: dict[tuple[int, Atom], Reductions] = {}
        self.rows: dict[int | None, int] = {}
        self.optimizer: dict[int | None, int] = {}
        self.dense_stale = 0
        self.sightings: list[Sighting] = []

    # -- who touches what -------------------------------------------------------------------------------------------

    def is_local(self, batch: int) -> bool:
        """Whether this replica asks for the key in this batch."""
        return self.scenario.remote_parity is None or batch % 2 != self.scenario.remote_parity

    def bit_of(self, batch: int, followed: int, cached: bool) -> int:
        """Histories in which a cache holds the key when the batch comes."""
        return containing(followed + self.batches.index(batch), 2 * followed) if cached and batch in self.batches else 0

    def keys_of(self, op: Op, batch: int) -> int:
        """Histories in which the op finds the key among the owned keys of `batch`."""
        return self.keys_touched(op, batch) if self.is_listed(op, batch) else 0

    def is_listed(self, op: Op, batch: int) -> bool:
        """Whether the op finds the key among the owned keys, if the batch touches it."""
        return self.is_local(batch) or (batch in self.extended and op_reads(op, Data.OWNED, batch))

    def keys_touched(self, op: Op, batch: int) -> int:
        """Histories in which `batch` touches the key and it belongs to the op's part of the batch."""
        touched, part = self.touch[batch], self.splits.parts.get(op.part or "")
        if part is None:
            return touched
        if part.split is Split.STATIC:
            return touched if self.scenario.static in (None, part.name) else 0
        if part.split in (Split.CACHED, Split.UNCACHED):
            inside = self.hit[batch]
        else:
            other = batch + (part.offset or 0)
            inside = self.touch[other] if 0 <= other < self.steps else 0
        return touched & (inside if part.split in (Split.IN, Split.CACHED) else ~inside)

    def find_clashes(self) -> dict[tuple[int, Data], list[tuple[int, int]]]:
        """For each op and state, the unordered ops that write it and the histories that contain both batches."""
        found: dict[tuple[int, Data], list[tuple[int, int]]] = {}
        keys = [self.keys_touched(op, op.batch) for op in self.order.ops]
        for state in CACHES:
            writers = [i for i, op in enumerate(self.order.ops) if op_writes(op, state)]
            users = [i for i, op in enumerate(self.order.ops) if op_reads(op, state)] + writers
            for i in dict.fromkeys(users):
                for j in writers:
                    both = keys[i] & keys[j]
                    if both and not self.order.ordered(i, j):
                        found.setdefault((i, state), []).append((j, both))
        return found

    def clashing(self, op: int, state: Data) -> int:
        """Histories in which what the op finds in the state is undefined."""
        mask = 0
        for writer, both in self.clashes.get((op, state), []):
            if not self.takes_turns(op, writer, state):
                mask |= both
        return mask

    def takes_turns(self, op: int, writer: int, state: Data) -> bool:
        """Whether rows are atomic for both ops: one has the row before the other, whichever comes first.

        Copying a whole row back over what another op has applied loses an update, however atomic each is; and what a
        later batch applies, or the op's own, must not be seen at all.
        """
        first, second = self.order.ops[op], self.order.ops[writer]
        applies = [o for o in (first, second) if op_writes(o, state)]
        atomic = any(s.data is state and s.atomic and s.part in (None, first.part) for s in self.program.states)
        seen_early = first not in applies and second.batch >= first.batch
        return atomic and not seen_early and all(op_reads(o, Data.OWNED_GRADS) for o in applies)

    def found_in(self, i: int, state: Data) -> Version:
        """What a lookup may find: of several versions that which misses most."""
        found = self.states[state].undefined_in(self.clashing(i, state))
        for writer, both in self.clashes.get((i, state), []):
            if self.takes_turns(i, writer, state):
                found = found.without(self.order.ops[writer].batch, both)
        return found

    # -- one op -----------------------------------------------------------------------------------------------------

    def step(self, i: int) -> None:
        """Runs op number `i`."""
        op = self.order.ops[i]
        match KINDS[op.kind].meaning:
            case Meaning.COPY:
                self.lookup(i, op)
            case Meaning.SYNC:
                self.sync(op)
            case Meaning.SERVE if op_reads(op, Data.ROWS, op.batch):
                self.serve(op)
            case Meaning.USE:
                self.compute(i, op)
            case Meaning.REDUCE | Meaning.EXTEND if op_writes(op, Data.DENSE_GRADS):
                for grads in self.grads_of(op, op.writes):
                    grads.collective(op.kind, self.resources[self.order.streams[i]])
            case Meaning.APPLY:
                self.update(i, op)
            case Meaning.STORE:
                self.write_back(i, op)
            case Meaning.EXTEND if op_writes(op, Data.OWNED):
                self.extended.add(op.batch)
            case Meaning.AVERAGE:
                self.average(op)

    def serve(self, op: Op) -> None:
        rows, name = self.cached[Data.ROWS, op.batch], (op.batch, op.micro_batch)
        if op.part is not None:
            rows = self.embeddings.get(name, self.nothing).where(self.keys_touched(op, op.batch), rows)
        self.embeddings[name] = rows

    def lookup(self, i: int, op: Op) -> None:
        for state, buffer in CACHES.items():
            if op_writes(op, buffer):
                found = self.found_in(i, state) if op_reads(op, state) else self.blank
                before = self.nothing if op.part is None else self.cached.get((buffer, op.batch), self.nothing)
                self.cached[buffer, op.batch] = before.where(self.keys_of(op, op.batch), found)

    def sync(self, op: Op) -> None:
        for buffer in CACHES.values():
            if not op_writes(op, buffer):
                continue
            batches = {access.batch for access in op.reads if access.data is buffer and access.batch is not None}
            for source in sorted(batches - {op.batch}):
                at_owner = op_reads(op, Data.OWNED, source) and op_reads(op, Data.OWNED, op.batch)
                known = self.is_listed(op, source) and (at_owner or self.scenario.same_rank)
                shared = self.touch[source] & self.keys_of(op, op.batch) if known else 0
                own = self.cached[buffer, op.batch]
                self.cached[buffer, op.batch] = own.where(shared, self.cached[buffer, source])

    def grads_of(self, op: Op, accesses: Iterable[Access]) -> list[Reductions]:
        """The dense gradients, by layer, that an op reads or writes."""
        return [
            self.dense_grads.setdefault((op.batch, layer), Reductions())
            for access in accesses
            if access.data is Data.DENSE_GRADS
            for layer in self.splits.touched(op, access)
        ]

    def dense_of(self, op: Op, accesses: Iterable[Access]) -> list[set[int]]:
        """The updates that the dense parameters, by layer, which an op reads or writes have received."""
        dense = [access for access in accesses if access.data is Data.DENSE]
        return [self.dense[layer] for access in dense for layer in self.splits.touched(op, access)]

    def compute(self, i: int, op: Op) -> None:
        for grads in self.grads_of(op, op.writes):
            grads.add(op.micro_batch)
        version = self.embeddings.get((op.batch, op.micro_batch))
        if version is not None and op_reads(op, Data.EMBEDDINGS) and self.is_local(op.batch):
            self.observe(i, Data.TABLE, version, self.touch[op.batch])
        for dense in self.dense_of(op, op.reads) if Data.DENSE in self.applies else ():
            missing = set(range(op.batch)) - dense
            ahead = {batch for batch in dense if batch >= op.batch}
            if ahead:
                self.see("frozen-window", i, Data.DENSE, min(ahead))
            elif missing:
                self.dense_stale = max(self.dense_stale, len(missing))
                self.see("stale-dense", i, Data.DENSE, max(missing))

    def update(self, i: int, op: Op) -> None:
        self.expect_frozen(i, op, Data.DENSE)
        for grads in self.grads_of(op, op.reads):
            if (fault := grads.fault()) is not None:
                self.see(fault, i, Data.DENSE, op.batch)
        self.apply(i, op)
        for dense in self.dense_of(op, op.writes):
            dense.add(op.batch)

    def apply(self, i: int, op: Op) -> None:
        """Applies the gradients of the batch to the rows, optimiser rows or states that the op writes."""
        mask = self.keys_of(op, op.batch)
        self.expect_frozen(i, op, Data.TABLE, mask)
        for state, buffer in CACHES.items():
            if self.replicated and not self.averaged and (op_writes(op, buffer) or op_writes(op, state)):
                self.see("not-averaged", i, state, op.batch, mask)
            if op_writes(op, buffer):
                version = self.cached[buffer, op.batch]
                if not op.micro_batch:  # later ones see what the first has applied: not-frozen says so
                    self.observe(i, state, version, mask)
                self.cached[buffer, op.batch] = version.applied(op.batch, mask, averaged=self.averaged)
            if op_writes(op, state):
                version = self.states[state].undefined_in(self.clashing(i, state))
                if not op.micro_batch:
                    self.observe(i, state, version, mask)
                self.states[state] = version.applied(op.batch, mask, averaged=self.averaged)

    def expect_frozen(self, i: int, op: Op, state: Data, mask: int = 0) -> None:
        """Parameters do not change while micro-batches of the batch are still to come."""
        used = {state, CACHES.get(state, state)}
        if op.micro_batch is not None and self.program.micro_batches > 1 and used & {a.data for a in op.writes}:
            self.see("not-frozen", i, state, op.batch, mask)

    def average(self, op: Op) -> None:
        for buffer in CACHES.values():
            if op_writes(op, buffer):
                merged = self.cached[buffer, op.batch].merged(op.batch, self.keys_of(op, op.batch))
                self.cached[buffer, op.batch] = merged

    def write_back(self, i: int, op: Op) -> None:
        if op_reads(op, Data.OWNED_GRADS):
            self.apply(i, op)
            return
        for state, buffer in CACHES.items():
            if op_writes(op, state) and op_reads(op, buffer):
                version = self.cached[buffer, op.batch].undefined_in(self.clashing(i, state))
                self.states[state] = self.states[state].where(self.keys_of(op, op.batch), version)

    # -- what is seen -----------------------------------------------------------------------------------------------

    def see(self, rule: str, i: int, state: Data, update: int, histories: int = 0) -> None:
        """Keeps the first sighting of each rule."""
        if all(sighting.rule != rule for sighting in self.sightings):
            self.sightings.append(Sighting(rule=rule, op=i, state=state, histories=histories, update=update))

    def observe(self, i: int, state: Data, version: Version, mask: int) -> None:
        """Notes what op `i` sees in the histories of `mask`: staleness by distance, and faults."""
        batch = self.order.ops[i].batch
        staleness = self.rows if state is Data.TABLE else self.optimizer
        if undefined := version.undefined & mask:
            self.see("undefined", i, state, 0, undefined)
            return
        for update in range(batch, self.steps):
            if ahead := version.has[update] & mask:
                self.see("frozen-window", i, state, update, ahead)
                return
        earlier = range(batch) if state in self.applies else range(0)
        missing = [m for u in earlier if (m := mask & self.touch[u] & ~version.has[u])]
        for distance, histories in self.distances(batch, mask):
            stale, where = most_missing(histories, missing)
            staleness[distance] = max(staleness.get(distance, 0), stale)
            if stale and distance is not None:
                self.see(f"stale-{state}", i, state, batch - distance, where)

    def distances(self, batch: int, mask: int) -> Iterator[tuple[int | None, int]]:
        """Splits histories by the distance of `batch` to the last batch before it that they contain."""
        left = mask
        for distance in range(1, batch + 1):
            if histories := left & self.touch[batch - distance]:
                yield distance, histories
                left &= ~histories
        if left:
            yield None, left

    def end(self) -> None:
        """After the last op every update must have arrived."""
        last = self.order.sequence[-1] if self.order.sequence else 0
        for state, version in self.states.items():
            if state not in self.applies:
                continue
            if version.undefined:
                self.see("undefined", last, state, 0, version.undefined)
            for update in range(self.steps):
                if lost := self.touch[update] & ~version.has[update] & ~version.undefined:
                    self.see("lost-update", last, state, update, lost)
                    break
        for dense in self.dense.values() if Data.DENSE in self.applies else ():
            if missing := set(range(self.steps)) - dense:
                self.see("lost-update", last, Data.DENSE, min(missing))


def means(op: Op, *meanings: Meaning) -> bool:
    """Whether this is what the op does to versions."""
    return KINDS[op.kind].meaning in meanings


def op_reads(op: Op, data: Data, batch: int | None = None) -> bool:
    """Whether the op reads the data, of this batch if one is given."""
    return any(a.data is data and batch in (None, a.batch) for a in op.reads)


def op_writes(op: Op, data: Data) -> bool:
    """Whether the op writes the data."""
    return any(a.data is data for a in op.writes)


def _applied(ops: tuple[Op, ...]) -> set[Data]:
    """The states that updates are meant to reach: those for which gradients are computed."""
    written = {access.data for op in ops for access in op.writes}
    used = written | {access.data for op in ops for access in op.reads}
    found = {Data.DENSE} if Data.DENSE_GRADS in written else set()
    if written & {Data.ROW_GRADS, Data.OWNED_GRADS}:
        found |= {Data.TABLE} | ({Data.OPTIMIZER} if used & {Data.OPTIMIZER, Data.MOMENTS} else set())
    return found
