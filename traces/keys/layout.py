"""What a key file looks like, from its first lines."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError
from traces.formats.reading import open_bytes

__all__ = ["KeyFileLayout", "KeyFormat", "check_indices", "detect_layout", "is_index", "readable"]

_SNIFF_BYTES = 1 << 16
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?|[0-9a-fA-F]{8,16}")
_HEADER_NAME = re.compile(r"[^\W\d][\w .:/#-]*")
_ID = re.compile(r"[\w.-]+")
_NOT_A_KEY = re.compile(
    r"label|target|\w*_?score|row_?(id|number|num)|y|clk|clicks?|clicked|ratings?|timestamp|ts|time|time_ms|date|hourmin|weight|split|index"
    r"|(is|has)_\w+|\w+_ratio|long_view|\w*_(time|time_ms|duration|duration_ms)|duration_ms|I\d+|int_\d+|dense\w*|unnamed\W*\d*",
    re.IGNORECASE,
)
_LABEL = re.compile(r"label|target|\w*_?score|row_?(id|number|num)|clk|click|clicked|is_click", re.IGNORECASE)
_DENSE = re.compile(r"I\d+|int_\d+|dense\w*", re.IGNORECASE)
_FRACTION = re.compile(r"[+-]?(\d*\.\d*[1-9]\d*([eE][+-]?\d+)?|\d+\.\d{2,})")
#: Seconds, ms, us and ns of Unix time from 2001 to 2033.
_EPOCHS = (10**9, 10**12, 10**15, 10**18)
_ROWS_TO_TELL, _DIGITS_MAX = 10, 20
_KUAIRAND = frozenset({"user_id", "video_id", "time_ms", "is_click"})
_KUAIRAND_KEYS = ("user_id", "video_id", "tab")
_MOVIELENS = ("userId", "movieId", "rating", "timestamp")


class KeyFormat(StrEnum):
    """The kinds of key file; the value is what the command line takes and prints."""

    CSV = "csv"
    CRITEO = "criteo"
    MOVIELENS = "movielens"
    KUAIRAND = "kuairand"
    INDEX_LIST = "index_list"
    SLOTS = "slots"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFileLayout:
    """What a key file looks like, from its first lines.

    Attributes:
        format: kind of file.
        delimiter: between cells; None where the format has none (slots, index lists).
        has_header: whether the first line names the columns.
        columns: all column names; `c1`, `c2`, ... where the file has no header.
        key_columns: the columns that may hold keys.
        default_columns: the ones read unless the caller names others; none where a file has no header and its
            columns may hold anything.
    """

    format: KeyFormat
    delimiter: str | None = None
    has_header: bool = False
    columns: tuple[str, ...] = ()
    key_columns: tuple[str, ...] = ()
    default_columns: tuple[str, ...] = ()

    @property
    def label_column(self) -> str | None:
        """The column that says by its name what a sample's label is: of 0 or 1."""
        if self.format is KeyFormat.SLOTS:
            return "label"
        return next((name for name in self.columns if _LABEL.fullmatch(name)), None)

    @property
    def dense_columns(self) -> tuple[str, ...]:
        """The columns that are dense values by their names."""
        return tuple(name for name in self.columns if _DENSE.fullmatch(name))


def detect_layout(path: str | Path) -> KeyFileLayout:
    """What kind of key file this is, from its first 64 KiB.

    Raises:
        TraceError: the file is missing, empty, damaged or not a key file.
    """
    path = Path(path)
    with readable(path), open_bytes(path) as file:
        head = file.read(_SNIFF_BYTES)
    try:
        text = io.IncrementalNewlineDecoder(None, translate=True).decode(_utf8_prefix(head))
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a key file: expected UTF-8 text, got binary data") from None
    lines = text.split("\n")
    if len(head) == _SNIFF_BYTES and len(lines) > 1:
        lines.pop()
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise TraceError(f"{path}: empty; expected at least one line of keys")
    return _layout_of(path, lines)


def _utf8_prefix(head: bytes) -> str:
    """Text of a cut file: a last character may be incomplete."""
    try:
        return head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(head) == _SNIFF_BYTES and error.start >= len(head) - 3:
            return head[: error.start].decode("utf-8-sig")
        raise


def _layout_of(path: Path, lines: list[str]) -> KeyFileLayout:
    first = lines[0]
    if "::" in first and first.count("::") == 3:
        return KeyFileLayout(format=KeyFormat.MOVIELENS, delimiter="::", **_movielens_columns(_MOVIELENS))
    delimiter = next((mark for mark in "\t,;|" if mark in first), None)
    if delimiter is None:
        tokens = first.split()
        if all(":" in token for token in tokens):
            return KeyFileLayout(format=KeyFormat.SLOTS)
        if len(tokens) == 1 and _HEADER_NAME.fullmatch(first.strip()) and not _NUMBER.fullmatch(first.strip()):
            for number, line in enumerate(lines[1:50], start=2):
                if not _ID.fullmatch(line.strip().strip('"')):
                    raise TraceError(f"{path}: line {number}: expected an integer or another id, got {line[:40]!r}")
            return _with_header(path, (first.strip(),), ",")
        check_indices(path, first, 1)
        return KeyFileLayout(format=KeyFormat.INDEX_LIST)
    cells = tuple(cell.strip() for cell in next(csv.reader([first], delimiter=delimiter)))
    if not any(_NUMBER.fullmatch(cell) for cell in cells) and all(cells[1:]):
        return _with_header(path, cells, delimiter, lines[1:])
    widths = {len(line.split(delimiter)) for line in lines[:50]}
    if len(widths) > 1 and delimiter in ",;|":
        check_indices(path, first.replace(delimiter, " "), 1)
        return KeyFileLayout(format=KeyFormat.INDEX_LIST, delimiter=delimiter)
    if not any(_NUMBER.fullmatch(cell) for cell in cells) or any(" " in cell for cell in cells):
        raise TraceError(f"{path}: line 1: not a key file: expected column names or ids, got {first[:40]!r}")
    return _without_header(cells, delimiter)


