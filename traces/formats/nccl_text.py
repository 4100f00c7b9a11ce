"""What nccl-tests, RCCL tests and the HCCL tester print: rows of a size and its times, out of place and in place.

Source: nccl-tests `src/common.cu` and `src/util.cu` (columns, units, `size` = larger of send and receive buffer of a
rank), `doc/PERFORMANCE.md` (bus factors); HCCL performance tester, result description (CANN 8.0).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from nestpipe.base import TraceError
from traces.formats.phases import known_collective

__all__ = [
    "BUS_FACTORS",
    "LogHeader",
    "LogRow",
    "bare",
    "bus_factor",
    "collective_name",
    "parse_text",
]

# (numerator, weight of 1/n): busbw / algbw = numerator x (n - 1) / n, or 1 where it does not depend on n
BUS_FACTORS: dict[str, float | None] = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
    "gather": 1.0,
    "scatter": 1.0,
    "broadcast": None,
    "reduce": None,
    "send_recv": None,
}

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$")
_RANK_LINE = re.compile(r"^#?\s*Rank\s+(\d+)\s+.*\bdevice\b", re.IGNORECASE)
_FAILED = re.compile(r"Out of bounds values\s*:\s*(\d+)\s*FAILED", re.IGNORECASE)
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*([0-9.eE+-]+)", re.IGNORECASE)
_START = re.compile(r"Collective test starting:\s*(\S+)", re.IGNORECASE)


# the printed bandwidth decides which of two units is meant
_SIZE_UNITS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("b", "byte", "bytes"), (1,)),
    **{f"{k}ib": (1024**n,) for n, k in enumerate("kmg", 1)},
    **{name: (1000**n, 1024**n) for n, k in enumerate("kmg", 1) for name in (f"{k}b", f"{k}bytes")},
}
_TIME_UNITS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
_BANDWIDTH_UNITS = {"mb/s": 1e-3, "gb/s": 1.0, "gbyte/s": 1.0, "gbytes/s": 1.0, "gbps": 0.125, "gbit/s": 0.125}
# what mpirun --tag-output, srun --label and terminals put around a line
_WRAPPING = re.compile(r"\x1b\[[0-9;]*m|^\[\d+,\d+\]<std(?:out|err)>:|^\s*\d+: (?=\s*[\d#])")


def bare(line: str) -> str:
    """A line without what launchers and terminals add to it.

    >>> bare("[1,0]<stdout>:  8  2  float"), bare("0: # size"), bare(" 8 2 float ")
    ('8  2  float', '# size', '8 2 float')
    """
    return _WRAPPING.sub("", line).strip()


class LogRow(NamedTuple):
    """One line of a log and one placement of it; bandwidths in GB/s (10^9) as printed, `None` where not.

    `root` is the printed root rank, -1 where the collective has none, `None` where it is not printed; `failed` says
    what the check of the results found wrong.
    """

    line: int
    size_bytes: int
    dtype: str
    redop: str
    time_us: float
    algbw: str | None
    busbw: str | None
    in_place: bool
    checked: bool
    root: int | None = None
    failed: str = ""


class LogHeader(NamedTuple):
    """What the lines around the rows state: test program, ranks, average bus bandwidth in bytes/s, failed checks."""

    test: str | None
    num_ranks: int | None
    average_busbw: float | None
    num_failed: int = 0


def bus_factor(collective: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    >>> bus_factor("all_reduce", 8), bus_factor("all_to_all", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    weight = BUS_FACTORS.get(collective)
    return 1.0 if weight is None else weight * (world_size - 1) / world_size


def collective_name(text: str) -> str | None:
    """The collective that a program, column or file name speaks of.

    >>> collective_name("alltoallv_perf"), collective_name("ncclAllReduce"), collective_name("hello")
    ('all_to_all', 'all_reduce', None)
    """
    name = known_collective(text.lower())
    return name if name in BUS_FACTORS else None


def _is_number(token: str) -> bool:
    return _NUMBER.match(token) is not None or token.lower() in ("nan", "inf")


def _header_shape(line: str) -> tuple[bool, int, bool] | None:
    """If `line` is the column header: is there a `root` column, how many columns has a placement, is one `#wrong`."""
    words = re.sub(r"\([^)]*\)", "", line.lstrip("#")).split()
    if len(words) < 6 or words[0] != "size" or "time" not in words:
        return None
    first = words.index("time")
    rest = words[first + 1 :]
    width = rest.index("time") + 1 if "time" in rest else len(rest) + 1
    return "root" in words[:first], width, "#wrong" in rest


def _row(path: str, number: int, tokens: list[str], shape: tuple[bool, int, bool]) -> list[LogRow]:
    has_root, width, counts_wrong = shape
    size, dtype, rest = int(tokens[0]), tokens[2], tokens[3:]
    redop = ""
    if rest and not _is_number(rest[0]) and rest[0] != "N/A":
        redop, rest = rest[0], rest[1:]
    root: int | None = None
    if has_root and rest:
        root, rest = int(rest[0]) if re.fullmatch(r"-?\d{1,9}", rest[0]) else None, rest[1:]
    rows: list[LogRow] = []
    for placement in range(2):
        cells = rest[placement * width : placement * width + width]
        if len(cells) < 3:
            break
        if not all(_is_number(cell) for cell in cells[:3]):
            continue
        time_us = float(cells[0])
        if not 0 <= time_us < 1e15 or size >= 2**62:
            raise TraceError(
                f"{path}: line {number}: a size of {size} B in {cells[0]} us is invalid; is the line damaged?"
            )
        checked = len(cells) > 3 and cells[3] != "N/A"
        failed = f"{cells[3]} values wrong" if checked and counts_wrong and cells[3].strip("0") else ""
        rows.append(
            LogRow(number, size, dtype, redop, time_us, cells[1], cells[2], placement == 1, checked, root, failed)
        )
    if not rows:
        raise TraceError(
            f"{path}: line {number}: expected size, count, type, [redop, root], then time, algbw and busbw, "
            f"got {' '.join(tokens)!r}; is the line cut short?"
        )
    return rows


class _HcclColumns(NamedTuple):
    """Where the HCCL tester's header puts what, and in which units."""

    size: int = 0
    time: int = 1
    bandwidth: int = 2
    size_bytes: tuple[int, ...] = (1,)
    time_us: float = 1.0
    bandwidth_gb: float = 1.0


