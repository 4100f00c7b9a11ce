"""One measured exchange of a benchmark: the row that every log and table of collectives is turned into."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nestpipe.base import NS_PER_S
from traces.formats.nccl_text import bus_factor, collective_name

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "COLLECTIVE_COLUMNS",
    "FAILED_CHECK",
    "Given",
    "Measurement",
    "frame_of",
    "gigabytes",
    "measurement",
    "printed",
]

FAILED_CHECK = "check failed"
GIGA = 1e9  # nccl-tests' GB


class Given(NamedTuple):
    """The file, and what the caller knows that it may not say."""

    path: str
    collective: str | None
    world_size: int | None

    def named(self, text: str) -> str | None:
        """The collective that the caller, else this text, else the file's name states; a text of another is none."""
        names_another = re.search(r"_perf\b|^\w+$", text.strip()) is not None
        return (
            self.collective
            or collective_name(text)
            or (None if names_another else collective_name(Path(self.path).name))
        )

    def source(self, note: str = "", failed: str = "") -> str:
        """The provenance of a row; `failed` is what the check of its results found."""
        notes = "; ".join(part for part in (note, f"{FAILED_CHECK}: {failed}" if failed else "") if part)
        return f"measured: {Path(self.path).name}" + (f" ({notes})" if notes else "")

    def wrong(self, value: object) -> str:
        """What a count of wrong values says of the check, as `source` takes it."""
        number = printed(value)
        return f"{number:g} values wrong" if number else ""


class Measurement(NamedTuple):
    """Its fields are the columns that `read_collective_log` explains."""

    collective: str
    world_size: int
    size_bytes: int | None
    time_ns: int
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    in_place: bool
    dtype: str
    source: str


COLLECTIVE_COLUMNS = Measurement._fields


def measurement(
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
) -> Measurement:
    """A row; printed bandwidths (GB/s) are kept where they have three digits, else size over time is more exact."""
    exact = size_bytes * NS_PER_S / time_ns if time_ns > 0 else None
    algbw_bytes = float(round(algbw * GIGA)) if algbw is not None and algbw >= 1 else exact
    if busbw is not None and busbw >= 1:
        busbw_bytes: float | None = float(round(busbw * GIGA))
    else:
        busbw_bytes = None if algbw_bytes is None else algbw_bytes * bus_factor(collective, world_size)
    return Measurement(collective, world_size, size_bytes, time_ns, algbw_bytes, busbw_bytes, in_place, dtype, source)


def printed(value: object) -> float | None:
    """A printed bandwidth in GB/s; `None` where there is none or it is not a finite number (`nan`, `inf`)."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def gigabytes(value: object) -> float | None:
    """An average as nccl-tests give it, a number or an object with `bandwidth`, in bytes/s."""
    number = printed(value.get("bandwidth") if isinstance(value, Mapping) else value)
    return None if number is None else float(round(number * GIGA))


def frame_of(rows: list[Measurement]) -> pd.DataFrame:
    """The rows as a typed table."""
    import pandas as pd

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