def _measures(cells: list[str]) -> bool:
    """Whether a column's cells are no keys but fractions, row numbers one after the other or points in time."""
    known = [cell for cell in cells if cell]
    if any(_FRACTION.fullmatch(cell) for cell in known):
        return True
    if len(known) < _ROWS_TO_TELL or not all(is_index(cell) and len(cell) < _DIGITS_MAX for cell in known):
        return False
    numbers = [int(cell) for cell in known]
    if all(after == before + 1 for before, after in pairwise(numbers)):
        return True
    return any(all(low <= number < 2 * low for number in numbers) for low in _EPOCHS)


def _with_header(path: Path, names: tuple[str, ...], delimiter: str, lines: Sequence[str] = ()) -> KeyFileLayout:
    columns = (names[0] or "index", *names[1:])
    bad = [name for name in columns if not _HEADER_NAME.fullmatch(name)]
    if bad or len(set(columns)) != len(columns):
        what = f"got {bad[0][:40]!r}" if bad else "got a name twice"
        raise TraceError(f"{path}: line 1: not a key file: expected distinct column names or ids, {what}")
    if set(_MOVIELENS[:2]) <= set(columns):
        return KeyFileLayout(
            format=KeyFormat.MOVIELENS, delimiter=delimiter, has_header=True, **_movielens_columns(columns)
        )
    shared: dict[str, Any] = {"delimiter": delimiter, "has_header": True, "columns": columns}
    if set(columns) >= _KUAIRAND:
        keys = tuple(name for name in columns if name in _KUAIRAND_KEYS)
        return KeyFileLayout(format=KeyFormat.KUAIRAND, key_columns=keys, default_columns=("video_id",), **shared)
    rows = [row for row in csv.reader(lines, delimiter=delimiter) if len(row) == len(columns)]
    keys = tuple(
        name
        for at, name in enumerate(columns)
        if not _NOT_A_KEY.fullmatch(name) and not _measures([row[at].strip() for row in rows])
    )
    if not keys:
        keys = columns
    return KeyFileLayout(format=KeyFormat.CSV, key_columns=keys, default_columns=keys, **shared)


def _without_header(cells: tuple[str, ...], delimiter: str) -> KeyFileLayout:
    if delimiter == "\t" and len(cells) in (39, 40):
        dense, ids = [f"I{i}" for i in range(1, 14)], tuple(f"C{i}" for i in range(1, 27))
        columns = (*["label"] * (len(cells) - 39), *dense, *ids)
        return KeyFileLayout(
            format=KeyFormat.CRITEO, delimiter=delimiter, columns=columns, key_columns=ids, default_columns=ids
        )
    if len(cells) == 4 and delimiter == "\t" and all(cell.isdigit() for cell in cells) and 1 <= int(cells[2]) <= 5:
        return KeyFileLayout(format=KeyFormat.MOVIELENS, delimiter=delimiter, **_movielens_columns(_MOVIELENS))
    columns = tuple(f"c{i}" for i in range(1, len(cells) + 1))
    return KeyFileLayout(format=KeyFormat.CSV, delimiter=delimiter, columns=columns, key_columns=columns)


def _movielens_columns(columns: tuple[str, ...]) -> dict[str, Any]:
    return {"columns": columns, "key_columns": _MOVIELENS[:2], "default_columns": ("movieId",)}


def is_index(token: str) -> bool:
    """Whether a token is a whole number in ASCII digits."""
    digits = token[1:] if token.startswith("-") else token
    return digits.isdecimal() and digits.isascii()


def check_indices(path: Path, line: str, number: int) -> None:
    for token in line.split():
        if not is_index(token):
            raise TraceError(
                f"{path}: line {number}: expected indices, key:slot pairs or delimited columns, got {token[:40]!r}"
            )


class readable:  # noqa: N801 - read as a verb where it is used
    """Turns what a damaged or missing file raises into a `TraceError` with the path."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        import pyarrow as pa

        if isinstance(error, UnicodeDecodeError):
            raise TraceError(f"{self._path}: not a key file: expected UTF-8 text, got binary data") from None
        if isinstance(error, pa.ArrowInvalid):
            raise TraceError(f"{self._path}: cannot be read as a table of keys: {str(error)[:200]}") from None
        if isinstance(error, OSError):
            raise TraceError(f"{self._path}: cannot be read: {error.strerror or error}") from None
