"""The records of the op kinds."""

from __future__ import annotations

import pytest

from nestpipe.ir import STATES
from nestpipe.ir.kinds import CACHES, COLLECTIVES, KINDS, Meaning, OpKind, StepPart, kinds_of


@pytest.mark.parametrize("kind", OpKind)
def test_every_kind_has_a_record_that_does_not_contradict_itself(kind: OpKind) -> None:
    record = KINDS[kind]
    assert set(record.needs) <= record.writes
    assert all(set(needed) <= record.reads for needed in record.needs.values())
    if record.in_place and record.meaning is not Meaning.APPLY:
        assert record.writes <= record.reads, "what changes an instance reads it"
    for other in (record.sized_like, record.counted_as):
        assert other is None or (KINDS[other].counted_as is None and KINDS[other].sized_like is None)


def test_states_are_written_by_what_applies_or_stores_only() -> None:
    writers = {kind for kind, record in KINDS.items() if record.writes & STATES}
    assert writers == kinds_of(Meaning.APPLY, Meaning.STORE)


def test_what_fills_a_cache_from_a_state_is_a_copy() -> None:
    fill = {
        kind for kind, record in KINDS.items() if set(CACHES) & record.reads and set(CACHES.values()) & record.writes
    }
    assert fill == kinds_of(Meaning.COPY, Meaning.APPLY)


def test_compute_waits_for_collectives_only() -> None:
    assert kinds_of(StepPart.EMBEDDINGS, StepPart.DENSE) <= COLLECTIVES


@pytest.mark.parametrize("part", sorted(set(StepPart) - {StepPart.COMPUTE, StepPart.OTHER}))
def test_kinds_of_one_part_of_the_step_have_an_order(part: StepPart) -> None:
    places = [record.precedence for record in KINDS.values() if record.part is part and record.counted_as is None]
    assert len(set(places)) == len(places)
