"""Chakra execution traces: one rank's dependency graph of compute, memory and communication nodes.

A file is a sequence of length-delimited protobuf messages, first the metadata, then nodes. Times are whole
microseconds; what `traces.formats.export_chakra` writes carries exact nanoseconds in attributes of its own, and those
win.

Source: mlcommons/chakra, schema/protobuf/et_def.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nestpipe.base import NS_PER_US, TraceError
from traces.formats.format import Found, Head, Options, count
from traces.formats.json_stream import whole
from traces.formats.phases import collective_of, kind_name, kind_of_collective, phase_of
from traces.formats.protobuf import BYTES, FIXED32, FIXED64, Field, WireError, fields, read_varint, signed, unzigzag
from traces.formats.reading import open_bytes, rank_in_name
from traces.table import INT_COLUMNS, KINDS, TEXT_COLUMNS, Origin, provenance

__all__ = ["COMM_TYPES", "NODE_TYPES", "PRIVATE_PREFIX", "ChakraNode", "ChakraTrace", "read", "sniff", "summarise"]

NODE_TYPES = ("invalid", "metadata", "memory_load", "memory_store", "compute", "send", "recv", "collective")
COMM_TYPES = (
    *("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all"),
    *("reduce_scatter", "reduce_scatter_block", "barrier"),
)
_COLLECTIVE = NODE_TYPES.index("collective")
PRIVATE_PREFIX = "nestpipe_"
MESSAGE_BYTES_MAX = 1 << 28
_SIGNED_FIELDS, _ZIGZAG_FIELDS, _BOOL_FIELDS = (7, 8, 9, 10), (15, 16, 17, 18), (27, 28)
_DOUBLE_FIELDS, _FLOAT_FIELDS = (3, 4), (5, 6)
_TEXT_FIELDS = (29, 30)


class ChakraNode(NamedTuple):
    """One node; times in ns."""

    id: int
    name: str
    type: int
    ctrl_deps: list[int]
    data_deps: list[int]
    start_ns: int
    duration_ns: int
    attributes: dict[str, Any]


class ChakraTrace(NamedTuple):
    """One rank's file."""

    path: str
    version: str
    rank: int | None
    attributes: dict[str, Any]
    nodes: list[ChakraNode]
    num_messages: int

    @property
    def has_kernels(self) -> bool:
        """Whether collectives of the device are among the nodes, as in a trace merged from host and device."""
        return any(node.type == _COLLECTIVE and _on_host(node) is False for node in self.nodes)


def _on_host(node: ChakraNode) -> bool | None:
    """Whether a node ran on the host; `None` where the writer does not say."""
    flag = node.attributes.get("is_cpu_op")
    if isinstance(flag, str):
        flag = {"true": True, "1": True, "false": False, "0": False}.get(flag.lower())
    return bool(flag) if isinstance(flag, int) else None


def sniff(head: Head) -> bool:
    """Whether this begins with a length-delimited metadata message that holds a version text."""
    if head.is_json:
        return False
    try:
        size, at = read_varint(head.raw, 0)
        if not 2 <= size <= 65536 or len(head.raw) < at + size:
            return False
        parts = list(fields(head.raw[at : at + size]))
    except WireError:
        return False
    return bool(parts) and all(part.number in (1, 2) and part.wire == BYTES for part in parts)


