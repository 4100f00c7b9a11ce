"""PyTorch execution traces: what was exchanged, in which sizes and splits; times only of device nodes (ET+).

An execution trace records each collective as a node `record_param_comms` whose tensors are tuples (tensor id, storage
id, offset, number of elements, bytes an element, device). Both layouts are read: schema 1.0.1 (`inputs`, `input_types`,
`parent`) and 1.0.2 to 1.1.x of Chakra (`inputs.values`, `ctrl_deps`, `attrs`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nestpipe.base import TraceError, ns_to_us
from traces.formats.dtypes import element_bytes, is_integer
from traces.formats.format import Found, Head, Options, count
from traces.formats.json_stream import EventStream, exact_ns, whole
from traces.formats.phases import (
    Phase,
    collective_of,
    kernel_collective,
    kind_name,
    kind_of_collective,
    phase_of,
)
from traces.formats.reading import rank_in_name
from traces.table import Origin, provenance

__all__ = ["NOT_COLLECTIVES", "EtCollective", "EtRank", "et_rows", "int_list", "read", "sniff", "summarise"]

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
NOT_COLLECTIVES = ("wait", "init", "barrier")
# the number before the name is the rank's own here; of a broadcast it is the root, of a send the peer
_OWN_RANK = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})


class EtCollective(NamedTuple):
    """One recorded communication: names as recorded and in our spelling, bytes in and out, elements per peer."""

    recorded: str
    collective: str
    bytes_in: int
    bytes_out: int
    dtype: str
    splits: list[int]
    splits_out: list[int]
    group: str
    group_size: int | None
    rank: int | None
    phase: Phase | None
    start_ns: int | None = None


class EtKernel(NamedTuple):
    """A device event, which traces merged with the profiler's (ET+) hold as nodes; times in ns."""

    name: str
    stream: str
    start_ns: int
    duration_ns: int
    phase: Phase | None


class EtRank(NamedTuple):
    """What one file holds; `notes` say what of it is inconsistent."""

    path: str
    schema: str
    rank: int | None
    rank_source: str
    world_size: int | None
    num_nodes: int
    collectives: list[EtCollective]
    kernels: list[EtKernel]
    notes: list[str]

    @classmethod
    def of(
        cls,
        path: str,
        schema: str,
        num_nodes: int,
        collectives: list[EtCollective],
        kernels: list[EtKernel] | None = None,
    ) -> EtRank:
        """The rank as the file's name or else its collectives state it; the world size is that of the largest group."""
        # some schemas record 0 on every rank, so the name comes first
        rank, source = rank_in_name(path), "file name"
        if rank is None:
            rank = next((one.rank for one in collectives if one.rank is not None), None)
            source = "record_param_comms" if rank is not None else "unknown"
        sizes = [one.group_size for one in collectives if one.group_size]
        collectives, notes = _checked(path, collectives)
        return cls(path, schema, rank, source, max(sizes, default=None), num_nodes, collectives, kernels or [], notes)


def _checked(path: str, collectives: list[EtCollective]) -> tuple[list[EtCollective], list[str]]:
    """The collectives with bytes that agree with their splits, and notes on those whose splits do not agree.

    Splits count elements, or rows of several elements each.
    """
    made: list[EtCollective] = []
    sums = groups = 0
    for one in collectives:
        width = element_bytes(one.dtype) or 0
        sent, received = sum(one.splits) * width, sum(one.splits_out) * width
        changed = one._replace(
            bytes_in=sent if sent > 0 and one.bytes_in % sent else one.bytes_in,
            bytes_out=received if received > 0 and one.bytes_out % received else one.bytes_out,
        )
        sums += changed != one
        lengths = {len(splits) for splits in (one.splits, one.splits_out) if splits}
        groups += bool(one.group_size and lengths - {one.group_size})
        made.append(changed)
    notes = []
    if sums:
        notes.append(
            f"{path}: the splits of {sums} collectives do not sum to their tensors; bytes are those of the splits"
        )
    if groups:
        notes.append(
            f"{path}: {groups} collectives have another number of splits than their group has ranks; the file "
            "contradicts itself, and their sizes per peer are doubtful"
        )
    return made, notes


def _tensors(value: object) -> Iterator[tuple[int, int]]:
    """(elements, bytes an element) of the tensor tuples in a value, however deeply they are listed."""
    if not isinstance(value, list):
        return
    if len(value) >= 5 and all(type(item) is int for item in value[:5]):
        if len(value) >= 6 and isinstance(value[5], str):
            yield value[3], value[4]
        return
    for item in value:
        yield from _tensors(item)


def _bytes(path: str, node: object, values: object) -> int:
    total = 0
    for number, width in _tensors(values):
        if number < 0 or width < 0 or number * width >= 2**62:
            raise TraceError(f"{path}: node {node}: a tensor of {number} elements of {width} bytes is invalid")
        total += number * width
    return total


