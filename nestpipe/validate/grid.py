"""The grids on which predictions are tested. None of their workloads, seeds or link rates is profiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from executor.profile import RunConfig
from executor.runtime import EmulatedDevice
from nestpipe.base import CaseError, unknown_name

__all__ = ["GRIDS", "Point", "grid", "names"]

SCHEDULES: Final = ("sync", "sparse_dist", "dbp", "fwp", "nestpipe")
_STEPS: Final = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A configuration and the link rate at which it runs."""

    config: RunConfig
    rate_bits_per_s: int


#: For each grid its seed and its workloads: micro-batches, batch per rank, width, link rate in Mbit/s. The first grid
#: was used to find what the model lacked; the others are for a model that stands.
GRIDS: Final[dict[str, tuple[int, tuple[tuple[int, int, int, int], ...]]]] = {
    "first": (
        7,
        (
            *((4, 128, 96, 200), (2, 96, 32, 400), (8, 512, 32, 1000), (4, 384, 192, 200)),
            *((8, 384, 192, 400), (4, 512, 128, 1000), (2, 320, 224, 500)),
        ),
    ),
    "second": (
        11,
        (
            *((4, 192, 80, 250), (2, 448, 48, 300), (8, 576, 40, 800), (4, 320, 240, 350)),
            *((8, 416, 144, 200), (4, 608, 112, 900), (2, 224, 208, 600)),
        ),
    ),
    "third": (
        13,
        (
            *((4, 288, 176, 220), (8, 352, 72, 450), (2, 144, 120, 1000), (4, 544, 56, 400)),
            *((8, 480, 216, 550), (4, 208, 248, 650), (2, 400, 88, 280)),
        ),
    ),
    "fourth": (
        23,
        (
            *((4, 272, 104, 260), (8, 432, 64, 520), (2, 176, 184, 750), (4, 400, 232, 310)),
            *((8, 560, 136, 240), (4, 240, 40, 950), (2, 352, 160, 430)),
        ),
    ),
    "fifth": (
        29,
        (
            *((4, 336, 152, 230), (8, 528, 88, 480), (2, 120, 168, 850), (4, 464, 200, 320)),
            *((8, 368, 224, 270), (4, 184, 60, 980), (2, 304, 136, 540)),
        ),
    ),
    "sixth": (
        31,
        (
            *((4, 1152, 112, 400), (8, 1408, 144, 710), (2, 896, 176, 1000), (4, 1760, 72, 290)),
            *((8, 1664, 56, 860), (4, 1024, 208, 510), (2, 1216, 88, 210)),
        ),
    ),
    "seventh": (
        37,
        (
            *((4, 1312, 136, 370), (8, 1536, 104, 640), (2, 960, 168, 940), (4, 1600, 80, 260)),
            *((8, 1216, 152, 790), (4, 1088, 196, 460), (2, 1440, 64, 230)),
        ),
    ),
    "eighth": (
        41,
        (
            *((4, 1248, 120, 390), (8, 1472, 136, 680), (2, 1008, 160, 970), (4, 1696, 72, 270)),
            *((8, 1344, 176, 830), (4, 1152, 184, 490), (2, 1184, 96, 220)),
        ),
    ),
    "ninth": (
        43,
        (
            *((4, 1376, 104, 420), (8, 1568, 88, 720), (2, 1056, 152, 910), (4, 1504, 100, 310)),
            *((8, 1312, 168, 590), (4, 1104, 216, 990), (2, 1136, 116, 240)),
        ),
    ),
    "quick": (17, ((4, 192, 72, 250),)),
    "heavy": (19, ((3, 616, 252, 200),)),
}


def names() -> tuple[str, ...]:
    """The names of the grids."""
    return tuple(GRIDS)


def grid(name: str, device: EmulatedDevice | None, *, schedules: tuple[str, ...] = SCHEDULES) -> list[Point]:
    """The points of a grid: every schedule on every workload.

    Args:
        name: one of `names()`.
        device: an emulated device, or None to compute for real.
        schedules: which.

    Raises:
        CaseError: if there is no such grid.
    """
    if name not in GRIDS:
        raise CaseError(unknown_name("grid", name, GRIDS))
    seed, workloads = GRIDS[name]
    return [
        Point(
            config=RunConfig(
                schedule=schedule,
                micro_batches=micro_batches,
                batch_size=batch_size,
                dim=dim,
                steps=_STEPS,
                seed=seed,
                device=device,
            ),
            rate_bits_per_s=rate * 1_000_000,
        )
        for micro_batches, batch_size, dim, rate in workloads
        for schedule in schedules
    ]
