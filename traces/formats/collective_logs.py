"""Measured collectives as one table, whoever printed them: nccl-tests, RCCL tests, HCCL, or a table of a tool.

`read_collective_log(path)` tells the formats apart by content. A row is one size of one collective at one world size,
out of place or in place; `time_ns` is what was measured, the bandwidths follow nccl-tests' definitions.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from nestpipe.base import NS_PER_S, TraceError, ms_to_ns, us_to_ns
from traces.formats.nccl_text import (
    LogRow,
    bus_factor,
    collective_name,
    infer_collective,
    infer_world_size,
    parse_text,
    sections,
)
from traces.formats.reading import parse_json, read_head, read_text, text_lines

__all__ = [
    "COLLECTIVE_COLUMNS",
    "ELEMENT_BYTES",
    "element_bytes",
    "looks_like_log",
    "read_bus_ratios",
    "read_collective_log",
]

COLLECTIVE_COLUMNS = (
    "collective",
    "world_size",
    "size_bytes",
    "time_ns",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "in_place",
    "dtype",
    "source",
)
GIGA = 1e9  # nccl-tests' GB

ELEMENT_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "byte", "bool", "fp8", "f8e4m3", "f8e5m2", "signed char"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "unsigned char", "c10::float8_e4m3fn", "c10::float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "fp8_e4m3", "fp8_e5m2", "qint8", "quint8"), 1),
    **dict.fromkeys(("half", "float16", "fp16", "bf16", "bfloat16", "short", "int16", "uint16", "c10::half"), 2),
    **dict.fromkeys(("c10::bfloat16", "short int", "unsigned short"), 2),
    **dict.fromkeys(("float", "float32", "fp32", "int", "int32", "uint32", "c10::float", "unsigned int", "qint32"), 4),
    **dict.fromkeys(
        ("double", "float64", "fp64", "int64", "uint64", "long", "long int", "long long", "unsigned long"), 8
    ),
    **dict.fromkeys(("c10::complex<float>", "complex64", "complexfloat"), 8),
    **dict.fromkeys(("c10::complex<double>", "complex128", "complexdouble"), 16),
}


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element of a dtype as PyTorch, NCCL or a C compiler spells it; `None` where unknown.

    >>> element_bytes("Half"), element_bytes("long int"), element_bytes("opaque")
    (2, 8, None)
    """
    return ELEMENT_BYTES.get(dtype.strip().lower())


class _Measurement(NamedTuple):
    collective: str
    world_size: int
    size_bytes: int | None
    time_ns: int
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    in_place: bool
    dtype: str
    source: str


def _bandwidth(size_bytes: int, time_ns: int) -> float | None:
    return size_bytes * NS_PER_S / time_ns if time_ns > 0 else None


def _measurement(
    collective: str,
    world_size: int,
    size_bytes: int,
    time_ns: int,
    source: str,
    *,
    dtype: str = "",
    in_place: bool = False,
    algbw: float | None = None,
    busbw: float | None = None,
) -> _Measurement:
    """A row; printed bandwidths (GB/s) are kept where they have three digits, else size over time is more exact."""
    exact = _bandwidth(size_bytes, time_ns)
    algbw_bytes = float(round(algbw * GIGA)) if algbw is not None and algbw >= 1 else exact
    if busbw is not None and busbw >= 1:
        busbw_bytes: float | None = float(round(busbw * GIGA))
    else:
        busbw_bytes = None if algbw_bytes is None else algbw_bytes * bus_factor(collective, world_size)
    return _Measurement(collective, world_size, size_bytes, time_ns, algbw_bytes, busbw_bytes, in_place, dtype, source)


