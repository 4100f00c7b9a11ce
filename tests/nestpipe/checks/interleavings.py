"""A brute-force oracle for the checks: runs a small program on two ranks in every interleaving and looks at the values.

It knows nothing of happens-before. Every op has a start and an end; what it reads is sampled at its start and must be
the same at its end; what it writes is in flux in between. A value read in flux, or changed while it was read, is
poison. Poison that reaches a forward, an update or the table that is left at the end is a race, and so are two
interleavings that read different versions. Rows are followed key by key: one key for every set of batches, for each
owner, asked for by one rank, by the other, or by both in turn.

State space. All positions of rank 0 are explored: the down-sets of its events in stream and wait order, at most the
product over streams of (2 x ops + 1), reached depth first with a set of visited states (positions and the contents of
all cells). Rank 1 runs along as fast as it can: ranks only meet in collectives, so this allows rank 0 every
interleaving that any behaviour of rank 1 allows; and since the keys are closed under exchanging the ranks, what rank 1
would see is what rank 0 sees; a test compares this with exploring both ranks. `MAX_STATES` bounds the search: running
into it is an error, never an answer. The largest of the tests, 6 batches of `nestpipe_2d_sp`, has 53,865 states.

A schedule with domains is run twice: once each rank is a domain of its own and the two are replicas of each other, once
both are one domain without replicas; the same with nodes and rails. Dense gradients carry how often each rank's are
contained in them; what an update applies must hold those of both ranks once, or replicas drift apart, or apply what is
wrong. A send and its recv on the other rank end once both have started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations, product
from typing import Any

from nestpipe.ir import (
    ALL_TO_ALLS,
    CACHES,
    COLLECTIVES,
    MICRO_DATA,
    STATES,
    Access,
    Atom,
    Data,
    Op,
    OpKind,
    OpRef,
    Part,
    Program,
    Resource,
    Split,
)

MAX_STATES = 2_000_000
RANKS = (0, 1)
POISON, ABSENT = "poison", "absent"
REDUCES = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER)
KEYED = frozenset({Data.TABLE, Data.OPTIMIZER, Data.ROWS, Data.MOMENTS})


SEVERITY = ("synchronous", "stale", "drift", "wrong", "race", "deadlock")
PARTNER = {OpKind.SEND: OpKind.RECV, OpKind.RECV: OpKind.SEND}


class RaceFoundError(Exception):
    """A value that is not defined has been used."""


@dataclass(frozen=True)
class Key:
    owner: int
    asked_by: tuple[tuple[int, int], ...]  # (batch, rank)
    group: str | None = None  # the static part to which its table belongs
    hits: tuple[int, ...] = ()  # the batches in which a cache holds it

    def touched(self) -> tuple[int, ...]:
        return tuple(batch for batch, _ in self.asked_by)


@dataclass
class Outcome:
    verdict: str
    staleness: dict[int, int] = field(default_factory=dict)
    dense_staleness: int = 0
    num_states: int = 0
    why: str = ""


def explore(program: Program, *, both_ranks: bool = False) -> Outcome:
    """What the program does on two ranks, over all interleavings.

    `both_ranks` explores the positions of both ranks together, without the argument about rank 1: to test it.
    """
    used = {stream.resource for stream in program.streams}
    domains = (1, 2) if used & {Resource.DOMAIN, Resource.REPLICA} else (2,)
    nodes = (1, 2) if used & {Resource.NODE, Resource.RAIL} else (2,)
    outcomes = [_Oracle(program, sizes=sizes, both_ranks=both_ranks).explore() for sizes in product(domains, nodes)]
    worst = max(outcomes, key=lambda outcome: SEVERITY.index(outcome.verdict))
    for outcome in outcomes:
        for distance, stale in outcome.staleness.items():
            worst.staleness[distance] = max(stale, worst.staleness.get(distance, 0))
    worst.dense_staleness = max(outcome.dense_staleness for outcome in outcomes)
    worst.num_states = sum(outcome.num_states for outcome in outcomes)
    return worst


def make_keys(steps: int, parts: tuple[Part, ...] = ()) -> tuple[Key, ...]:
    """A key for every set of batches, owner, part and way in which the ranks take turns to ask for it."""
    groups = [part.name for part in parts if part.split is Split.STATIC] or [None]
    cached = any(part.split in (Split.CACHED, Split.UNCACHED) for part in parts)
    sets = [s for size in range(1, steps + 1) for s in combinations(range(steps), size)]
    found = {
        Key(owner, tuple((batch, (first + turn * i) % 2) for i, batch in enumerate(touched)), group, hits)
        for touched in sets
        for group in groups
        for size in range(len(touched) + 1 if cached else 1)
        for hits in combinations(touched, size)
        for owner in RANKS
        for first in RANKS
        for turn in (0, 1)
    }
    return tuple(sorted(found, key=repr))


@dataclass(frozen=True)
class _Spec:
    """An op of the program with the cells it uses."""

    op: Op
    waits: tuple[tuple[int, int], ...]  # (stream, position that must be reached)
    collective: bool
    partner: tuple[int, int] | None  # (stream, position) at the other end of a message; -1 where there is none
    number: int
    cells: tuple[int, ...]
    reads: tuple[tuple[Access, tuple[int, ...]], ...]
    writes: tuple[tuple[Access, tuple[int, ...]], ...]


class _Oracle:
    def __init__(self, program: Program, *, sizes: tuple[int, int], both_ranks: bool) -> None:
        self.domain_size, self.node_size = sizes
        self.explored = RANKS if both_ranks else (0,)
        self.program, self.steps, self.num_micro = program, program.steps, program.micro_batches
        self.keys = make_keys(program.steps, program.parts)
        self.splits = program.splits
        self.atomic = {state.data for state in program.states if state.atomic}
        exchanges = [s.resource for s in program.streams for op in s.ops if op.kind in ALL_TO_ALLS]
        self.alone = bool(exchanges) and not self.meets(exchanges[0])  # each rank owns all keys
        kinds = {op.kind for op in program.ops}
        self.averaged = OpKind.ALL_REDUCE_TABLES in kinds
        self.applied = self.find_applied()
        self.contents: list[Any] = []
        self.ids: dict[Any, int] = {}
        self.cells: dict[tuple[Data, int, int | None, Atom], int] = {}
        self.in_pieces = {
            a.data
            for op in program.ops
            if op.micro_batch is not None
            for a in op.writes
            if a.data not in MICRO_DATA | STATES
        }
        self.slots = {b.data: b.slots for b in program.buffers}
        self.groups = [s.resource for s in program.streams]
        self.specs = self.make_specs()
        self.atoms = {number: cell[3] for cell, number in self.cells.items()}
        self.end = tuple(2 * len(s) for s in self.specs)
        self.seen: dict[Any, set[int]] = {}
        self.memo: dict[Any, Any] = {}

    # -- what the program is ----------------------------------------------------------------------------------------

    def meets(self, resource: Resource) -> bool:
        """Whether the two ranks are in one group."""
        alone = (
            {1: Resource.DOMAIN, 2: Resource.REPLICA}[self.domain_size],
            {1: Resource.NODE, 2: Resource.RAIL}[self.node_size],
        )
        return resource not in alone

    def takes_turns(self, op: Op, data: Data) -> bool:
        """Whether the op applies gradients to rows one by one, each at once."""
        return data in self.atomic and (op.kind is OpKind.UPDATE or self.applies_grads(op))

    def find_applied(self) -> set[Data]:
        """The states that updates must reach: those for which there are gradients."""
        written = {a.data for op in self.program.ops for a in op.writes}
        used = {a.data for op in self.program.ops for a in op.reads} | written
        found: set[Data] = set()
        if Data.DENSE_GRADS in written:
            found.add(Data.DENSE)
        if Data.ROW_GRADS in written or Data.OWNED_GRADS in written:
            found.add(Data.TABLE)
            if Data.OPTIMIZER in used or Data.MOMENTS in used:
                found.add(Data.OPTIMIZER)
        return found

    def cell(self, data: Data, slot: int, piece: int | None, atom: Atom) -> int:
        return self.cells.setdefault((data, slot, piece, atom), len(self.cells))

    def atom_of(self, k: int, batch: int) -> Atom:
        """The atom to which a key belongs in a batch."""
        key = self.keys[k]
        names = {key.group}
        for part in self.splits.parts.values():
            inside = batch + (part.offset or 0) in key.touched() if part.split.with_batch else batch in key.hits
            if part.split is not Split.STATIC:
                names.add(part.name if inside is (part.split in (Split.IN, Split.CACHED)) else f"not {part.name}")
        return next(atom for atom in self.splits.atoms if names.issuperset(atom))

    @cache  # noqa: B019, an oracle lives for one program
    def keys_in(self, atom: Atom, batch: int) -> frozenset[int]:
        """The keys that belong to an atom in a batch."""
        return frozenset(k for k in range(len(self.keys)) if self.atom_of(k, batch) == atom)

    def in_cell(self, op: Op, access: Access, cell: int) -> frozenset[int]:
        """The keys that an op may find or leave in a cell: of a state those of its part, else those of its atom."""
        if access.data in STATES:
            mine = [atom for atom in self.splits.atoms if op.part in (None, *atom)] or self.splits.atoms
            return frozenset().union(*(self.keys_in(atom, op.batch) for atom in mine))
        assert access.batch is not None
        return self.keys_in(self.atoms[cell], access.batch)

    def holding(self, cells: tuple[int, ...], k: int, batch: int | None) -> int:
        """The cell, of those of an access, in which a key of a batch is."""
        assert batch is not None
        atom = self.atom_of(k, batch)
        return next(cell for cell in cells if self.atoms[cell] == atom)

    def cells_of(self, op: Op, access: Access) -> tuple[int, ...]:
        atoms = self.splits.touched(op, access)
        if access.data in STATES:
            layers = atoms if access.data is Data.DENSE else ((),)
            return tuple(self.cell(access.data, 0, None, atom) for atom in layers)
        slot = self.instance(access) % self.slots[access.data]
        if access.data not in self.in_pieces:
            return tuple(self.cell(access.data, slot, None, atom) for atom in atoms)
        everything = op.micro_batch is None or op.kind in REDUCES
        pieces = range(self.num_micro) if everything else (op.micro_batch,)
        return tuple(self.cell(access.data, slot, piece, atom) for piece in pieces for atom in atoms)

    def instance(self, access: Access) -> int:
        batch = access.batch or 0
        return batch if access.micro_batch is None else batch * self.num_micro + access.micro_batch

    def make_specs(self) -> list[list[_Spec]]:
        streams = self.program.streams
        where = {op.ref: (s, 2 * i + 2) for s, stream in enumerate(streams) for i, op in enumerate(stream.ops)}
        return [[self.make_spec(op, stream.resource, where) for op in stream.ops] for stream in streams]

    def make_spec(self, op: Op, resource: Resource, where: dict[OpRef, tuple[int, int]]) -> _Spec:
        reads = tuple((a, self.cells_of(op, a)) for a in op.reads)
        writes = tuple((a, self.cells_of(op, a)) for a in op.writes)
        s, position = where[op.ref]
        return _Spec(
            op=op,
            waits=tuple(where[ref] for ref in op.after),
            collective=op.kind in COLLECTIVES and self.meets(resource),
            partner=where.get(replace(op.ref, kind=PARTNER[op.kind]), (0, -1)) if op.kind in PARTNER else None,
            number=s * MAX_STATES + position,
            cells=tuple(sorted({cell for _, cells in (*reads, *writes) for cell in cells})),
            reads=reads,
            writes=writes,
        )

    def intern(self, content: Any) -> int:
        known = self.ids.get(content)
        if known is None:
            known = self.ids[content] = len(self.contents)
            self.contents.append(content)
        return known

    # -- the search -------------------------------------------------------------------------------------------------

    def explore(self) -> Outcome:
        if self.gets_stuck():
            return Outcome("deadlock")
        outcome = Outcome("synchronous")
        visited: set[Any] = set()
        try:
            stack = [self.run_along(self.initial())]
            visited.add(stack[0])
            while stack:
                state = stack.pop()
                events = [
                    (rank, s) for rank in self.explored for s in range(len(self.specs)) if self.enabled(state, rank, s)
                ]
                if not events:
                    assert state[0] == state[1] == self.end, "stuck in some interleavings only"
                    self.look_at_the_end(state)
                for rank, s in events:
                    new = self.run_along(self.fire(state, rank, s))
                    if new not in visited:
                        visited.add(new)
                        stack.append(new)
                if len(visited) > MAX_STATES:
                    raise RuntimeError(f"{self.program.name}: more than {MAX_STATES} states")
            self.judge(outcome)
        except RaceFoundError as race:
            return Outcome("race", num_states=len(visited), why=str(race))
        outcome.num_states = len(visited)
        return outcome

    def gets_stuck(self) -> bool:
        """Whether the ranks do not come to the end; neither values nor order matter, as events only enable others."""
        positions = [[0] * len(self.specs), [0] * len(self.specs)]
        moved = True
        while moved:
            moved = False
            for rank in RANKS:
                for s in range(len(self.specs)):
                    while self.enabled(positions, rank, s):
                        positions[rank][s] += 1
                        moved = True
        return any(tuple(reached) != self.end for reached in positions)

    def initial(self) -> Any:
        empty = self.intern(("empty",))
        table = self.intern(("state", tuple(frozenset() for _ in self.keys)))
        dense = self.intern(("dense", frozenset()))
        start = {Data.TABLE: table, Data.OPTIMIZER: table, Data.DENSE: dense}
        memory = tuple(start.get(data, empty) for data, *_ in self.cells)
        nothing = (0,) * len(self.specs)
        idle = (None,) * len(self.specs)
        return (nothing, nothing, memory, memory, idle, idle)

    def enabled(self, state: Any, rank: int, s: int) -> bool:
        position = state[rank][s]
        if position >= self.end[s]:
            return False
        spec = self.specs[s][position // 2]
        if position % 2 and spec.partner is not None:
            stream, reached = spec.partner
            return reached >= 0 and self.meets(self.groups[s]) and state[1 - rank][stream] >= reached - 1
        if position % 2:
            return not spec.collective or state[1 - rank][s] >= position
        mine = state[rank]
        return all([mine[stream] >= reached for stream, reached in spec.waits])  # noqa: C419, it is faster

    def run_along(self, state: Any) -> Any:
        """Rank 1 goes as far as it can."""
        moved = 1 not in self.explored
        while moved:
            moved = False
            for s in range(len(self.specs)):
                while state[1][s] < self.end[s] and self.enabled(state, 1, s):
                    state, moved = self.fire(state, 1, s), True
        return state

    def fire(self, state: Any, rank: int, s: int) -> Any:
        position, memory, active = state[rank][s], list(state[2 + rank]), list(state[4 + rank])
        others = state[5 - rank]
        spec = self.specs[s][position // 2]
        if position % 2 == 0:
            captured = self.start(spec, rank, memory)
            active[s] = captured
            if spec.collective and state[1 - rank][s] == position + 1:
                both = self.intern(("both", captured, others[s]) if rank == 0 else ("both", others[s], captured))
                active[s] = both
                others = (*others[:s], both, *others[s + 1 :])
        else:
            self.finish(spec, rank, memory, active[s])
            active[s] = None
        positions = (*state[rank][:s], position + 1, *state[rank][s + 1 :])
        if rank == 0:
            return (positions, state[1], tuple(memory), state[3], tuple(active), others)
        return (state[0], positions, state[2], tuple(memory), others, tuple(active))

    # -- an op starts -----------------------------------------------------------------------------------------------

    def start(self, spec: _Spec, rank: int, memory: list[int]) -> int:
        """Samples what is read and puts what is written into flux; returns the sample."""
        key = (spec.number, rank, *[memory[cell] for cell in spec.cells])
        done = self.memo.get(key)
        if done is None:
            sample = {cell: memory[cell] for cell in spec.cells}
            marked = tuple(self.really_start(spec, rank, sample))
            captured = self.intern(("own", tuple(sample.items()), marked))
            done = self.memo[key] = (marked, captured)
        for cell, content in done[0]:
            memory[cell] = content
        return int(done[1])

    def really_start(self, spec: _Spec, rank: int, sample: dict[int, int]) -> list[tuple[int, int]]:
        op = spec.op
        self.expect_lists(op)
        for access, cells in spec.reads:
            if access.data not in KEYED:
                for cell in cells:
                    self.expect(op, access, self.contents[sample[cell]], named=self.is_named(op, access, cell))
        in_flux = []
        for access, cells in spec.writes:
            for cell in cells:
                content = self.contents[sample[cell]]
                if access.data in KEYED:
                    content = self.keyed_flux(spec, rank, access, cell, content, sample)
                else:
                    if content[0] == "flux":
                        raise RaceFoundError(f"{op.ref} and {content[1]} write {access} at the same time")
                    if access.data is not Data.DENSE and op.kind in (*REDUCES, OpKind.ALL_GATHER):
                        self.expect(op, access, content, named=self.is_named(op, access, cell))
                    content = ("flux", op.ref)
                in_flux.append((cell, self.intern(content)))
        return in_flux

    def expect_lists(self, op: Op) -> None:
        """An op of a part told apart by another batch must read which keys both batches have."""
        part = self.splits.parts.get(op.part or "")
        if part is not None and part.split.with_batch:
            wanted = {op.batch, op.batch + (part.offset or 0)} & set(range(self.steps))
            if not wanted <= {access.batch for access in op.reads if access.data is Data.OWNED}:
                raise RaceFoundError(f"{op.ref} does not know which keys are {part.name}")

    def is_named(self, op: Op, access: Access, cell: int) -> bool:
        """Whether the cell must hold what the op names: a sum over ranks takes what other micro-batches have added."""
        if op.micro_batch is None or op.kind not in REDUCES:
            return True
        slot = self.instance(access) % self.slots[access.data]
        return access.data not in self.in_pieces or cell == self.cell(
            access.data, slot, op.micro_batch, self.atoms[cell]
        )

    def expect(self, op: Op, access: Access, content: Any, *, named: bool = True) -> None:
        """The cell must hold the instance that is named."""
        if content[0] == "flux":
            raise RaceFoundError(f"{op.ref} uses {access} while {content[1]} writes it")
        if named and access.data is not Data.DENSE and content[:2] != ("whole", self.instance(access)):
            raise RaceFoundError(f"{op.ref} finds {content[:2]} instead of {access}")

    def keyed_flux(
        self, spec: _Spec, rank: int, access: Access, cell: int, content: Any, sample: dict[int, int]
    ) -> Any:
        op = spec.op
        mark = ("flux", op.ref)
        if op.kind is OpKind.LOOKUP:
            return ("rows", mark, tuple(mark for _ in self.keys))
        targets = self.targets(spec, rank, access, sample) & self.in_cell(op, access, cell)
        if self.takes_turns(op, access.data):
            return content
        if access.data in STATES:
            return ("state", tuple(mark if k in targets else v for k, v in enumerate(content[1])))
        if content[0] != "rows" or content[1] != access.batch:
            if targets:
                raise RaceFoundError(f"{op.ref} changes {access} but finds {content[:2]}")
            return content
        return ("rows", content[1], tuple(mark if k in targets else v for k, v in enumerate(content[2])))

    def targets(self, spec: _Spec, rank: int, access: Access, sample: dict[int, int]) -> frozenset[int]:
        """The keys, by index, that an op writes into a keyed cell."""
        if spec.op.kind is not OpKind.SYNC:
            return self.owned_keys(spec, rank, spec.op.batch, sample)
        found: frozenset[int] = frozenset()
        for source in self.sources(spec, access.data):
            found |= self.shared_keys(spec, rank, source, sample)
        return found

    @staticmethod
    def sources(spec: _Spec, data: Data) -> list[int]:
        return sorted({a.batch for a, _ in spec.reads if a.data is data and a.batch not in (None, spec.op.batch)})

    def owned_keys(self, spec: _Spec, rank: int, batch: int, sample: dict[int, int]) -> frozenset[int]:
        """The list of owned keys that the op reads; without it, it is taken to know them."""
        for access, cells in spec.reads:
            if access.data is Data.OWNED and access.batch == batch:
                return frozenset().union(*(self.contents[sample[cell]][2] for cell in cells))
        return self.routed(rank, batch)

    def shared_keys(self, spec: _Spec, rank: int, source: int, sample: dict[int, int]) -> frozenset[int]:
        batches = {source, spec.op.batch}
        if batches <= {a.batch for a, _ in spec.reads if a.data is Data.OWNED}:
            return self.owned_keys(spec, rank, source, sample) & self.owned_keys(spec, rank, spec.op.batch, sample)
        if batches <= {a.batch for a, _ in spec.reads if a.data is Data.KEYS}:
            # each rank finds the keys that it asks for in both batches, and tells the owner
            found: frozenset[int] = frozenset()
            for asking in RANKS:
                found |= self.asked(asking, source) & self.asked(asking, spec.op.batch)
            return found & self.routed(rank, source)
        raise RaceFoundError(f"{spec.op.ref} does not know which keys batches {sorted(batches)} share")

    def asked(self, rank: int, batch: int) -> frozenset[int]:
        return frozenset(i for i, key in enumerate(self.keys) if (batch, rank) in key.asked_by)

    def routed(self, rank: int, batch: int) -> frozenset[int]:
        """The keys that arrive at their owner."""
        if self.alone:
            return self.asked(rank, batch)
        return frozenset(k for asking in RANKS for k in self.asked(asking, batch) if self.keys[k].owner == rank)

    # -- an op ends -------------------------------------------------------------------------------------------------

    def finish(self, spec: _Spec, rank: int, memory: list[int], captured: int) -> None:
        """Compares what was read, and writes."""
        key = (-1 - spec.number, rank, captured, *[memory[cell] for cell in spec.cells])
        done = self.memo.get(key)
        if done is None:
            taken = self.contents[captured]
            peers = [self.contents[peer] for peer in taken[1:]] if taken[0] == "both" else [taken]
            own = peers[rank] if len(peers) > 1 else taken
            now = {cell: memory[cell] for cell in spec.cells}
            samples = [dict(peer[1]) for peer in peers]
            done = self.memo[key] = self.really_finish(spec, rank, now, dict(own[1]), dict(own[2]), samples)
        for cell, content in done[0]:
            memory[cell] = content
        for name, content in done[1]:
            self.seen.setdefault(name, set()).add(content)

    def really_finish(
        self,
        spec: _Spec,
        rank: int,
        now: dict[int, int],
        sample: dict[int, int],
        marked: dict[int, int],
        peers: list[dict[int, int]],
    ) -> tuple[list[tuple[int, int]], list[tuple[Any, int]]]:
        op = spec.op
        for access, cells in spec.reads:
            for cell in cells if access.data not in KEYED else ():
                if cell not in marked and now[cell] != sample[cell]:
                    raise RaceFoundError(f"{access} changes while {op.ref} reads it")
        written = []
        for access, cells in spec.writes:
            for cell in cells:
                if access.data in KEYED:
                    content = self.keyed_result(spec, rank, access, cell, now, sample, marked, peers)
                else:
                    if now[cell] != marked[cell]:
                        raise RaceFoundError(f"{access} is written while {op.ref} writes it")
                    content = self.whole_result(spec, rank, access, cell, sample, peers)
                written.append((cell, self.intern(content)))
        return written, self.observations(spec, rank, sample)

    def whole_result(
        self,
        spec: _Spec,
        rank: int,
        access: Access,
        cell: int,
        sample: dict[int, int],
        peers: list[dict[int, int]],
    ) -> Any:
        op, head = spec.op, ("whole", self.instance(access))
        match access.data:
            case Data.DENSE:
                return ("dense", self.contents[sample[cell]][1] | {op.batch})
            case Data.OWNED if op.kind is OpKind.ALL_GATHER:
                return (*head, tuple(sorted({k for peer in peers for k in self.contents[peer[cell]][2]})))
            case Data.OWNED:
                return (*head, tuple(sorted(self.routed(rank, op.batch) & self.in_cell(op, access, cell))))
            case Data.EMBEDDINGS:
                asked = self.asked(rank, op.batch) & self.in_cell(op, access, cell)
                return (*head, self.exchanged(spec, asked, sample, peers))
            case Data.DENSE_GRADS if op.kind in (*REDUCES, OpKind.ALL_GATHER):
                return self.combined(spec, access, cell, sample, peers)
            case Data.DENSE_GRADS:
                return (*head, ((rank, 1),), False)
            case Data.OWNED_GRADS:
                return (*head, tuple(range(len(peers))) if len(peers) > 1 else (rank,))
        return head

    def combined(
        self, spec: _Spec, access: Access, cell: int, sample: dict[int, int], peers: list[dict[int, int]]
    ) -> Any:
        """Dense gradients after a collective: how often those of each rank are contained, and whether it is a shard."""
        own = self.contents[sample[cell]]
        if own[:2] != ("whole", self.instance(access)) or len(peers) < 2:
            return own
        if spec.op.kind is OpKind.ALL_GATHER:
            return (*own[:3], False)
        counts = Counter[int]()
        for peer in peers:
            counts.update(dict(self.contents[peer[cell]][2]))
        return (*own[:2], tuple(sorted(counts.items())), own[3] or spec.op.kind is OpKind.REDUCE_SCATTER)

    def exchanged(
        self, spec: _Spec, asked: frozenset[int], sample: dict[int, int], peers: list[dict[int, int]]
    ) -> tuple[Any, ...]:
        """The row versions that arrive at a rank for the keys it asks for, in order of the keys."""
        rows = [(a, cells) for a, cells in spec.reads if a.data is Data.ROWS]
        if not rows:
            return ()
        access, cells = rows[0]
        for cell in cells:
            if self.contents[sample[cell]][:2] != ("rows", access.batch):
                raise RaceFoundError(f"{spec.op.ref} finds no {access}")
        found = []
        for k in sorted(asked):
            cell = self.holding(cells, k, access.batch)
            holder = sample if self.alone or len(peers) < 2 else peers[self.keys[k].owner]
            content = self.contents[holder[cell]]
            good = content[0] == "rows" and content[1] == access.batch
            found.append(self.defined(content[2][k]) if good else POISON)
        return tuple(found)

    @staticmethod
    def defined(value: Any) -> Any:
        return value if isinstance(value, frozenset) else (value if value == ABSENT else POISON)

    def keyed_result(
        self,
        spec: _Spec,
        rank: int,
        access: Access,
        cell: int,
        now: dict[int, int],
        sample: dict[int, int],
        marked: dict[int, int],
        peers: list[dict[int, int]],
    ) -> Any:
        op, mark = spec.op, ("flux", spec.op.ref)
        current = self.contents[now[cell]]
        if op.kind is OpKind.LOOKUP:
            if now[cell] != marked[cell]:
                return ("rows", access.batch, tuple(POISON for _ in self.keys))
            owned = self.owned_keys(spec, rank, op.batch, sample) & self.in_cell(op, access, cell)
            if not self.alone and any(self.keys[k].owner != rank for k in owned):
                raise RaceFoundError(f"{op.ref} looks up rows that another rank owns")
            values = self.looked_up(spec, access, now, sample)
            return ("rows", access.batch, tuple(v if k in owned else ABSENT for k, v in enumerate(values)))
        targets = self.targets(spec, rank, access, sample) & self.in_cell(op, access, cell)
        if access.data not in STATES and (current[0] != "rows" or current[1] != access.batch):
            if targets:
                raise RaceFoundError(f"{op.ref} changes {access} but it has become {current[:2]}")
            return current
        values = list(current[-1])
        if self.takes_turns(op, access.data):
            for k in targets:
                values[k] = values[k] | {self.applied_name(op.batch)} if isinstance(values[k], frozenset) else POISON
            return (*current[:-1], tuple(values))
        for k in targets:
            new = self.new_value(spec, rank, access, cell, k, now, sample, peers)
            values[k] = new if values[k] == mark else POISON
        return (*current[:-1], tuple(values))

    def looked_up(self, spec: _Spec, access: Access, now: dict[int, int], sample: dict[int, int]) -> list[Any]:
        state = next(state for state, cache in CACHES.items() if cache is access.data)
        for read, cells in spec.reads:
            if read.data is state:
                before, after = self.contents[sample[cells[0]]][1], self.contents[now[cells[0]]][1]
                if state in self.atomic:  # each row is read at some time in between; at the start is the oldest
                    return [self.defined(a) for a in before]
                return [self.defined(a) if a == b else POISON for a, b in zip(before, after, strict=True)]
        return [frozenset() for _ in self.keys]

    def stable(self, cell: int, batch: int | None, k: int, now: dict[int, int], sample: dict[int, int]) -> Any:
        """The value of a key in a rows cell that was read from start to end."""
        before, after = self.contents[sample[cell]], self.contents[now[cell]]
        if before[0] != "rows" or before[1] != batch or after[:2] != before[:2] or before[2][k] != after[2][k]:
            return POISON
        return self.defined(before[2][k])

    def new_value(
        self,
        spec: _Spec,
        rank: int,
        access: Access,
        cell: int,
        k: int,
        now: dict[int, int],
        sample: dict[int, int],
        peers: list[dict[int, int]],
    ) -> Any:
        op = spec.op
        before = self.defined(self.contents[sample[cell]][-1][k])
        if op.kind is OpKind.SYNC:
            value = before
            for source in self.sources(spec, access.data):
                if k in self.shared_keys(spec, rank, source, sample):
                    cells = next(c for a, c in spec.reads if a.data is access.data and a.batch == source)
                    from_cell = self.holding(cells, k, source)
                    value = self.stable(from_cell, source, k, now, sample)
            return value
        if op.kind is OpKind.ALL_REDUCE_TABLES:
            if len(peers) < 2:
                return before
            return self.average([self.defined(self.contents[peer[cell]][-1][k]) for peer in peers], op.batch)
        if op.kind is OpKind.WRITE_BACK and not any(a.data is Data.OWNED_GRADS for a, _ in spec.reads):
            rows = [(a, c) for a, c in spec.reads if a.data is CACHES[access.data]]
            if not rows:
                return before
            batch = rows[0][0].batch
            value = self.stable(self.holding(rows[0][1], k, batch), batch, k, now, sample)
        else:
            value = before if not isinstance(before, frozenset) else before | {self.applied_name(op.batch)}
        if not isinstance(value, frozenset):
            raise RaceFoundError(f"{op.ref} uses {access} of key {self.keys[k]}, which is {value}")
        return value

    def applied_name(self, batch: int) -> Any:
        return ("here", batch) if self.averaged and self.alone else batch

    @staticmethod
    def average(values: list[Any], batch: int) -> Any:
        here = ("here", batch)
        if not all(isinstance(v, frozenset) and here in v for v in values) or len(set(values)) > 1:
            return POISON
        return (values[0] - {here}) | {batch}

    def observations(self, spec: _Spec, rank: int, sample: dict[int, int]) -> list[tuple[Any, int]]:
        """What a forward, backward or update sees; raises if it is not defined."""
        op, found = spec.op, []
        if op.kind is OpKind.ALL_TO_ALL_ROWS:
            return []
        for access, cells in spec.reads:
            for cell in cells:
                content = self.contents[sample[cell]]
                if access.data is Data.DENSE and op.kind is not OpKind.UPDATE:
                    found.append((("dense", op.ref, rank, cell), sample[cell]))
                elif access.data is Data.EMBEDDINGS and op.kind is OpKind.FORWARD:
                    if any(not isinstance(v, frozenset) for v in content[2]):
                        raise RaceFoundError(f"{op.ref} reads rows that are not defined")
                    found.append((("rows", op.ref, rank, cell), sample[cell]))
                elif op.kind is OpKind.UPDATE and access.data is Data.DENSE_GRADS:
                    found.append((("grads", op.ref, rank, cell), sample[cell]))
                elif access.data is Data.OWNED_GRADS and content[2] != ((rank,) if self.alone else RANKS):
                    raise RaceFoundError(f"{op.ref} applies row gradients of ranks {content[2]}")
        return found

    # -- the answer -------------------------------------------------------------------------------------------------

    def look_at_the_end(self, state: Any) -> None:
        for rank in RANKS:
            for cell, content in zip(self.cells, state[2 + rank], strict=True):
                if cell[0] in self.applied:
                    self.seen.setdefault(("end", cell[0], rank, cell), set()).add(content)

    @staticmethod
    def applies_grads(op: Op) -> bool:
        return op.kind is OpKind.WRITE_BACK and any(access.data is Data.OWNED_GRADS for access in op.reads)

    def judge_grads(self, content: Any) -> str:
        """Whether what an update applies to dense parameters is the sum over ranks."""
        _, _, counts, shard = content
        if shard or dict(counts) == dict.fromkeys(RANKS, 1):
            return "drift" if shard else "synchronous"
        return "wrong" if any(count > 1 for _, count in counts) else "drift"

    def judge(self, outcome: Outcome) -> None:
        found = ["synchronous"]
        applies = [op for op in self.program.ops if op.micro_batch is not None and self.num_micro > 1]
        if any(op.kind is OpKind.UPDATE or self.applies_grads(op) for op in applies):
            found.append("wrong")
        if self.alone and not self.averaged and Data.TABLE in self.applied:
            found.append("drift")
        for name, contents in self.seen.items():
            if len(contents) > 1 and name[0] == "rows" and self.atomic:
                for content in contents:
                    self.judge_rows(outcome, name, self.contents[content][2])
                continue
            if len(contents) > 1:
                raise RaceFoundError(f"{name} differs between interleavings")
            content = self.contents[next(iter(contents))]
            if name[0] == "grads":
                found.append(self.judge_grads(content))
            elif name[0] == "end":
                self.judge_end(name[1], name[2], content)
            elif name[0] == "dense":
                behind = self.behind(content[1], range(name[1].batch), name, Data.DENSE)
                outcome.dense_staleness = max(outcome.dense_staleness, behind)
            else:
                self.judge_rows(outcome, name, content[2])
        if outcome.dense_staleness or any(outcome.staleness.values()):
            found.append("stale")
        outcome.verdict = max(found, key=SEVERITY.index)

    def judge_rows(self, outcome: Outcome, name: Any, values: tuple[Any, ...]) -> None:
        batch, rank = name[1].batch, name[2]
        asked = self.asked(rank, batch) & self.keys_in(self.atoms[name[3]], batch)
        for k, value in zip(sorted(asked), values, strict=bool(values)):
            earlier = [b for b in self.keys[k].touched() if b < batch]
            behind = self.behind(value, earlier, name, Data.TABLE)
            if earlier:
                distance = batch - max(earlier)
                outcome.staleness[distance] = max(behind, outcome.staleness.get(distance, 0))

    def behind(self, value: Iterable[Any], earlier: Iterable[int], name: Any, state: Data) -> int:
        expected = set(earlier) if state in self.applied else set()
        if any(isinstance(u, int) and u not in expected for u in value):
            raise RaceFoundError(f"{name} sees updates too early")
        return len(expected - set(value))

    def judge_end(self, data: Data, rank: int, content: Any) -> None:
        if data is Data.DENSE:
            if set(content[1]) != set(range(self.steps)):
                raise RaceFoundError("dense updates are lost")
            return
        for k, value in enumerate(content[1]):
            if self.alone or self.keys[k].owner == rank:
                if not isinstance(value, frozenset):
                    raise RaceFoundError(f"{data} of {self.keys[k]} is left {value}")
                if value != frozenset(self.keys[k].touched()):
                    raise RaceFoundError(f"{data} of {self.keys[k]} ends with {set(value)}: updates are lost")
