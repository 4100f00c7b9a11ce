"""Resume is bitwise, at the same world size or another; a damaged checkpoint is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.data.batch import Feature, MicroBatch
from executor.data.sources import SyntheticSource
from executor.data.tables import TableSpec
from executor.models.dlrm import DLRM
from executor.models.lookups import Lookups
from executor.models.optimizers import OptimizerKind
from executor.runtime.checkpoint import latest, restore, save
from executor.runtime.digests import state_digests
from executor.runtime.groups import ProcessGroups
from executor.runtime.manifest import MANIFEST, read_manifest
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
    assert (
        "--optimizer was lazy_adam, this run has sgd; resume with the same, or allow it: --allow-change optimizer"
        in (problem(OptimizerKind.SGD))
    )
    assert "tables was a 31 x 4 hashed, b 2 x 8 hashed, this run has a 32 x 4 hashed" in problem(num_rows=32)
    shard = path / "rows-0-shard-0.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "rows-0-shard-0.npy: its SHA-256 is" in problem()
    shard.unlink()
    assert "the checkpoint is incomplete" in problem()
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 7}))
    assert "version must be 2, got 7" in problem()
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


class Normed(DLRM):
    """A model with state that is no parameter, of which every rank has its own."""

    def __init__(self) -> None:
        super().__init__(
            [TableSpec(name="a", num_rows=31, dim=4)], [Feature(name="f", table="a")], num_dense=4, hidden=(4,)
        )
        self.norm = torch.nn.BatchNorm1d(4)

    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return super().loss(lookups, replace(batch, dense=self.norm(batch.dense)))


def normed(world: ProcessGroups, directory: Path | None, steps: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Digests and buffers after some batches, and a checkpoint there, from the newest one if there is one."""
    torch.manual_seed(2)
    source = SyntheticSource(features=("f",), batch_size=32, num_keys=60, mean_length=2.0)
    trainer = Trainer(world, load("nestpipe"), Normed(), source, Settings())
    found = None if directory is None else latest(directory)
    if found is not None:
        restore(trainer, found)
    if steps > trainer.next_batch:
        trainer.run(steps - trainer.next_batch)
    if directory is not None:
        save(trainer, directory)
    return state_digests(trainer), trainer.worker.model.rank_buffers()


def test_buffers_of_the_model_are_each_rank_s_own_and_go_on(tmp_path: Path) -> None:
    whole = pool(2).run(normed, None, 5)
    assert not torch.equal(*(buffers["norm.running_mean"] for _, buffers in whole))
    pool(2).run(normed, tmp_path, 2)
    resumed = pool(2).run(normed, tmp_path, 5)
    assert [digests for digests, _ in resumed] == [digests for digests, _ in whole]
    assert all(torch.equal(old[1][key], new[1][key]) for old, new in zip(whole, resumed, strict=True) for key in old[1])
    more = pool(4).run(normed, tmp_path, 5)
    assert torch.equal(more[3][1]["norm.running_mean"], whole[1][1]["norm.running_mean"])


def rewritten(path: Path, **changes: object) -> None:
    """The manifest with other values, and a digest that fits them."""
    manifest = read_manifest(path)
    for name, value in changes.items():
        object.__setattr__(manifest, name, value)
    (path / MANIFEST).write_text(manifest.text())


def test_a_changed_manifest_is_refused(tmp_path: Path) -> None:
    pool(2).run(saved, tmp_path)
    path = tmp_path / "batch-00000002"
    whole = read_manifest(path)
    (path / MANIFEST).write_text(whole.text().replace('"position": 2', '"position": 1'))
    assert "it has been changed since it was written" in pool(2).run(refused, path, OptimizerKind.LAZY_ADAM, 31)[1]
    for changes, message in (
        ({"num_shards": 0}, "num_shards must be a whole number of at least 1, got 0"),
        ({"num_shards": 3}, "num_shards must divide world_size 2, got 3"),
        ({"num_shards": 1}, "rows-0-shard-0.npy: expected float32 of shape (31, 4), got float32 of (16, 4)"),
        ({"next_batch": -1}, "next_batch must be a whole number of at least 0, got -1"),
        ({"position": "2"}, "position must be a whole number of at least 0, got '2'"),
        ({"files": {"dense.pt": 7}}, "files must be texts by name"),
    ):
        (path / MANIFEST).write_text(whole.text())
        rewritten(path, **changes)
        assert message in pool(2).run(refused, path, OptimizerKind.LAZY_ADAM, 31)[0]


def test_an_array_of_another_shape_is_refused_even_if_its_digest_is_given(tmp_path: Path) -> None:
    pool(1).run(saved, tmp_path)
    path = tmp_path / "batch-00000002"
    column = path / "rows-0-shard-0.npy"
    np.save(column, np.load(column)[:, :1])
    digests = dict(read_manifest(path).files)
    rewritten(path, files={**digests, column.name: hashlib.sha256(column.read_bytes()).hexdigest()})
    message = pool(1).run(refused, path, OptimizerKind.LAZY_ADAM, 31)[0]
    assert f"{column.name}: expected float32 of shape (31, 4), got float32 of (31, 1)" in message
