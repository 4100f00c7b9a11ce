"""What staleness does to a recommender: HSTU on MovieLens sequences, trained with several schedules on two ranks.

    python benchmarks/movielens_convergence.py ratings.csv [--epochs 40] [--schedules sync nestpipe async_prefetch]

Each user's last item is held out; a model ranks it among all items that the user has not seen. HR@k is the share of
users whose item is among the first k, NDCG@k weighs it by 1 / log2(1 + rank). Synchronous schedules must give the same
numbers to the last bit, and so they are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from executor.app import ModelKind, RankPool, RunOptions, last_batch, make_trainer, user_sequences
from executor.models import OptimizerKind, SequenceModel, next_item_scores
from executor.runtime import NanPolicy, ProcessGroups, state_digests

CUTS = (10, 50)


def ranking_metrics(model: SequenceModel, table: torch.Tensor, path: Path) -> dict[str, float]:
    """HR and NDCG of the held-out items."""
    sequences, _ = user_sequences(path)
    users = [items.tolist() for items in sequences if len(items) > 2]
    scores = next_item_scores(model, table, [items[:-1] for items in users])
    for row, items in zip(scores, users, strict=True):
        row[[item for item in items[:-1] if item != items[-1]]] = -torch.inf
    held_out = torch.tensor([items[-1] for items in users])
    target = scores[torch.arange(len(users)), held_out]
    ranks = (scores > target[:, None]).sum(dim=1) + 1
    found = {}
    for cut in CUTS:
        hit = ranks <= cut
        found[f"HR@{cut}"] = float(hit.double().mean())
        found[f"NDCG@{cut}"] = float((hit / torch.log2(1 + ranks.double())).mean())
    return found


def train_and_rank(world: ProcessGroups, options: RunOptions) -> dict[str, object]:
    """Metrics, last loss and digests of a run."""
    trainer = make_trainer(world, options)
    start = time.monotonic()
    trainer.run(last_batch(trainer, None))
    elapsed = time.monotonic() - start
    state, losses, digests = trainer.state(), trainer.losses(), state_digests(trainer)
    assert isinstance(trainer.worker.model, SequenceModel)
    assert options.data is not None
    found = ranking_metrics(trainer.worker.model, state["table.0"], options.data) if world.rank == 0 else {}
    return {**found, "loss": losses[-1], "steps": len(losses), "seconds": elapsed, "digests": digests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ratings", type=Path)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--schedules", nargs="+", default=["sync", "nestpipe", "async_prefetch"])
    parser.add_argument("--optimizer", type=OptimizerKind, default=OptimizerKind.LAZY_ADAM)
    arguments = parser.parse_args()
    with RankPool(2, timeout_s=7200) as pool:
        for schedule in arguments.schedules:
            options = RunOptions(
                schedule=schedule,
                model=ModelKind.HSTU,
                data=arguments.ratings,
                steps=None,
                epochs=arguments.epochs,
                batch_size=32,
                micro_batches=4,
                dim=32,
                max_length=50,
                num_negatives=64,
                optimizer=arguments.optimizer,
                lr=0.005,
                dense_lr=0.002,
                allow_staleness=1,
                nan=NanPolicy.STOP,
            )
            print(json.dumps({"schedule": schedule, **pool.run(train_and_rank, options)[0]}), flush=True)


if __name__ == "__main__":
    main()
