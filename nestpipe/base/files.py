"""Writing files and folders: whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from nestpipe.base.errors import NestPipeError
from nestpipe.base.units import MIB

__all__ = ["atomic_file", "atomic_folder", "output_dir", "replace_folder", "write_text"]


@contextmanager
def atomic_file(
    path: str | os.PathLike[str], error: type[NestPipeError] = NestPipeError, *, option: str = "--out"
) -> Iterator[IO[bytes]]:
    """A file to write to that takes the place of `path` when the block ends, readable by all.

    It lies beside `path` until then; if the block raises or is interrupted, it is removed and `path` stays as it was.

    Args:
        path: the file; its folder is made if need be.
        error: what to raise.
        option: the option that chooses the place, for the message.

    Raises:
        error: if the disk is full or the place cannot be written; names the path, the reason and the way out.
    """
    path = Path(path)
    with _said(path, error, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb", buffering=MIB) as file:
                yield file
            os.chmod(draft, 0o644)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise


@contextmanager
def atomic_folder(
    path: str | os.PathLike[str], error: type[NestPipeError] = NestPipeError, *, option: str = "--out"
) -> Iterator[Path]:
    """A folder to fill that replaces `path` and everything in it when the block ends; see `atomic_file`."""
    path = Path(path)
    with _said(path, error, option):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            draft.chmod(0o755)
            yield draft
            replace_folder(draft, path)
        except error as cause:  # of a file inside: the user knows the folder, not the draft of it
            raise error(str(cause).replace(str(draft), str(path))) from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def replace_folder(draft: Path, path: Path) -> None:
    """Renames `draft` to `path`; what was there is removed only once the new folder is in its place."""
    if not path.is_dir() or not any(path.iterdir()):
        os.replace(draft, path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    try:
        os.replace(path, old / "folder")
        try:
            os.replace(draft, path)
        except OSError:
            os.replace(old / "folder", path)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes the file whole or not at all.

    Raises:
        NestPipeError: if it cannot be written.
    """
    with atomic_file(path) as file:
        file.write(text.encode())


def output_dir(path: Path) -> Path:
    """The folder, made if need be.

    Raises:
        NestPipeError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise NestPipeError(
            f"{path}: cannot be made a folder: {cause.strerror or cause}; choose another --out"
        ) from None
    return path


@contextmanager
def _said(path: Path, error: type[NestPipeError], option: str) -> Iterator[None]:
    """Turns an error of the system into ours."""
    try:
        yield
    except OSError as cause:
        space = "free some space or " if cause.errno == errno.ENOSPC else ""
        reason = cause.strerror or cause
        raise error(f"{path}: cannot be written: {reason}; {space}choose another {option}") from None
