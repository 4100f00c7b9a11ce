"""The claim this package stands on: a synchronous schedule trains to the same bits as sequential training.

`compare` trains a case with its schedule and with the sequential one of the same micro-batches, and compares tables,
optimiser rows and dense parameters with `torch.equal`. `python -m executor.app.equality` runs the whole grid.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from executor.app.pool import RankPool
from executor.data import Feature, Pooling, SequenceSource, Source, SyntheticSource, TableSpec
from executor.models import DLRM, FuXiBlock, HSTUBlock, Model, OptimizerKind, SequenceModel
from executor.runtime import ProcessGroups, Settings, Trainer, Wrap
from nestpipe.ir import Loop, with_micro_batches
from nestpipe.schedules import load

__all__ = ["Comparison", "DataShape", "EqualityCase", "compare", "full_grid", "main", "train_case"]

BATCH_SIZE = 16
_EQUAL = "equal"


class DataShape(StrEnum):
    """What the data are like.

    mixed: the batches take turns in being full, uneven, empty on a rank, smaller than the micro-batches, or without a
    single key; odd ranks run out of data after three quarters. few_rows: tables with fewer rows than there are ranks.
    idle_rank: rank 1 never has a sample. two_dims: tables of two widths, a feature with mean pooling and a weighted
    one. sequences, fuxi: HSTU and FuXi-α on histories.
    """

    MIXED = "mixed"
    FEW_ROWS = "few_rows"
    IDLE_RANK = "idle_rank"
    TWO_DIMS = "two_dims"
    SEQUENCES = "sequences"
    FUXI = "fuxi"


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityCase:
    """One configuration to compare with its sequential twin."""

    schedule: str
    micro_batches: int
    optimizer: OptimizerKind = OptimizerKind.ROWWISE_ADAGRAD
    shape: DataShape = DataShape.MIXED
    steps: int = 100
    domain_size: int | None = None
    seed: int = 0
    debug: bool = False

    @property
    def twin(self) -> EqualityCase:
        """The same case in sequence."""
        return replace(self, schedule="2d_sp" if "2d" in self.schedule else "sync", debug=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of a case: the tensors that differ, how many rows of each do, and whether the losses are equal."""

    case: EqualityCase
    differing: tuple[tuple[str, int], ...]
    same_losses: bool
    loss: float

    @property
    def equal(self) -> bool:
        """Whether every bit is the same."""
        return not self.differing and self.same_losses


def train_case(
    world: ProcessGroups, case: EqualityCase, loop: Loop | None = None, wraps: tuple[Wrap, ...] = ()
) -> Trainer:
    """A trainer that has run the case, or another loop on its data. A collective call."""
    loop = with_micro_batches(load(case.schedule) if loop is None else loop, case.micro_batches)
    source, model = _workload(case)
    settings = Settings(
        optimizer=case.optimizer, seed=case.seed, debug=case.debug, domain_size=case.domain_size, lr=0.1
    )
    trainer = Trainer(world, loop, model, source, settings, wraps=wraps)
    trainer.run(case.steps)
    return trainer


