"""As much of the protobuf wire format as Chakra and Perfetto need: varints, fixed words, length-delimited fields.

Source: Protocol Buffers, Encoding (protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = [
    "Field",
    "WireError",
    "fields",
    "message",
    "signed",
    "text_field",
    "uint_field",
]
__all__ += ["read_varint", "unzigzag", "varint"]

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
VARINT_BYTES_MAX = 10
_MASK = (1 << 64) - 1


class WireError(ValueError):
    """Bytes that are no protobuf message; the caller adds the file."""


class Field(NamedTuple):
    """One field of a message: its number, its wire type, and an int or the bytes."""

    number: int
    wire: int
    value: int | bytes


def varint(value: int) -> bytes:
    """The varint of an unsigned or, as protobuf's int64 does it, two's-complement number.

    >>> varint(300).hex(), varint(-1).hex()
    ('ac02', 'ffffffffffffffffff01')
    """
    value &= _MASK
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at this position and the position after it.

    >>> read_varint(bytes.fromhex("ac02"), 0)
    (300, 2)

    Raises:
        WireError: it does not end within the data or within 10 bytes.
    """
    result = shift = 0
    for position in range(at, min(at + VARINT_BYTES_MAX, len(data))):
        byte = data[position]
        result |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return result & _MASK, position + 1
        shift += 7
    raise WireError(f"a varint at byte {at} does not end")


def signed(value: int) -> int:
    """An int64 from its varint.

    >>> signed((1 << 64) - 1)
    -1
    """
    return value - (1 << 64) if value >= 1 << 63 else value


def unzigzag(value: int) -> int:
    """A sint64 from its varint.

    >>> [unzigzag(n) for n in range(4)]
    [0, -1, 1, -2]
    """
    return (value >> 1) ^ -(value & 1)


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message, in the order written.

    Raises:
        WireError: the bytes are no message.
    """
    at, end = 0, len(data)
    while at < end:
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise WireError(f"field number 0 before byte {at}")
        value: int | bytes
        if wire == VARINT:
            value, at = read_varint(data, at)
        elif wire in (FIXED64, FIXED32):
            size = 8 if wire == FIXED64 else 4
            if at + size > end:
                raise WireError(f"field {number} is cut short at byte {at}")
            value, at = int.from_bytes(data[at : at + size], "little"), at + size
        elif wire == BYTES:
            size, at = read_varint(data, at)
            if at + size > end:
                raise WireError(f"field {number} is cut short at byte {at}: {size} bytes announced, {end - at} left")
            value, at = data[at : at + size], at + size
        else:
            raise WireError(f"wire type {wire} before byte {at}")
        yield Field(number, wire, value)


def uint_field(number: int, value: int) -> bytes:
    """A varint field (uint, int, bool, enum)."""
    return varint(number << 3 | VARINT) + varint(value)


def message(number: int, body: bytes) -> bytes:
    """A length-delimited field: a message, or raw bytes."""
    return varint(number << 3 | BYTES) + varint(len(body)) + body


def text_field(number: int, value: str) -> bytes:
    """A string field."""
    return message(number, value.encode("utf-8", "replace"))
