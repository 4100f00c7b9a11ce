"""Checkpoints at a drained batch boundary: written whole or not at all, read back bit for bit, at any world size.

A checkpoint is a directory `batch-00000100`: each rank of domain 0 writes its shard as `.npy` files, each rank its
random state and buffers, rank 0 the dense state and the manifest. It is written under a temporary name and renamed when
every rank has succeeded, so a crash or a full disk leaves the last good checkpoint as it was.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from executor.runtime.manifest import MANIFEST, Manifest, made_with, read_manifest, require_same
from executor.runtime.trainer import Trainer
from nestpipe.base import ExecutorError, replace_folder
from nestpipe.ir import Data

__all__ = ["latest", "remove_drafts", "restore", "save"]

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
    own = {"random": torch.get_rng_state(), "buffers": worker.model.rank_buffers()}
    digests[f"rank-{rank}.pt"] = _write_file(directory / f"rank-{rank}.pt", partial(_save_objects, own))
    if rank == 0:
        dense = {"parameters": dict(worker.model.named_parameters()), "moments": worker.dense.moments}
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
    manifest = Manifest(
        next_batch=trainer.next_batch,
        position=trainer.worker.source.position(trainer.next_batch, trainer.world.world_size),
        num_shards=trainer.domain_size,
        world_size=trainer.world.world_size,
        made_with=made_with(trainer),
        files=dict(sorted(digests.items())),
    )
    _write_file(draft / MANIFEST, lambda out: out.write(manifest.text().encode()))
    replace_folder(draft, final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_drafts(directory: Path) -> None:
    """Remove what a run that was killed while it wrote a checkpoint has left; a checkpoint set aside comes back."""
    for old in directory.glob(".batch-*.old.*"):
        final = directory / old.name[1:].partition(".old.")[0]
        if not final.exists() and (old / "folder").is_dir():
            os.replace(old / "folder", final)
        shutil.rmtree(old, ignore_errors=True)
    for draft in directory.glob(".batch-*.partial"):
        shutil.rmtree(draft, ignore_errors=True)


def latest(directory: Path) -> Path | None:
    """The newest whole checkpoint of a directory, None if there is none."""
    found = sorted(path for path in directory.glob("batch-*") if (path / MANIFEST).is_file())
    return found[-1] if found else None


def restore(trainer: Trainer, checkpoint: Path, *, may_change: Collection[str] = ()) -> None:
    """Put a trainer into the state of a checkpoint, also one that another number of ranks wrote. A collective call.

    The position in the data is kept at another world size too. Buffers of the model are each rank's own; where there
    are more ranks than before, rank r takes those of rank r modulo the old world size.

    Args:
        trainer: before its first batch.
        checkpoint: the folder of one.
        may_change: flags of options that may differ from those that it was made with.

    Raises:
        ExecutorError: if the checkpoint is damaged, or was made with other tables or options.
    """
    worker = trainer.worker
    manifest = read_manifest(checkpoint)
    require_same(checkpoint, manifest.made_with, made_with(trainer), may_change)
    for name, data in _STATES:
        for group, values in enumerate(worker.store.state(data)):
            for shard in range(manifest.num_shards):
                path = checkpoint / f"{name}-{group}-shard-{shard}.npy"
                _fill(trainer, manifest, path, group, shard, values)
    dense = _load_objects(manifest, checkpoint / "dense.pt", worker.device)
    own = _load_objects(manifest, checkpoint / f"rank-{worker.rank % manifest.world_size}.pt", worker.device)
    try:
        worker.model.load_state_dict(dense["parameters"] | own["buffers"])
        if dense["moments"].shape != worker.dense.moments.shape:
            raise ValueError(f"optimiser values {dense['moments'].shape}, expected {worker.dense.moments.shape}")
    except (KeyError, RuntimeError, ValueError) as error:
        raise ExecutorError(f"{checkpoint}: its dense state does not fit this model: {error}") from None
    worker.dense.moments.copy_(dense["moments"])
    if manifest.world_size == trainer.world.world_size:
        torch.set_rng_state(own["random"].cpu())
    worker.source = worker.source.resumed(manifest.next_batch, manifest.position)
    trainer.next_batch = manifest.next_batch


def _load_objects(manifest: Manifest, path: Path, device: torch.device) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(_verified(manifest, path), map_location=device, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ExecutorError(f"{path}: not a file of this checkpoint: {str(error).splitlines()[0]}") from None
    return found


def _verified(manifest: Manifest, path: Path) -> Path:
    expected = manifest.files.get(path.name)
    try:
        found = _digest(path)
    except OSError as error:
        raise ExecutorError(f"{path}: {error.strerror}; the checkpoint is incomplete") from None
    if found != expected:
        raise ExecutorError(f"{path}: its SHA-256 is {found}, the manifest says {expected}; the file is damaged")
    return path


def _fill(trainer: Trainer, manifest: Manifest, path: Path, group: int, shard: int, values: Tensor) -> None:
    """Copy the rows that this rank owns out of one shard file; ids of either shard are evenly spaced."""
    layout, size = trainer.worker.layout, manifest.num_shards
    theirs = replace(layout, num_shards=size).shard_ids(group, shard)
    mine = layout.shard_ids(group, trainer.worker.store.shard)
    try:
        file = np.load(_verified(manifest, path), mmap_mode="r")
    except ValueError as error:
        raise ExecutorError(f"{path}: not an array: {error}") from None
    expected = (len(theirs), values.shape[1])
    if file.shape != expected or file.dtype != np.float32:
        raise ExecutorError(f"{path}: expected float32 of shape {expected}, got {file.dtype} of {file.shape}")
    first = next((id for id in mine[: 2 * size] if id in theirs), None)
    if first is not None:
        stride = math.lcm(layout.num_shards, size)
        part = np.array(file[theirs.index(first) :: stride // size])
        values[mine.index(first) :: stride // layout.num_shards] = torch.from_numpy(part)
