"""Versions: which updates each read of a row, of its optimiser state and of the dense parameters sees.

A key is described by its *history*: the set of batches that touch it. For S batches there are 2^S histories, and all of
them are followed at once: a `Version` says for each update u in which histories it is contained, as a bitset with one
bit per history. An op that works on the keys of batch t only changes the histories that contain t. So a lookup, a
sync, an update and a write-back are a few operations on bitsets each, and the answer is exact for every key there can
be, not for a sample.

One run stands for all: `nestpipe.liveness` has shown that the accesses to buffers are ordered. Lookups and write-backs
touch `table` and `optimizer` only in the keys of their batch; where two of them are not ordered, what the one reads is
undefined in the histories that contain both batches, and that follows the row until it is overwritten or used.

The staleness of a read is the number of updates of the row that a sequential run has applied before it and this one has
not. A row that an update leaves behind, because the update started from an older version that is then written back, is
*lost*: it does not arrive late, it never arrives. That counts as a race, whatever the staleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from nestpipe.happens_before import Order
from nestpipe.ir import CACHES, Data, Op, OpKind, Program, op_name
from nestpipe.verdicts import Finding, Verdict, WitnessStep

__all__ = ["FOLLOWED", "Scenario", "VersionReport", "scenarios", "versions"]

FOLLOWED: Final = 12
"""The number of consecutive batches whose histories are followed at once: 2^12 bits per set."""

_STATE_OF = {cache: state for state, cache in CACHES.items()}
_REDUCES = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who asks for a key, as far as a schedule can tell the difference.

    `same_rank`: an intersection per rank finds the keys that batches share. `remote_parity`: batches of this parity ask
    for the key on the other replica of the shard only; None where there is one replica or it asks for all.
    """

    name: str
    same_rank: bool = True
    remote_parity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """Staleness by distance (None: first touch) of rows and optimiser rows, of dense, and what is wrong."""

    rows: dict[int | None, int]
    optimizer: dict[int | None, int]
    dense: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class _Version:
    """`undefined`: histories in which there is no defined value; `has[u]`: histories in which update u is contained.

    `local[u]`: histories in which update u has been applied here but not yet averaged over the replicas.
    """

    undefined: int
    has: tuple[int, ...]
    local: tuple[int, ...]

    def where(self, mask: int, new: _Version) -> _Version:
        """`new` in the histories of `mask`, this version elsewhere."""
        return _Version(
            self.undefined & ~mask | new.undefined & mask,
            tuple(a & ~mask | b & mask for a, b in zip(self.has, new.has, strict=True)),
            tuple(a & ~mask | b & mask for a, b in zip(self.local, new.local, strict=True)),
        )

    def applied(self, update: int, mask: int, *, averaged: bool) -> _Version:
        target = list(self.local if averaged else self.has)
        target[update] |= mask
        return replace(self, local=tuple(target)) if averaged else replace(self, has=tuple(target))

    def merged(self, update: int, mask: int) -> _Version:
        has, local = list(self.has), list(self.local)
        has[update] |= local[update] & mask
        local[update] &= ~mask
        return _Version(self.undefined, tuple(has), tuple(local))


def scenarios(ops: Iterable[Op]) -> tuple[Scenario, ...]:
    """The scenarios in which the schedule may behave differently; one unless it intersects per rank or has replicas."""
    ops = tuple(ops)
    found = [Scenario(name="")]
    if any(op.kind is OpKind.SYNC and any(a.data is Data.KEYS for a in op.reads) for op in ops):
        found.append(Scenario(name="asked for by different ranks", same_rank=False))
    if any(op.kind is OpKind.ALL_REDUCE_TABLES for op in ops):
        found += [Scenario(name="asked for by different replicas", remote_parity=parity) for parity in (0, 1)]
    return tuple(found)


def versions(program: Program, order: Order, scenario: Scenario, first_batch: int = 0) -> VersionReport:
    """Follows histories through a program whose buffer accesses are ordered.

    Args:
        program: what `order` is the order of.
        order: of a program in which `nestpipe.liveness` finds nothing wrong.
        scenario: one of `scenarios`.
        first_batch: follow the keys that are touched by `FOLLOWED` batches from here on only, and by no others.
    """
    run = _Run(program, order, scenario, first_batch)
    for op in order.sequence:
        run.step(op)
    run.final()
    return VersionReport(rows=run.rows, optimizer=run.optimizer, dense=run.dense_stale, findings=tuple(run.findings))


