"""Cutting a batch into micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.data.batch import Feature, Jagged, RawBatch, cut, to_device
from executor.data.sources import SyntheticSource
from executor.data.tables import TableSpec, make_layout
from nestpipe.base.errors import ExecutorError


def _raw(lengths: list[int]) -> RawBatch:
    values = np.arange(sum(lengths), dtype=np.int64)
    count = len(lengths)
    return RawBatch(
        features={
            "x": Jagged(values=values, lengths=np.array(lengths, dtype=np.int64), weights=values.astype(np.float32))
        },
        dense=np.arange(count, dtype=np.float32)[:, None],
        labels=np.arange(count, dtype=np.float32),
        terms=np.arange(count, dtype=np.int64),
    )


@given(st.lists(st.integers(0, 3), max_size=9), st.integers(1, 4), st.booleans())
def test_micro_batches_hold_every_sample_once_with_its_keys(lengths: list[int], parts: int, backwards: bool) -> None:
    layout = make_layout((TableSpec(name="t", num_rows=100, dim=1, hashed=False),), 2)

    def reverse(raw: RawBatch, micro_batches: int) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
        return list(np.array_split(np.arange(raw.num_samples)[::-1], micro_batches))

    raw = _raw(lengths)
    features = [Feature(name="x", table="t", weighted=True), Feature(name="x", table="t")]
    batch = cut(raw, features, layout, parts, reverse if backwards else None)
    batch = to_device(batch, lambda _, shape, dtype: torch.empty(shape, dtype=dtype))
    ends = np.cumsum(lengths)
    seen = []
    for m in range(parts):
        micro = batch.micro_batch(m)
        wanted = [
            key for label in micro.labels.int().tolist() for key in range(ends[label] - lengths[label], ends[label])
        ]
        assert micro.ids.tolist() == wanted * 2
        assert micro.weights is not None
        assert micro.weights.tolist() == [*wanted, *[1.0] * len(wanted)]
        assert micro.lengths.tolist() == [[lengths[label] for label in micro.labels.int().tolist()]] * 2
        assert micro.num_terms == int(micro.labels.sum())
        assert torch.equal(micro.dense[:, 0], micro.labels)
        seen += micro.labels.int().tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_weights_that_a_source_does_not_give_are_missed() -> None:
    layout = make_layout((TableSpec(name="t", num_rows=9, dim=1),), 1)
    raw = SyntheticSource(features=("x",), batch_size=3, num_keys=5).read(0, 0, 1)
    with pytest.raises(ExecutorError, match="feature x is weighted, but its source gives keys without weights"):
        cut(raw, [Feature(name="x", table="t", weighted=True)], layout, 2)
