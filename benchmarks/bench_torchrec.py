"""The time of a training step against TorchRec's on the same cores, as a ratio.

    python benchmarks/bench_torchrec.py [--schedule sync] [--blocks 20]

Both train a DLRM of 26 tables of 40,000 rows x 64, row-wise sharded over 2 ranks, 512 samples a rank, bags of 0 to 6
keys, row-wise Adagrad, on the same batches, which are made beforehand. They take turns in one run, a block of steps
each, and go first in turn. What is printed is the median over the blocks of ours / TorchRec's, for wall time and for
the CPU time of rank 0, with a 95 % confidence interval (bootstrap), the ratio of the fastest blocks, and the median
milliseconds of a step of each. Unrolling and planning, once per block, count as ours.

Needs the environment that tests/executor/models/torchrec_oracle.py describes.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.app import RankPool
from executor.data import Feature, RawBatch, SyntheticSource, TableSpec
from executor.models import DLRM
from executor.runtime import ProcessGroups, Settings, Trainer
from nestpipe.ir import with_micro_batches
from nestpipe.schedules import load

NAMES = tuple(f"f{index}" for index in range(26))
ROWS, DIM, BATCH, BLOCK, KEPT = 40_000, 64, 512, 25, 16
Times: TypeAlias = tuple[float, float]  # seconds of a step: wall, CPU
SETTINGS = Settings(lr=0.05, dense_lr=0.01)


@dataclass(frozen=True, slots=True)
class Kept:
    """Batches of a rank that were made beforehand, over and over again."""

    batches: tuple[RawBatch, ...]

    def num_batches(self, rank: int, world_size: int) -> int:  # noqa: ARG002
        return 1 << 30

    def position(self, batch: int, world_size: int) -> int:  # noqa: ARG002
        return batch

    def resumed(self, batch: int, position: int) -> Kept:  # noqa: ARG002
        return self

    def read(self, batch: int, rank: int, world_size: int) -> RawBatch:  # noqa: ARG002
        return self.batches[batch % len(self.batches)]


def make_model() -> DLRM:
    """The same on every rank."""
    torch.manual_seed(0)
    tables = [TableSpec(name=name, num_rows=ROWS, dim=DIM, hashed=False) for name in NAMES]
    return DLRM(tables, [Feature(name=name, table=name) for name in NAMES], num_dense=4, hidden=(256, 128))


class TorchRecModel(nn.Module):
    """TorchRec's embedding bags under the DLRM's dense part."""

    def __init__(self) -> None:
        import torchrec

        super().__init__()
        self.bags = torchrec.EmbeddingBagCollection(
            tables=[
                torchrec.EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
                for name in NAMES
            ]
        )
        self.top = make_model()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean loss and the logits."""
        keys, dense, labels = batch
        found = self.bags(keys)
        pooled = found.wait() if hasattr(found, "wait") else found
        logits = self.top.logits([pooled[name] for name in NAMES], dense)
        return functional.binary_cross_entropy_with_logits(logits, labels), logits


class TorchRecTrainer:
    """Trains by a plain loop: forward, backward, with the update of the rows in it, dense step."""

    def __init__(self, world: ProcessGroups, source: Kept) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import DistributedModelParallel
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        model = TorchRecModel()
        kind = EmbOptimType.EXACT_ROWWISE_ADAGRAD
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": kind, "learning_rate": SETTINGS.lr, "eps": 1e-8}
        )
        placed = construct_module_sharding_plan(
            model.bags,
            {name: row_wise(compute_kernel="fused") for name in NAMES},
            local_size=world.world_size,
            world_size=world.world_size,
            device_type="cpu",
            sharder=sharder,
        )
        self.model = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
            device=torch.device("cpu"),
            plan=ShardingPlan({"bags": placed}),
            sharders=[sharder],
        )
        dense = [value for name, value in self.model.named_parameters() if "bags" not in name]
        self.optimizer = torch.optim.Adagrad(dense, lr=SETTINGS.dense_lr, eps=1e-8)
        self.world, self.source, self.next_batch = world, source, 0

    def run(self, steps: int) -> None:
        """Train some batches."""
        import torchrec

        for batch in range(self.next_batch, self.next_batch + steps):
            raw = self.source.read(batch, self.world.rank, self.world.world_size)
            keys = torchrec.KeyedJaggedTensor.from_lengths_sync(
                keys=list(NAMES),
                values=torch.cat([torch.from_numpy(raw.features[name].values) for name in NAMES]),
                lengths=torch.cat([torch.from_numpy(raw.features[name].lengths) for name in NAMES]).int(),
            )
            loss, _ = self.model((keys, torch.from_numpy(raw.dense), torch.from_numpy(raw.labels)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.next_batch += steps


def compare(world: ProcessGroups, schedule: str, micro_batches: int, blocks: int) -> list[tuple[Times, Times]]:
    """What a step of ours and of TorchRec's takes, by block."""
    warnings.simplefilter("ignore")
    source = SyntheticSource(features=NAMES, batch_size=BATCH, num_keys=ROWS, mean_length=3.0)
    kept = Kept(tuple(source.read(batch, world.rank, world.world_size) for batch in range(KEPT)))
    ours = Trainer(world, with_micro_batches(load(schedule), micro_batches), make_model(), kept, SETTINGS)
    theirs = TorchRecTrainer(world, kept)

    def timed(trainer: Trainer | TorchRecTrainer) -> Times:
        world.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        trainer.run(BLOCK)
        return (time.perf_counter() - start) / BLOCK, (time.process_time() - start_cpu) / BLOCK

    timed(ours), timed(theirs)
    found = []
    for block in range(blocks):
        if block % 2:
            their_times, our_times = timed(theirs), timed(ours)
        else:
            our_times, their_times = timed(ours), timed(theirs)
        found.append((our_times, their_times))
    return found


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="sync")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=20)
    options = parser.parse_args()
    with RankPool(2, timeout_s=1800) as pool:
        times = np.array(pool.run(compare, options.schedule, options.micro_batches, options.blocks)[0])
    rng = np.random.default_rng(0)
    for column, what in enumerate(("wall time", "CPU time")):
        ratios = times[:, 0, column] / times[:, 1, column]
        medians = np.median(rng.choice(ratios, size=(2000, len(ratios))), axis=1)
        low, high = np.quantile(medians, [0.025, 0.975])
        ours_ms, theirs_ms = 1e3 * np.median(times[:, :, column], axis=0)
        least = times[:, 0, column].min() / times[:, 1, column].min()
        print(
            f"{options.schedule} N={options.micro_batches}, {what}: {np.median(ratios):.2f} [{low:.2f}, {high:.2f}] of "
            f"TorchRec's, fastest block {least:.2f} ({ours_ms:.1f} and {theirs_ms:.1f} ms, {len(ratios)} blocks)"
        )


if __name__ == "__main__":
    main()