def _printed(value: object) -> float | None:
    """A printed bandwidth in GB/s; `None` where there is none or it is not a finite number (`nan`, `inf`)."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _gigabytes(value: object) -> float | None:
    """An average as nccl-tests give it, a number or an object with `bandwidth`, in bytes/s."""
    number = _printed(value.get("bandwidth") if isinstance(value, Mapping) else value)
    return None if number is None else float(round(number * GIGA))


def _from_rows(path: str, rows: list[LogRow], collective: str, world_size: int, how: str) -> list[_Measurement]:
    note = "" if how == "printed" else f" (world size: {how})"
    source = f"measured: {Path(path).name}{note}"
    return [
        _measurement(
            collective,
            world_size,
            row.size_bytes,
            us_to_ns(row.time_us),
            source,
            dtype=row.dtype,
            in_place=row.in_place,
            algbw=_printed(row.algbw),
            busbw=_printed(row.busbw),
        )
        for row in rows
    ]


def _read_text_log(
    path: str, text: str, collective: str | None, world_size: int | None
) -> tuple[list[_Measurement], float | None]:
    parts = sections(text_lines(text))
    if len(parts) > 1:
        return _several(path, parts, collective, world_size), None
    header, rows = parse_text(path, parts[0])
    if not rows:
        raise TraceError(
            f"{path}: no row of a collective log found; expected nccl-tests text or JSON, the HCCL tester's table, "
            "or a CSV with num_gpus, message_size and latency"
        )
    hint = Path(path).name.lower()
    name = collective or infer_collective(path, header, rows, hint)
    if world_size is None:
        world_size, how = infer_world_size(path, name, header, rows, hint)
    else:
        how = "given"
    return _from_rows(path, rows, name, world_size, how), header.average_busbw


def _several(
    path: str, parts: list[list[tuple[int, str]]], collective: str | None, world_size: int | None
) -> list[_Measurement]:
    """The rows of several tests in one file; the average over them would mean nothing."""
    found: list[_Measurement] = []
    for part in parts:
        text = "\n".join(line for _, line in part)
        rows, _ = _read_text_log(path, text, collective, world_size)
        found.extend(rows)
    return found


# -- JSON ------------------------------------------------------------------------------------------------------------


def _number(path: str, where: str, record: Mapping[str, Any], *names: str) -> float:
    name = next((name for name in names if name in record), names[0])
    return _quantity(f"{path}: {where}.{name}", record.get(name))


def _quantity(where: str, value: object) -> float:
    """A finite number from 0 up to what an int64 holds; JSON numbers and text alike."""
    try:
        if (
            isinstance(value, str | int | float)
            and not isinstance(value, bool)
            and 0 <= (number := float(value)) < 2**62
        ):
            return number
    except (ValueError, OverflowError):
        pass
    raise TraceError(f"{where} must be a finite number from 0 up, got {value!r}")


def _read_nccl_json(
    path: str, document: Mapping[str, Any], collective: str | None, world_size: int | None
) -> list[_Measurement]:
    config = document.get("config")
    config = config if isinstance(config, Mapping) else {}
    devices = config.get("devices")
    if world_size is None:
        if not isinstance(devices, list) or not devices:
            raise TraceError(f"{path}: config.devices must list the ranks; pass world_size=")
        world_size = len(devices)
    args = document.get("args")
    name = collective or collective_name(str(args[0]) if isinstance(args, list) and args else "")
    name = name or collective_name(Path(path).name)
    if name is None:
        raise TraceError(
            f"{path}: args[0] must name the test program, got {args!r}; "
            "or name the collective in the file's name, such as all_gather.json (in Python: collective=)"
        )
    rows: list[_Measurement] = []
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
                _measurement(
                    name,
                    world_size,
                    size,
                    us_to_ns(_number(path, where, body, "time", "cpu_time")),
                    f"measured: {Path(path).name}",
                    dtype=str(result.get("type", "")),
                    in_place=in_place,
                    algbw=_printed(body.get("alg_bw")),
                    busbw=_printed(body.get("bus_bw")),
                )
            )
    return rows


def _rccl_records(path: str, text: str) -> list[Mapping[str, Any]] | None:
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


def _read_rccl_records(
    path: str, records: list[Mapping[str, Any]], collective: str | None, world_size: int | None
) -> list[_Measurement]:
    rows: list[_Measurement] = []
    for index, record in enumerate(records):
        where = f"record {index}"
        size = int(_number(path, where, record, "size"))
        name = collective or collective_name(str(record.get("name", ""))) or collective_name(Path(path).name)
        if name is None:
            raise TraceError(f"{path}: {where}.name must name the collective, got {record.get('name')!r}")
        ranks = world_size or int(_number(path, where, record, "ranks"))
        if size > 0:
            rows.append(
                _measurement(
                    name,
                    ranks,
                    size,
                    us_to_ns(_number(path, where, record, "time")),
                    f"measured: {Path(path).name}",
                    dtype=str(record.get("type", "")),
                    in_place=str(record.get("inPlace", 0)).lower() in ("1", "true"),
                    algbw=_printed(record.get("algBw")),
                    busbw=_printed(record.get("busBw")),
                )
            )
    return rows


# -- CSV -------------------------------------------------------------------------------------------------------------


def _cell(path: str, line: int, record: Mapping[str, Any], name: str) -> float:
    return _quantity(f"{path}: line {line}: {name}", record.get(name))


def _latency_row(path: str, line: int, record: Mapping[str, Any]) -> list[_Measurement]:
    """aiconfigurator's tables: `message_size` counts elements, `latency` is ms."""
    dtype = str(record.get("nccl_dtype", ""))
    width = element_bytes(dtype)
    if width is None:
        raise TraceError(f"{path}: line {line}: nccl_dtype {dtype!r} has no known element size")
    name = collective_name(str(record.get("op_name", "")))
    if name is None:
        raise TraceError(f"{path}: line {line}: op_name {record.get('op_name')!r} is no known collective")
    ranks = int(_cell(path, line, record, "num_gpus"))
    size = int(_cell(path, line, record, "message_size")) * width
    time_ns = ms_to_ns(_cell(path, line, record, "latency"))
    return [_measurement(name, ranks, size, time_ns, f"measured: {Path(path).name}", dtype=dtype)]