def _values(node: Mapping[str, Any], which: str) -> list[Any]:
    side = node.get(which)
    if isinstance(side, dict):
        side = side.get("values")
    return side if isinstance(side, list) else []


def _attributes(node: Mapping[str, Any]) -> dict[str, Any]:
    attrs = node.get("attrs")
    if not isinstance(attrs, list):
        return {}
    return {str(a.get("name")): a.get("value") for a in attrs if isinstance(a, dict)}


def int_list(value: object) -> list[int]:
    """A list of whole numbers, as JSON or as text of it; empty where it is none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return []
    if not isinstance(value, list):
        return []
    numbers = [whole(item) for item in value]
    return [number for number in numbers if number is not None] if None not in numbers else []


def _group(inputs: list[Any], name_at: int, attributes: Mapping[str, Any]) -> tuple[str, int | None]:
    """Process group and its size: from attributes, else the arguments around the collective's name."""
    group = attributes.get("pg_name")
    if group is None and name_at >= 2:
        given = inputs[name_at - 2]
        group = given[0] if isinstance(given, list) and given and isinstance(given[0], str) else None
    # after the two split lists: [start, stride, size] or only the size
    numbers = [item for item in inputs[name_at + 3 :] if type(item) is int] if name_at >= 0 else []
    size = whole(attributes.get("pg_size"))
    if size is None and numbers:
        size = numbers[-1]
    return str(group) if group is not None else "", size if size is not None and size > 0 else None


def _collective(path: str, node: Mapping[str, Any], phase: Phase | None) -> EtCollective | None:
    inputs, attributes = _values(node, "inputs"), _attributes(node)
    name_at = next((i for i, item in enumerate(inputs) if isinstance(item, str)), -1)
    recorded = str(inputs[name_at]) if name_at >= 0 else str(attributes.get("collective_name") or "")
    if not recorded:
        return None
    splits = int_list(inputs[name_at + 1]) if 0 <= name_at < len(inputs) - 1 else []
    splits_out = int_list(inputs[name_at + 2]) if 0 <= name_at < len(inputs) - 2 else []
    splits = splits or int_list(attributes.get("in_split_size"))
    splits_out = splits_out or int_list(attributes.get("out_split_size"))
    group, size = _group(inputs, name_at, attributes)
    size = None if recorded in NOT_COLLECTIVES else size or len(splits) or len(splits_out) or None
    rank = inputs[name_at - 1] if name_at >= 1 and type(inputs[name_at - 1]) is int else None
    identity = node.get("id")
    # the arguments before the name are the tensors; split lists after it are plain numbers
    bytes_in = _bytes(path, identity, inputs[: max(name_at, 0)])
    bytes_out = _bytes(path, identity, _values(node, "outputs"))
    dtype = _dtype(node, attributes)
    width = element_bytes(dtype)
    if bytes_in == 0 and width and recorded not in NOT_COLLECTIVES:
        bytes_in = (whole(attributes.get("in_msg_nelems")) or 0) * width
        bytes_out = bytes_out or (whole(attributes.get("out_msg_nelems")) or 0) * width
    return EtCollective(
        recorded,
        collective_of(recorded),
        bytes_in,
        bytes_out,
        dtype,
        splits,
        splits_out,
        group,
        size,
        rank if rank is not None and rank >= 0 and collective_of(recorded) in _OWN_RANK else None,
        phase,
    )


def _dtype(node: Mapping[str, Any], attributes: Mapping[str, Any]) -> str:
    named = attributes.get("dtype")
    if isinstance(named, str) and named:
        return named
    types = node.get("input_types")
    side = node.get("inputs")
    if types is None and isinstance(side, dict):
        types = side.get("types")
    first = str(types[0]) if isinstance(types, list) and types else ""
    return first.rsplit("Tensor(", 1)[1].split(")", 1)[0] if "Tensor(" in first else ""


