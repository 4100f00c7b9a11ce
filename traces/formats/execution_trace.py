"""PyTorch execution traces and PARAM communication traces: what was exchanged, in which sizes and splits; no times.

An execution trace records each collective as a node `record_param_comms` whose tensors are tuples (tensor id, storage
id, offset, number of elements, bytes an element, device). Both layouts are read: schema 1.0.1 (`inputs`, `input_types`,
`parent`) and 1.0.2 to 1.1.x of Chakra (`inputs.values`, `ctrl_deps`, `attrs`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nestpipe.base import TraceError
from traces.formats.collective_logs import element_bytes
from traces.formats.json_stream import EventStream, whole
from traces.formats.kineto import rank_in_name
from traces.formats.kineto_join import kind_of_collective
from traces.formats.phases import Phase, collective_of, phase_of
from traces.table import Origin, provenance

__all__ = ["EtCollective", "EtRank", "et_rows", "read_execution_trace", "read_param_trace"]

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


class EtRank(NamedTuple):
    """What one file holds."""

    path: str
    schema: str
    rank: int | None
    rank_source: str
    world_size: int | None
    num_nodes: int
    collectives: list[EtCollective]


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
    for count, width in _tensors(values):
        if count < 0 or width < 0 or count * width >= 2**62:
            raise TraceError(f"{path}: node {node}: a tensor of {count} elements of {width} bytes cannot be")
        total += count * width
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


def _int_list(value: object) -> list[int]:
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
    splits = _int_list(inputs[name_at + 1]) if 0 <= name_at < len(inputs) - 1 else []
    splits_out = _int_list(inputs[name_at + 2]) if 0 <= name_at < len(inputs) - 2 else []
    splits = splits or _int_list(attributes.get("in_split_size"))
    splits_out = splits_out or _int_list(attributes.get("out_split_size"))
    group, size = _group(inputs, name_at, attributes)
    if size is None and recorded not in NOT_COLLECTIVES:
        size = len(splits) or len(splits_out) or None
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


def read_execution_trace(
    path: str | os.PathLike[str], *, partial: bool = False, on_progress: Callable[[int], None] | None = None
) -> EtRank:
    """The communications of one rank's execution trace.

    Raises:
        TraceError: not such a file, cut short, or a node that cannot be.
    """
    name = os.fspath(path)
    stream = EventStream(path, events_key="nodes", partial=partial, on_progress=on_progress)
    nodes = _Nodes()
    pending: list[Mapping[str, Any]] = []
    for index, node in enumerate(stream):
        if not isinstance(node, dict) or not isinstance(node.get("name"), str):
            raise TraceError(f"{name}: nodes[{index}] must be an object with a name, got {str(node)[:60]!r}")
        nodes.add(node)
        if node["name"] == "record_param_comms":
            pending.append(node)
    schema = stream.meta.get("schema")
    if not isinstance(schema, str):
        raise TraceError(f"{name}: schema must name the version of the execution trace, got {schema!r}")
    found = [_collective(name, node, nodes.phase(node.get("id"))) for node in pending]
    collectives = [one for one in found if one is not None]
    # some schemas record 0 on every rank, so a name that states the rank is worth more
    rank, source = rank_in_name(name), "file name"
    if rank is None:
        rank = next((one.rank for one in collectives if one.rank is not None), None)
        source = "record_param_comms" if rank is not None else "unknown"
    sizes = [one.group_size for one in collectives if one.group_size and one.recorded not in NOT_COLLECTIVES]
    world = max(sizes) if sizes else None
    return EtRank(name, schema, rank, source, world, stream.num_events, collectives)


# -- PARAM -----------------------------------------------------------------------------------------------------------


def read_param_trace(path: str | os.PathLike[str], document: object) -> EtRank:
    """The communications of a PARAM trace: a list of records with `comms`, sizes in elements and splits.

    Source: facebookresearch/param, basic trace of commsTraceReplay (`in_msg_size` counts elements of `dtype`).

    Raises:
        TraceError: a record that cannot be.
    """
    name = os.fspath(path)
    if not isinstance(document, list):
        raise TraceError(f"{name}: expected a list of communication records")
    collectives: list[EtCollective] = []
    for index, record in enumerate(document):
        if not isinstance(record, dict):
            raise TraceError(f"{name}: record {index} must be an object, got {str(record)[:40]!r}")
        if isinstance(record.get("comms"), str):
            collectives.append(_param_record(name, index, record))
    if not collectives:
        raise TraceError(f"{name}: no record with 'comms' among {len(document)}; expected a PARAM communication trace")
    rank = rank_in_name(name)
    sizes = [one.group_size for one in collectives if one.group_size]
    world = max(sizes) if sizes else None
    source = "unknown" if rank is None else "file name"
    return EtRank(name, "PARAM", rank, source, world, len(document), collectives)


def _param_record(name: str, index: int, record: Mapping[str, Any]) -> EtCollective:
    recorded = str(record["comms"]).lower()
    dtype = str(record.get("dtype", ""))
    width = element_bytes(dtype)
    sizes: list[int] = []
    for key in ("in_msg_size", "out_msg_size"):
        count = whole(record.get(key, 0))
        if count is None or not 0 <= count < 2**58:
            raise TraceError(f"{name}: record {index}: {key} must count elements from 0 up, got {record.get(key)!r}")
        if count and width is None:
            raise TraceError(f"{name}: record {index}: dtype {dtype!r} has no known element size")
        sizes.append(count * (width or 0))
    start = whole(record.get("startTime_ns"))
    group_ranks = _int_list(record.get("global_ranks"))
    return EtCollective(
        recorded,
        collective_of(recorded),
        sizes[0],
        sizes[1],
        dtype,
        _int_list(record.get("in_split")),
        _int_list(record.get("out_split")),
        str(record.get("pg_id", "")),
        whole(record.get("world_size")) or len(group_ranks) or None,
        None,
        phase_of(str((record.get("markers") or [""])[0])) if isinstance(record.get("markers"), list) else None,
        start if start is not None and 0 <= start < 2**62 else None,
    )


# -- rows and summary ------------------------------------------------------------------------------------------------


def et_rows(trace: EtRank) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Table rows (sizes without times) and the JSON summary of a rank."""
    source = provenance(Origin.RECORDED, Path(trace.path).name)
    rows: list[dict[str, Any]] = []
    counts: dict[str, dict[str, int]] = {}
    recorded: dict[str, dict[str, int]] = {}
    for one in trace.collectives:
        for table, name in ((recorded, one.recorded), (counts, one.collective)):
            if table is counts and one.recorded in NOT_COLLECTIVES:
                continue
            entry = table.setdefault(name, {"count": 0, "bytes": 0, "bytes_out": 0})
            entry["count"] += 1
            entry["bytes"] += one.bytes_in
            entry["bytes_out"] += one.bytes_out
        if one.recorded in NOT_COLLECTIVES:
            continue
        integers = "int" in one.dtype.lower() or "long" in one.dtype.lower() if one.dtype else None
        kind, _ = kind_of_collective(one.collective, one.phase, integers)
        rows.append(
            {
                "rank": trace.rank,
                "kind": kind.value if kind is not None else "unclassified",
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
    summary = {
        "rank": trace.rank,
        "rank_source": trace.rank_source,
        "world_size": trace.world_size,
        "file": trace.path,
        "schema": trace.schema,
        "num_nodes": trace.num_nodes,
        "collectives": dict(sorted(counts.items())),
        "collectives_as_recorded": dict(sorted(recorded.items())),
    }
    return rows, summary
