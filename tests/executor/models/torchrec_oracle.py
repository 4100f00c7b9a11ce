"""TorchRec as a second opinion: the same tables, keys and loss, trained by TorchRec's row-wise sharding and by us.

Needs an environment of its own: torch 2.13.0, and installed without dependencies fbgemm-gpu-cpu 1.8.0, torchrec 1.8.0,
torchmetrics 1.0.3, tensordict and what these import. `python -m tests.executor.models.torchrec_oracle` prints the
differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.app.pool import RankPool
from executor.data.batch import Feature, Jagged, MicroBatch, RawBatch
from executor.data.tables import TableSpec
from executor.models.dlrm import Model
from executor.models.lookups import Lookups
from executor.models.optimizers import OptimizerKind
from executor.runtime.groups import ProcessGroups
from executor.runtime.trainer import Settings, Trainer
from nestpipe.ir import with_micro_batches
from nestpipe.schedules import load

NAMES, ROWS, DIM, BATCH, STEPS, LR = ("a", "b"), 200, 8, 32, 10, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Random bags of up to `longest` keys; `distinct` keys never repeat within a global batch."""

    longest: int
    distinct: bool
    world_size: int = 2

    def num_batches(self, rank: int, world_size: int) -> int:  # noqa: ARG002
        return STEPS

    def position(self, batch: int, world_size: int) -> int:
        return batch * BATCH * world_size

    def resumed(self, batch: int, position: int) -> Keys:
        raise NotImplementedError

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:
        generator = torch.Generator().manual_seed(batch)
        count = BATCH * world_size
        features = {}
        for name in NAMES:
            lengths = torch.randint(0, self.longest + 1, (count,), generator=generator)
            total = int(lengths.sum())
            if self.distinct:
                values = torch.randperm(ROWS, generator=generator)[:total]
                lengths[int((lengths.cumsum(0) <= ROWS).sum()) :] = 0
                values = values[: int(lengths.sum())]
            else:
                values = torch.randint(0, ROWS, (total,), generator=generator)
            ends = lengths.cumsum(0)
            mine = slice(rank * BATCH, (rank + 1) * BATCH)
            first, last = int(ends[mine.start] - lengths[mine.start]), int(ends[mine.stop - 1])
            features[name] = Jagged(values=values[first:last].numpy(), lengths=lengths[mine].numpy())
        labels = torch.randint(0, 2, (count,), generator=generator).float()[rank * BATCH : (rank + 1) * BATCH]
        terms = torch.ones(BATCH, dtype=torch.int64).numpy()
        return RawBatch(features=features, dense=torch.zeros(BATCH, 0).numpy(), labels=labels.numpy(), terms=terms)


def logits_of(pooled: Sequence[Tensor]) -> Tensor:
    """A top without parameters: dot products with fixed vectors."""
    weights = torch.linspace(-1, 1, DIM)
    return sum((part @ (weights * (index + 1)) for index, part in enumerate(pooled)), start=torch.zeros(1))


