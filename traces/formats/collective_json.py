"""Measured collectives in JSON: nccl-tests' document and the records of RCCL tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nestpipe.base import TraceError, us_to_ns
from traces.formats.measurement import Given, Measurement, gigabytes, measurement, printed
from traces.formats.reading import parse_json, quantity

__all__ = ["read_json", "read_records"]


def read_json(given: Given, text: str) -> tuple[list[Measurement], float | None]:
    """The rows of a JSON file, and the average bus bandwidth in bytes/s that it states.

    Raises:
        TraceError: damaged, or neither of the two.
    """
    records = _records(given.path, text)
    if records is not None:
        return read_records(given, records), None
    document = parse_json(given.path, text)
    if not isinstance(document, Mapping) or not isinstance(document.get("results"), list):
        raise TraceError(f"{given.path}: expected nccl-tests JSON with a list 'results'")
    return _results(given, document), gigabytes(document.get("average_bus_bandwidth"))


def _number(path: str, where: str, record: Mapping[str, Any], *names: str) -> float:
    name = next((name for name in names if name in record), names[0])
    return quantity(f"{path}: {where}.{name}", record.get(name))


def _results(given: Given, document: Mapping[str, Any]) -> list[Measurement]:
    path, world_size = given.path, given.world_size
    config = document.get("config")
    config = config if isinstance(config, Mapping) else {}
    devices = config.get("devices")
    if world_size is None:
        if not isinstance(devices, list) or not devices:
            raise TraceError(f"{path}: config.devices must list the ranks; pass world_size=")
        world_size = len(devices)
    args = document.get("args")
    name = given.named(str(args[0]) if isinstance(args, list) and args else "")
    if name is None:
        raise TraceError(
            f"{path}: args[0] must name the test program, got {args!r}; "
            "or name the collective in the file's name, such as all_gather.json (in Python: collective=)"
        )
    rows: list[Measurement] = []
    for index, result in enumerate(document["results"]):
        if not isinstance(result, Mapping):
            raise TraceError(f"{path}: results[{index}] must be an object, got {result!r}")
        size = int(_number(path, f"results[{index}]", result, "size"))
        for key, in_place in (("out_of_place", False), ("in_place", True)):
            body = result.get(key)
            if size <= 0 or not isinstance(body, Mapping):
                continue
            where = f"results[{index}].{key}"
            rows.append(
                measurement(
                    name,
                    world_size,
                    size,
                    us_to_ns(_number(path, where, body, "time", "cpu_time")),
                    given.source(failed=given.wrong(body.get("nwrong"))),
                    dtype=str(result.get("type", "")),
                    in_place=in_place,
                    algbw=printed(body.get("alg_bw")),
                    busbw=printed(body.get("bus_bw")),
                )
            )
    return rows


def _records(path: str, text: str) -> list[Mapping[str, Any]] | None:
    """The records of RCCL tests' `-Z json` (an array, or one object a line), if `text` is that."""
    stripped = text.strip()
    if stripped.startswith("["):
        value = parse_json(path, stripped)
    else:
        try:
            value = [json.loads(line) for line in stripped.splitlines() if line.strip()]
        except ValueError:
            return None
    records = [record for record in value if isinstance(record, Mapping)]
    return records if records and {"size", "time", "busBw"} <= records[0].keys() else None


def read_records(given: Given, records: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """The rows of RCCL tests' records, from JSON or CSV.

    Raises:
        TraceError: an invalid value, or a record whose collective is unknown.
    """
    path = given.path
    rows: list[Measurement] = []
    for index, record in enumerate(records):
        where = f"record {index}"
        size = int(_number(path, where, record, "size"))
        name = given.named(str(record.get("name", "")))
        if name is None:
            raise TraceError(f"{path}: {where}.name must name the collective, got {record.get('name')!r}")
        ranks = given.world_size or int(_number(path, where, record, "ranks"))
        if size > 0:
            rows.append(
                measurement(
                    name,
                    ranks,
                    size,
                    us_to_ns(_number(path, where, record, "time")),
                    given.source(failed=given.wrong(record.get("wrong"))),
                    dtype=str(record.get("type", "")),
                    in_place=str(record.get("inPlace", 0)).lower() in ("1", "true"),
                    algbw=printed(record.get("algBw")),
                    busbw=printed(record.get("busBw")),
                )
            )
    return rows
