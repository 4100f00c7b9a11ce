"""What a trace format is: a module with `sniff`, `read` and `summarise`, and what these three pass on.

`traces.formats.importing.FORMATS` lists the formats; a new one needs its reader and an entry there, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from traces.formats.reading import read_head
from traces.table import TraceTable

_JSON_START = re.compile(rb"""\{\s*(?:["}]|$)|\[\s*(?:["\[\]{\-0-9tfnN]|$)""")

__all__ = ["Format", "Found", "Head", "Options", "Reader", "count"]


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, from which its format is detected.

    Attributes:
        path: the file.
        raw: its first 64 KiB, unpacked.
        lists: names of the top-level lists of a JSON file; filled in only if `raw` matched no format.
    """

    path: Path
    raw: bytes
    lists: frozenset[str] = frozenset()

    @classmethod
    def of(cls, path: Path) -> Head:
        """The head of a file.

        Raises:
            TraceError: unreadable.
        """
        return cls(path, read_head(path))

    @property
    def text(self) -> str:
        """The head as text, without byte order mark and leading white space."""
        return self.stripped.decode("utf-8", "replace")

    @property
    def stripped(self) -> bytes:
        return self.raw.lstrip(b"\xef\xbb\xbf \t\r\n")

    @property
    def is_json(self) -> bool:
        # a binary file may begin with the byte of a bracket; after one, JSON has a name, a value or the end
        return _JSON_START.match(self.stripped) is not None

    @property
    def is_parquet(self) -> bool:
        return self.raw.startswith(b"PAR1")

    def has(self, *keys: str) -> bool:
        """Whether one of these words stands in quotes in the head."""
        return any(f'"{key}"'.encode() in self.raw for key in keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to read.

    Attributes:
        partial: take the complete events of a file that is cut short.
        on_progress: called with the number of bytes read so far.
    """

    partial: bool = False
    on_progress: Callable[[int], None] | None = None


@dataclass(slots=True, kw_only=True)
class Found:
    """What one file adds to an import.

    Attributes:
        rank: that the file belongs to; None where it belongs to none, or is unknown.
        rows: of the trace table.
        section: the part of the import's summary that `summaries` belong to.
        summaries: JSON-ready.
        notes: what the reader of the numbers must know, with the file's name.
        trace: a rank's trace that is put together with those of the other ranks (`traces.formats.ranks`) once all
            files are read; rows and summary are made then.
    """

    rank: int | None = None
    rows: TraceTable | Sequence[Mapping[str, Any]] = ()
    section: str = "ranks"
    summaries: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trace: object = None


class Reader(Protocol):
    """What the module of a format has to define."""

    def sniff(self, head: Head, /) -> bool:
        """Whether a file that begins so is of this format."""

    def read(self, path: Path, options: Options, /) -> Any:
        """What the file holds.

        Raises:
            TraceError: damaged.
        """

    def summarise(self, trace: Any, /) -> Found:
        """Rows and summary of what `read` returned.

        Raises:
            TraceError: invalid.
        """


class Format(NamedTuple):
    """An entry of the table of formats: name in summaries, title in messages, and the module that reads it."""

    name: str
    title: str
    reader: Reader


def count(table: dict[str, dict[str, int]], name: str, **amounts: int) -> None:
    """Counts one more `name`, and adds up its amounts.

    >>> seen: dict[str, dict[str, int]] = {}
    >>> count(seen, "all_reduce", bytes=8)
    >>> count(seen, "all_reduce", bytes=4)
    >>> seen
    {'all_reduce': {'count': 2, 'bytes': 12}}
    """
    entry = table.setdefault(name, dict.fromkeys(("count", *amounts), 0))
    entry["count"] += 1
    for key, amount in amounts.items():
        entry[key] += amount
