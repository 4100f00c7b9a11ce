"""Where batches come from: the same from the same seed, dealt once to the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from executor.data.sources import KeyStreamSource, SequenceSource, SyntheticSource
from traces.keys.stream import KeyStream


def test_synthetic_batches_depend_on_batch_rank_and_seed_alone() -> None:
    source = SyntheticSource(features=("a",), batch_size=6, num_keys=50, mean_length=2.0, empty_share=0.3)
    again = SyntheticSource(features=("a",), batch_size=6, num_keys=50, mean_length=2.0, empty_share=0.3)
    first, second = (s.read(3, 1, 2).features["a"] for s in (source, again))
    assert first.values.tolist() == second.values.tolist()
    assert first.lengths.tolist() == second.lengths.tolist()
    assert source.read(4, 1, 2).features["a"].values.tolist() != first.values.tolist()


def test_a_rank_that_has_run_out_gives_empty_batches() -> None:
    source = SyntheticSource(features=("a",), batch_size=6, num_keys=50, batches=lambda rank: 2 - rank)
    assert source.read(1, 0, 2).num_samples == 6
    assert source.read(1, 1, 2).num_samples == 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_key_file_samples_are_dealt_once_whatever_the_world_size(world_size: int) -> None:
    values = np.arange(22, dtype=np.uint64)
    stream = KeyStream(features=("a", "b"), values=values, offsets=np.arange(23, dtype=np.int64), source="test")
    source = KeyStreamSource(stream=stream, batch_size=2)
    keys = [
        source.read(batch, rank, world_size).features["a"].values.tolist()
        for batch in range(source.num_batches(0, world_size))
        for rank in range(world_size)
    ]
    assert [key for part in keys for key in part] == list(range(0, 22, 2))
    whole, part = KeyStreamSource(stream=stream, batch_size=11).read(0, 0, 1), source.read(0, 0, 1)
    assert np.array_equal(whole.dense[:2], part.dense)


def test_sequences_are_dealt_once_per_epoch_in_another_order_each_time() -> None:
    sequences = tuple(np.array([i, i + 1]) for i in range(7))
    source = SequenceSource(sequences=sequences, num_items=9, batch_size=2, num_negatives=3, epochs=2)
    assert source.num_batches(0, 2) == 4
    epochs = [
        [
            key
            for b in range(first, first + 2)
            for r in (0, 1)
            for key in source.read(b, r, 2).features["items"].values[::2]
        ]
        for first in (0, 2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(7))
    assert epochs[0] != epochs[1]
    assert source.read(4, 0, 2).num_samples == 0
    raw = source.read(0, 0, 2)
    assert raw.terms.tolist() == [1] * raw.num_samples
    assert raw.features["negatives"].lengths.tolist() == [3] * raw.num_samples


@pytest.mark.parametrize(("before", "after", "batches"), [(2, 4, 3), (4, 2, 1), (2, 3, 4), (3, 1, 2)])
def test_a_key_file_goes_on_at_another_world_size_where_it_stopped(before: int, after: int, batches: int) -> None:
    values = np.arange(46, dtype=np.uint64)
    stream = KeyStream(features=("a",), values=values, offsets=np.arange(47, dtype=np.int64), source="test")
    source = KeyStreamSource(stream=stream, batch_size=2)
    resumed = source.resumed(batches, source.position(batches, before))
    seen = _dealt(source, range(batches), before)
    seen += _dealt(resumed, range(batches, resumed.num_batches(0, after)), after)
    assert seen == list(range(46))


@pytest.mark.parametrize(("before", "after", "batches"), [(2, 4, 3), (4, 2, 2), (2, 1, 6), (2, 2, 7)])
def test_sequences_go_on_within_the_epoch_at_another_world_size(before: int, after: int, batches: int) -> None:
    sequences = tuple(np.array([i, i + 1]) for i in range(17))
    source = SequenceSource(sequences=sequences, num_items=20, batch_size=2, num_negatives=1, epochs=3)
    resumed = source.resumed(batches, source.position(batches, before))
    seen = _dealt(source, range(batches), before)
    seen += _dealt(resumed, range(batches, resumed.num_batches(0, after)), after)
    assert seen == _dealt(source, range(source.num_batches(0, 1)), 1)


def _dealt(source: KeyStreamSource | SequenceSource, batches: range, world_size: int) -> list[int]:
    """The first key of every sample, in the order of batches and ranks."""
    found = []
    for batch in batches:
        for rank in range(world_size):
            column = source.read(batch, rank, world_size).features[source.features[0]]
            found += column.values[np.cumsum(column.lengths) - column.lengths].tolist()
    return found
