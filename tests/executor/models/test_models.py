"""The models: padding changes nothing, the future is not seen, and empty bags and short histories work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from executor.data.batch import Feature, MicroBatch, Pooling
from executor.data.sources import SyntheticSource
from executor.data.tables import TableSpec
from executor.models.dlrm import DLRM, Model
from executor.models.lookups import Lookups
from executor.models.optimizers import OptimizerKind
from executor.models.sequence import FuXiBlock, HSTUBlock, SequenceModel, next_item_scores, pad_rows
from executor.runtime.groups import ProcessGroups
from executor.runtime.trainer import Settings, Trainer
from nestpipe.base.errors import ExecutorError
from nestpipe.ir import with_micro_batches
from nestpipe.schedules import load
from tests.executor.jobs import pool

BLOCKS = [HSTUBlock, FuXiBlock]
BAGS = [
    pytest.param(Feature(name="f", table="t"), id="sum"),
    pytest.param(Feature(name="f", table="t", pooling=Pooling.MEAN), id="mean"),
    pytest.param(Feature(name="f", table="t", weighted=True), id="weighted"),
]


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


def lookups_of(*rows: Tensor) -> Lookups:
    """Lookups that are the given rows, each feature's in a table group of its own."""
    inverse = torch.cat([torch.arange(len(each)) for each in rows])
    return Lookups(leaves=rows, groups=range(len(rows)), inverse=inverse, totals=[len(each) for each in rows])


def test_pooling_sums_bags_and_gives_zeros_for_empty_ones() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    (bags,) = lookups_of(rows).bags([Feature(name="f", table="t")], micro_batch([[2, 0, 1]]))
    assert bags.tolist() == [[4.0, 6.0], [0.0, 0.0], [5.0, 6.0]]


def test_features_of_several_groups_and_poolings_get_their_rows_and_one_gradient_per_leaf() -> None:
    torch.manual_seed(3)
    features = [
        Feature(name="a", table="t"),
        Feature(name="b", table="u", weighted=True),
        Feature(name="c", table="t"),
        Feature(name="d", table="t", pooling=Pooling.MEAN),
    ]
    lengths = torch.randint(0, 5, (4, 40))
    totals = lengths.sum(dim=1).tolist()
    leaves = [torch.randn(12, 6, requires_grad=True), torch.randn(9, 3, requires_grad=True)]
    groups = [0, 1, 0, 0]
    parts = [torch.randint(0, len(leaves[group]), (total,)) for group, total in zip(groups, totals, strict=True)]
    batch = replace(micro_batch(lengths.tolist()), weights=torch.rand(sum(totals)))
    found = Lookups(leaves=leaves, groups=groups, inverse=torch.cat(parts), totals=totals)
    weights = torch.split(batch.weights, totals)
    targets = [torch.randn(40, leaves[group].shape[1]) for group in groups]
    expected = []
    for index, (feature, group, keys) in enumerate(zip(features, groups, parts, strict=True)):
        rows = leaves[group][keys]
        torch.testing.assert_close(found.rows(index), rows, rtol=0, atol=0)
        rows = rows * weights[index][:, None] if feature.weighted else rows
        bags = [bag.sum(dim=0) for bag in torch.split(rows, lengths[index].tolist())]
        sizes = lengths[index].clamp(min=1)[:, None] if feature.pooling == Pooling.MEAN else 1
        expected.append(torch.stack(bags) / sizes)
    mine = found.bags(features, batch)
    for bags, theirs in zip(mine, expected, strict=True):
        torch.testing.assert_close(bags, theirs)
    grads = [
        torch.autograd.grad(sum((b * t).sum() for b, t in zip(bags, targets, strict=True)), leaves)
        for bags in (mine, expected)
    ]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted)


def test_weights_go_with_sums_only() -> None:
    with pytest.raises(ExecutorError, match="feature f: weights go with sum pooling only, got mean"):
        Feature(name="f", table="t", pooling=Pooling.MEAN, weighted=True)


def embedding_bag(
    table: Tensor, keys: Tensor, lengths: Tensor, feature: Feature, weights: Tensor | None = None
) -> Tensor:
    """Torch's own, for a feature of ours."""
    offsets = lengths.cumsum(0) - lengths
    return functional.embedding_bag(keys, table, offsets, mode=feature.pooling.value, per_sample_weights=weights)


class Bags(Model):
    """One table's bags under a logistic loss, without dense parameters that matter."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.tables = (TableSpec(name="t", num_rows=30, dim=4, hashed=False),)
        self.features = (feature,)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        (bags,) = lookups.bags(self.features, batch)
        logits = bags.sum(dim=1) + self.bias
        return functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum"), logits


def train_bags(world: ProcessGroups, feature: Feature, micro_batches: int) -> tuple[Tensor, Tensor]:
    """The table before and after four steps of SGD, pipelined."""
    loop = with_micro_batches(load("nestpipe"), micro_batches)
    trainer = Trainer(world, loop, Bags(feature), bag_source(), Settings(optimizer=OptimizerKind.SGD, lr=1.0))
    before = trainer.state()["table.0"]
    trainer.run(4)
    return before, trainer.state()["table.0"]


def bag_source() -> SyntheticSource:
    """Skewed keys in bags, some of them empty, with weights."""
    return SyntheticSource(features=("f",), batch_size=16, num_keys=30, mean_length=3.0, empty_share=0.2, weighted=True)


@pytest.mark.parametrize("feature", BAGS)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_rank_trains_bags_as_torch_s_embedding_bag_does(feature: Feature, micro_batches: int) -> None:
    before, after = pool(1).run(train_bags, feature, micro_batches)[0]
    table, bias = before.clone().requires_grad_(), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [table], "lr": 1.0}, {"params": [bias], "lr": Settings().dense_lr}])
    for step in range(4):
        raw = bag_source().read(step, 0, 1)
        keys, lengths = (torch.from_numpy(part) for part in (raw.features["f"].values, raw.features["f"].lengths))
        assert raw.features["f"].weights is not None
        weights = torch.from_numpy(raw.features["f"].weights) if feature.weighted else None
        logits = embedding_bag(table, keys, lengths, feature, weights).sum(dim=1) + bias
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(raw.labels)).backward()
        optimizer.step()
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, table.detach(), rtol=1e-6, atol=1e-6)


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
    together, logits = model.loss(lookups_of(rows, negatives), micro_batch([lengths, [3, 3, 3]]))
    parts = zip(rows.split(lengths), negatives.split(3), lengths, strict=True)
    apart = sum(model.loss(lookups_of(row, negative), micro_batch([[n], [3]]))[0] for row, negative, n in parts)
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
    loss, logits = model.loss(lookups_of(torch.randn(1, 4), torch.randn(0, 8)), batch)
    assert logits.shape == (2,)
    assert torch.isfinite(loss)


def test_every_parameter_of_every_model_gets_a_gradient() -> None:
    for block in BLOCKS:
        model = sequence_model(block)
        loss, _ = model.loss(lookups_of(torch.randn(11, 8), torch.randn(9, 8)), micro_batch([[2, 6, 3], [3, 3, 3]]))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        assert all(bool(grad.abs().sum() > 0) for grad in grads)
