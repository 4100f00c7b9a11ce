"""Key-centric sample clustering for the executor: on the CPU, while the batch is read, ahead of its training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor.data.batch import Int64, RawBatch
from nestpipe.base import split_evenly
from traces.keys import cluster_keys, row_keys

__all__ = ["cluster_by_keys"]


def cluster_by_keys(raw: RawBatch, micro_batches: int) -> Sequence[Int64]:
    """The samples of each micro-batch, such that those which share keys are together; sizes as even as in order.

    A batch with fewer samples than micro-batches is cut in order. Deterministic.
    """
    count = raw.num_samples
    if count < micro_batches or micro_batches == 1:
        bounds = np.cumsum([0, *(split_evenly(count, micro_batches, m) for m in range(micro_batches))])
        return [np.arange(bounds[m], bounds[m + 1]) for m in range(micro_batches)]
    samples = [np.repeat(np.arange(count), jagged.lengths) for jagged in raw.features.values()]
    keys = [row_keys(jagged.values.view(np.uint64), name) for name, jagged in raw.features.items()]
    sample = np.concatenate(samples)
    order = np.argsort(sample, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sample, minlength=count))]).astype(np.int64)
    part = cluster_keys(np.concatenate(keys)[order], offsets, count, micro_batches)
    return [np.flatnonzero(part == m) for m in range(micro_batches)]
