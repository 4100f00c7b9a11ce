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

from nestpipe.base import ExecutorError

__all__ = ["DenseOptimizer", "OptimizerKind", "SparseOptimizer", "sparse_optimizer"]


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
        rows.add_(grads, alpha=-lr)

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


class DenseOptimizer:
    """The dense counterpart of a sparse optimiser: SGD, Adagrad or Adam on all parameters as one flat vector.

    The parameters become views of `values`, so one operation updates them all. (torch.optim would import the compiler
    at its first step, which takes seconds.)

    Args:
        kind: SGD, Adagrad (element-wise, m += g²) or Adam.
        parameters: of the model, on their device.
        lr: learning rate.
    """

    def __init__(self, kind: OptimizerKind, parameters: Iterable[nn.Parameter], *, lr: float) -> None:
        parameters = list(parameters)
        flat = [parameter.detach().reshape(-1) for parameter in parameters]
        self.values = torch.cat(flat) if flat else torch.empty(0)
        at = 0
        for parameter in parameters:
            parameter.data = self.values[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        # one value per row makes the row-wise Adagrad the element-wise one
        self._optimizer = sparse_optimizer(kind, lr=lr)
        self.moments = self.values.new_zeros(at, self._optimizer.width(1))

    def step(self, grads: Tensor, step: int) -> None:
        """Apply a flat gradient; `step` counts batches from 1."""
        self._optimizer.apply(self.values.view(-1, 1), self.moments, grads.view(-1, 1), step)
