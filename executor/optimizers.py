"""Sparse optimisers as pure functions on rows, and the dense optimiser of the same name.

Every optimiser sees one gradient per row and batch: the sum over micro-batches and ranks divided by the global count
of loss terms. Per-row state travels with the row as `moments`, (rows, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn

from nestpipe.errors import ExecutorError

__all__ = ["OptimizerKind", "SparseOptimizer", "dense_optimizer", "sparse_optimizer"]


class OptimizerKind(StrEnum):
    """The optimisers of rows and dense parameters."""

    SGD = "sgd"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    LAZY_ADAM = "lazy_adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer:
    """How rows are updated.

    `apply(rows, moments, grads, step)` changes rows and moments in place; `step` counts batches from 1, whether or not
    a row was touched before (TorchRec's convention).
    """

    kind: OptimizerKind
    apply: Callable[[Tensor, Tensor, Tensor, int], None]

    def width(self, dim: int) -> int:
        """Optimiser values per row of `dim` values."""
        return {OptimizerKind.SGD: 0, OptimizerKind.ROWWISE_ADAGRAD: 1, OptimizerKind.LAZY_ADAM: 2 * dim}[self.kind]


def sparse_optimizer(
    kind: OptimizerKind, *, lr: float, eps: float = 1e-8, betas: tuple[float, float] = (0.9, 0.999)
) -> SparseOptimizer:
    """The optimiser of a kind.

    Row-wise Adagrad: m += mean(g²), w -= lr g / (sqrt(m) + eps). Source: FBGEMM's EXACT_ROWWISE_ADAGRAD; the gradients
    of duplicates are summed first, squared after.
    Lazy Adam: Adam with bias correction on the rows of the batch only. Source: Kingma and Ba 2015, algorithm 1.

    Raises:
        ExecutorError: if the learning rate is not positive.
    """
    if not lr > 0:
        raise ExecutorError(f"the learning rate must be positive, got {lr}")

    def sgd(rows: Tensor, moments: Tensor, grads: Tensor, step: int) -> None:  # noqa: ARG001
        rows.sub_(grads * lr)

    def rowwise_adagrad(rows: Tensor, moments: Tensor, grads: Tensor, step: int) -> None:  # noqa: ARG001
        moments.add_(grads.square().mean(dim=1, keepdim=True))
        rows.sub_(grads * (lr / (moments.sqrt() + eps)))

    def lazy_adam(rows: Tensor, moments: Tensor, grads: Tensor, step: int) -> None:
        first, second = moments.tensor_split(2, dim=1)
        first.mul_(betas[0]).add_(grads, alpha=1 - betas[0])
        second.mul_(betas[1]).add_(grads.square(), alpha=1 - betas[1])
        denominator = (second / (1 - betas[1] ** step)).sqrt_().add_(eps)
        rows.sub_(first / denominator * (lr / (1 - betas[0] ** step)))

    apply = {
        OptimizerKind.SGD: sgd,
        OptimizerKind.ROWWISE_ADAGRAD: rowwise_adagrad,
        OptimizerKind.LAZY_ADAM: lazy_adam,
    }[kind]
    return SparseOptimizer(kind=kind, apply=apply)


def dense_optimizer(kind: OptimizerKind, parameters: Iterable[nn.Parameter], *, lr: float) -> torch.optim.Optimizer:
    """The dense counterpart of a sparse optimiser: SGD, Adagrad or Adam of torch."""
    parameters = list(parameters)
    if kind == OptimizerKind.SGD:
        return torch.optim.SGD(parameters, lr=lr, foreach=False)
    if kind == OptimizerKind.ROWWISE_ADAGRAD:
        return torch.optim.Adagrad(parameters, lr=lr, foreach=False)
    return torch.optim.Adam(parameters, lr=lr, foreach=False)
