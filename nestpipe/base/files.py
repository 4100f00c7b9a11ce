"""Writing files: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nestpipe.base.errors import NestPipeError

__all__ = ["output_dir", "write_text"]


def write_text(path: Path, text: str) -> None:
    """Writes the file whole or not at all.

    Raises:
        NestPipeError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise NestPipeError(f"{path}: cannot be written: {error.strerror or error}; choose another --out") from None


def output_dir(path: Path) -> Path:
    """The folder, made if need be.

    Raises:
        NestPipeError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NestPipeError(
            f"{path}: cannot be made a folder: {error.strerror or error}; choose another --out"
        ) from None
    return path
