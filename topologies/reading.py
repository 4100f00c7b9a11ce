"""Takes values out of nested YAML mappings: every number with a unit in its key and a source, every error with a
path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nestpipe.base import TopologyError, unknown_name

__all__ = ["Quantity", "Reader"]

_LEAST_RATE = 1e6  # below this a "bytes per second" is a number of GB/s somebody forgot to convert
_MOST_RATE = 1e17


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number in the unit of its key, and where it comes from; a source that starts with "assumed" is a guess."""

    value: float
    source: str

    @property
    def assumed(self) -> bool:
        """Whether the number is a guess: no source publishes it."""
        return self.source.lower().startswith("assumed")


class Reader:
    """Takes values out of nested mappings, naming the path to whatever is wrong."""

    def __init__(self, data: Any, path: str, where: str) -> None:
        self.where, self.path = where, path
        if not isinstance(data, Mapping):
            raise self.error("", f"must be a mapping, got {type(data).__name__}")
        self.data = {str(key): value for key, value in data.items()}
        self.known: list[str] = []

    def error(self, key: str, text: str) -> TopologyError:
        path = ".".join(part for part in (self.path, key) if part)
        return TopologyError(f"{self.where}: {path} {text}" if path else f"{self.where}: {text}")

    def take(self, key: str, *, optional: bool = False) -> Any:
        self.known.append(key)
        if key not in self.data:
            if optional:
                return None
            for given in self.data:
                if given not in self.known and _stem(given) == _stem(key):
                    raise self.error(given, f"is in the wrong unit; give {key} ({_unit_hint(key)})")
            raise self.error(key, "is missing")
        return self.data.pop(key)

    def text(self, key: str, *, optional: bool = False) -> str:
        value = self.take(key, optional=optional)
        if value is None and optional:
            return ""
        if not isinstance(value, str):
            raise self.error(key, f"must be text, got {value!r}")
        return value

    def count(self, key: str, *, optional: bool = False) -> int | None:
        value = self.take(key, optional=optional)
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"must be a whole number of 1 or more, got {value!r}")
        return value

    def group(self, key: str) -> Reader:
        return Reader(self.take(key), ".".join(p for p in (self.path, key) if p), self.where)

    def quantity(self, key: str, *, optional: bool = False, zero: bool = False) -> Quantity | None:
        value = self.take(key, optional=optional)
        if value is None and optional:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be {{value: ..., source: ...}}, got {value!r}")
        inner = Reader(value, ".".join(p for p in (self.path, key) if p), self.where)
        number, source = inner.take("value"), inner.text("source")
        inner.finish()
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise self.error(f"{key}.value", f"must be a number {_unit_hint(key)}, got {number!r}")
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
            raise self.error(f"{key}.value", f"must be {'0 or more' if zero else 'positive'}, got {number}")
        if not source.strip():
            raise self.error(f"{key}.source", "must say where the number comes from (or 'assumed: why')")
        if key.endswith("bytes_per_s") and not _LEAST_RATE <= number <= _MOST_RATE:
            raise self.error(
                f"{key}.value",
                f"must be in bytes per second, got {number:g}; 25 GB/s is 25e9, 200 Gbit/s is 25e9, 25 GiB/s is 26.8e9",
            )
        return Quantity(float(number), source)

    def need(self, key: str, *, zero: bool = False) -> Quantity:
        found = self.quantity(key, zero=zero)
        assert found is not None
        return found

    def finish(self) -> None:
        """Refuses unknown keys."""
        for key in self.data:
            near = [known for known in self.known if _stem(known) == _stem(key)]
            if near:
                raise self.error(key, f"is in the wrong unit; give {near[0]} ({_unit_hint(near[0])})")
            raise self.error("", unknown_name("key", key, self.known))


_UNITS = re.compile(
    r"_[gmkt]?i?(b|bits?|bytes?|bps|flops)(_?per_s|ps|s)?$"  # _gb, _gib_per_s, _gbps, _bytes_per_s, _tflops
    r"|_(ns|us|ms|s)$"
)


def _stem(key: str) -> str:
    """A key without its unit: bandwidth_gbps, bandwidth_gb_per_s and bandwidth_bytes_per_s share one."""
    return _UNITS.sub("", key)


def _unit_hint(key: str) -> str:
    for ending, unit in (
        ("bytes_per_s", "of bytes per second; 400 Gbit/s is 50e9"),
        ("flops_per_s", "of floating-point operations per second"),
        ("rows_per_s", "of rows per second"),
        ("_bytes", "of bytes; 80 GB is 80e9, 80 GiB is 85.9e9"),
        ("_ns", "of nanoseconds"),
    ):
        if key.endswith(ending):
            return unit
    return "without a unit"