def _text(value: int | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _repeated(part: Field) -> list[int]:
    """A repeated integer field: one value, or several packed."""
    if isinstance(part.value, int):
        return [part.value]
    numbers: list[int] = []
    at = 0
    while at < len(part.value):
        number, at = read_varint(part.value, at)
        numbers.append(number)
    return numbers


def _scalar(number: int, value: int | bytes, wire: int) -> Any:
    if isinstance(value, bytes):
        return _text(value) if number in _TEXT_FIELDS else value
    if number in _DOUBLE_FIELDS and wire == FIXED64:
        return struct.unpack("<d", value.to_bytes(8, "little"))[0]
    if number in _FLOAT_FIELDS and wire == FIXED32:
        return struct.unpack("<f", value.to_bytes(4, "little"))[0]
    if number in _BOOL_FIELDS:
        return bool(value)
    if number in _ZIGZAG_FIELDS:
        return unzigzag(value)
    return signed(value) if number in _SIGNED_FIELDS else value


def _list(number: int, data: bytes) -> list[Any]:
    """The list form of an attribute's value: a message whose field 1 repeats, numbers packed or not."""
    values: list[Any] = []
    width = 8 if number in (4, 22, 26) else 4 if number in (6, 20, 24) else 0
    for item in fields(data):
        if item.number != 1:
            continue
        if isinstance(item.value, int) or number in (30, 32):
            values.append(_scalar(number, item.value, item.wire))
        elif width:
            wire = FIXED64 if width == 8 else FIXED32
            for at in range(0, len(item.value) - width + 1, width):
                values.append(_scalar(number, int.from_bytes(item.value[at : at + width], "little"), wire))
        else:
            values.extend(_scalar(number, value, 0) for value in _repeated(item))
    return values


def _attribute(data: bytes) -> tuple[str, Any]:
    name = ""
    value: Any = None
    for part in fields(data):
        if part.number == 1:
            name = _text(part.value)
        elif part.number >= 3:
            is_list = part.number % 2 == 0 and isinstance(part.value, bytes)
            value = _list(part.number, bytes(part.value)) if is_list else _scalar(part.number, part.value, part.wire)
    return name, value


def _node(data: bytes) -> ChakraNode:
    numbers = {1: 0, 3: 0, 6: 0, 7: 0}
    name = ""
    ctrl: list[int] = []
    deps: list[int] = []
    attributes: dict[str, Any] = {}
    for part in fields(data):
        if part.number in numbers and isinstance(part.value, int):
            numbers[part.number] = part.value
        elif part.number == 2:
            name = _text(part.value)
        elif part.number == 4:
            ctrl.extend(_repeated(part))
        elif part.number == 5:
            deps.extend(_repeated(part))
        elif part.number == 10 and isinstance(part.value, bytes):
            key, value = _attribute(part.value)
            attributes[key] = value
    start, duration = numbers[6] * NS_PER_US, numbers[7] * NS_PER_US
    return ChakraNode(numbers[1], name, numbers[3], ctrl, deps, start, duration, attributes)


def _messages(path: str, data: bytes) -> Iterator[bytes]:
    at = index = 0
    while at < len(data):
        try:
            size, at = read_varint(data, at)
        except WireError as error:
            raise TraceError(f"{path}: message {index}: {error}; the file is cut short") from error
        if size > MESSAGE_BYTES_MAX or at + size > len(data):
            raise TraceError(
                f"{path}: message {index} announces {size} bytes, {len(data) - at} are left; "
                "the file is cut short, or it is no Chakra trace"
            )
        yield data[at : at + size]
        at += size
        index += 1


def read(path: Path, _options: Options) -> ChakraTrace:
    """A rank's Chakra trace, protobuf, plain or gzip.

    Raises:
        TraceError: not such a file, or cut short.
    """
    name = str(path)
    with open_bytes(path) as file:
        data = file.read()
    version, metadata, nodes = "", dict[str, Any](), list[ChakraNode]()
    count = 0
    for index, body in enumerate(_messages(name, data)):
        count += 1
        try:
            if index == 0:
                for part in fields(body):
                    if part.number == 1:
                        version = _text(part.value)
                    elif part.number == 2 and isinstance(part.value, bytes):
                        key, value = _attribute(part.value)
                        metadata[key] = value
            else:
                nodes.append(_node(body))
        except (WireError, struct.error, OverflowError) as error:
            raise TraceError(f"{name}: message {index} is no Chakra node: {error}") from error
    if count == 0:
        raise TraceError(f"{name}: the file is empty; expected a Chakra trace")
    for node in nodes:
        if node.type >= len(NODE_TYPES):
            raise TraceError(f"{name}: node {node.id}: type must be 0 to {len(NODE_TYPES) - 1}, got {node.type}")
    return ChakraTrace(name, version, rank_in_name(name), metadata, nodes, count)


# -- rows and summary ------------------------------------------------------------------------------------------------


def collective_name_of(node: ChakraNode, *, has_kernels: bool = False) -> str | None:
    """Which collective or transfer a node is; `None` where it is none.

    Args:
        node: a node.
        has_kernels: whether the trace holds the device's part of collectives; then the host's part is none.
    """
    if has_kernels and _on_host(node):
        return None
    if NODE_TYPES[node.type] in ("send", "recv"):
        return NODE_TYPES[node.type]
    if NODE_TYPES[node.type] != "collective":
        return None
    number = node.attributes.get("comm_type")
    if isinstance(number, str):
        return collective_of(number)
    if isinstance(number, int) and 0 <= number < len(COMM_TYPES):
        return "reduce_scatter" if number == 8 else COMM_TYPES[number]
    return collective_of(node.name)


def _private(node: ChakraNode, row: dict[str, Any]) -> None:
    for name in (*INT_COLUMNS, *TEXT_COLUMNS):
        value = node.attributes.get(PRIVATE_PREFIX + name)
        if isinstance(value, int if name in INT_COLUMNS else str):
            row[name] = value


def _group(node: ChakraNode) -> str | None:
    """The communicator's name; the world has none ("" or "0" in Chakra)."""
    name = node.attributes.get("pg_name")
    return None if name in (None, "", "0") else str(name)


def _row(trace: ChakraTrace, node: ChakraNode, source: str, *, timed: bool, has_kernels: bool) -> dict[str, Any]:
    collective = collective_name_of(node, has_kernels=has_kernels)
    phase = phase_of(node.name)
    kind = kind_of_collective(collective, phase, None)[0] if collective else phase.kind if phase else None
    size = whole(node.attributes.get("comm_size" if collective else "tensor_size"))
    flops = whole(node.attributes.get("num_ops"))
    row: dict[str, Any] = {
        "rank": trace.rank,
        "kind": kind_name(kind),
        "op": node.name,
        "bytes": size if size is not None and 0 <= size < 2**62 else None,
        "flops": flops if flops is not None and 0 <= flops < 2**62 else None,
        "collective": collective,
        "stream": f"stream {node.attributes['stream']}" if "stream" in node.attributes else None,
        "group": _group(node),
        "source": source,
    }
    if timed:
        row["duration_ns"] = node.duration_ns
        if node.start_ns:
            row["start_ns"], row["end_ns"] = node.start_ns, node.start_ns + node.duration_ns
    _private(node, row)
    if row["kind"] not in KINDS:
        raise TraceError(
            f"{trace.path}: node {node.id}: {PRIVATE_PREFIX}kind {row['kind']!r} is no kind of a trace table"
        )
    return row


def summarise(trace: ChakraTrace) -> Found:
    """Table rows and summary of a rank's Chakra trace; if all durations are 0, none was recorded."""
    timed = any(node.duration_ns for node in trace.nodes)
    origin = Origin.MEASURED if timed else Origin.RECORDED
    source = provenance(origin, Path(trace.path).name)
    if isinstance(trace.attributes.get(PRIVATE_PREFIX + "source"), str):
        source = str(trace.attributes[PRIVATE_PREFIX + "source"])
    if any(max(node.duration_ns, node.start_ns) >= 2**61 for node in trace.nodes):
        raise TraceError(f"{trace.path}: a node has a time beyond what 64 bits of nanoseconds hold")
    has_kernels = trace.has_kernels
    rows = [
        _row(trace, node, source, timed=timed, has_kernels=has_kernels)
        for node in trace.nodes
        if NODE_TYPES[node.type] != "metadata"
    ]
    return Found(rank=trace.rank, rows=rows, summaries=[_summary(trace, timed=timed)], notes=_notes(trace))


def _notes(trace: ChakraTrace) -> list[str]:
    halves = sum(node.type == _COLLECTIVE and bool(_on_host(node)) for node in trace.nodes)
    if not halves or not trace.has_kernels:
        return []
    return [f"{trace.path}: {halves} collective nodes are the host's part of those that ran on the device; not counted"]


def _summary(trace: ChakraTrace, *, timed: bool) -> dict[str, Any]:
    types: dict[str, int] = {}
    counts: dict[str, dict[str, int]] = {}
    has_kernels = trace.has_kernels
    for node in trace.nodes:
        types[NODE_TYPES[node.type]] = types.get(NODE_TYPES[node.type], 0) + 1
        collective = collective_name_of(node, has_kernels=has_kernels)
        if collective is not None:
            size = whole(node.attributes.get("comm_size"))
            count(counts, collective, bytes=size or 0, without_size=int(size is None))
    world = whole(trace.attributes.get("ngpus"))
    kernels = [node for node in trace.nodes if _on_host(node) is False]
    return {
        "rank": trace.rank,
        "world_size": world,
        "file": trace.path,
        "schema": trace.version,
        "num_messages": trace.num_messages,
        "num_nodes": len(trace.nodes),
        "node_types": dict(sorted(types.items())),
        "num_device_nodes": len(kernels),
        "duration_us": sum(node.duration_ns for node in trace.nodes) / NS_PER_US if timed else None,
        "collectives": dict(sorted(counts.items())),
    }
