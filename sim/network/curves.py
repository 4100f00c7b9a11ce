"""Measured collectives as curves of time against message size, and what they say about hardware as described.

A curve passes through what was measured (monotone cubic, PCHIP, in log time over log size), but between sizes no
message takes longer than a larger one was measured to take: it could be sent as the larger one, so a time above that
tells of an interruption, which its neighbours do not share. How far a curve can be trusted is found by leaving one size
out at a time. Outside the measured sizes the time is held (below) or grows with the size (above), and is called
extrapolated.

Source: PCHIP, Fritsch and Butland, SIAM J. Sci. Stat. Comput. 5(2) 1984, as in scipy.interpolate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nestpipe.base import TraceError
from sim.network.problem import Floats
from topologies.cluster import MeasuredCollective

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Basis", "Curve", "Reading", "Residuals", "read_curves", "read_measured"]

_SAME_SIZE = 1e-9
_LEAST_SIZES = 2


class Basis(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    EXTRAPOLATED = "extrapolated"


@dataclass(frozen=True, slots=True)
class Reading:
    """A time and what it rests on."""

    time_ns: int
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Errors of predicting each inner size from all others, relative to what was measured."""

    size_bytes: tuple[int, ...]
    error: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the absolute errors."""
        return float(np.median(np.abs(self.error)))

    @property
    def worst(self) -> float:
        """Greatest absolute error."""
        return float(np.abs(self.error).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Time of one collective at one world size against bytes per rank, as measured; sizes ascend."""

    collective: str
    world_size: int
    dtype: str
    in_place: bool
    source: str
    size_bytes: tuple[int, ...]
    time_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.size_bytes) < _LEAST_SIZES or any(np.diff(self.size_bytes) <= 0) or min(self.size_bytes) <= 0:
            raise TraceError(f"{self.source}: a curve needs {_LEAST_SIZES} sizes or more, positive and ascending")
        if min(self.time_ns) <= 0:
            raise TraceError(f"{self.source}: a measured time must be positive, got {min(self.time_ns)} ns")

    def at(self, size_bytes: float) -> Reading:
        """Time for a size.

        Raises:
            ValueError: the size is not positive.
        """
        if not size_bytes > 0:
            raise ValueError(f"size_bytes must be positive, got {size_bytes}")
        sizes, times = np.array(self.size_bytes, dtype=float), np.array(self.time_ns, dtype=float)
        near = int(np.abs(sizes - size_bytes).argmin())
        if abs(sizes[near] / size_bytes - 1) < _SAME_SIZE:
            return Reading(self.time_ns[near], Basis.MEASURED)
        if size_bytes < sizes[0]:
            return Reading(self.time_ns[0], Basis.EXTRAPOLATED)
        if size_bytes > sizes[-1]:
            return Reading(round(times[-1] * size_bytes / sizes[-1]), Basis.EXTRAPOLATED)
        return Reading(round(_between(sizes, times, size_bytes)), Basis.INTERPOLATED)

    def leave_one_out(self) -> Residuals:
        """How well each size between the smallest and the largest follows from the others.

        Raises:
            TraceError: fewer than four sizes.
        """
        if len(self.size_bytes) < 4:
            raise TraceError(f"{self.source}: leaving one size out needs four or more, got {len(self.size_bytes)}")
        sizes, times = np.array(self.size_bytes, dtype=float), np.array(self.time_ns, dtype=float)
        errors = []
        for left_out in range(1, len(sizes) - 1):
            kept = np.arange(len(sizes)) != left_out
            errors.append(float(_between(sizes[kept], times[kept], sizes[left_out]) / times[left_out] - 1))
        return Residuals(size_bytes=self.size_bytes[1:-1], error=tuple(errors))

    def efficiency(self, size_bytes: float, ideal_ns: float) -> tuple[float, Basis]:
        """Share of the hardware's speed that was reached: the time hardware alone would take over the measured one."""
        found = self.at(size_bytes)
        return ideal_ns / found.time_ns, found.basis


def _between(sizes: Floats, times: Floats, size: float) -> float:
    from scipy.interpolate import PchipInterpolator

    times = np.minimum.accumulate(times[::-1])[::-1]  # no longer than any larger message
    return float(np.exp(PchipInterpolator(np.log(sizes), np.log(times))(np.log(size))))


def read_curves(path: Path, collective: str | None = None) -> list[Curve]:
    """The curves of a log: one for each collective, world size, dtype, and in or out of place.

    Sizes measured more than once count with their median; those measured alone make no curve and are left out.

    Raises:
        TraceError: the file is not readable, or has no such collective.
    """
    from traces.formats import read_collective_log

    table = read_collective_log(path)
    table = table[(table["size_bytes"] > 0) & (table["time_ns"] > 0)]
    if collective is not None:
        if collective not in set(table["collective"]):
            found = ", ".join(sorted(set(table["collective"]))) or "nothing"
            raise TraceError(f"{path}: has no {collective}; it has {found}")
        table = table[table["collective"] == collective]
    curves = []
    for (name, world_size, dtype, in_place), rows in table.groupby(["collective", "world_size", "dtype", "in_place"]):
        times: pd.Series[float] = rows.groupby("size_bytes")["time_ns"].median().sort_index()
        if len(times) >= _LEAST_SIZES:
            curves.append(
                Curve(
                    collective=str(name),
                    world_size=int(str(world_size)),
                    dtype=str(dtype),
                    in_place=bool(in_place),
                    source=str(path),
                    size_bytes=tuple(int(size) for size in times.index.to_numpy()),
                    time_ns=tuple(round(float(time)) for time in times),
                )
            )
    return curves


def read_measured(paths: Sequence[Path]) -> tuple[MeasuredCollective, ...]:
    """What logs say of a cluster's collectives: one curve a collective and world size, over all logs.

    Out of place where there is such a row, else in place; sizes measured more than once, or with several element
    types, count with their median. One size is enough.

    Raises:
        TraceError: a file is not readable, or has no sizes.
    """
    from traces.formats import read_collective_log

    tables = [read_collective_log(path) for path in paths]
    found: dict[tuple[str, int], dict[int, list[tuple[bool, float]]]] = {}
    for table in tables:
        known = table[table["size_bytes"].notna() & (table["time_ns"] > 0)]
        rows: Any = known.itertuples(index=False)
        for row in rows:
            sizes = found.setdefault((str(row.collective), int(row.world_size)), {})
            sizes.setdefault(int(row.size_bytes), []).append((bool(row.in_place), float(row.time_ns)))
    if not found:
        raise TraceError(f"{', '.join(map(str, paths))}: no row with bytes and a time, so no curve")
    source = ", ".join(path.name for path in paths)
    return tuple(
        MeasuredCollective(
            collective=collective,
            world_size=world_size,
            size_bytes=tuple(sorted(sizes)),
            time_ns=tuple(_typical(sizes[size]) for size in sorted(sizes)),
            source=source,
        )
        for (collective, world_size), sizes in sorted(found.items())
    )


def _typical(times: Sequence[tuple[bool, float]]) -> float:
    outside = [time for in_place, time in times if not in_place]
    return float(np.median(outside or [time for _, time in times]))
