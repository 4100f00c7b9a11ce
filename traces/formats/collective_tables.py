"""Measured collectives in tables: RCCL tests' CSV, aiconfigurator's, DeepEP's, and rows copied from a publication."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nestpipe.base import TraceError, ms_to_ns, us_to_ns
from traces.formats.collective_json import read_records
from traces.formats.dtypes import element_bytes
from traces.formats.measurement import Given, Measurement, measurement, printed
from traces.formats.nccl_text import collective_name
from traces.formats.reading import quantity

__all__ = ["read_csv"]


def _cell(given: Given, line: int, record: Mapping[str, Any], name: str) -> float:
    return quantity(f"{given.path}: line {line}: {name}", record.get(name))


def _latency_row(given: Given, line: int, record: Mapping[str, Any]) -> list[Measurement]:
    """aiconfigurator's tables: `message_size` counts elements, `latency` is ms."""
    dtype = str(record.get("nccl_dtype", ""))
    width = element_bytes(dtype)
    if width is None:
        raise TraceError(f"{given.path}: line {line}: nccl_dtype {dtype!r} has no known element size")
    name = collective_name(str(record.get("op_name", "")))
    if name is None:
        raise TraceError(f"{given.path}: line {line}: op_name {record.get('op_name')!r} is no known collective")
    ranks = int(_cell(given, line, record, "num_gpus"))
    size = int(_cell(given, line, record, "message_size")) * width
    time_ns = ms_to_ns(_cell(given, line, record, "latency"))
    return [measurement(name, ranks, size, time_ns, given.source(), dtype=dtype)]


def _deepep_row(given: Given, line: int, record: Mapping[str, Any]) -> list[Measurement]:
    """DeepEP: transmission times by tokens; bytes depend on the token's precision, which is not recorded."""
    ranks, tokens = int(_cell(given, line, record, "node_num")) * 8, int(_cell(given, line, record, "num_token"))
    rows: list[Measurement] = []
    for name in ("dispatch", "combine"):
        sms, notify = int(_cell(given, line, record, f"{name}_sms")), _cell(given, line, record, f"{name}_notify_us")
        source = given.source(f"tokens {tokens}, SMs {sms}, 8 GPUs a node, notify {notify:g} us on top")
        time_ns = us_to_ns(_cell(given, line, record, f"{name}_transmit_us"))
        rows.append(Measurement(name, ranks, None, time_ns, None, None, False, "", source))
    return rows


def _excerpt_row(given: Given, line: int, record: Mapping[str, Any]) -> list[Measurement]:
    name = collective_name(str(record.get("op", "")))
    if name is None:
        raise TraceError(f"{given.path}: line {line}: op {record.get('op')!r} is no known collective")
    ranks, size = int(_cell(given, line, record, "gpus")), int(_cell(given, line, record, "size_bytes"))
    return [
        measurement(
            name,
            ranks,
            size,
            us_to_ns(_cell(given, line, record, f"{prefix}_time_us")),
            str(given.source(record.get("source", "no source given"))),
            in_place=prefix == "ip",
            algbw=printed(record.get(f"{prefix}_algbw_GBs")),
            busbw=printed(record.get(f"{prefix}_busbw_GBs")),
        )
        for prefix in ("oop", "ip")
        if record.get(f"{prefix}_time_us") not in (None, "")
    ]


_CSV_READERS: tuple[tuple[set[str], Callable[[Given, int, Mapping[str, Any]], list[Measurement]]], ...] = (
    ({"num_gpus", "message_size", "op_name", "latency"}, _latency_row),
    ({"node_num", "num_token", "dispatch_transmit_us", "combine_transmit_us"}, _deepep_row),
    ({"gpus", "op", "size_bytes", "oop_time_us"}, _excerpt_row),
)


def _records(text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The number of the line and the cells by column, without the blanks that some tools put around both."""
    table = csv.reader(io.StringIO(text.lstrip()), skipinitialspace=True)
    names = [name.strip().strip('"') for name in next(table)]
    for cells in table:
        if any(cell.strip().strip('"') for cell in cells):
            yield table.line_num, dict(zip(names, (cell.strip().strip('"') for cell in cells), strict=False))


def read_csv(given: Given, text: str) -> list[Measurement] | None:
    """The rows of a CSV table; `None` if the first line is not a known header.

    Raises:
        TraceError: an invalid cell.
    """
    first = text.lstrip().partition("\n")[0]
    names = {name.strip().strip('"') for name in first.split(",")}
    if {"size", "time", "busBw"} <= names:
        return read_records(given, [record for _, record in _records(text)])
    for wanted, reader in _CSV_READERS:
        if wanted <= names:
            rows: list[Measurement] = []
            for line, record in _records(text):
                rows.extend(reader(given, line, record))
            return rows
    return None
