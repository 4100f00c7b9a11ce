"""Sparse and dense optimisers against torch's."""

from __future__ import annotations

import pytest
import torch

from executor.models.optimizers import DenseOptimizer, OptimizerKind, sparse_optimizer
from nestpipe.base.errors import ExecutorError


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_optimisers_agree_with_torch_on_parameters_of_one_value(kind: OptimizerKind) -> None:
    rows, moments = torch.tensor([[1.0], [-2.0]]), torch.zeros(2, sparse_optimizer(kind, lr=0.1).width(1))
    parameter = torch.nn.Parameter(rows.clone())
    reference: torch.optim.Optimizer = {
        OptimizerKind.SGD: lambda: torch.optim.SGD([parameter], lr=0.1),
        OptimizerKind.ROWWISE_ADAGRAD: lambda: torch.optim.Adagrad([parameter], lr=0.1, eps=1e-8),
        OptimizerKind.LAZY_ADAM: lambda: torch.optim.Adam([parameter], lr=0.1),
    }[kind]()
    dense = DenseOptimizer(kind, [torch.nn.Parameter(rows.clone())], lr=0.1)
    for step in range(1, 6):
        grads = torch.tensor([[0.5 * step], [-1.0 / step]])
        parameter.grad = grads.clone()
        reference.step()
        sparse_optimizer(kind, lr=0.1).apply(rows, moments, grads, step)
        dense.step(grads.view(-1), step)
        torch.testing.assert_close(rows, parameter.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(dense.values, rows.view(-1))


def test_rowwise_adagrad_takes_the_mean_of_squares_of_a_row() -> None:
    rows, moments = torch.zeros(1, 2), torch.zeros(1, 1)
    sparse_optimizer(OptimizerKind.ROWWISE_ADAGRAD, lr=1.0, eps=0.0).apply(rows, moments, torch.tensor([[3.0, 1.0]]), 1)
    assert moments.item() == 5.0
    torch.testing.assert_close(rows, -torch.tensor([[3.0, 1.0]]) / 5.0**0.5)


def test_dense_parameters_become_views_of_one_vector() -> None:
    model = torch.nn.Linear(3, 2)
    dense = DenseOptimizer(OptimizerKind.SGD, model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    dense.step(torch.ones(8), 1)
    assert torch.equal(model.weight.detach(), before - 1)


def test_a_learning_rate_must_be_positive() -> None:
    with pytest.raises(ExecutorError, match="learning rate must be positive, got 0"):
        sparse_optimizer(OptimizerKind.SGD, lr=0)
