"""A whole run on one rank: train in segments, checkpoint between them, gather Timeline, counters and digests."""

from __future__ import annotations

import glob
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from executor.app.options import ModelKind, RunOptions
from executor.models import AreaUnderCurve, area_under_curve
from executor.options import Scope, option
from executor.runtime import Trainer, counters, gather_timeline, remove_drafts, save, state_digests, step_times_ms
from nestpipe.base import ExecutorError, ns_to_s
from nestpipe.ir import OpKind
from nestpipe.timeline import write_timeline
from traces.formats import write_kineto

__all__ = ["Outputs", "last_batch", "train"]

_SEGMENT_BATCHES = 1000
_FILES = "Files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a run writes besides its result."""

    checkpoint: Path | None = option(None, "Folder of checkpoints.", group=_FILES, scope=Scope.RUN)
    checkpoint_every: int | None = option(
        None, "Batches between checkpoints; only the last if none.", group=_FILES, scope=Scope.RUN
    )
    resume: bool = option(False, "Go on from the newest checkpoint.", group=_FILES, scope=Scope.RUN)
    may_change: tuple[str, ...] = option(
        (),
        "Option that may differ from what the resumed checkpoint was made with, such as lr.",
        group=_FILES,
        flag="--allow-change",
        collect=lambda names: tuple("--" + name.removeprefix("--") for name in names),
        scope=Scope.RUN,
    )
    timeline: Path | None = option(None, "Write the measured Timeline as Parquet.", group=_FILES, scope=Scope.RANK)
    chrome: Path | None = option(None, "Write Kineto/Chrome traces into this folder.", group=_FILES, scope=Scope.RANK)

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ExecutorError(f"checkpoint_every must be at least 1, got {self.checkpoint_every}")
        if self.checkpoint is None and (self.checkpoint_every is not None or self.resume):
            raise ExecutorError("checkpoint_every and resume need a checkpoint directory; give --checkpoint")

    def prepare(self) -> str | None:
        """Make the folders, so that an unwritable output is known before training; the problem, if any.

        Drafts of these outputs that a killed run has left are removed.
        """
        folders = (self.checkpoint, self.chrome, None if self.timeline is None else self.timeline.parent)
        for folder in filter(None, folders):
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return f"{folder}: cannot create the folder: {error.strerror}; choose another"
            if not os.access(folder, os.W_OK):
                return f"{folder}: not writable; choose another"
        if self.timeline is not None and self.timeline.is_dir():
            return f"{self.timeline}: --timeline expects a file, this is a folder"
        if self.checkpoint is not None:
            remove_drafts(self.checkpoint)
        if self.timeline is not None:
            for draft in self.timeline.parent.glob(f".{glob.escape(self.timeline.name)}.????????"):
                draft.unlink(missing_ok=True)
        return None


def train(trainer: Trainer, options: RunOptions, outputs: Outputs, end: int) -> dict[str, Any]:
    """Train to batch `end` and say what came out. A collective call; the result is meant for rank 0.

    Raises:
        ExecutorError: if an op fails or writing a checkpoint does.
    """
    curve = AreaUnderCurve(trainer.world.device)
    if options.model == ModelKind.DLRM:
        trainer.worker.on_predictions = lambda _, micro, logits: curve.add(logits, micro.labels)
    trainer.keeps_records = any(trainer.world.gather(outputs.timeline is not None or outputs.chrome is not None))
    with _progress(trainer, end):
        while trainer.next_batch < end:
            # a program is unrolled whole; draining now and then bounds its memory
            every = min(outputs.checkpoint_every or _SEGMENT_BATCHES, _SEGMENT_BATCHES)
            trainer.run(min(every - trainer.next_batch % every, end - trainer.next_batch))
            every = outputs.checkpoint_every or end
            if outputs.checkpoint is not None and (trainer.next_batch % every == 0 or trainer.next_batch == end):
                save(trainer, outputs.checkpoint)
    world, worker = trainer.world, trainer.worker
    emulated = None if options.emulated is None else asdict(options.emulated)
    meta = {"model": options.model.value, "emulated": emulated}
    if trainer.keeps_records:
        timeline = gather_timeline(trainer, meta)
        if world.rank == 0 and outputs.timeline is not None:
            write_timeline(timeline, outputs.timeline, option="--timeline")
        if world.rank == 0 and outputs.chrome is not None:
            outputs.chrome.mkdir(parents=True, exist_ok=True)
            write_kineto(timeline.frame(), outputs.chrome)
    return {
        "schedule": trainer.loop.name,
        "model": options.model.value,
        "world_size": world.world_size,
        "micro_batches": trainer.loop.micro_batches,
        "steps": end,
        "optimizer": options.optimizer.value,
        "backend": world.backend,
        "device": world.device.type,
        "emulated": emulated,
        "precision": dict.fromkeys(("rows", "grads", "dense"), options.comm_dtype.value),
        "losses": [None if math.isnan(loss) else loss for loss in trainer.losses()],
        "auc": area_under_curve(torch.stack(world.gather(curve.counts.cpu())).sum(dim=0)),
        "data": trainer.data,
        "step_times_ms": step_times_ms(trainer),
        "wall_s": ns_to_s(trainer.wall_ns),
        "bad_batches": worker.numerics.bad_batches,
        "counters": world.gather(counters(trainer)),
        "digests": state_digests(trainer),
    }


def last_batch(trainer: Trainer, steps: int | None) -> int:
    """The batch to stop before: as asked, or when the rank with the most data has run out. All ranks agree.

    Raises:
        ExecutorError: if there is no batch, or no end.
    """
    world = trainer.world
    longest = max(world.gather(trainer.worker.source.num_batches(world.rank, world.world_size)))
    end = longest if steps is None else min(steps, longest)
    if steps is None and longest > 1 << 40:
        raise ExecutorError("generated data have no end; give a number of steps")
    if end < 1:
        raise ExecutorError("the data hold no batch; nothing to train on")
    if end <= trainer.next_batch:
        raise ExecutorError(
            f"the checkpoint stands at batch {trainer.next_batch} and training ends before it; "
            "give more --steps or data"
        )
    return int(end)


@contextmanager
def _progress(trainer: Trainer, end: int) -> Iterator[None]:
    """A bar on rank 0's stderr where that is a terminal; it reads the position that the lanes publish."""
    if trainer.world.rank or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress

    ended = threading.Event()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{trainer.loop.name}", total=end, completed=trainer.next_batch)

        def follow() -> None:
            while not ended.wait(0.2):
                runtime = trainer.runtime
                if runtime is not None:
                    finished = [lane.last for lane in runtime.lanes if lane.last is not None]
                    updates = [op.batch + 1 for op in finished if op.kind == OpKind.UPDATE]
                    bar.update(task, completed=trainer.next_batch + max(updates, default=0))

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
