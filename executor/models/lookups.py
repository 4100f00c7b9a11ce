"""What a micro-batch has looked up, as models see it: the rows of each feature, or its bags of rows as vectors.

Rows come as the distinct ones of each table group, the leaves of autograd, and where each lookup stands among them. All
features of a group are taken from its leaf at once: a selection for each would make a gradient of full size for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from executor.data import Feature, MicroBatch

__all__ = ["Lookups"]


@dataclass(slots=True, kw_only=True)
class Lookups:
    """The lookups of a micro-batch.

    Attributes:
        leaves: per table group float32 (distinct rows, dim).
        groups: the table group of each feature.
        inverse: int64 (lookups,), by feature, then sample: position among the distinct rows of the group.
        totals: lookups of each feature.
    """

    leaves: Sequence[Tensor]
    groups: Sequence[int]
    inverse: Tensor
    totals: Sequence[int]
    _rows: list[Tensor] | None = field(default=None, init=False)

    def rows(self, feature: int) -> Tensor:
        """The rows of a feature: float32 (lookups, dim), ordered by sample."""
        if self._rows is None:
            self._rows = [torch.empty(0)] * len(self.groups)
            for leaf, mine in self._by(lambda feature: self.groups[feature]):
                selected = leaf.index_select(0, self._joined(self.inverse, mine))
                parts = torch.split(selected, [self.totals[each] for each in mine])
                for each, part in zip(mine, parts, strict=True):
                    self._rows[each] = part
        return self._rows[feature]

    def bags(self, features: Sequence[Feature], batch: MicroBatch) -> list[Tensor]:
        """Each feature's bags as one vector per sample: float32 (samples, dim); an empty bag gives zeros.

        Args:
            features: of the model, in its order; they say how bags are pooled, and which are weighted.
            batch: its `lengths` cut the lookups into samples, its `weights` multiply the rows of weighted features.
        """
        found = [torch.empty(0)] * len(features)
        for leaf, mine in self._by(lambda each: (self.groups[each], features[each].pooling, features[each].weighted)):
            lengths = batch.lengths[mine].view(-1)
            weights = batch.weights if features[mine[0]].weighted else None
            pooled = functional.embedding_bag(
                self._joined(self.inverse, mine),
                leaf,
                lengths.cumsum(0) - lengths,
                mode=features[mine[0]].pooling.value,
                per_sample_weights=None if weights is None else self._joined(weights, mine),
            )
            for each, vectors in zip(mine, torch.split(pooled, batch.num_samples), strict=True):
                found[each] = vectors
        return found

    def _by(self, kind: Callable[[int], object]) -> Iterator[tuple[Tensor, list[int]]]:
        """The features that are of one kind, and the leaf of their group."""
        kinds: dict[object, list[int]] = {}
        for feature in range(len(self.groups)):
            kinds.setdefault(kind(feature), []).append(feature)
        for mine in kinds.values():
            yield self.leaves[self.groups[mine[0]]], mine

    def _joined(self, values: Tensor, features: list[int]) -> Tensor:
        """What belongs to the lookups of some features."""
        if len(features) == len(self.totals):
            return values
        parts = torch.split(values, list(self.totals))
        return torch.cat([parts[feature] for feature in features])
