"""PARAM communication traces: what was exchanged, in which sizes and splits.

Source: facebookresearch/param, basic trace of commsTraceReplay (`in_msg_size` counts elements of `dtype`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError
from traces.formats.dtypes import element_bytes
from traces.formats.execution_trace import EtCollective, EtRank, int_list, summarise
from traces.formats.format import Head, Options
from traces.formats.json_stream import whole
from traces.formats.phases import collective_of, phase_of
from traces.formats.reading import load_json

__all__ = ["read", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether this is a list of records with `comms`."""
    return head.stripped.startswith(b"[") and head.has("comms")


def read(path: Path, _options: Options) -> EtRank:
    """The communications of a rank: records with `comms`, sizes in elements and splits.

    Raises:
        TraceError: an invalid record.
    """
    name, document = str(path), load_json(path)
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
    return EtRank.of(name, "PARAM", len(document), collectives)


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
    group_ranks = int_list(record.get("global_ranks"))
    return EtCollective(
        recorded,
        collective_of(recorded),
        sizes[0],
        sizes[1],
        dtype,
        int_list(record.get("in_split")),
        int_list(record.get("out_split")),
        str(record.get("pg_id", "")),
        whole(record.get("world_size")) or len(group_ranks) or None,
        None,
        phase_of(str((record.get("markers") or [""])[0])) if isinstance(record.get("markers"), list) else None,
        start if start is not None and 0 <= start < 2**62 else None,
    )