class _Run:
    def __init__(self, program: Program, order: Order, scenario: Scenario, first_batch: int) -> None:
        self.program, self.order, self.scenario, self.steps = program, order, scenario, program.steps
        self.first_batch = first_batch
        followed = min(FOLLOWED, self.steps - first_batch)
        self.full = (1 << (1 << followed)) - 1
        self.touch = [
            _histories_with(batch - first_batch, followed) if 0 <= batch - first_batch < followed else 0
            for batch in range(self.steps)
        ]
        kinds = {op.kind for op in order.ops}
        self.averaged = OpKind.ALL_REDUCE_TABLES in kinds
        self.reduced = any(op.kind in _REDUCES and _writes(op, Data.DENSE_GRADS) for op in order.ops)
        self.applies = {
            data
            for op in order.ops
            if op.kind is OpKind.UPDATE or (op.kind is OpKind.WRITE_BACK and _reads(op, Data.OWNED_GRADS))
            for data in (Data.TABLE, Data.OPTIMIZER, Data.DENSE)
            if _writes(op, data) or _writes(op, CACHES.get(data, data))
        }
        if any(_reads(op, d) or _writes(op, d) for op in order.ops for d in (Data.OPTIMIZER, Data.MOMENTS)):
            self.applies |= {Data.OPTIMIZER} if Data.TABLE in self.applies else set()
        nothing = (0,) * self.steps
        self.blank = _Version(0, nothing, nothing)
        self.states = dict.fromkeys(CACHES, self.blank)
        self.cached: dict[tuple[Data, int], _Version] = {}
        self.embeddings: dict[tuple[int, int | None], _Version] = {}
        self.dense: set[int] = set()
        self.extended: set[int] = set()
        self.reduced_grads: set[int] = set()
        self.clashes = self.find_clashes()
        self.rows: dict[int | None, int] = {}
        self.optimizer: dict[int | None, int] = {}
        self.dense_stale = 0
        self.findings: list[Finding] = []

    # -- who touches what -------------------------------------------------------------------------------------------

    def is_local(self, batch: int) -> bool:
        return self.scenario.remote_parity is None or batch % 2 != self.scenario.remote_parity

    def keys_of(self, batch: int) -> int:
        """Histories in which an op on the owned keys of `batch` works on the key now."""
        return self.touch[batch] if self.is_local(batch) or batch in self.extended else 0

    def find_clashes(self) -> dict[tuple[int, Data], list[tuple[int, int]]]:
        """For each op and state, the unordered conflicting ops and the histories that contain both batches."""
        found: dict[tuple[int, Data], list[tuple[int, int]]] = {}
        for state in CACHES:
            users = [i for i, op in enumerate(self.order.ops) if _reads(op, state) or _writes(op, state)]
            writers = [i for i in users if _writes(self.order.ops[i], state)]
            for i in users:
                for j in writers:
                    if not self.order.ordered(i, j):
                        both = self.touch[self.order.ops[i].batch] & self.touch[self.order.ops[j].batch]
                        found.setdefault((i, state), []).append((j, both))
        return found

    def clashing(self, op: int, state: Data) -> int:
        mask = 0
        for _, both in self.clashes.get((op, state), []):
            mask |= both
        return mask

    # -- one op -----------------------------------------------------------------------------------------------------

    def step(self, i: int) -> None:
        op = self.order.ops[i]
        match op.kind:
            case OpKind.LOOKUP:
                self.lookup(i, op)
            case OpKind.SYNC:
                self.sync(op)
            case OpKind.ALL_TO_ALL_ROWS if _reads(op, Data.ROWS, op.batch):
                self.embeddings[op.batch, op.micro_batch] = self.cached[Data.ROWS, op.batch]
            case OpKind.FORWARD | OpKind.BACKWARD:
                self.compute(i, op)
            case OpKind.ALL_REDUCE | OpKind.REDUCE_SCATTER:
                self.reduced_grads.add(op.batch)
            case OpKind.UPDATE:
                self.update(i, op)
            case OpKind.WRITE_BACK:
                self.write_back(i, op)
            case OpKind.ALL_GATHER:
                self.extended.add(op.batch)
            case OpKind.ALL_REDUCE_TABLES:
                for cache in _STATE_OF:
                    if _writes(op, cache):
                        merged = self.cached[cache, op.batch].merged(op.batch, self.keys_of(op.batch))
                        self.cached[cache, op.batch] = merged

    def lookup(self, i: int, op: Op) -> None:
        mask = self.keys_of(op.batch)
        for state, cache in CACHES.items():
            if _writes(op, cache):
                found = self.blank
                if _reads(op, state):
                    found = replace(
                        self.states[state], undefined=self.states[state].undefined | self.clashing(i, state)
                    )
                self.cached[cache, op.batch] = _Version(self.full, self.blank.has, self.blank.local).where(mask, found)

    def sync(self, op: Op) -> None:
        for cache in _STATE_OF:
            if not _writes(op, cache):
                continue
            for source in sorted({a.batch for a in op.reads if a.data is cache and a.batch is not None} - {op.batch}):
                at_owner = _reads(op, Data.OWNED, source) and _reads(op, Data.OWNED, op.batch)
                shared = self.keys_of(source) & self.keys_of(op.batch) if at_owner or self.scenario.same_rank else 0
                own = self.cached[cache, op.batch]
                self.cached[cache, op.batch] = own.where(shared, self.cached[cache, source])

    def compute(self, i: int, op: Op) -> None:
        version = self.embeddings.get((op.batch, op.micro_batch))
        if version is not None and _reads(op, Data.EMBEDDINGS) and self.is_local(op.batch):
            self.observe(i, Data.TABLE, version, self.touch[op.batch], self.rows)
        if _reads(op, Data.DENSE):
            missing = set(range(op.batch)) - self.dense if Data.DENSE in self.applies else set()
            ahead = {batch for batch in self.dense if batch >= op.batch}
            if ahead:
                self.dense_finding(i, "frozen-window", Verdict.RACE, min(ahead))
            elif missing:
                self.dense_stale = max(self.dense_stale, len(missing))
                self.dense_finding(i, "stale-dense", Verdict.STALE, max(missing))

    def update(self, i: int, op: Op) -> None:
        if _reads(op, Data.DENSE_GRADS) and self.reduced and op.batch not in self.reduced_grads:
            self.unreduced(i, op)
        self.apply(i, op)
        if _writes(op, Data.DENSE):
            self.dense.add(op.batch)

    def apply(self, i: int, op: Op) -> None:
        """Applies the gradients of the batch to the rows, optimiser rows or states that the op writes."""
        mask = self.keys_of(op.batch)
        for state, cache in CACHES.items():
            observed = self.rows if state is Data.TABLE else self.optimizer
            if _writes(op, cache):
                version = self.cached[cache, op.batch]
                self.observe(i, state, version, mask, observed)
                self.cached[cache, op.batch] = version.applied(op.batch, mask, averaged=self.averaged)
            if _writes(op, state):
                version = self.states[state]
                version = replace(version, undefined=version.undefined | self.clashing(i, state))
                self.observe(i, state, version, mask, observed)
                self.states[state] = version.applied(op.batch, mask, averaged=self.averaged)

    def write_back(self, i: int, op: Op) -> None:
        if _reads(op, Data.OWNED_GRADS):
            self.apply(i, op)
            return
        for state, cache in CACHES.items():
            if _writes(op, state) and _reads(op, cache):
                mask = self.keys_of(op.batch)
                version = self.cached[cache, op.batch]
                version = replace(version, undefined=version.undefined | self.clashing(i, state) & self.full)
                self.states[state] = self.states[state].where(mask, version)

    # -- what is seen -----------------------------------------------------------------------------------------------

    def observe(self, i: int, state: Data, version: _Version, mask: int, staleness: dict[int | None, int]) -> None:
        """Records the staleness of what op `i` reads, by distance; findings for the first history of each kind."""
        op = self.order.ops[i]
        if undefined := version.undefined & mask:
            self.finding(i, state, "undefined", Verdict.RACE, undefined, 0)
            return
        for update in range(op.batch, self.steps):
            if ahead := version.has[update] & mask:
                self.finding(i, state, "frozen-window", Verdict.RACE, ahead, update)
                return
        missing = []
        if state in self.applies:
            missing = [m for u in range(op.batch) if (m := mask & self.touch[u] & ~version.has[u])]
        for distance, histories in self.distances(op.batch, mask):
            at_least = [histories]
            for update in missing:
                more = [m & update for m in at_least]
                at_least = [a | b for a, b in zip([*at_least, 0], [0, *more], strict=True)]
            stale = max(k for k, histories_k in enumerate(at_least) if histories_k or not k)
            staleness[distance] = max(staleness.get(distance, 0), stale)
            if stale and distance is not None:
                self.finding(i, state, f"stale-{state}", Verdict.STALE, at_least[stale], op.batch - distance)

    def distances(self, batch: int, mask: int) -> Iterator[tuple[int | None, int]]:
        left = mask
        for distance in range(1, batch + 1):
            if histories := left & self.touch[batch - distance]:
                yield distance, histories
            left &= ~self.touch[batch - distance]
        if left:
            yield None, left

    def final(self) -> None:
        """After the last batch every update must have arrived."""
        last = self.order.sequence[-1] if self.order.sequence else 0
        for state, version in self.states.items():
            if state not in self.applies:
                continue
            if version.undefined:
                self.finding(last, state, "undefined", Verdict.RACE, version.undefined, 0)
            for update in range(self.steps):
                if lost := self.touch[update] & ~version.has[update] & ~version.undefined:
                    self.finding(last, state, "lost-update", Verdict.RACE, lost, update)
                    break
        if Data.DENSE in self.applies and (missing := set(range(self.steps)) - self.dense):
            self.dense_finding(last, "lost-update", Verdict.RACE, min(missing))

    def finding(self, i: int, state: Data, rule: str, verdict: Verdict, histories: int, update: int) -> None:
        """Keeps the first finding of each rule, with a witness for the smallest history that shows it."""
        if any(f.rule == rule for f in self.findings):
            return
        number = (histories & -histories).bit_length() - 1
        history = [self.first_batch + bit for bit in range(FOLLOWED) if number >> bit & 1]
        op, what = self.order.ops[i], "rows" if state is Data.TABLE else "optimiser rows"
        keys = f"keys that batches {_listed(history)} touch" + (f", {self.scenario.name}" if self.scenario.name else "")
        clash = self.clash_in(number) if rule == "undefined" else None
        if clash is not None:
            first, second, data = clash
            names = f"{op_name(self.order.ops[first])} writes {data} while {op_name(self.order.ops[second])}"
            message = f"{names} uses it: no order between them; {keys} are undefined; let one wait for the other"
            witness: tuple[WitnessStep, ...] = (
                self.witness_step(first, f"starts, writes {data}"),
                self.witness_step(second, f"may start before 1 has ended, uses {data}"),
                self.witness_step(i, f"uses {what} that are either, or half of each"),
            )
        else:
            message = f"{_MESSAGES[rule].format(op=op_name(op), what=what, update=update)} ({keys})"
            witness = self.told(history, None if rule == "lost-update" else i, state)
        self.findings.append(Finding(rule=rule, verdict=verdict, message=message, witness=witness))

    def told(self, history: list[int], last: int | None, state: Data) -> tuple[WitnessStep, ...]:
        """What the batches of a history do with a key, up to op `last` or to the end."""
        run = _Told(self.program, self.order, self.scenario, self.first_batch)
        return run.tell_all(history, last, state)

    def clash_in(self, number: int) -> tuple[int, int, Data] | None:
        """Unordered ops of this history: writer, other and the state."""
        for (i, state), others in self.clashes.items():
            for j, both in others:
                if both >> number & 1:
                    return j, i, state
        return None

    def dense_finding(self, i: int, rule: str, verdict: Verdict, update: int) -> None:
        if any(f.rule == rule for f in self.findings):
            return
        message = _MESSAGES[rule].format(op=op_name(self.order.ops[i]), what="dense parameters", update=update)
        steps = [j for j in self.order.sequence if _writes(self.order.ops[j], Data.DENSE)]
        applied = next((j for j in steps if self.order.ops[j].batch == update), None)
        notes = {i: f"dense parameters contain updates {_listed(sorted(self.dense))}"}
        if applied is not None:
            notes[applied] = f"applies batch {update} to dense"
        witness = tuple(self.witness_step(j, notes[j]) for j in self.order.sequence if j in notes)
        self.findings.append(Finding(rule=rule, verdict=verdict, message=message, witness=witness))

    def unreduced(self, i: int, op: Op) -> None:
        if any(f.rule == "unreduced" for f in self.findings):
            return
        message = _MESSAGES["unreduced"].format(op=op_name(op))
        witness = (self.witness_step(i, "dense_grads are those of this rank alone"),)
        self.findings.append(Finding(rule="unreduced", verdict=Verdict.RACE, message=message, witness=witness))

    def witness_step(self, i: int, note: str) -> WitnessStep:
        return WitnessStep(op=self.order.ops[i], stream=self.order.streams[i], note=note)


