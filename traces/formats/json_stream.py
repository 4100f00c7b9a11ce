"""The events of a Chrome trace one by one, however large the file: memory holds one chunk and one event.

The standard library's scanner is run on a sliding window. It is as fast as ijson's C backend with floats
(`benchmarks/bench_import.py`), and it keeps numbers as written: a time such as 4458676524670.502 us has more digits
than a float can round to whole nanoseconds, so numbers with a fraction stay text until `exact_ns` reads them. It also
reads the bare `inf` that Kineto prints, and knows how many whole events a file that is cut short still holds.
"""

from __future__ import annotations

import codecs
import json
import os
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

from nestpipe.base import TraceError
from traces.formats.reading import ReadsBytes, open_bytes, unreadable

__all__ = ["EventStream", "exact_ns", "whole"]

CHUNK_BYTES = 1 << 20
VALUE_CHARS_MAX = 64 << 20
WHITESPACE = " \t\r\n"
_LONE_NUMBERS = {"nan": "NaN", "inf": "Infinity", "-nan": "NaN", "-inf": "-Infinity"}


def exact_ns(value: object) -> int | None:
    """Microseconds, as a JSON number or the text of one, to the nearest nanosecond; `None` if it is neither.

    >>> exact_ns("4458676524670.502"), exact_ns(1694128201436271), exact_ns("1.5e3"), exact_ns([])
    (4458676524670502, 1694128201436271000, 1500000, None)
    """
    if type(value) is int:
        return value * 1000
    if type(value) is not str:
        return round(value * 1000) if isinstance(value, float) and abs(value) < 1e18 else None
    whole_part, _, fraction = value.partition(".")
    if fraction.isdecimal() and whole_part.isdecimal():
        ns = int(whole_part) * 1000 + int(fraction[:3].ljust(3, "0"))
        return ns + 1 if fraction[3:4] >= "5" else ns
    try:
        number = Decimal(value) * 1000
        return int(number.to_integral_value()) if number.is_finite() and abs(number) < 10**20 else None
    except (InvalidOperation, ValueError):
        return None


def whole(value: object) -> int | None:
    """A JSON value as an int where it is a whole number, or the text of one; else `None`.

    >>> whole(7), whole("7"), whole("7.0"), whole(True), whole("x")
    (7, 7, 7, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, str):
        try:
            number = Decimal(value)
        except (InvalidOperation, ValueError):
            return None
        if number.is_finite() and abs(number) < 2**63 and number == number.to_integral_value():
            return int(number)
    return None


class EventStream:
    """Iterates over the objects of `traceEvents` (or of a bare list) in a JSON file, plain or gzip.

    After the iteration `meta` holds the other top-level values and `cut_short` says whether the file ended inside a
    value; that is an error unless `partial` is set.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        events_key: str = "traceEvents",
        partial: bool = False,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self.cut_short = False
        self.num_events = 0
        self._events_key = events_key
        self._partial = partial
        self._on_progress = on_progress
        self._scan = json.JSONDecoder(parse_float=str, strict=False).raw_decode
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at = 0
        self._ended = False
        self._bytes_seen = 0
        self._file: ReadsBytes | None = None

    def __iter__(self) -> Iterator[Any]:
        with open_bytes(self.path) as file:
            self._file = file
            try:
                yield from self._document()
            except EOFError:
                self.cut_short = True
                if not self._partial:
                    raise self._error(
                        f"the file is cut short after {self.num_events} complete events; copy it again, "
                        "or pass --partial to import what is there"
                    ) from None

    def _error(self, problem: str) -> TraceError:
        return TraceError(f"{self.path}: {problem}")

    def _fill(self) -> bool:
        """Reads more; False at the end of the file."""
        if self._ended or self._file is None:
            return False
        try:
            # a value that needs several chunks is read in ever larger ones, so that rescanning it stays linear
            data = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        except (EOFError, zlib.error) as error:
            if not self._partial:
                raise unreadable(self.path, error) from error
            data, self.cut_short = b"", True
        self._ended = not data
        self._bytes_seen += len(data)
        if self._on_progress is not None:
            self._on_progress(self._bytes_seen)
        more = self._decoder.decode(data, final=self._ended)
        self._text = self._text[self._at :] + more
        self._at = 0
        return bool(more) or not self._ended

    def _peek(self) -> str:
        """The next character that is no white space; "" at the end of the file."""
        while True:
            text, at, end = self._text, self._at, len(self._text)
            while at < end and text[at] in WHITESPACE:
                at += 1
            self._at = at
            if at < end:
                return text[at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        if self._peek() == "":
            raise EOFError
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except json.JSONDecodeError as error:
                self._recover(error)
                continue
            except RecursionError:
                raise self._error("the JSON is nested too deeply to be a trace") from None
            except ValueError as error:
                raise self._error(f"not valid JSON: {error}") from error
            if end == len(self._text) and self._fill():
                continue  # a number may go on in the next chunk
            self._at = end
            return value

    def _recover(self, error: json.JSONDecodeError) -> None:
        """Reads on where the value is only cut by the chunk, mends a bare `nan` or `inf`, else raises."""
        near_end = error.pos >= len(self._text) - 16 or error.msg.startswith("Unterminated string")
        if near_end and not self._ended:
            if len(self._text) - self._at > VALUE_CHARS_MAX:
                raise self._error(f"a single value is longer than {VALUE_CHARS_MAX} characters; this is no trace")
            self._fill()
            return
        for spelling, number in _LONE_NUMBERS.items() if error.msg == "Expecting value" else ():
            # Kineto prints C's spelling of a bandwidth over a duration of zero
            if self._text[error.pos : error.pos + len(spelling)].lower() == spelling:
                self._text = self._text[: error.pos] + number + self._text[error.pos + len(spelling) :]
                return
        if near_end:
            raise EOFError
        excerpt = self._text[error.pos : error.pos + 20]
        raise self._error(f"not valid JSON after {self.num_events} events: {error.msg}, got {excerpt!r}")

    def _document(self) -> Iterator[Any]:
        first = self._peek()
        if first == "\ufeff":
            self._at += 1
            first = self._peek()
        if first == "[":
            yield from self._items()
        elif first == "{":
            yield from self._members()
        elif first == "":
            raise self._error("the file is empty; expected a trace")
        else:
            raise self._error(f"expected a JSON object or list, got {self._text[self._at : self._at + 20]!r}")
        if self._peek() not in ("", "\0"):
            raise self._error("something follows the end of the JSON value; is the file two files?")

    def _members(self) -> Iterator[Any]:
        self._at += 1
        while (char := self._peek()) != "}":
            if char == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._peek() not in (":", ""):
                raise self._error(f"not valid JSON after {self.num_events} events: expected a key, got {key!r}")
            if self._peek() == "":
                raise EOFError
            self._at += 1
            if key == self._events_key and self._peek() == "[":
                yield from self._items()
            else:
                self.meta[key] = self._value()
        self._at += 1

    def _items(self) -> Iterator[Any]:
        self._at += 1
        while (char := self._peek()) != "]":
            if char == ",":
                self._at += 1
                continue
            item = self._value()
            self.num_events += 1
            yield item
        self._at += 1
