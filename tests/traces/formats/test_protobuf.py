"""The protobuf wire format: what is written is read back."""

from __future__ import annotations

import struct

import pytest

from traces.formats.protobuf import WireError, fields, read_varint, text_field, uint_field


def test_varints_and_fields_are_read_as_written() -> None:
    body = uint_field(3, 300) + text_field(2, "ä") + b"\x29" + struct.pack("<d", 1.5)
    assert [(part.number, part.wire) for part in fields(body)] == [(3, 0), (2, 2), (5, 1)]
    for damaged in (b"\x80" * 11, body[:-1], b"\x00"):
        with pytest.raises(WireError):
            list(fields(damaged))
    with pytest.raises(WireError, match="does not end"):
        read_varint(b"", 0)