class FixedTop(Model):
    """Pooled rows under `logits_of`."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = tuple(TableSpec(name=name, num_rows=ROWS, dim=DIM, hashed=False) for name in NAMES)
        self.features = tuple(Feature(name=name, table=name) for name in NAMES)

    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logits = logits_of(lookups.bags(self.features, batch))
        return functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum"), logits


def ours(world: ProcessGroups, keys: Keys, optimizer: OptimizerKind) -> tuple[list[Tensor], Tensor]:
    """Logits of every step and the tables after the last, trained by `nestpipe`."""
    loop = with_micro_batches(load("nestpipe"), 1)
    trainer = Trainer(world, loop, FixedTop(), keys, Settings(optimizer=optimizer, lr=LR))
    logits: dict[int, Tensor] = {}
    trainer.worker.on_predictions = lambda batch, _, predictions: logits.update({batch: predictions.clone()})
    trainer.run(STEPS)
    return [logits[step] for step in range(STEPS)], trainer.state()["table.0"]


def theirs(world: ProcessGroups, keys: Keys, optimizer: OptimizerKind) -> tuple[list[Tensor], Tensor]:
    """The same by TorchRec's row-wise sharded embedding bags."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    start = Trainer(world, load("sync"), FixedTop(), keys, Settings(optimizer=optimizer, lr=LR)).state()["table.0"]
    kind = {
        OptimizerKind.SGD: EmbOptimType.EXACT_SGD,
        OptimizerKind.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    }
    bags = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
            for name in NAMES
        ]
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": kind[optimizer], "learning_rate": LR, "eps": 1e-8}
    )
    placed = construct_module_sharding_plan(
        bags,
        {name: row_wise(compute_kernel="fused") for name in NAMES},
        local_size=world.world_size,
        world_size=world.world_size,
        device_type="cpu",
        sharder=sharder,
    )
    plan = ShardingPlan({"bags": placed})
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    model = DistributedModelParallel(
        nn.ModuleDict({"bags": bags}), env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    sharded = model.module["bags"]
    _load(model, start)
    logits = []
    for step in range(STEPS):
        raw = keys.read(step, world.rank, world.world_size)
        batch = torchrec.KeyedJaggedTensor.from_lengths_sync(
            keys=list(NAMES),
            values=torch.cat([torch.from_numpy(raw.features[name].values) for name in NAMES]),
            lengths=torch.cat([torch.from_numpy(raw.features[name].lengths) for name in NAMES]).int(),
        )
        found: Any = sharded(batch)
        pooled = found.wait() if hasattr(found, "wait") else found
        out = logits_of([pooled[name] for name in NAMES])
        functional.binary_cross_entropy_with_logits(out, torch.from_numpy(raw.labels)).backward()
        logits.append(out.detach())
    return logits, torch.cat(_whole(world, model))


def _shards(model: nn.Module) -> dict[str, list[tuple[int, Tensor]]]:
    found = {}
    for key, value in model.state_dict().items():
        name = key.split(".")[-2]
        found[name] = [(shard.metadata.shard_offsets[0], shard.tensor) for shard in value.local_shards()]
    return found


def _load(model: nn.Module, start: Tensor) -> None:
    for name, shards in _shards(model).items():
        table = start[NAMES.index(name) * ROWS :][:ROWS]
        for first, rows in shards:
            rows.detach().copy_(table[first : first + len(rows)])


def _whole(world: ProcessGroups, model: nn.Module) -> list[Tensor]:
    parts = world.gather(
        {name: [(at, rows.detach()) for at, rows in shards] for name, shards in _shards(model).items()}
    )
    whole = []
    for name in NAMES:
        table = torch.zeros(ROWS, DIM)
        for part in parts:
            for first, rows in part[name]:
                table[first : first + len(rows)] = rows
        whole.append(table)
    return whole


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest absolute difference of logits and tables, and whether they are the same bits."""

    logits: float
    tables: float
    equal: bool


def difference(world: ProcessGroups, keys: Keys, optimizer: OptimizerKind) -> Difference:
    """How far TorchRec and we are apart after all steps, on this rank."""
    (mine, table), (other, reference) = ours(world, keys, optimizer), theirs(world, keys, optimizer)
    gaps = [float((a - b).abs().max()) for a, b in zip(mine, other, strict=True)]
    same = all(torch.equal(a, b) for a, b in zip(mine, other, strict=True)) and torch.equal(table, reference)
    return Difference(max(gaps), float((table - reference).abs().max()), same)


def main() -> None:
    """Print the differences for all cases."""
    with RankPool(2) as pool:
        for optimizer in (OptimizerKind.SGD, OptimizerKind.ROWWISE_ADAGRAD):
            for longest, distinct in ((1, True), (2, True), (2, False), (5, False)):
                found = pool.run(difference, Keys(longest=longest, distinct=distinct), optimizer)
                worst = Difference(
                    max(f.logits for f in found), max(f.tables for f in found), all(f.equal for f in found)
                )
                print(f"{optimizer:<16} bags up to {longest}, {'distinct' if distinct else 'repeated'} keys: {worst}")


if __name__ == "__main__":
    main()
