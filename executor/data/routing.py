"""Key routing as pure tensor functions: dedup, bucketing by owner, and the owner's second dedup.

The order of everything is fixed by the data alone, so two runs agree bit for bit: unique ids are sorted by (owner, id),
what an owner receives is ordered by (micro-batch, source), and what it owns is sorted by id.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from executor.data.tables import Layout

__all__ = ["Owned", "Routed", "dedup", "join_by_group", "own", "shared_positions", "split_by_group", "with_union"]


@dataclass(slots=True)
class Routed:
    """The distinct ids of one micro-batch, bucketed by owner.

    ids: int64 (unique), sorted by (owner, id). inverse: int64 (lookups), position of each lookup among the ids *of its
    group*. counts[owner][group]: how many ids go there.
    """

    ids: Tensor
    inverse: Tensor
    counts: list[list[int]]


@dataclass(slots=True)
class Owned:
    """What the owner knows of a batch after the key exchange.

    ids: int64 (owned), sorted, distinct. bounds[group]: where the group's ids begin, plus the end. requests[m][group]:
    int64, position among the group's ids of every row requested for micro-batch m, ordered by source.
    received[m][source][group] and sent[m][owner][group]: row counts of the exchange in either direction. num_terms:
    loss terms of the ranks known so far. mine[group]: positions that this replica requested itself, None for all.
    """

    ids: Tensor
    bounds: list[int]
    requests: list[list[Tensor]]
    received: list[list[list[int]]]
    sent: list[list[list[int]]]
    num_terms: int
    mine: list[Tensor] | None = None

    def of_group(self, group: int) -> Tensor:
        """The owned ids of a group."""
        return self.ids[self.bounds[group] : self.bounds[group + 1]]


def dedup(ids: Tensor, layout: Layout) -> Routed:
    """The distinct ids of a micro-batch by owner.

    Args:
        ids: int64 (lookups), any order.
        layout: gives the owner (id modulo shards) and the group of an id.
    """
    unique, inverse = torch.unique(ids, sorted=True, return_inverse=True)
    owners = unique.remainder(layout.num_shards)
    order = torch.argsort(owners, stable=True)
    rank_of = torch.empty_like(order)
    rank_of[order] = torch.arange(len(order), device=order.device)
    routed = unique[order]
    num_groups = len(layout.groups)
    groups = _group_of(routed, layout)
    cells = torch.bincount(owners[order] * num_groups + groups, minlength=layout.num_shards * num_groups)
    counts = cells.view(layout.num_shards, num_groups).tolist()
    if num_groups > 1:
        rank_of = _rank_in_group(groups, num_groups)[rank_of]
    return Routed(ids=routed, inverse=rank_of[inverse], counts=counts)


def _group_of(ids: Tensor, layout: Layout) -> Tensor:
    starts = torch.tensor([group.first for group in layout.groups[1:]], dtype=torch.int64, device=ids.device)
    return torch.bucketize(ids, starts, right=True)


def _rank_in_group(groups: Tensor, num_groups: int) -> Tensor:
    ranks = torch.empty_like(groups)
    for group in range(num_groups):
        member = groups == group
        ranks[member] = torch.arange(int(member.sum()), device=groups.device)
    return ranks


def own(
    requested: list[Tensor],
    received: list[list[list[int]]],
    sent: list[list[list[int]]],
    num_terms: int,
    layout: Layout,
) -> Owned:
    """The owner's view: the second dedup, over all sources and micro-batches.

    Args:
        requested: per micro-batch int64 ids, ordered by source.
        received: row counts [micro-batch][source][group].
        sent: row counts [micro-batch][owner][group] of this rank's own requests.
        num_terms: loss terms of the batch.
        layout: the address space.
    """
    ids, inverse = torch.unique(torch.cat(requested), sorted=True, return_inverse=True)
    bounds = _bounds(ids, layout)
    positions = torch.split(inverse, [len(part) for part in requested])
    requests = []
    for position, counts in zip(positions, received, strict=True):
        by_group = split_by_group(position, counts, [1] * len(layout.groups))
        requests.append([part.view(-1) - bound for part, bound in zip(by_group, bounds, strict=False)])
    return Owned(ids=ids, bounds=bounds, requests=requests, received=received, sent=sent, num_terms=num_terms)


def _bounds(ids: Tensor, layout: Layout) -> list[int]:
    starts = torch.tensor([group.first for group in layout.groups], dtype=torch.int64, device=ids.device)
    bounds: list[int] = torch.searchsorted(ids, starts).tolist()
    return [*bounds, len(ids)]


def with_union(owned: Owned, ids: Tensor, num_terms: int, layout: Layout) -> Owned:
    """`owned` extended to a sorted superset of its ids; `mine` keeps which of them it was extended from."""
    bounds = _bounds(ids, layout)
    mine = [torch.searchsorted(ids, owned.of_group(group)) - bounds[group] for group in range(len(layout.groups))]
    return Owned(
        ids=ids,
        bounds=bounds,
        requests=[[moved[part] for moved, part in zip(mine, request, strict=True)] for request in owned.requests],
        received=owned.received,
        sent=owned.sent,
        num_terms=num_terms,
        mine=mine,
    )


def shared_positions(ids: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Where two sorted distinct id lists agree: positions in `ids` and in `other`, both ascending.

    >>> [part.tolist() for part in shared_positions(torch.tensor([1, 4, 6]), torch.tensor([0, 4, 5, 6]))]
    [[1, 2], [1, 3]]
    """
    if not len(ids) or not len(other):
        empty = torch.empty(0, dtype=torch.int64, device=ids.device)
        return empty, empty
    at = torch.searchsorted(other, ids).clamp_(max=len(other) - 1)
    mine = torch.nonzero(other[at] == ids).squeeze(1)
    return mine, at[mine]


def split_by_group(flat: Tensor, counts: list[list[int]], dims: list[int]) -> list[Tensor]:
    """Cut a flat exchange buffer, ordered by (rank, group), into one (rows, dim) tensor per group.

    Args:
        flat: (values,).
        counts: rows [rank][group].
        dims: width of each group.
    """
    if len(dims) == 1:
        return [flat.view(-1, dims[0])]
    pieces = torch.split(flat, [count * dim for row in counts for count, dim in zip(row, dims, strict=True)])
    return [torch.cat(pieces[group :: len(dims)]).view(-1, dim) for group, dim in enumerate(dims)]


def join_by_group(rows: list[Tensor], counts: list[list[int]], out: Tensor) -> Tensor:
    """The opposite of `split_by_group`: fill the flat buffer `out`, ordered by (rank, group), and return it."""
    if len(rows) == 1:
        return out.copy_(rows[0].reshape(-1))
    pieces = [torch.split(part, [row[group] for row in counts]) for group, part in enumerate(rows)]
    flat = [pieces[group][rank].reshape(-1) for rank in range(len(counts)) for group in range(len(rows))]
    return out.copy_(torch.cat(flat))
