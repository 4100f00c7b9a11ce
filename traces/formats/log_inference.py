"""Which collective a log measured and over how many ranks, where it does not say: by bandwidths, roots and checks.

Source: nccl-tests `doc/PERFORMANCE.md` (bus factors) and the test programs (root column, checks in place).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from nestpipe.base import TraceError
from traces.formats.nccl_text import BUS_FACTORS, LogHeader, LogRow, collective_name

__all__ = ["infer_collective", "infer_world_size"]

# those for which nccl-tests print the root rank; -1 for all others
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


def _printed_range(text: str) -> tuple[float, float]:
    decimals = len(text.split(".")[1]) if "." in text and "e" not in text.lower() else 0
    half = 0.5 * 10.0**-decimals
    return float(text) - half, float(text) + half


def factor_range(rows: Iterable[LogRow]) -> tuple[float, float] | None:
    """Between what busbw / algbw must lie for all rows, given that both were rounded when printed."""
    low, high, seen = 0.0, 2.0, False
    for row in rows:
        if row.algbw is None or row.busbw is None or not float(row.algbw) >= 5 or not math.isfinite(float(row.algbw)):
            continue
        (alg_low, alg_high), (bus_low, bus_high) = _printed_range(row.algbw), _printed_range(row.busbw)
        low, high, seen = max(low, bus_low / alg_high), min(high, bus_high / alg_low), True
    return (low, high) if seen and low <= high else None


_NAME_IT = "name it in the file's name, such as all_gather.log (in Python: collective=)"


def infer_collective(path: str, header: LogHeader, rows: list[LogRow], hint: str) -> str:
    """The collective that a log measured: as stated, else one its bandwidths allow, chosen by the file name (`hint`).

    Raises:
        TraceError: several are possible, or the log names a test of none that is known.
    """
    if header.test:
        if named := collective_name(header.test):
            return named
        raise TraceError(
            f"{path}: the log says that it is of {header.test}, which measures none of {', '.join(BUS_FACTORS)}; "
            "pass collective= if it is one of them"
        )
    named = collective_name(hint)
    bounds = factor_range(rows)
    if bounds is None:
        if named:
            return named
        raise TraceError(f"{path}: the log does not say which collective it measured; {_NAME_IT}")
    reduces = any(row.redop not in ("", "none") for row in rows)
    names: tuple[str, ...]
    if reduces:
        names = ("all_reduce", "reduce_scatter", "reduce", "send_recv")
    else:
        names = ("all_to_all", "all_gather", "gather", "scatter", "broadcast", "send_recv")
    possible = [name for name in names if _allows(name, bounds) and _has_root(name, rows)]
    if named in possible:
        return named
    checked = {row.in_place for row in rows if row.checked}
    if possible[:2] == ["all_to_all", "all_gather"] and checked == {False} and any(row.in_place for row in rows):
        return "all_to_all"  # nccl-tests check it out of place only, and all others of these in place as well
    if len(possible) == 1:
        return possible[0]
    choices = ", ".join(possible) or "none of those known"
    raise TraceError(f"{path}: busbw/algbw allows {choices}; {_NAME_IT}")


def _has_root(name: str, rows: list[LogRow]) -> bool:
    """Whether the printed root ranks allow this collective."""
    roots = {row.root >= 0 for row in rows if row.root is not None}
    return not roots or roots == {name in _ROOTED}


def _allows(name: str, bounds: tuple[float, float]) -> bool:
    low, high = bounds
    weight = BUS_FACTORS[name]
    if weight is None:
        return low <= 1 <= high
    # a group has at least two ranks, so the factor lies between weight / 2 and weight
    return high >= weight / 2 and low < weight


def infer_world_size(path: str, collective: str, header: LogHeader, rows: list[LogRow], hint: str) -> tuple[int, str]:
    """Ranks that took part, and how that is known: printed, by the file's name, or from busbw/algbw.

    The factor that the program itself applied outranks what a name claims.

    Raises:
        TraceError: unknown, or the list of devices and the factor contradict each other.
    """
    claims = [(header.num_ranks, "printed")] if header.num_ranks else []
    claims += [
        (int(number), "file name") for number in re.findall(r"(?<![a-z])(\d+)(?=[_-]?(?:gpu|npu|rank|device))", hint)
    ]
    claims += [(int(number), "file name") for number in re.findall(r"[a-z]\d+x(\d+)(?![0-9])", hint)]
    claims = [(number, how) for number, how in claims if number and number >= 2]
    bounds, weight = factor_range(rows), BUS_FACTORS[collective]
    if bounds is None or weight is None:
        if claims:
            number, how = claims[0]
            return int(number), how
        raise TraceError(f"{path}: the log does not say how many ranks took part; pass world_size=")
    low = max(2, math.ceil(weight / (weight - min(bounds[0], weight * (1 - 1e-9))) - 1e-9))
    high = math.floor(weight / (weight - bounds[1]) + 1e-9) if bounds[1] < weight else math.inf
    for number, how in claims:
        if number and low <= number <= high:
            return number, how
    if low > high:
        raise TraceError(f"{path}: no number of ranks gives the printed busbw/algbw for {collective}; pass world_size=")
    span = f"{low} or more" if high == math.inf else f"{low} to {high}" if high > low else f"{low}"
    if header.num_ranks:
        raise TraceError(
            f"{path}: the list of devices has {header.num_ranks} ranks, but busbw/algbw of {collective} is that of "
            f"{span}; correct the list or the collective, or pass world_size="
        )
    powers = [2**k for k in range(1, 24) if low <= 2**k <= high]
    if low != high and len(powers) != 1:
        raise TraceError(
            f"{path}: busbw/algbw of {collective} allows {span} ranks; write the number into the file's name, such as "
            "all_reduce_64gpu.log, or pass world_size="
        )
    return (
        (low, "inferred from busbw/algbw")
        if low == high
        else (powers[0], f"inferred from busbw/algbw, the power of two in {span}")
    )
