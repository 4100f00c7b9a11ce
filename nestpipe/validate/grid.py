"""Grids: the configurations on which predictions are tested, as YAML files that are named after their purpose.

None of the workloads, seeds or link rates of the grids that come with nestpipe is profiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal

from msgspec import Meta

from executor.compute import EmulatedDevice
from executor.profile import RunConfig, loop_of
from nestpipe.base import CaseError, Config, NestPipeError, decode, read_yaml, unknown_name
from nestpipe.validate.bench import bits_per_s, links_given

__all__ = ["Point", "at_rate", "grid_names", "load_grid"]

_CATALOGUE: Final = "nestpipe.validate.grids"
_SUFFIX: Final = ".yaml"
_Count = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration and the link rate at which it runs."""

    config: RunConfig
    rate_bits_per_s: int


class _Workload(Config, frozen=True, kw_only=True):
    """What every schedule of a grid runs on: `batch_size` samples per rank, rows `dim` wide, links of one rate."""

    micro_batches: _Count
    batch_size: _Count
    dim: _Count
    rate_mbit_per_s: Annotated[float, Meta(gt=0, le=1e6)]


class _Grid(Config, frozen=True, kw_only=True):
    """A grid file. Steps are at least 4, since the first two of a run do not count."""

    format: Literal["nestpipe-grid-1"]
    purpose: str
    seed: Annotated[int, Meta(ge=0)]
    steps: Annotated[int, Meta(ge=4)]
    schedules: Annotated[list[str], Meta(min_length=1)]
    workloads: Annotated[list[_Workload], Meta(min_length=1)]


def grid_names() -> tuple[str, ...]:
    """The names of the grids that come with nestpipe."""
    found = (entry.name for entry in files(_CATALOGUE).iterdir() if entry.name.endswith(_SUFFIX))
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found))


def load_grid(name: str | Path, device: EmulatedDevice | None) -> list[Point]:
    """The points of a grid: every schedule on every workload, workload by workload.

    Args:
        name: one of `grid_names()`, or a YAML file.
        device: an emulated device, or None to compute for real.

    Raises:
        CaseError: if there is no such grid, or its file or one of its schedules is invalid.
    """
    if name in grid_names():
        source = f"{name}{_SUFFIX}"
        grid = decode((files(_CATALOGUE) / source).read_text(encoding="utf-8"), _Grid, CaseError, source=source)
    elif (path := Path(name)).suffix in (".yaml", ".yml") or path.exists():
        source, grid = str(path), read_yaml(path, _Grid, CaseError)
    else:
        raise CaseError(unknown_name("grid", str(name), grid_names()) + "; or give a .yaml file")
    return [
        _point(f"{source}: workloads[{number}]", grid, workload, schedule, device)
        for number, workload in enumerate(grid.workloads)
        for schedule in grid.schedules
    ]


def at_rate(points: Sequence[Point], rate_mbit_per_s: float | None) -> list[Point]:
    """The points at the rate of the links here, where these are not shaped; as they are, where they are shaped.

    Raises:
        CaseError: if the rate is invalid, is missing, or is given for a testbed.
    """
    if not links_given(rate_mbit_per_s):
        if rate_mbit_per_s is not None:
            raise CaseError("--rate-mbit-per-s is for torchrun; on a testbed links have the rates of the grid")
        return list(points)
    assert rate_mbit_per_s is not None, "links_given refuses None"
    return [replace(point, rate_bits_per_s=bits_per_s(rate_mbit_per_s)) for point in points]


def _point(where: str, grid: _Grid, workload: _Workload, schedule: str, device: EmulatedDevice | None) -> Point:
    try:
        config = RunConfig(
            schedule=schedule,
            micro_batches=workload.micro_batches,
            batch_size=workload.batch_size,
            dim=workload.dim,
            steps=grid.steps,
            seed=grid.seed,
            device=device,
        )
        loop_of(config)
    except NestPipeError as error:
        raise CaseError(f"{where}: {error}") from None
    return Point(config=config, rate_bits_per_s=round(workload.rate_mbit_per_s * 1e6))
