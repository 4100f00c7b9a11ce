"""Conversions and rounding, all of them: simulated time is an int of nanoseconds, sizes are bytes."""

from __future__ import annotations

import math
import re

__all__ = [
    "BITS_PER_BYTE",
    "GIB",
    "KIB",
    "MIB",
    "NS_PER_MS",
    "NS_PER_S",
    "NS_PER_US",
    "bytes_text",
    "gbit_to_bytes",
    "ms_to_ns",
    "ns_to_ms",
    "ns_to_s",
    "ns_to_us",
    "parse_bytes",
    "s_to_ns",
    "split_evenly",
    "us_to_ns",
]

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
BITS_PER_BYTE = 8
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def _whole(value: float) -> int:
    if not math.isfinite(value):
        raise ValueError(f"a time must be finite, got {value}")
    return round(value)


def s_to_ns(seconds: float) -> int:
    """Seconds to the nearest whole nanosecond."""
    return _whole(seconds * NS_PER_S)


def ms_to_ns(milliseconds: float) -> int:
    """Milliseconds to the nearest whole nanosecond.

    >>> ms_to_ns(1895.98)
    1895980000
    """
    return _whole(milliseconds * NS_PER_MS)


def us_to_ns(microseconds: float) -> int:
    """Microseconds to the nearest whole nanosecond."""
    return _whole(microseconds * NS_PER_US)


def ns_to_ms(nanoseconds: float) -> float:
    """Nanoseconds to milliseconds."""
    return nanoseconds / NS_PER_MS


def ns_to_us(nanoseconds: float) -> float:
    """Nanoseconds to microseconds."""
    return nanoseconds / NS_PER_US


def ns_to_s(nanoseconds: float) -> float:
    """Nanoseconds to seconds."""
    return nanoseconds / NS_PER_S


def gbit_to_bytes(gbit_per_s: float) -> float:
    """Gbit/s (10^9 bits) to bytes per second.

    >>> gbit_to_bytes(200)
    25000000000.0
    """
    return gbit_per_s * 1e9 / BITS_PER_BYTE


def split_evenly(total: int, parts: int, part: int) -> int:
    """The share of `total` that falls to `part` of `parts`; the shares are whole and sum to `total`.

    >>> [split_evenly(10, 4, i) for i in range(4)]
    [2, 3, 2, 3]
    """
    return total * (part + 1) // parts - total * part // parts


def bytes_text(num_bytes: float) -> str:
    """Bytes for people, in powers of 1,024.

    >>> bytes_text(3 * MIB)
    '3.00 MiB'
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} PiB"


_BYTE_UNITS = {
    "B": 1,
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)},
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)},
    "kB": 1000,
}


def parse_bytes(size: int | str) -> int:
    """Bytes from a number of bytes or from text with a unit: B, kB/MB/... (powers of 1,000), KiB/MiB/... (of 1,024).

    Raises:
        ValueError: if it is neither, or negative.

    >>> parse_bytes("64 GiB"), parse_bytes("1.5 kB"), parse_bytes(7)
    (68719476736, 1500, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE][+]?\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = (match[2] or "B") if match else ""
    if match is None or unit not in _BYTE_UNITS:
        raise ValueError(f"a size must be bytes or a number with B, MB, GB, MiB, GiB, ..., got {size!r}")
    size_bytes: int = round(float(match[1]) * _BYTE_UNITS[unit])
    return size_bytes