def _workload(case: EqualityCase) -> tuple[Source, Model]:
    torch.manual_seed(case.seed)
    if case.shape in (DataShape.SEQUENCES, DataShape.FUXI):
        block = HSTUBlock if case.shape == DataShape.SEQUENCES else FuXiBlock
        table = TableSpec(name="item", num_rows=97, dim=8, hashed=False)
        model: Model = SequenceModel(block, table, layers=1, heads=2, max_length=9, num_negatives=4)
        generator = torch.Generator().manual_seed(case.seed)
        lengths = torch.randint(2, 10, (150,), generator=generator).tolist()
        sequences = tuple(torch.randint(0, 97, (length,), generator=generator).numpy() for length in lengths)
        return (
            SequenceSource(
                sequences=sequences,
                num_items=97,
                batch_size=BATCH_SIZE,
                num_negatives=4,
                epochs=1 << 20,
                seed=case.seed,
            ),
            model,
        )
    rows = {DataShape.FEW_ROWS: (1, 2, 1)}.get(case.shape, (60, 7, 300))
    dims = (4, 8, 4) if case.shape == DataShape.TWO_DIMS else (8, 8, 8)
    tables = [TableSpec(name=f"t{i}", num_rows=r, dim=d) for i, (r, d) in enumerate(zip(rows, dims, strict=True))]
    features = [Feature(name=f"f{i}", table=f"t{i}") for i in range(3)]
    if case.shape == DataShape.TWO_DIMS:
        features[1:] = [replace(features[1], pooling=Pooling.MEAN), replace(features[2], weighted=True)]
    source = SyntheticSource(
        features=tuple(feature.name for feature in features),
        batch_size=BATCH_SIZE,
        num_keys=500,
        mean_length=2.0,
        empty_share=0.2,
        weighted=case.shape == DataShape.TWO_DIMS,
        seed=case.seed,
        batches=(lambda rank: case.steps - case.steps // 4 * (rank % 2)) if case.shape == DataShape.MIXED else None,
        size_of=_idle_rank if case.shape == DataShape.IDLE_RANK else _mixed_size,
    )
    return source, DLRM(tables, features, num_dense=4, hidden=(16,))


def _mixed_size(batch: int, rank: int) -> int:
    uneven = (batch * 7 + rank * 5) % (BATCH_SIZE + 1)
    return (BATCH_SIZE, uneven, 0 if rank == 1 else uneven, 1 + rank % 2, BATCH_SIZE, 0)[batch % 6]


def _idle_rank(batch: int, rank: int) -> int:
    return 0 if rank == 1 else _mixed_size(batch, rank)


def compare(world: ProcessGroups, cases: Iterable[EqualityCase]) -> list[Comparison]:
    """Train every case and its twin, each twin once, and compare. A collective call."""
    twins: dict[EqualityCase, tuple[dict[str, Tensor], list[float]]] = {}
    outcomes = []
    for case in cases:
        if case.twin not in twins:
            trainer = train_case(world, case.twin)
            twins[case.twin] = (trainer.state(), trainer.losses())
        trainer = train_case(world, case)
        outcomes.append(_compared(case, (trainer.state(), trainer.losses()), twins[case.twin]))
    return outcomes


def _compared(
    case: EqualityCase, mine: tuple[dict[str, Tensor], list[float]], twin: tuple[dict[str, Tensor], list[float]]
) -> Comparison:
    differing = [
        (name, int((value != twin[0][name]).reshape(len(value), -1).any(dim=1).sum()) if value.dim() else 1)
        for name, value in mine[0].items()
        if not torch.equal(value, twin[0][name])
    ]
    losses = torch.tensor([mine[1], twin[1]], dtype=torch.float64)
    same = torch.equal(losses[0].nan_to_num(-1.0), losses[1].nan_to_num(-1.0))
    finite = losses[0][~losses[0].isnan()]
    return Comparison(case=case, differing=tuple(differing), same_losses=same, loss=float(finite[-1]))


def full_grid(world_size: int, steps: int) -> Iterator[EqualityCase]:
    """Every synchronous schedule, optimiser, number of micro-batches and shape."""
    axes = itertools.product(DataShape, OptimizerKind, (1, 2, 4, 8))
    for shape, optimizer, micro_batches in axes:
        for schedule in ("sparse_dist", "dbp", "fwp", "nestpipe", "nestpipe_2d_sp"):
            yield EqualityCase(
                schedule=schedule,
                micro_batches=micro_batches,
                optimizer=optimizer,
                shape=shape,
                steps=steps,
                domain_size=max(world_size // 2, 1) if "2d" in schedule else None,
            )


def main(arguments: list[str] | None = None) -> int:
    """Run the grid and print one line per case; 1 if any differs or has not been run."""
    parser = argparse.ArgumentParser(prog="python -m executor.app.equality", description=main.__doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4], metavar="P")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--shape", type=DataShape, choices=list(DataShape), nargs="+", default=list(DataShape))
    parser.add_argument("--log", type=Path, help="append the lines here, and do not run again what stands there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this long")
    options = parser.parse_args(arguments)
    stop = time.monotonic() + options.seconds
    done = {}
    if options.log is not None and options.log.exists():
        done = dict(line.split(": ") for line in options.log.read_text(encoding="utf-8").splitlines())
    verdicts = []
    for world_size in options.world_sizes:
        grid = [case for case in full_grid(world_size, options.steps) if case.shape in options.shape]
        left = [case for case in grid if _name(world_size, case) not in done]
        done |= _run(world_size, left, options.log, stop)
        verdicts += [done.get(_name(world_size, case)) for case in grid]
    equal, missing = verdicts.count(_EQUAL), verdicts.count(None)
    print(
        f"{equal} of {len(verdicts)} cases equal bit for bit after {options.steps} steps, "
        f"{len(verdicts) - equal - missing} differ, {missing} not run"
    )
    return int(equal < len(verdicts))


def _run(world_size: int, cases: Iterable[EqualityCase], log: Path | None, stop: float) -> dict[str, str]:
    """Verdicts by name of the cases, those with one twin together, printed and logged as they come."""
    found: dict[str, str] = {}
    with RankPool(world_size) as pool:
        for _, group in itertools.groupby(cases, key=lambda case: (case.shape, case.optimizer, case.micro_batches)):
            if time.monotonic() > stop:
                break
            start = time.monotonic()
            lines = {
                _name(world_size, outcome.case): _verdict(outcome) for outcome in pool.run(compare, list(group))[0]
            }
            text = "".join(f"{name}: {verdict}\n" for name, verdict in lines.items())
            print(text, end="", flush=True)
            if log is not None:
                with log.open("a", encoding="utf-8") as out:
                    out.write(text)
            print(f"{len(lines)} cases in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
            found |= lines
    return found


def _name(world_size: int, case: EqualityCase) -> str:
    return (
        f"ranks {world_size}  steps {case.steps}  {case.shape:<10} {case.optimizer:<16} N={case.micro_batches}  "
        f"{case.schedule:<14}"
    )


def _verdict(outcome: Comparison) -> str:
    if outcome.equal:
        return _EQUAL
    return f"DIFFERS in {', '.join(f'{name} ({rows} rows)' for name, rows in outcome.differing) or 'losses'}"


if __name__ == "__main__":
    sys.exit(main())
