"""SHA-256 digests of the trained state in canonical order; those of tables are the same at every world size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from executor.runtime.trainer import Trainer
from nestpipe.ir import Data

__all__ = ["iter_rows", "state_digests"]

_CHUNK_ROWS = 1 << 18


def iter_rows(trainer: Trainer, data: Data, group: int, chunk_rows: int = _CHUNK_ROWS) -> Iterator[Tensor]:
    """The rows of a table group in id order, a chunk at a time, on every rank. A collective call."""
    worker, size = trainer.worker, trainer.domain_size
    spec = worker.layout.groups[group]
    mine = worker.store.state(data)[group]
    for first in range(spec.first, spec.end, chunk_rows):
        chunk = range(first, min(first + chunk_rows, spec.end))
        ids = worker.layout.shard_ids(group, worker.store.shard)
        start, stop = (len(range(ids.start, bound, size)) for bound in (chunk.start, chunk.stop))
        shards = trainer.world.gather(mine[start:stop].clone() if worker.rank < size else None)
        whole = torch.empty(len(chunk), mine.shape[1])
        for shard in range(size):
            whole[(shard - chunk.start) % size :: size] = shards[shard]
        yield whole


def state_digests(trainer: Trainer) -> dict[str, str]:
    """Digests of tables, optimiser rows, dense parameters and the model's buffers. A collective call.

    A digest covers, per table group, the shape and the float32 values, little endian; dense parameters follow in name
    order with their names. Buffers are each rank's own, so theirs are taken in rank order.
    """
    found = {}
    for name, data in (("tables", Data.TABLE), ("optimizer", Data.OPTIMIZER)):
        total = hashlib.sha256()
        for group, spec in enumerate(trainer.worker.layout.groups):
            total.update(f"{spec.num_rows}x{trainer.worker.store.state(data)[group].shape[1]}".encode())
            for rows in iter_rows(trainer, data, group):
                total.update(_bytes(rows))
        found[name] = total.hexdigest()
    model = trainer.worker.model
    found["dense"] = _digest_of(dict(model.named_parameters()))
    own = trainer.world.gather(_digest_of(model.rank_buffers()))
    found["buffers"] = hashlib.sha256(" ".join(own).encode()).hexdigest()
    return found


def _digest_of(tensors: Mapping[str, Tensor]) -> str:
    total = hashlib.sha256()
    for key, value in sorted(tensors.items()):
        total.update(f"{key} {tuple(value.shape)}".encode())
        total.update(_bytes(value.detach().cpu()))
    return total.hexdigest()


def _bytes(values: Tensor) -> bytes:
    return np.ascontiguousarray(values.numpy(), dtype="<f4").tobytes()
