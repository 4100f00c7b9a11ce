"""Checkpoints at a drained batch boundary: written whole or not at all, read back bit for bit, at any world size.

A checkpoint is a directory `batch-00000100`: each rank of domain 0 writes its shard as `.npy` files, rank 0 the dense
state and a manifest with the digest of every file. It is written under a temporary name and renamed when every rank
has succeeded, so a crash or a full disk leaves the last good checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from executor.runtime.trainer import Trainer
from nestpipe.base import ExecutorError, replace_folder
from nestpipe.ir import Data

__all__ = ["latest", "restore", "save"]

_VERSION = 1
_STATES = (("rows", Data.TABLE), ("moments", Data.OPTIMIZER))


def save(trainer: Trainer, directory: Path) -> Path:
    """Write a checkpoint of all that decides how training goes on. A collective call, between two runs.

    Returns:
        The directory of this checkpoint.

    Raises:
        ExecutorError: on every rank, if a rank could not write; names it and the reason.
    """
    world, batch = trainer.world, trainer.next_batch
    final = directory / f"batch-{batch:08d}"
    draft = directory / f".{final.name}.partial"
    error: str | None = None
    digests: dict[str, str] = {}
    if world.rank == 0:
        error = _attempt(lambda: _make_empty(draft))
    if world.gather(error)[0] is None:
        error = _attempt(lambda: digests.update(_write(trainer, draft)))
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(world.gather(error)) if problem]
    found = {name: digest for part in world.gather(digests) for name, digest in part.items()}
    if world.rank == 0 and not problems:
        error = _attempt(lambda: _publish(trainer, draft, final, found))
        problems = [f"rank 0: {error}"] * bool(error)
    problems = world.gather(problems)[0]
    if problems:
        if world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        kept = latest(directory)
        raise ExecutorError(
            f"checkpoint at batch {batch} failed on {'; '.join(problems)}; free space in {directory} or choose another "
            "directory; " + (f"the last good one is {kept}" if kept else "there is no earlier one")
        )
    return final


def _attempt(action: Callable[[], object]) -> str | None:
    try:
        action()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _make_empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _write(trainer: Trainer, directory: Path) -> dict[str, str]:
    """This rank's files; the digest of each."""
    worker, rank = trainer.worker, trainer.world.rank
    digests = {}
    if rank < trainer.domain_size:
        for name, data in _STATES:
            for group, values in enumerate(worker.store.state(data)):
                file = f"{name}-{group}-shard-{rank}.npy"
                digests[file] = _write_file(directory / file, partial(_save_array, values))
    random = {"torch": torch.get_rng_state(), "next_batch": trainer.next_batch}
    file = f"random-{rank}.pt"
    digests[file] = _write_file(directory / file, partial(_save_objects, random))
    if rank == 0:
        dense = {"model": worker.model.state_dict(), "moments": worker.dense.moments}
        digests["dense.pt"] = _write_file(directory / "dense.pt", partial(_save_objects, dense))
    return digests


def _write_file(path: Path, write: Callable[[BinaryIO], object]) -> str:
    with path.open("wb") as out:
        write(out)
        out.flush()
        os.fsync(out.fileno())
    return _digest(path)


def _save_array(values: Tensor, out: BinaryIO) -> None:
    # through a view of the file: numpy's own writing to real files loses the reason of a failure
    np.lib.format.write_array(_Writer(out), values.numpy())


class _Writer:
    def __init__(self, out: BinaryIO) -> None:
        self.write = out.write


def _save_objects(objects: dict[str, Any], out: BinaryIO) -> None:
    memory = io.BytesIO()
    torch.save(objects, memory)
    out.write(memory.getbuffer())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(trainer: Trainer, draft: Path, final: Path, digests: dict[str, str]) -> None:
    layout = trainer.worker.layout
    manifest = {
        "version": _VERSION,
        "next_batch": trainer.next_batch,
        "num_shards": trainer.domain_size,
        "world_size": trainer.world.world_size,
        "optimizer": trainer.worker.sparse.kind.value,
        "tables": [[table.name, table.num_rows, table.dim, table.hashed] for table in layout.tables],
        "files": dict(sorted(digests.items())),
    }
    text = json.dumps(manifest, indent=1) + "\n"
    _write_file(draft / "manifest.json", lambda out: out.write(text.encode()))
    replace_folder(draft, final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def latest(directory: Path) -> Path | None:
    """The newest whole checkpoint of a directory, None if there is none."""
    found = sorted(path for path in directory.glob("batch-*") if (path / "manifest.json").is_file())
    return found[-1] if found else None


def restore(trainer: Trainer, checkpoint: Path) -> None:
    """Put a trainer into the state of a checkpoint, also one that another number of ranks wrote. A collective call.

    Raises:
        ExecutorError: if the checkpoint is damaged or was made with other tables or another optimiser.
    """
    worker = trainer.worker
    manifest = _manifest(checkpoint)
    mine = [[table.name, table.num_rows, table.dim, table.hashed] for table in worker.layout.tables]
    for what, theirs, ours in (
        ("tables", manifest["tables"], mine),
        ("optimizer", manifest["optimizer"], worker.sparse.kind.value),
    ):
        if theirs != ours:
            raise ExecutorError(f"{checkpoint}: its {what} is {theirs}, this run has {ours}; resume with the same")
    num_shards = int(manifest["num_shards"])
    for name, data in _STATES:
        for group, values in enumerate(worker.store.state(data)):
            for shard in range(num_shards):
                _fill(
                    trainer,
                    manifest,
                    checkpoint / f"{name}-{group}-shard-{shard}.npy",
                    group,
                    (shard, num_shards),
                    values,
                )
    dense = torch.load(_verified(manifest, checkpoint / "dense.pt"), map_location=worker.device, weights_only=True)
    worker.model.load_state_dict(dense["model"])
    worker.dense.moments.copy_(dense["moments"])
    if manifest["world_size"] == trainer.world.world_size:
        random = torch.load(_verified(manifest, checkpoint / f"random-{worker.rank}.pt"), weights_only=True)
        torch.set_rng_state(random["torch"])
    trainer.next_batch = int(manifest["next_batch"])


def _manifest(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExecutorError(f"{path}: invalid manifest of a checkpoint: {error}") from None
    if manifest.get("version") != _VERSION:
        raise ExecutorError(f"{path}: version must be {_VERSION}, got {manifest.get('version')!r}")
    return manifest


def _verified(manifest: dict[str, Any], path: Path) -> Path:
    expected = manifest["files"].get(path.name)
    try:
        found = _digest(path)
    except OSError as error:
        raise ExecutorError(f"{path}: {error.strerror}; the checkpoint is incomplete") from None
    if found != expected:
        raise ExecutorError(f"{path}: its SHA-256 is {found}, the manifest says {expected}; the file is damaged")
    return path


def _fill(
    trainer: Trainer, manifest: dict[str, Any], path: Path, group: int, shard: tuple[int, int], values: Tensor
) -> None:
    """Copy the rows that this rank owns out of one shard file; ids of either shard are evenly spaced."""
    layout = trainer.worker.layout
    theirs = replace(layout, num_shards=shard[1]).shard_ids(group, shard[0])
    mine = layout.shard_ids(group, trainer.worker.store.shard)
    first = next((id for id in mine[: 2 * shard[1]] if id in theirs), None)
    file = np.load(_verified(manifest, path), mmap_mode="r")
    if first is not None:
        stride = math.lcm(layout.num_shards, shard[1])
        part = np.array(file[theirs.index(first) :: stride // shard[1]])
        values[mine.index(first) :: stride // layout.num_shards] = torch.from_numpy(part)
