"""Resume is bitwise, at the same world size or another; a damaged checkpoint is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from executor.data.batch import Feature
from executor.data.sources import SyntheticSource
from executor.data.tables import TableSpec
from executor.models.dlrm import DLRM
from executor.models.optimizers import OptimizerKind
from executor.runtime.checkpoint import latest, restore, save
from executor.runtime.groups import ProcessGroups
from executor.runtime.trainer import Settings, Trainer
from nestpipe.base.errors import ExecutorError
from nestpipe.schedules import load
from tests.executor.jobs import pool


def make(world: ProcessGroups, optimizer: OptimizerKind = OptimizerKind.LAZY_ADAM, num_rows: int = 31) -> Trainer:
    torch.manual_seed(2)
    tables = [TableSpec(name="a", num_rows=num_rows, dim=4), TableSpec(name="b", num_rows=2, dim=8)]
    model = DLRM(tables, [Feature(name="f", table="a"), Feature(name="g", table="b")], num_dense=4, hidden=(4,))
    source = SyntheticSource(features=("f", "g"), batch_size=8, num_keys=60, mean_length=2.0)
    return Trainer(world, load("nestpipe"), model, source, Settings(optimizer=optimizer))


def interrupted(world: ProcessGroups, directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state after 3 + 4 batches without a pause, and with a checkpoint, a new trainer and a resume between."""
    whole = make(world)
    whole.run(7)
    first = make(world)
    first.run(3)
    save(first, directory)
    second = make(world)
    restore(second, directory / "batch-00000003")
    assert second.next_batch == 3
    second.run(4)
    return whole.state(), second.state()


@pytest.mark.parametrize("world_size", [2, 4])
def test_resume_is_bitwise(tmp_path: Path, world_size: int) -> None:
    for whole, resumed in pool(world_size).run(interrupted, tmp_path):
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def saved(world: ProcessGroups, directory: Path) -> dict[str, Tensor]:
    trainer = make(world)
    trainer.run(2)
    save(trainer, directory)
    return trainer.state()


def restored(world: ProcessGroups, directory: Path) -> dict[str, Tensor]:
    trainer = make(world)
    found = latest(directory)
    assert found is not None
    restore(trainer, found)
    return trainer.state()


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1)])
def test_a_checkpoint_is_read_at_another_world_size(tmp_path: Path, before: int, after: int) -> None:
    written = pool(before).run(saved, tmp_path)[0]
    read = pool(after).run(restored, tmp_path)[0]
    assert all(torch.equal(written[key], read[key]) for key in written)


def refused(world: ProcessGroups, directory: Path, optimizer: OptimizerKind, num_rows: int) -> str:
    try:
        restore(make(world, optimizer, num_rows), directory)
    except ExecutorError as error:
        return str(error)
    return ""


def test_other_tables_optimizers_versions_and_damage_are_refused(tmp_path: Path) -> None:
    pool(1).run(saved, tmp_path)
    path = tmp_path / "batch-00000002"

    def problem(optimizer: OptimizerKind = OptimizerKind.LAZY_ADAM, num_rows: int = 31) -> str:
        return pool(1).run(refused, path, optimizer, num_rows)[0]

    assert problem() == ""
    assert "its optimizer is lazy_adam, this run has sgd" in problem(OptimizerKind.SGD)
    assert "its tables is [['a', 31" in problem(num_rows=32)
    shard = path / "rows-0-shard-0.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "rows-0-shard-0.npy: its SHA-256 is" in problem()
    shard.unlink()
    assert "the checkpoint is incomplete" in problem()
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 7}))
    assert "version must be 1, got 7" in problem()
    manifest.write_text("{")
    assert "invalid manifest of a checkpoint" in problem()
    manifest.unlink()
    assert latest(tmp_path) is None


def test_a_checkpoint_replaces_a_half_written_one(tmp_path: Path) -> None:
    (tmp_path / ".batch-00000002.partial").mkdir()
    (tmp_path / ".batch-00000002.partial" / "rows-9-shard-9.npy").write_bytes(b"old")
    pool(2).run(saved, tmp_path)
    pool(2).run(saved, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["batch-00000002"]
    assert not (tmp_path / "batch-00000002" / "rows-9-shard-9.npy").exists()
