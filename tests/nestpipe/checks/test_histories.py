"""Sets of histories as numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nestpipe.checks.histories import all_histories, blank, containing, most_missing


@given(st.integers(1, 6), st.data())
def test_a_history_contains_the_batches_of_its_bits(num_batches: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(0, num_batches - 1))
    held = containing(batch, num_batches)
    assert [held >> h & 1 for h in range(1 << num_batches)] == [h >> batch & 1 for h in range(1 << num_batches)]


@given(st.integers(0, all_histories(3)), st.lists(st.integers(0, all_histories(3)), max_size=5))
def test_the_most_missing_updates_are_those_of_the_worst_history(histories: int, missing: list[int]) -> None:
    counts = {h: sum(m >> h & 1 for m in missing) for h in range(8) if histories >> h & 1}
    worst = max(counts.values(), default=0)
    where = sum(1 << h for h, count in counts.items() if count == worst)
    assert most_missing(histories, missing) == (worst, where)


def test_an_update_of_one_replica_arrives_when_it_is_averaged() -> None:
    mask = containing(0, 2)
    local = blank(2).applied(0, mask, averaged=True)
    assert local.has == (0, 0)
    assert local.merged(0, mask) == blank(2).applied(0, mask, averaged=False)
