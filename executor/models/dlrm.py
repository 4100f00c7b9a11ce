"""What a model is to the executor, and the DLRM.

A model owns dense parameters only. It names its tables and the features that look them up, and turns looked-up rows
into the *sum* of its loss terms; the executor divides by the global count of terms when it applies the gradients. So
uneven and empty ranks weigh what they should.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.data import Feature, MicroBatch, TableSpec
from executor.models.lookups import Lookups

__all__ = ["DLRM", "Model", "make_mlp"]


class Model(nn.Module, ABC):
    """A recommendation model without its tables."""

    tables: tuple[TableSpec, ...]
    features: tuple[Feature, ...]

    def rank_buffers(self) -> dict[str, Tensor]:
        """What the model remembers besides its parameters, such as BatchNorm's running means: each rank its own."""
        parameters = {name for name, _ in self.named_parameters()}
        return {name: value for name, value in self.state_dict().items() if name not in parameters}

    @abstractmethod
    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The summed loss and the predictions of a micro-batch with at least one sample.

        Args:
            lookups: the rows of its features.
            batch: the micro-batch; its `lengths` cut the lookups of a feature into samples.

        Returns:
            A scalar, the sum over the loss terms, and the predictions, whose first dimension is samples or terms.
        """


def make_mlp(widths: Sequence[int], *, last_activation: bool) -> nn.Sequential:
    """Linear layers of the given widths with ReLU between them, and after the last if asked."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_activation else layers[:-1]))


class DLRM(Model):
    """Bottom MLP on dense features, pooled embeddings, pairwise dot products, top MLP, logistic loss.

    Source: Naumov et al., arXiv 1906.00091, figure 1.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[Feature],
        *,
        num_dense: int,
        hidden: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        dims = {table.dim for table in tables}
        self.tables, self.features = tuple(tables), tuple(features)
        self.width = max(dims)
        self.project = nn.ModuleDict(
            {
                table.name: nn.Identity() if table.dim == self.width else nn.Linear(table.dim, self.width, bias=False)
                for table in tables
            }
        )
        self.bottom = make_mlp([num_dense, *hidden, self.width], last_activation=True)
        num_vectors = len(features) + 1
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("pairs", row * num_vectors + column, persistent=False)
        self.top = make_mlp([self.width + len(row), *hidden, 1], last_activation=False)

    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        bags = zip(self.features, lookups.bags(self.features, batch), strict=True)
        pooled = [self.project[feature.table](vectors) for feature, vectors in bags]
        logits = self.logits(pooled, batch.dense)
        return functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum"), logits

    def logits(self, pooled: Sequence[Tensor], dense: Tensor) -> Tensor:
        """The dense part: logits, float32 (samples,).

        Args:
            pooled: per feature float32 (samples, width).
            dense: float32 (samples, values).
        """
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *pooled], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = dots.flatten(start_dim=1).index_select(1, self.get_buffer("pairs"))
        logits: Tensor = self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)
        return logits
