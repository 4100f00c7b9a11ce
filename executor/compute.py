"""Who computes: the device at hand, or one of an assumed speed that local ops wait for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from nestpipe.base import NS_PER_S, NS_PER_US, CaseError, ExecutorError, unknown_name
from nestpipe.ir import COLLECTIVES, OpKind

if TYPE_CHECKING:
    from executor.runtime import Cost

__all__ = ["Compute", "EmulatedDevice", "parse_number"]


class Compute(StrEnum):
    """Who computes: the CPU or GPU at hand, or waits of calibrated length."""

    REAL = "real"
    EMULATED = "emulated"

    @property
    def device(self) -> EmulatedDevice | None:
        """The emulated device, with its default speeds."""
        return EmulatedDevice() if self is Compute.EMULATED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """How fast the emulated device and host memory are. All are assumed, none measured.

    Attributes:
        launch_us: what every op costs at least.
        forward_us_per_sample: forward; backward takes twice as long.
        dedup_ns_per_key: dedup, per looked-up key.
        lookup_ns_per_row: lookup in host memory, per distinct row that the rank owns.
        write_back_ns_per_row: write_back, per row.
        sync_ns_per_row: sync, per row of the buffer.
        update_ns_per_row: update, per row.
        copy_bytes_per_s: copy_h2d.
        read_ns_per_key: read.
    """

    launch_us: float = 200.0
    forward_us_per_sample: float = 50.0
    dedup_ns_per_key: float = 400.0
    lookup_ns_per_row: float = 4000.0
    write_back_ns_per_row: float = 2000.0
    sync_ns_per_row: float = 500.0
    update_ns_per_row: float = 2000.0
    copy_bytes_per_s: float = 1e9
    read_ns_per_key: float = 1000.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value >= 0 or (name == "copy_bytes_per_s" and value == 0):
                raise CaseError(f"emulated device: {name} must be positive, got {value}")

    @classmethod
    def parse(cls, texts: Sequence[str]) -> EmulatedDevice | None:
        """A device from NAME=VALUE of the attributes that are not at their default; None from nothing.

        Raises:
            CaseError, ExecutorError: for an unknown name or an invalid value.

        >>> EmulatedDevice.parse(["forward_us_per_sample=80"]).forward_us_per_sample
        80.0
        """
        values = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                raise ExecutorError(f"--emulate {text}: expected NAME=VALUE such as forward_us_per_sample=80")
            if name not in cls.__slots__:
                raise CaseError(f"--emulate {text}: {unknown_name('attribute', name, cls.__slots__)}")
            values[name] = parse_number(value, f"--emulate {text}")
        return cls(**values) if values else None

    def time_ns(self, kind: OpKind, cost: Cost, samples: int) -> int:
        """Nanoseconds of an op that moved `cost` for `samples` samples; collectives are real and take none."""
        if kind in COLLECTIVES or kind is OpKind.WAIT:
            return 0
        work = {
            OpKind.READ: self.read_ns_per_key * cost.keys,
            OpKind.COPY_H2D: cost.bytes / self.copy_bytes_per_s * NS_PER_S,
            OpKind.DEDUP: self.dedup_ns_per_key * cost.keys,
            OpKind.LOOKUP: self.lookup_ns_per_row * cost.unique_keys,
            OpKind.SYNC: self.sync_ns_per_row * cost.keys,
            OpKind.FORWARD: self.forward_us_per_sample * NS_PER_US * samples,
            OpKind.BACKWARD: 2 * self.forward_us_per_sample * NS_PER_US * samples,
            OpKind.UPDATE: self.update_ns_per_row * cost.keys,
            OpKind.WRITE_BACK: self.write_back_ns_per_row * cost.keys,
        }
        return round(self.launch_us * NS_PER_US + work.get(kind, 0.0))


def parse_number(text: str, what: str) -> float:
    """A finite number that is not negative, as given on the command line for `what`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ExecutorError(f"{what}: expected a number that is not negative, got {text!r}")
    return value
