"""Opening what users have: plain or gzip, whole or cut short, with errors that name the file and the way out."""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from nestpipe.base import TraceError

__all__ = [
    "ReadsBytes",
    "load_json",
    "open_buffered",
    "open_bytes",
    "parse_json",
    "quantity",
    "rank_in_name",
    "read_head",
    "read_text",
    "text_lines",
    "unreadable",
]

GZIP_MAGIC = b"\x1f\x8b"
GZIP_WINDOW = 31  # zlib's word for: the largest window, with a gzip header
PIECE_BYTES = 1 << 18


class ReadsBytes(Protocol):
    """A source of bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, or everything."""


def unreadable(path: str | os.PathLike[str], error: Exception) -> TraceError:
    """The error for a file that the operating system or gzip fails to read."""
    if isinstance(error, FileNotFoundError):
        return TraceError(f"{path}: no such file")
    if isinstance(error, EOFError):
        return TraceError(f"{path}: the gzip data ends early; the file is cut short, copy it again")
    if isinstance(error, zlib.error):
        return TraceError(f"{path}: the gzip data is damaged ({error}); copy the file again")
    return TraceError(f"{path}: cannot be read: {error}")


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a gzip file, all that a file cut short still holds; then the error.

    `gzip.GzipFile` gives up with the last buffer unread, which for a small file is everything.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._member = zlib.decompressobj(GZIP_WINDOW)
        self._packed = b""
        self._started = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Up to the buffer's length, for readers that want a file of Python's."""
        part = self.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, or everything; b"" at the end.

        Raises:
            EOFError: nothing is left and the data ended early; at once if everything was asked for.
            zlib.error: the data is damaged.
        """
        parts: list[bytes] = []
        left = size
        while left != 0:
            if not self._packed and not self._refill():
                if self._started and (size < 0 or not parts):
                    raise EOFError
                break
            part = self._member.decompress(self._packed, max(left, 0) or PIECE_BYTES)
            self._packed = self._member.unconsumed_tail
            self._started = True
            if self._member.eof:
                # what follows is another member, or padding
                self._packed = self._member.unused_data.lstrip(b"\0")
                self._member, self._started = zlib.decompressobj(GZIP_WINDOW), False
            if part:
                parts.append(part)
                left = left - len(part) if size >= 0 else left
        return b"".join(parts)

    def _refill(self) -> bool:
        self._packed = self._raw.read(PIECE_BYTES)
        return bool(self._packed)


@contextmanager
def open_buffered(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader]:
    """The same as a buffered file, for readers that go by lines or pieces; whatever is damaged fails as a whole.

    Raises:
        TraceError: as `open_bytes`.
    """
    with open_bytes(path) as file:
        yield file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)


@contextmanager
def open_bytes(path: str | os.PathLike[str]) -> Iterator[io.BufferedReader | io.RawIOBase]:
    """The bytes of `path`, unpacked where the content (not the name) says gzip.

    Raises:
        TraceError: the file cannot be opened, or its gzip data turns out damaged while it is read.
    """
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            yield _Unpacked(raw) if packed else raw
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def read_head(path: str | os.PathLike[str], num_bytes: int = 65536) -> bytes:
    """The first `num_bytes` of the unpacked content; what there is of it where the gzip data ends early."""
    parts: list[bytes] = []
    try:
        with open_bytes(path) as file:
            while num_bytes > 0:
                # one small piece at a time, so that a damaged tail does not take the good head with it
                part = file.read(min(num_bytes, 4096))
                if not part:
                    break
                parts.append(part)
                num_bytes -= len(part)
    except TraceError as error:
        if not parts or isinstance(error.__cause__, FileNotFoundError | PermissionError):
            raise
    return b"".join(parts)


def read_text(path: str | os.PathLike[str]) -> str:
    """The whole unpacked file as text (UTF-8, with or without a byte order mark).

    Raises:
        TraceError: not readable, or not text.
    """
    with open_bytes(path) as file:
        data = file.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{path}: byte {error.start} is not UTF-8 text; expected a text log, table or JSON file"
        raise TraceError(message) from error


def parse_json(path: str | os.PathLike[str], text: str) -> Any:
    """The JSON value of `text`, which came from `path`.

    Raises:
        TraceError: invalid JSON; the message gives the position and whether the file looks cut short.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise TraceError(f"{path}: the JSON is nested too deeply to be a trace") from error
    except ValueError as error:
        where = getattr(error, "pos", 0)
        cut = " (the file looks cut short)" if where >= len(text.rstrip()) - 1 else ""
        raise TraceError(f"{path}: not valid JSON{cut}: {error}") from error


def load_json(path: str | os.PathLike[str]) -> Any:
    """The JSON value in `path`, plain or gzip.

    Raises:
        TraceError: not readable or not JSON.
    """
    return parse_json(path, read_text(path))


def text_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, whatever the line ends."""
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        yield number, line.rstrip("\n")


def quantity(where: str, value: object) -> float:
    """A finite number from 0 up to what an int64 holds, given as a JSON number or as text.

    Raises:
        TraceError: anything else; `where` names file and field.
    """
    try:
        if (
            isinstance(value, str | int | float)
            and not isinstance(value, bool)
            and 0 <= (number := float(value)) < 2**62
        ):
            return number
    except (ValueError, OverflowError):
        pass
    raise TraceError(f"{where} must be a finite number of at least 0, got {value!r}")


def rank_in_name(path: str | os.PathLike[str]) -> int | None:
    """The rank that a name states (`rank3.json.gz`, `worker0_step_12.pt.trace.json`, `t.7.et`), else its folder.

    >>> rank_in_name("x/recsys_rank3.json.gz"), rank_in_name("edge_rank_missing.json"), rank_in_name("t.7.et")
    (3, None, 7)
    >>> rank_in_name("rank_5/trace.json"), rank_in_name("run_8gpu_1node.json")
    (5, None)
    """
    name, folder = Path(path).name.lower(), Path(path).parent.name.lower()
    found = (
        re.search(r"(?<!\d)(?:rank|worker|gpu)[_\-. ]?(\d{1,7})(?!\d|[_\-]?node)", name)
        or re.search(r"\.(\d{1,7})\.et(?:\.gz)?$", name)
        or re.fullmatch(r"(?:rank|worker)[_\-. ]?(\d{1,7})", folder)
    )
    return int(found[1]) if found else None