class _Nodes:
    """Names and parents of the nodes, to find the annotation that a collective lies under."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._phases: dict[int, Phase] = {}

    def add(self, node: Mapping[str, Any]) -> None:
        identity = node.get("id")
        parent = node.get("ctrl_deps", node.get("parent"))
        if type(identity) is int:
            if type(parent) is int:
                self._parents[identity] = parent
            phase = phase_of(str(node.get("name", "")))
            if phase is not None:
                self._phases[identity] = phase

    def phase(self, identity: object) -> Phase | None:
        seen: set[int] = set()
        while type(identity) is int and identity not in seen:
            if identity in self._phases:
                return self._phases[identity]
            seen.add(identity)
            identity = self._parents.get(identity)
        return None


def _kernel(path: str, node: Mapping[str, Any], phase: Phase | None) -> EtKernel | None:
    """The device event that a node stands for; `None` where it stands for none."""
    if str(node.get("cat")).lower() not in _DEVICE_CATEGORIES:
        return None
    start, duration = exact_ns(node.get("ts")), exact_ns(node.get("dur"))
    if start is None or duration is None or duration < 0 or max(abs(start), duration) >= 2**61:
        raise TraceError(
            f"{path}: node {node.get('id')}: ts and dur must be times in us, "
            f"got {node.get('ts')!r}, {node.get('dur')!r}"
        )
    return EtKernel(str(node["name"]), f"device {node.get('pid')} stream {node.get('tid')}", start, duration, phase)


def sniff(head: Head) -> bool:
    """Whether this is an object with a schema and nodes."""
    if not head.stripped.startswith(b"{"):
        return False
    return (head.has("schema") and head.has("nodes", "start_ts")) or "nodes" in head.lists


def read(path: Path, options: Options) -> EtRank:
    """The communications of one rank's execution trace.

    Raises:
        TraceError: cut short, or an invalid node.
    """
    name = str(path)
    stream = EventStream(path, events_key="nodes", partial=options.partial, on_progress=options.on_progress)
    nodes = _Nodes()
    pending: list[Mapping[str, Any]] = []
    for index, node in enumerate(stream):
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            raise TraceError(f"{name}: nodes[{index}] must be an object with a name, got {str(node)[:60]!r}")
        nodes.add(node)
        if node["name"] == "record_param_comms" or "cat" in node:
            pending.append(node)
    schema = stream.meta.get("schema")
    if not isinstance(schema, str):
        raise TraceError(f"{name}: schema must name the version of the execution trace, got {schema!r}")
    collectives: list[EtCollective] = []
    kernels: list[EtKernel] = []
    for node in pending:
        phase = nodes.phase(node.get("id"))
        if kernel := _kernel(name, node, phase):
            kernels.append(kernel)
        elif node["name"] == "record_param_comms" and (one := _collective(name, node, phase)):
            collectives.append(one)
    return EtRank.of(name, schema, stream.num_events, collectives, kernels)


def summarise(trace: EtRank) -> Found:
    """The rank's trace, whose sizes complete those of its profiler trace where both are imported."""
    return Found(rank=trace.rank, trace=trace)


# -- rows and summary ------------------------------------------------------------------------------------------------


def et_rows(trace: EtRank) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Table rows (sizes without times) and the JSON summary of a rank."""
    source = provenance(Origin.RECORDED, Path(trace.path).name)
    rows: list[dict[str, Any]] = []
    counts: dict[str, dict[str, int]] = {}
    recorded: dict[str, dict[str, int]] = {}
    for one in trace.collectives:
        count(recorded, one.recorded, bytes=one.bytes_in, bytes_out=one.bytes_out)
        if one.recorded in NOT_COLLECTIVES:
            continue
        count(counts, one.collective, bytes=one.bytes_in, bytes_out=one.bytes_out)
        kind, _ = kind_of_collective(one.collective, one.phase, is_integer(one.dtype) if one.dtype else None)
        rows.append(
            {
                "rank": trace.rank,
                "kind": kind_name(kind),
                "op": one.recorded,
                "bytes": one.bytes_in,
                "bytes_out": one.bytes_out,
                "collective": one.collective,
                "group": one.group or None,
                "group_size": one.group_size,
                "splits": json.dumps(one.splits) if one.splits else None,
                "splits_out": json.dumps(one.splits_out) if one.splits_out else None,
                "launch_ns": one.start_ns,
                "source": source,
            }
        )
    rows.extend(_kernel_row(trace, kernel) for kernel in trace.kernels)
    summary = {
        "rank": trace.rank,
        "rank_source": trace.rank_source,
        "world_size": trace.world_size,
        "file": trace.path,
        "schema": trace.schema,
        "num_nodes": trace.num_nodes,
        "num_device_nodes": len(trace.kernels),
        "duration_us": ns_to_us(sum(one.duration_ns for one in trace.kernels)) if trace.kernels else None,
        "collectives": dict(sorted(counts.items())),
        "collectives_as_recorded": dict(sorted(recorded.items())),
    }
    return rows, summary


def _kernel_row(trace: EtRank, kernel: EtKernel) -> dict[str, Any]:
    collective = kernel_collective(kernel.name)
    phase = kernel.phase
    kind = kind_of_collective(collective, phase, None)[0] if collective else phase.kind if phase else None
    return {
        "rank": trace.rank,
        "stream": kernel.stream,
        "kind": kind_name(kind),
        "op": kernel.name,
        "start_ns": kernel.start_ns,
        "end_ns": kernel.start_ns + kernel.duration_ns,
        "duration_ns": kernel.duration_ns,
        "collective": collective,
        "source": provenance(Origin.MEASURED, Path(trace.path).name),
    }