def _hccl_columns(path: str, number: int, line: str) -> _HcclColumns:
    """The columns of a header such as `data_size(Bytes): | aveg_time(us): | alg_bandwidth(GB/s): | check_result:`.

    Raises:
        TraceError: a column is missing, or in a unit that is not known.
    """
    cells = [cell.strip() for cell in line.split("|")] if "|" in line else re.findall(r"\S+", line)
    places: dict[str, tuple[int, str]] = {}
    for at, cell in enumerate(cells):
        name, _, unit = cell.rstrip(":").partition("(")
        for key in ("size", "time", "bandwidth"):
            if key in name.lower():
                places[key] = at, unit.rstrip("):").strip().lower()
    found: list[Any] = []
    for key, units in (("size", _SIZE_UNITS), ("time", _TIME_UNITS), ("bandwidth", _BANDWIDTH_UNITS)):
        if key not in places or places[key][1] not in units:
            got = f"({places[key][1]})" if key in places else "none"
            raise TraceError(
                f"{path}: line {number}: expected a column {key} in one of {', '.join(units)}, got {got}; "
                "convert the column"
            )
        found.append(units[places[key][1]])
    return _HcclColumns(places["size"][0], places["time"][0], places["bandwidth"][0], *found)


def _hccl_row(path: str, number: int, cells: list[str], columns: _HcclColumns) -> LogRow | None:
    """A row of the HCCL tester; `None` where the line is none.

    Raises:
        TraceError: invalid, or in KB, MB or GB that may be powers of 1000 or of 1024.
    """
    if len(cells) < 3 or max(columns[:3]) >= len(cells):
        return None
    size, time, bandwidth = (cells[at] for at in columns[:3])
    if not (_is_number(size) and _is_number(time) and _is_number(bandwidth)):
        return None
    time_us, gb = float(time) * columns.time_us, float(bandwidth) * columns.bandwidth_gb
    if not (0 <= time_us < 1e15 and 0 <= float(size) * columns.size_bytes[-1] < 2**62):
        raise TraceError(f"{path}: line {number}: a size of {size} in {time} is invalid; is the line damaged?")
    sizes = [float(size) * unit for unit in columns.size_bytes]
    if len(sizes) > 1:
        # the printed bandwidth is size over time in 10^9 bytes, so it says which of the two was meant
        sizes = [each for each in sizes if time_us and abs(each / (time_us * 1e3) / gb - 1) < 0.01] if gb else []
    if len(sizes) != 1 or sizes[0] != int(sizes[0]):
        raise TraceError(
            f"{path}: line {number}: a size of {size} is no whole number of bytes, or the unit may be powers of 1000 "
            "or of 1024 and the bandwidth does not tell; give bytes"
        )
    shown = bandwidth if columns.bandwidth_gb == 1 else repr(gb)
    failed = "" if "fail" not in " ".join(cells).lower() else "results wrong"
    return LogRow(number, int(sizes[0]), "", "", time_us, shown, None, False, "success" in cells, None, failed)


