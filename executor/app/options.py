"""Everything that a training run is made of, as options."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final

from executor.compute import EmulatedDevice
from executor.data import DenseScale, Pooling
from executor.options import Scope, option
from executor.runtime import Delay, Settings
from nestpipe.base import ExecutorError
from nestpipe.ir import show
from nestpipe.schedules import load

__all__ = ["IdKind", "ModelKind", "RunOptions"]


class ModelKind(StrEnum):
    """The models that come with the executor."""

    DLRM = "dlrm"
    HSTU = "hstu"
    FUXI = "fuxi"


class IdKind(StrEnum):
    """How keys become rows: hashed, or as they are, all of them below the number of rows."""

    HASH = "hash"
    STRICT = "strict"


_SCHEDULE: Final = "Schedule"
_MODEL: Final = "Model"
_DATA: Final = "Data"
_DEVICE: Final = "Emulation"


def _steps(text: str) -> int | None:
    return int(text) or None


def _widths(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise ExecutorError(f"--hidden must be positive widths such as 64 or 256,64, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))


def _delays(texts: Sequence[str]) -> tuple[Delay, ...]:
    return tuple(map(Delay.parse, texts))


def _schedule_identity(schedule: str) -> str:
    """The schedule by its text: a name may stand for different files on different machines."""
    return f"{schedule} (SHA-256 {hashlib.sha256(show(load(schedule)).encode()).hexdigest()[:16]})"


def _content(path: Path | None) -> str:
    """A file by its content, wherever it lies."""
    if path is None:
        return "none"
    try:
        stat = path.stat()
        return _content_of(path, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        return f"{path} ({error.strerror})"


@cache
def _content_of(path: Path, size_bytes: int, mtime_ns: int) -> str:  # noqa: ARG001 - of a changed file it is another
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{size_bytes} bytes (SHA-256 {digest[:16]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Settings):
    """Everything that a run is made of. Command line, tests and benchmarks make trainers of it."""

    schedule: str = option(
        "nestpipe", "Catalogue name or file of schedule text.", group=_SCHEDULE, identity=_schedule_identity
    )
    micro_batches: int | None = option(None, "Per batch; the schedule's if not given.", group=_SCHEDULE)
    allow_staleness: int = option(0, "Steps by which rows may be stale.", group=_SCHEDULE, scope=Scope.RUN)
    unchecked: bool = option(
        False, "Run a schedule that the checks reject, to see what happens.", group=_SCHEDULE, scope=Scope.RUN
    )
    steps: int | None = option(
        20, "Batches to train; 0 trains until the data end.", group=_SCHEDULE, parse=_steps, scope=Scope.RUN
    )
    model: ModelKind = option(ModelKind.DLRM, "Which model.", group=_MODEL)
    dim: int = option(32, "Width of embedding rows.", group=_MODEL)
    num_rows: int = option(100_000, "Rows of each table.", group=_MODEL)
    num_tables: int = option(4, "Tables of a DLRM on generated data; a key file brings its own.", group=_MODEL)
    hidden: tuple[int, ...] = option(
        (64,), "Widths of the DLRM's hidden layers, comma-separated.", group=_MODEL, parse=_widths
    )
    pooling: Pooling = option(Pooling.SUM, "Of the DLRM's bags.", group=_MODEL)
    layers: int = option(2, "Blocks of a sequence model.", group=_MODEL)
    heads: int = option(2, "Attention heads.", group=_MODEL)
    max_length: int = option(50, "Longest sequence, target included.", group=_MODEL)
    num_negatives: int = option(32, "Sampled negatives of a sequence.", group=_MODEL)
    data: Path | None = option(
        None, "Key file, MovieLens ratings or KuaiRand log; generated if none.", group=_DATA, identity=_content
    )
    ids: IdKind | None = option(
        None, "How a DLRM's keys become rows; strict for a file and hash for generated keys if not given.", group=_DATA
    )
    label: str | None = option(
        None, "Label column of the file, of 0 and 1 or NAME>=NUMBER; by its name if not given.", group=_DATA
    )
    dense: tuple[str, ...] | None = option(
        None, "Dense columns of the file, comma-separated; by their names if not given.", group=_DATA, parse=_names
    )
    sparse: tuple[str, ...] | None = option(
        None, "Key columns of the file, comma-separated; by their names if not given.", group=_DATA, parse=_names
    )
    dense_scale: DenseScale = option(DenseScale.LOG, "Of the file's dense values.", group=_DATA)
    batch_size: int = option(256, "Samples per rank and batch.", group=_DATA, flag="--batch")
    epochs: int = option(1, "Passes over the sequences of a file.", group=_DATA, scope=Scope.RUN)
    exponent: float = option(1.05, "Zipf exponent of generated keys.", group=_DATA)
    mean_length: float = option(2.0, "Mean keys per bag of generated data.", group=_DATA)
    weighted: bool = option(False, "Generate a weight for every key of a DLRM.", group=_DATA)
    cluster: bool = option(False, "Put samples that share keys into one micro-batch.", group=_DATA)
    delays: tuple[Delay, ...] = option(
        (),
        "KIND:RANK:MS before each such op; RANK may be *.",
        group=_DEVICE,
        flag="--delay",
        collect=_delays,
        scope=Scope.RUN,
    )
    emulated: EmulatedDevice | None = option(
        None,
        "NAME=VALUE of a device that local ops wait for, such as forward_us_per_sample=80.",
        group=_DEVICE,
        flag="--emulate",
        collect=EmulatedDevice.parse,
        scope=Scope.RUN,
    )

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        for name in ("batch_size", "dim", "num_rows", "num_tables", "layers", "heads", "num_negatives", "epochs"):
            if getattr(self, name) < 1:
                raise ExecutorError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ExecutorError(f"steps must be at least 1, got {self.steps}")
        if self.max_length < 2:
            raise ExecutorError(f"max_length must be at least 2 (one item and its target), got {self.max_length}")
        if self.model != ModelKind.DLRM and self.dim % self.heads:
            raise ExecutorError(f"dim {self.dim} must be a multiple of heads {self.heads}")
        columns = [name for name in ("label", "dense", "sparse") if getattr(self, name) is not None]
        if columns and (self.data is None or self.model != ModelKind.DLRM):
            raise ExecutorError(f"{', '.join(columns)}: only a DLRM on --data takes columns of a file")
        if self.weighted and self.data is not None:
            raise ExecutorError("key files hold no weights; give --weighted with generated data only")
        if not 0 < self.mean_length < math.inf:
            raise ExecutorError(f"mean_length must be a positive number, got {self.mean_length}")
        if not 0 <= self.exponent < math.inf:
            raise ExecutorError(f"exponent must be a number that is not negative, got {self.exponent}")
        if self.allow_staleness < 0:
            raise ExecutorError(f"allow_staleness must not be negative, got {self.allow_staleness}")