def _deepep_row(path: str, line: int, record: Mapping[str, Any]) -> list[_Measurement]:
    """DeepEP: transmission times by tokens; bytes depend on the token's precision, which is not recorded."""
    ranks, tokens = int(_cell(path, line, record, "node_num")) * 8, int(_cell(path, line, record, "num_token"))
    rows: list[_Measurement] = []
    for name in ("dispatch", "combine"):
        sms, notify = int(_cell(path, line, record, f"{name}_sms")), _cell(path, line, record, f"{name}_notify_us")
        source = f"measured: {Path(path).name} (tokens {tokens}, SMs {sms}, 8 GPUs a node, notify {notify:g} us on top)"
        time_ns = us_to_ns(_cell(path, line, record, f"{name}_transmit_us"))
        rows.append(_Measurement(name, ranks, None, time_ns, None, None, False, "", source))
    return rows


def _excerpt_row(path: str, line: int, record: Mapping[str, Any]) -> list[_Measurement]:
    name = collective_name(str(record.get("op", "")))
    if name is None:
        raise TraceError(f"{path}: line {line}: op {record.get('op')!r} is no known collective")
    ranks, size = int(_cell(path, line, record, "gpus")), int(_cell(path, line, record, "size_bytes"))
    return [
        _measurement(
            name,
            ranks,
            size,
            us_to_ns(_cell(path, line, record, f"{prefix}_time_us")),
            f"measured: {Path(path).name} ({record.get('source', 'no source given')})",
            in_place=prefix == "ip",
            algbw=_printed(record.get(f"{prefix}_algbw_GBs")),
            busbw=_printed(record.get(f"{prefix}_busbw_GBs")),
        )
        for prefix in ("oop", "ip")
        if record.get(f"{prefix}_time_us") not in (None, "")
    ]


_CSV_READERS: tuple[tuple[set[str], Callable[[str, int, Mapping[str, Any]], list[_Measurement]]], ...] = (
    ({"num_gpus", "message_size", "op_name", "latency"}, _latency_row),
    ({"node_num", "num_token", "dispatch_transmit_us", "combine_transmit_us"}, _deepep_row),
    ({"gpus", "op", "size_bytes", "oop_time_us"}, _excerpt_row),
)


def _read_csv(path: str, text: str, collective: str | None, world_size: int | None) -> list[_Measurement] | None:
    """The rows of a CSV table, or `None` where the first line is no header that we know."""
    first = text.lstrip().partition("\n")[0]
    names = {name.strip().strip('"') for name in first.split(",")}
    if {"size", "time", "busBw"} <= names:
        records: list[Mapping[str, Any]] = list(csv.DictReader(io.StringIO(text.lstrip())))
        return _read_rccl_records(path, records, collective, world_size)
    for wanted, reader in _CSV_READERS:
        if wanted <= names:
            rows: list[_Measurement] = []
            table = csv.DictReader(io.StringIO(text.lstrip()), skipinitialspace=True)
            for record in table:
                rows.extend(reader(path, table.line_num, record))
            return rows
    return None