def sections(lines: Iterable[tuple[int, str]]) -> list[list[tuple[int, str]]]:
    """The lines of each test where one file holds several, one after the other."""
    found: list[list[tuple[int, str]]] = [[]]
    has_rows = False
    for number, line in lines:
        text = bare(line)
        if has_rows and (_START.search(text) or text.startswith(("# nThread", "# Using devices"))):
            found.append([])
            has_rows = False
        tokens = text.split()
        has_rows = has_rows or (len(tokens) > 5 and tokens[0].isdigit() and tokens[1].isdigit())
        found[-1].append((number, line))
    return found


def parse_text(path: str, lines: Iterable[tuple[int, str]]) -> tuple[LogHeader, list[LogRow]]:
    """Rows and header of a text log; rows of size 0 are left out, stray lines of libraries and launchers ignored.

    Raises:
        TraceError: an invalid row.
    """
    test: str | None = None
    ranks: set[int] = set()
    columns = (True, 4, False)
    num_failed = 0
    hccl: _HcclColumns | None = None
    average = None
    rows: list[LogRow] = []
    for number, line in lines:
        text = bare(line)
        if rank := _RANK_LINE.match(text):
            ranks.add(int(rank[1]))
        elif found := _AVERAGE.search(text):
            average = float(found[1]) if _NUMBER.match(found[1]) and float(found[1]) < 1e9 else None
        elif failed := _FAILED.search(text):
            num_failed = int(failed[1][:18])
        elif start := _START.search(text):
            test = start[1]
        elif shape := _header_shape(text):
            columns = shape
        elif re.search(r"data_size\s*\(", text):
            hccl = _hccl_columns(path, number, text)
        elif "|" in text or hccl is not None:
            cells = [cell.strip() for cell in text.split("|")] if "|" in text else text.split()
            if row := _hccl_row(path, number, cells, hccl or _HcclColumns()):
                rows.append(row)
        else:
            tokens = text.split()
            if len(tokens) >= 3 and tokens[0].isdigit() and tokens[1].isdigit() and not _is_number(tokens[2]):
                rows.extend(_row(path, number, tokens, columns))
    busbw = None if average is None else round(average * 1e9)
    return LogHeader(test, max(ranks) + 1 if ranks else None, busbw, num_failed), [
        row for row in rows if row.size_bytes > 0
    ]
