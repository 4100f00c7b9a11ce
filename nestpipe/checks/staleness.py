"""Staleness: which version of a row, its optimiser state and the dense parameters every read sees, with witnesses.

Keys of batch t are split by the distance d to the last batch before t that touched them. The staleness of a read is the
number of updates of the row that a sequential run has applied before it and this one has not; for each d it is the
largest over all histories, all batches and micro-batches, and all scenarios of who asks for the key.

A row whose update started from an older version, which is then written back over a newer one, does not arrive late: the
update that it lacks never arrives. Such a *lost update* counts as a race, and no allowance for staleness covers it. So
does an update that a read sees too early, inside the window in which the parameters are frozen, because an optimiser
that is not linear in the gradient (row-wise Adagrad, Adam) then computes something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nestpipe.checks.histories import Version
from nestpipe.checks.order import Order
from nestpipe.checks.report import Finding, Verdict, WitnessStep
from nestpipe.checks.versions import Scenario, Sighting, VersionRun, means, op_reads, op_writes, scenarios
from nestpipe.ir import CACHES, KINDS, Data, Meaning, Op, Program, op_name

__all__ = ["Scenario", "VersionReport", "scenarios", "versions"]

_MESSAGES: Final = {
    "undefined": "{op} uses {what} that were never looked up; a batch needs the keys of all replicas before its lookup",
    "frozen-window": "{op} sees {what} with update {update} already applied; "
    "update once per batch, after the last gradient of the batch",
    "stale-table": "{op} sees {what} without update {update}; look up or sync after the update",
    "stale-optimizer": "{op} starts from {what} without update {update}; optimiser state must travel with the row: "
    "let sync, lookup and write_back copy moments too",
    "stale-dense": "{op} sees {what} without update {update}; let it run after the update",
    "lost-update": "{what} never receive update {update}: a later write_back started from a version without it, or "
    "nothing wrote it back; sync, or look up after write_back",
    "unreduced": "{op} applies dense gradients that are not summed over all ranks, so that each rank trains dense "
    "parameters of its own; sum them once over world, or over domain and replica, and let it wait for that",
    "sharded": "{op} applies dense gradients of which each rank holds a shard; gather them before, or use all_reduce",
    "reduced-twice": "{op} applies dense gradients that have been summed over the same ranks more than once; gradients "
    "of micro-batches accumulate, so sum them once, after the last backward of the batch",
    "not-frozen": "{op} applies the gradients of one micro-batch of batch {update} to {what}, which are not frozen "
    "through the batch then; an optimiser that is not linear in the gradient computes something else; "
    "update once per batch",
    "not-averaged": "{op} updates {what} on this replica only, and nothing averages them over the replicas, which "
    "drift apart; add all_reduce[tables] on replica after it",
}
#: What is not a race.
_VERDICTS: Final = {
    "stale-table": Verdict.STALE,
    "stale-optimizer": Verdict.STALE,
    "stale-dense": Verdict.STALE,
    "unreduced": Verdict.DRIFT,
    "sharded": Verdict.DRIFT,
    "not-averaged": Verdict.DRIFT,
    "reduced-twice": Verdict.WRONG,
    "not-frozen": Verdict.WRONG,
}
_COPIES: Final = (Meaning.COPY, Meaning.SYNC)
_UPDATES: Final = (Meaning.APPLY, Meaning.STORE)
_WHAT: Final = {Data.TABLE: "rows", Data.OPTIMIZER: "optimiser rows", Data.DENSE: "dense parameters"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionReport:
    """Staleness by distance (None: first touch) of rows and optimiser rows, of dense, and what is wrong."""

    rows: dict[int | None, int]
    optimizer: dict[int | None, int]
    dense: int
    findings: tuple[Finding, ...]


def versions(program: Program, order: Order, scenario: Scenario, batches: range) -> VersionReport:
    """Follows histories through a program whose buffer accesses are ordered.

    Args:
        program: what `order` is the order of.
        order: of a program in which `nestpipe.checks.buffers` finds nothing wrong.
        scenario: one of `scenarios`.
        batches: follow the keys that are touched by these batches and by no others.
    """
    run = VersionRun(program, order, scenario, batches)
    for i in order.sequence:
        run.step(i)
    run.end()
    findings = tuple(_finding(run, sighting) for sighting in run.sightings)
    return VersionReport(rows=run.rows, optimizer=run.optimizer, dense=run.dense_stale, findings=findings)


def _finding(run: VersionRun, seen: Sighting) -> Finding:
    message = _MESSAGES[seen.rule].format(
        op=op_name(run.order.ops[seen.op]), what=_WHAT[seen.state], update=seen.update
    )
    if seen.state is Data.DENSE:
        witness = _dense_witness(run, seen)
    else:
        number = (seen.histories & -seen.histories).bit_length() - 1
        history = [batch for bit, batch in enumerate(run.batches) if number >> bit & 1]
        keys = f"keys that batches {_listed(history)} touch"
        keys += f", {run.scenario.name}" if run.scenario.name else ""
        clash = _clash(run, number) if seen.rule == "undefined" else None
        if clash is not None:
            return _race(run, seen, clash, keys)
        message += f" ({keys})"
        run_again = _Witness(run.program, run.order, run.scenario, run.batches)
        witness = run_again.steps_of(number, history, None if seen.rule == "lost-update" else seen.op, seen.state)
        message += _always_first(run, seen) if seen.rule == "stale-table" else ""
    return Finding(rule=seen.rule, verdict=_VERDICTS.get(seen.rule, Verdict.RACE), message=message, witness=witness)


def _always_first(run: VersionRun, seen: Sighting) -> str:
    """The path by which the row is copied before the update that it lacks, on every run."""
    order, batch = run.order, run.order.ops[seen.op].batch
    copies = [i for i in order.sequence if order.ops[i].batch == batch and means(order.ops[i], *_COPIES)]
    updates = [i for i in order.sequence if order.ops[i].batch == seen.update and means(order.ops[i], *_UPDATES)]
    for copy in reversed([i for i in copies if order.before(i, seen.op)]):
        for update in updates:
            if path := order.path(copy, update):
                return "; always in this order: " + " -> ".join(op_name(order.ops[i]) for i in path)
    return ""


def _race(run: VersionRun, seen: Sighting, clash: tuple[int, int, Data], keys: str) -> Finding:
    """Two unordered ops that use the same rows of a state, and where that matters."""
    writer, other, state = clash
    names = f"{op_name(run.order.ops[writer])} writes {state} while {op_name(run.order.ops[other])}"
    return Finding(
        rule=seen.rule,
        verdict=Verdict.RACE,
        message=f"{names} uses it: no order between them, {keys} are undefined; let one wait for the other",
        witness=(
            _step(run.order, writer, f"starts, writes {state}"),
            _step(run.order, other, f"may start before 1 has ended, uses {state}"),
            _step(run.order, seen.op, f"uses {_WHAT[seen.state]} that are old, new or half of each"),
        ),
    )


def _clash(run: VersionRun, number: int) -> tuple[int, int, Data] | None:
    """A writer, an op not ordered with it and the state, in a history."""
    for (i, state), others in run.clashes.items():
        for writer, both in others:
            if both >> number & 1:
                return writer, i, state
    return None


def _dense_witness(run: VersionRun, seen: Sighting) -> tuple[WitnessStep, ...]:
    notes = {seen.op: f"is about dense parameters of batch {run.order.ops[seen.op].batch}"}
    for i, op in enumerate(run.order.ops):
        if op.batch != seen.update:
            continue
        if op_writes(op, Data.DENSE):
            notes[i] = f"applies batch {seen.update} to dense parameters"
        elif op_writes(op, Data.DENSE_GRADS) and seen.rule in _VERDICTS and not seen.rule.startswith("stale"):
            added = f"adds the dense gradients of batch {seen.update}"
            resource = run.resources[run.order.streams[i]]
            notes[i] = added if means(op, Meaning.USE) else f"combines those of {resource} that have been added"
    return tuple(_step(run.order, i, notes[i]) for i in run.order.sequence if i in notes)


class _Witness(VersionRun):
    """The run of one history, op by op."""

    def steps_of(self, number: int, history: list[int], last: int | None, state: Data) -> tuple[WitnessStep, ...]:
        """What the batches of a history do with a key, up to op `last` or to the end."""
        steps: list[WitnessStep] = []
        for i in self.order.sequence:
            self.step(i)
            op = self.order.ops[i]
            shown = op.batch in history and (op.micro_batch in (None, 0) or i == last)
            note = self.note(op, state, number) if shown else None
            if note is not None or i == last:
                steps.append(_step(self.order, i, note or "uses it"))
            if i == last:
                break
        return tuple(steps)

    def note(self, op: Op, state: Data, number: int) -> str | None:
        """What the op leaves or reads of the key; None for an op that does not touch it."""
        buffer = CACHES[state]
        cached = f"{buffer} {op.batch}: {self.shown(self.cached.get((buffer, op.batch)), number)}"
        match KINDS[op.kind].meaning:
            case Meaning.COPY if op_writes(op, buffer):
                return f"copies {state} into {cached}"
            case Meaning.SYNC if op_writes(op, buffer):
                return f"leaves {cached}"
            case Meaning.USE if state is Data.TABLE and op_reads(op, Data.EMBEDDINGS):
                return f"reads rows {self.shown(self.embeddings.get((op.batch, op.micro_batch)), number)}"
            case Meaning.APPLY if op_writes(op, buffer):
                return f"applies batch {op.batch} to {cached}"
            case Meaning.AVERAGE if op_writes(op, buffer):
                return f"averages {cached}"
            case Meaning.STORE | Meaning.APPLY if op_writes(op, state):
                return f"leaves {state} {self.shown(self.states[state], number)}"
        return None

    def shown(self, version: Version | None, number: int) -> str:
        """The updates that the version contains in one history."""
        if version is None or version.undefined >> number & 1:
            return "undefined"
        found = [u for u, histories in enumerate(version.has) if histories >> number & 1]
        local = [u for u, histories in enumerate(version.local) if histories >> number & 1]
        return f"with updates {_listed(found)}" + (f", {_listed(local)} on this replica only" if local else "")


def _step(order: Order, i: int, note: str) -> WitnessStep:
    return WitnessStep(op=order.ops[i], stream=order.streams[i], note=note)


def _listed(batches: list[int]) -> str:
    return ", ".join(map(str, batches)) if batches else "none"