def read_bus_ratios(path: str | os.PathLike[str]) -> pd.DataFrame:
    """SimAI's ratio table in long form: size_bytes, num_nodes, world_size, label, busbw_ratio.

    The ratio is bus bandwidth over an unnamed peak. `num_nodes` and `world_size` are missing for the `Multi` columns,
    which do not say them; empty cells are unknown and left out.

    Raises:
        TraceError: not such a table.
    """
    rows = list(csv.reader(io.StringIO(read_text(path))))
    if not rows or not rows[0] or rows[0][0].strip() != "Size":
        raise TraceError(f"{path}: expected a ratio table whose first column is 'Size'")
    records = []
    for line, row in enumerate(rows[1:], start=2):
        for label, cell in zip(rows[0][1:], row[1:], strict=False):
            if not cell.strip():
                continue
            nodes, ranks = re.match(r"(\d+)\s*Node", label), re.search(r"(\d+)GPU", label)
            num_nodes = int(nodes[1]) if nodes else None
            # 8 GPUs a node, as the labelled columns have it
            world = int(ranks[1]) if ranks else (8 * num_nodes if num_nodes else None)
            size, ratio = _cell(str(path), line, {"Size": row[0]}, "Size"), _cell(str(path), line, {label: cell}, label)
            records.append((int(size), num_nodes, world, label.strip(), ratio))
    if not records:
        raise TraceError(f"{path}: the ratio table has no figure in it")
    frame = pd.DataFrame(records, columns=["size_bytes", "num_nodes", "world_size", "label", "busbw_ratio"])
    return frame.astype({"size_bytes": "int64", "num_nodes": "Int64", "world_size": "Int64", "busbw_ratio": "float64"})


def _frame(rows: list[_Measurement]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=list(COLLECTIVE_COLUMNS))
    sizes = "Int64" if any(row.size_bytes is None for row in rows) else "int64"
    return frame.astype(
        {
            "world_size": "int64",
            "size_bytes": sizes,
            "time_ns": "int64",
            "algbw_bytes_per_s": "float64",
            "busbw_bytes_per_s": "float64",
            "in_place": "bool",
        }
    )


def _parquet_as_csv(path: str) -> str:
    """aiconfigurator ships its tables as Parquet; the same columns as in its CSV."""
    try:
        return str(pd.read_parquet(path).to_csv(index=False))
    except Exception as error:  # pyarrow has no common base for what damaged files raise
        raise TraceError(f"{path}: not a readable Parquet file: {error}") from error


def looks_like_log(head: bytes) -> bool:
    """Whether the beginning of a file that looks like something else is a log: tagged by mpirun, or HCCL's."""
    return re.match(rb"\[\d+,\d+\]<std(out|err)>:", head) is not None or b"data_size(" in head[:4096]


def read_collective_log(
    path: str | os.PathLike[str], *, collective: str | None = None, world_size: int | None = None
) -> pd.DataFrame:
    """A benchmark of collectives as a table, one row per size and placement.

    Args:
        path: nccl-tests or RCCL tests text or JSON (plain or gzip), the HCCL tester's text, an aiconfigurator, DeepEP
            or transcribed CSV table.
        collective: which collective it is, for a log that does not say.
        world_size: ranks that took part, for a log that does not say.

    Returns:
        Columns `COLLECTIVE_COLUMNS`: collective (all_to_all, all_reduce, ...), world_size (ranks), size_bytes (larger
        of a rank's send and receive buffer; for all_to_all what a rank sends in total, its own share included),
        time_ns, algbw_bytes_per_s = size over time, busbw_bytes_per_s, in_place, dtype, source (provenance). Rows of
        size 0 are left out. Bandwidths are those printed where they have three digits, else computed. Where a log ends
        with an average, `attrs["average_busbw_bytes_per_s"]` holds it. DeepEP rows have no size_bytes (`<NA>`), since
        the table counts tokens.

    Raises:
        TraceError: not such a file; a value in it that cannot be; a collective or world size that nothing tells.
    """
    name = os.fspath(path)
    text = _parquet_as_csv(name) if read_head(path, 4) == b"PAR1" else read_text(path)
    average: float | None = None
    if text.lstrip()[:1] in ("{", "[") and not looks_like_log(text.lstrip()[:4096].encode()):
        records = _rccl_records(name, text)
        if records is not None:
            rows = _read_rccl_records(name, records, collective, world_size)
        else:
            document = parse_json(name, text)
            if not isinstance(document, Mapping) or not isinstance(document.get("results"), list):
                raise TraceError(f"{name}: expected nccl-tests JSON with a list 'results'")
            rows = _read_nccl_json(name, document, collective, world_size)
            average = _gigabytes(document.get("average_bus_bandwidth"))
    elif text.lstrip().startswith("Size,"):
        raise TraceError(f"{name}: a table of ratios to an unnamed peak, not of times; use read_bus_ratios")
    else:
        table = _read_csv(name, text, collective, world_size)
        if table is None:
            rows, average = _read_text_log(name, text, collective, world_size)
        else:
            rows = table
    if not rows:
        raise TraceError(f"{name}: no row with a size above 0")
    frame = _frame(rows)
    if average is not None:
        frame.attrs["average_busbw_bytes_per_s"] = average
    return frame