_MESSAGES: Final = {
    "undefined": "{op} uses {what} that are not there",
    "frozen-window": "{op} sees {what} with update {update} already applied; "
    "update once per batch, after the last gradient of the batch",
    "stale-table": "{op} sees {what} without update {update}; look up or sync after the update",
    "stale-optimizer": "{op} starts from {what} without update {update}; optimiser state must travel with the row: "
    "let sync, lookup and write_back copy moments too",
    "stale-dense": "{op} sees {what} without update {update}; let it run after the update",
    "lost-update": "after the last op {what} lack update {update}, for ever: a later write-back started from a version "
    "without it, or nothing brought it back; sync, or look up after write_back",
    "unreduced": "{op} applies dense gradients that no all_reduce has summed; let it wait for all_reduce",
}


class _Told(_Run):
    """The run of one history, told op by op."""

    number = 0

    def finding(self, i: int, state: Data, rule: str, verdict: Verdict, histories: int, update: int) -> None:
        """A trace tells what happens, it does not judge."""

    def dense_finding(self, i: int, rule: str, verdict: Verdict, update: int) -> None:
        """As `finding`."""

    def unreduced(self, i: int, op: Op) -> None:
        """As `finding`."""

    def shown(self, version: _Version | None) -> str:
        if version is None or version.undefined >> self.number & 1:
            return "undefined"
        found = [u for u in range(self.steps) if version.has[u] >> self.number & 1]
        local = [u for u in range(self.steps) if version.local[u] >> self.number & 1]
        return f"with updates {_listed(found)}" + (f", {_listed(local)} on this replica only" if local else "")

    def tell_all(self, history: list[int], last: int | None, state: Data) -> tuple[WitnessStep, ...]:
        self.number = sum(1 << batch - self.first_batch for batch in history)
        steps: list[WitnessStep] = []
        for i in self.order.sequence:
            self.step(i)
            op = self.order.ops[i]
            note = self.note(op, state) if op.batch in history and op.micro_batch in (None, 0) else None
            if note is not None or i == last:
                steps.append(self.witness_step(i, note or "uses it"))
            if i == last:
                break
        return tuple(steps)

    def note(self, op: Op, state: Data) -> str | None:
        cache = CACHES[state]
        cached = self.shown(self.cached.get((cache, op.batch)))
        match op.kind:
            case OpKind.LOOKUP if _writes(op, cache):
                return f"copies {state} into {cache} {op.batch}: {cached}"
            case OpKind.SYNC if _writes(op, cache):
                return f"leaves {cache} {op.batch} {cached}"
            case OpKind.FORWARD if state is Data.TABLE:
                return f"reads rows {self.shown(self.embeddings.get((op.batch, op.micro_batch)))}"
            case OpKind.UPDATE if _writes(op, cache):
                return f"applies batch {op.batch}: {cache} {op.batch} {cached}"
            case OpKind.ALL_REDUCE_TABLES if _writes(op, cache):
                return f"averages over replicas: {cache} {op.batch} {cached}"
            case OpKind.WRITE_BACK if _writes(op, state):
                return f"leaves {state} {self.shown(self.states[state])}"
        return None


def _listed(batches: list[int]) -> str:
    return ", ".join(map(str, batches)) if batches else "none"


def _reads(op: Op, data: Data, batch: int | None = None) -> bool:
    return any(a.data is data and batch in (None, a.batch) for a in op.reads)


def _writes(op: Op, data: Data) -> bool:
    return any(a.data is data for a in op.writes)


@lru_cache(maxsize=256)
def _histories_with(batch: int, steps: int) -> int:
    """The bitset of all histories of `steps` batches that contain `batch`.

    >>> bin(_histories_with(0, 2)), bin(_histories_with(1, 2))
    ('0b1010', '0b1100')
    """
    block = 1 << batch
    mask, width = ((1 << block) - 1) << block, 2 * block
    while width < 1 << steps:
        mask, width = mask | mask << width, 2 * width
    return mask
