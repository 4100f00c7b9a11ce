"""The models: padding changes nothing, the future is not seen, and empty bags and short histories work."""

from __future__ import annotations

import pytest
import torch

from executor.data import Feature, MicroBatch
from executor.models import DLRM, sum_pool
from executor.sequence_models import FuXiBlock, HSTUBlock, SequenceModel, next_item_scores, pad_rows
from executor.tables import TableSpec

BLOCKS = [HSTUBlock, FuXiBlock]


def sequence_model(block: type[HSTUBlock] | type[FuXiBlock]) -> SequenceModel:
    torch.manual_seed(0)
    table = TableSpec(name="item", num_rows=20, dim=8, hashed=False)
    model = SequenceModel(block, table, layers=2, heads=2, max_length=6, num_negatives=3)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and parameter.dim() == 2:
            torch.nn.init.normal_(parameter)
    return model


def micro_batch(lengths: list[list[int]], num_dense: int = 0) -> MicroBatch:
    count = len(lengths[0])
    totals = tuple(sum(row) for row in lengths)
    return MicroBatch(
        ids=torch.zeros(sum(totals), dtype=torch.int64),
        totals=totals,
        lengths=torch.tensor(lengths),
        dense=torch.randn(count, num_dense),
        labels=torch.ones(count),
        num_terms=count,
    )


def test_pooling_sums_bags_and_gives_zeros_for_empty_ones() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert sum_pool(rows, torch.tensor([2, 0, 1])).tolist() == [[4.0, 6.0], [0.0, 0.0], [5.0, 6.0]]


def test_padding_puts_rows_at_the_front_of_their_sample() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]])
    assert pad_rows(rows, torch.tensor([1, 0, 2]), 2).squeeze(2).tolist() == [[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_does_not_look_ahead(block: type[HSTUBlock] | type[FuXiBlock]) -> None:
    model = sequence_model(block)
    items = torch.randn(1, 5, 8)
    changed = items.clone()
    changed[0, 3:] = torch.randn(2, 8)
    before, after = model.encode(items), model.encode(changed)
    torch.testing.assert_close(before[0, :3], after[0, :3])
    assert not torch.allclose(before[0, 3:], after[0, 3:])


@pytest.mark.parametrize("block", BLOCKS)
def test_the_loss_of_samples_together_is_the_sum_of_their_losses(block: type[HSTUBlock] | type[FuXiBlock]) -> None:
    model = sequence_model(block)
    lengths, rows, negatives = [2, 6, 3], torch.randn(11, 8), torch.randn(9, 8)
    together, logits = model.loss([rows, negatives], micro_batch([lengths, [3, 3, 3]]))
    parts = zip(rows.split(lengths), negatives.split(3), lengths, strict=True)
    apart = sum(model.loss([row, negative], micro_batch([[n], [3]]))[0] for row, negative, n in parts)
    torch.testing.assert_close(together, apart)
    assert logits.shape == (1 + 5 + 2, 4)


@pytest.mark.parametrize("block", BLOCKS)
def test_next_item_scores_rank_the_whole_table(block: type[HSTUBlock] | type[FuXiBlock]) -> None:
    model, table = sequence_model(block), torch.randn(20, 8)
    scores = next_item_scores(model, table, [[1, 2, 3], [4], list(range(12))])
    assert scores.shape == (3, 20)
    torch.testing.assert_close(scores[0], next_item_scores(model, table, [[1, 2, 3]])[0])


def test_dlrm_takes_tables_of_several_widths_and_empty_bags() -> None:
    tables = [TableSpec(name="a", num_rows=9, dim=4), TableSpec(name="b", num_rows=9, dim=8)]
    model = DLRM(tables, [Feature(name="f", table="a"), Feature(name="g", table="b")], num_dense=3, hidden=(5,))
    batch = micro_batch([[1, 0], [0, 0]], num_dense=3)
    loss, logits = model.loss([torch.randn(1, 4), torch.randn(0, 8)], batch)
    assert logits.shape == (2,)
    assert torch.isfinite(loss)


def test_every_parameter_of_every_model_gets_a_gradient() -> None:
    for block in BLOCKS:
        model = sequence_model(block)
        loss, _ = model.loss([torch.randn(11, 8), torch.randn(9, 8)], micro_batch([[2, 6, 3], [3, 3, 3]]))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(bool(grad.abs().sum() > 0) for grad in grads)
