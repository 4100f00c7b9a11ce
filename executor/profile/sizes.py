"""How large every op of a run is, worked out from the data alone: keys, distinct keys, bytes, and who sends how much.

Nothing is run and nothing is timed: the batches of every rank are read from the source, cut, deduplicated and routed
with the executor's own pure functions. So the sizes of a configuration are known before it runs, to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from executor.data import Batch, Clustering, Layout, Owned, Routed, Source, cut, dedup, own, shared_positions
from executor.models import Model
from nestpipe.ir import OpKind

__all__ = ["SIZES", "RunSizes", "size_run"]

SIZES: Final = ("samples", "keys", "unique_keys", "bytes")
_ID_BYTES: Final = 8
_VALUE_BYTES: Final = 4

#: Names an op of a batch: kind, batch, micro-batch (None for a whole batch).
OpName = tuple[OpKind, int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSizes:
    """The sizes of every op of every rank.

    Attributes:
        table: columns rank, kind, batch, micro_batch (Int64), samples, keys, unique_keys, bytes. For an All2All `bytes`
            counts what a rank sends, its own share included.
        traffic: for each collective float64 (ranks, ranks), the bytes that the row's rank sends to the column's over
            the network; the diagonal is 0.
    """

    table: pd.DataFrame
    traffic: Mapping[OpName, npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankBatch:
    batch: Batch
    routed: tuple[Routed, ...]


def size_run(
    *,
    source: Source,
    model: Model,
    layout: Layout,
    moment_widths: Sequence[int],
    world_size: int,
    micro_batches: int,
    batches: int,
    cluster: Clustering | None = None,
) -> RunSizes:
    """The sizes of the first `batches` batches.

    Args:
        source, model, layout, cluster, micro_batches: as the run has them; `layout` has one shard per rank.
        moment_widths: optimiser values per row, by table group.
        world_size: ranks that share one row-wise sharding.
        batches: how many, at least 1.
    """
    rows: list[tuple[object, ...]] = []
    traffic: dict[OpName, npt.NDArray[np.float64]] = {}
    before: list[Owned] | None = None
    dense_bytes = (sum(parameter.numel() for parameter in model.parameters()) + 1) * _VALUE_BYTES
    for number in range(batches):
        ranks = [
            _route(source, model, layout, number, rank, world_size, micro_batches, cluster)
            for rank in range(world_size)
        ]
        owned = [_own(ranks, rank, layout) for rank in range(world_size)]
        sizes = _Batch(
            number=number, ranks=ranks, owned=owned, before=before, layout=layout, moments=tuple(moment_widths)
        )
        rows += sizes.rows(dense_bytes)
        traffic |= sizes.traffic(dense_bytes)
        before = owned
    columns = ["rank", "kind", "batch", "micro_batch", *SIZES]
    table = pd.DataFrame(rows, columns=columns).astype({"micro_batch": "Int64"})
    return RunSizes(table=table, traffic=traffic)


def _route(
    source: Source,
    model: Model,
    layout: Layout,
    number: int,
    rank: int,
    world_size: int,
    micro_batches: int,
    cluster: Clustering | None,
) -> _RankBatch:
    batch = cut(source.read(number, rank, world_size), model.features, layout, micro_batches, cluster)
    return _RankBatch(batch=batch, routed=tuple(dedup(batch.micro_batch(m).ids, layout) for m in range(micro_batches)))


def _own(ranks: Sequence[_RankBatch], owner: int, layout: Layout) -> Owned:
    """What an owner knows after the key exchange, worked out without one."""
    requested, received = [], []
    for m in range(len(ranks[0].routed)):
        parts = [rank.routed[m] for rank in ranks]
        pieces = [_to_owner(part, owner) for part in parts]
        requested.append(torch.cat(pieces))
        received.append([part.counts[owner] for part in parts])
    sent = [part.counts for part in ranks[owner].routed]
    terms = sum(sum(rank.batch.terms) for rank in ranks)
    return own(requested, received, sent, terms, layout)


def _to_owner(part: Routed, owner: int) -> torch.Tensor:
    sizes = [sum(row) for row in part.counts]
    first = sum(sizes[:owner])
    return part.ids[first : first + sizes[owner]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """One batch over all ranks."""

    number: int
    ranks: Sequence[_RankBatch]
    owned: Sequence[Owned]
    before: Sequence[Owned] | None
    layout: Layout
    moments: tuple[int, ...]

    def rows(self, dense_bytes: int) -> Iterator[tuple[object, ...]]:
        """Rows of the table of sizes."""
        for rank, (mine, owned) in enumerate(zip(self.ranks, self.owned, strict=True)):
            for kind, micro_batch, *sizes in (*self.whole(rank, mine, owned, dense_bytes), *self.micro(mine, owned)):
                yield (rank, kind.value, self.number, micro_batch, *sizes)  # type: ignore[attr-defined]

    def whole(self, rank: int, mine: _RankBatch, owned: Owned, dense_bytes: int) -> Iterator[tuple[object, ...]]:
        """Sizes of the ops of the whole batch: kind, None, samples, keys, unique_keys, bytes."""
        samples = sum(mine.batch.samples)
        moved = sum(tensor.numel() * tensor.element_size() for tensor in mine.batch.tensors.values())
        lookups = len(mine.batch.tensors["ids"])
        sent = torch.cat([part.ids for part in mine.routed])
        head = len(self.ranks) * (len(mine.routed) * len(self.layout.groups) + 1)
        requests = [sum(len(part) for part in parts) for parts in zip(*owned.requests, strict=True)]
        per_group = [len(owned.of_group(group)) for group in range(len(self.layout.groups))]
        state_bytes = self.state_bytes(per_group)
        grad_bytes = sum(
            count * group.dim * _VALUE_BYTES for count, group in zip(requests, self.layout.groups, strict=True)
        )
        yield OpKind.READ, None, samples, lookups, 0, moved
        yield OpKind.COPY_H2D, None, samples, 0, 0, moved
        key_bytes = (len(sent) + head) * _ID_BYTES
        yield OpKind.ALL_TO_ALL_KEYS, None, samples, len(sent), len(torch.unique(sent)), key_bytes
        yield OpKind.LOOKUP, None, samples, sum(requests), len(owned.ids), state_bytes
        shared = self.shared(rank)
        yield OpKind.SYNC, None, samples, len(owned.ids), sum(shared), self.state_bytes(shared)
        yield OpKind.ALL_REDUCE, None, samples, 0, 0, dense_bytes
        yield OpKind.UPDATE, None, samples, sum(requests), len(owned.ids), grad_bytes
        yield OpKind.WRITE_BACK, None, samples, len(owned.ids), len(owned.ids), state_bytes

    def micro(self, mine: _RankBatch, owned: Owned) -> Iterator[tuple[object, ...]]:
        """Sizes of the ops of each micro-batch."""
        for m, routed in enumerate(mine.routed):
            lookups, samples = sum(mine.batch.totals[m]), mine.batch.samples[m]
            answered, asked = self.value_bytes(owned.received[m]), self.value_bytes(owned.sent[m])
            yield OpKind.DEDUP, m, samples, lookups, len(routed.ids), lookups * _ID_BYTES
            requests = sum(len(part) for part in owned.requests[m])
            yield OpKind.ALL_TO_ALL_ROWS, m, samples, requests, 0, answered
            width = asked / max(len(routed.ids), 1)
            yield OpKind.FORWARD, m, samples, lookups, len(routed.ids), round(lookups * width)
            yield OpKind.BACKWARD, m, samples, lookups, len(routed.ids), round(lookups * width)
            yield OpKind.ALL_TO_ALL_GRADS, m, samples, len(routed.ids), 0, asked

    def traffic(self, dense_bytes: int) -> dict[OpName, npt.NDArray[np.float64]]:
        """Who sends how much to whom, for each collective of the batch."""
        size = len(self.ranks)
        ids = np.array([[[sum(row) for row in part.counts] for part in rank.routed] for rank in self.ranks])
        head = len(self.ranks[0].routed) * len(self.layout.groups) + 1
        found: dict[OpName, npt.NDArray[np.float64]] = {
            (OpKind.ALL_TO_ALL_KEYS, self.number, None): _off_rank((ids.sum(axis=1) + head) * float(_ID_BYTES)),
            (OpKind.ALL_REDUCE, self.number, None): ring_traffic(size, dense_bytes),
        }
        for m in range(ids.shape[1]):
            asked = np.array([[self.value_bytes([row]) for row in rank.routed[m].counts] for rank in self.ranks])
            found[OpKind.ALL_TO_ALL_GRADS, self.number, m] = _off_rank(asked)
            found[OpKind.ALL_TO_ALL_ROWS, self.number, m] = _off_rank(asked.T)
        return found

    def shared(self, rank: int) -> list[int]:
        """By group, the owned ids that the batch shares with the one before."""
        groups = range(len(self.layout.groups))
        if self.before is None:
            return [0 for _ in groups]
        mine, other = self.owned[rank], self.before[rank]
        return [len(shared_positions(mine.of_group(group), other.of_group(group))[0]) for group in groups]

    def state_bytes(self, counts: Sequence[int]) -> int:
        """Bytes of rows and their optimiser values, for a number of rows of each group."""
        widths = [group.dim + width for group, width in zip(self.layout.groups, self.moments, strict=True)]
        return sum(count * width * _VALUE_BYTES for count, width in zip(counts, widths, strict=True))

    def value_bytes(self, counts: Sequence[Sequence[int]]) -> int:
        """Bytes of rows without optimiser values, counts [rank][group]."""
        dims = [group.dim for group in self.layout.groups]
        return sum(count * dim * _VALUE_BYTES for row in counts for count, dim in zip(row, dims, strict=True))


def ring_traffic(size: int, num_bytes: float) -> npt.NDArray[np.float64]:
    """What the ranks of a ring all_reduce send: each 2 (n - 1) / n of the bytes to the next.

    Source: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009); gloo's default algorithm for all_reduce.
    """
    matrix = np.zeros((size, size))
    for rank in range(size if size > 1 else 0):
        matrix[rank, (rank + 1) % size] = 2 * (size - 1) / size * num_bytes
    return matrix


def _off_rank(matrix: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    found = matrix.astype(np.float64)
    np.fill_diagonal(found, 0.0)
    return found
