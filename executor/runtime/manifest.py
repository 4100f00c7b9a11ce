"""What a checkpoint says of itself: where it stands, what it was made with, and the digests of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from executor.options import Scope, terms
from executor.runtime.trainer import Trainer
from nestpipe.base import ExecutorError, unknown_name

__all__ = ["MANIFEST", "Manifest", "made_with", "read_manifest", "require_same"]

MANIFEST: Final = "manifest.json"
_VERSION: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself; `files` are SHA-256 digests by name."""

    next_batch: int
    position: int
    num_shards: int
    world_size: int
    made_with: Mapping[str, str]
    files: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, least in (("next_batch", 0), ("position", 0), ("num_shards", 1), ("world_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ExecutorError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.world_size % self.num_shards:
            raise ExecutorError(f"num_shards must divide world_size {self.world_size}, got {self.num_shards}")
        for name in ("made_with", "files"):
            value = getattr(self, name)
            if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
                raise ExecutorError(f"{name} must be texts by name, got {value!r:.80}")

    def text(self) -> str:
        """As JSON, with the version and a digest of the rest."""
        fields = {"version": _VERSION, **asdict(self)}
        return json.dumps({**fields, "digest": _digest_of(fields)}, indent=1) + "\n"


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        ExecutorError: if it is missing, damaged, changed, or of another version.
    """
    path = checkpoint / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExecutorError(f"{path}: invalid manifest of a checkpoint: {error}") from None
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        version = found.get("version") if isinstance(found, dict) else found
        raise ExecutorError(f"{path}: version must be {_VERSION}, got {version!r:.80}")
    digest = found.pop("digest", None)
    try:
        manifest = Manifest(**{name: value for name, value in found.items() if name != "version"})
    except (ExecutorError, TypeError) as error:
        raise ExecutorError(f"{path}: invalid manifest of a checkpoint: {error}") from None
    if digest != _digest_of(found):
        raise ExecutorError(f"{path}: it has been changed since it was written; take another checkpoint")
    return manifest


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def made_with(trainer: Trainer) -> dict[str, str]:
    """What a run that goes on from a checkpoint must have alike: options by flag, and the tables."""
    layout = trainer.worker.layout
    tables = [f"{each.name} {each.num_rows} x {each.dim}{' hashed' * each.hashed}" for each in layout.tables]
    return terms(trainer.settings, Scope.RESULT) | {"tables": ", ".join(tables)}


def require_same(
    checkpoint: Path, theirs: Mapping[str, str], ours: Mapping[str, str], may_change: Collection[str]
) -> None:
    """Refuse a checkpoint that was made with other options or tables.

    Args:
        checkpoint: for the message.
        theirs: what it was made with, by name.
        ours: what this run has.
        may_change: names that may differ.

    Raises:
        ExecutorError: naming what differs, with both values, and how to allow it.
    """
    unknown = next((name for name in may_change if name not in ours), None)
    if unknown is not None:
        raise ExecutorError(f"--allow-change: {unknown_name('option', unknown, list(ours))}")
    other = [name for name in dict.fromkeys([*theirs, *ours]) if theirs.get(name) != ours.get(name)]
    refused = [name for name in other if name not in may_change]
    if refused:
        found = "; ".join(f"{name} was {theirs.get(name)}, this run has {ours.get(name)}" for name in refused)
        options = [name for name in refused if name != "tables"]
        way = f", or allow it: {' '.join(f'--allow-change {name[2:]}' for name in options)}" if options else ""
        raise ExecutorError(f"{checkpoint}: {found}; resume with the same{way}")
