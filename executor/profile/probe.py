"""How fast the machine is right now: a fixed piece of work, timed on all ranks at once.

A virtual machine whose neighbours are busy, or a device that throttles, is slower for seconds at a time, whatever runs
on it, and no clock of its own says so. A run beside which this work took another time than when costs were profiled
says nothing about the prediction. The gate waits for the machine, runs again, and says how fast it was; it never sees
what is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
import torch.distributed as dist

from executor.runtime import ProcessGroups

__all__ = ["Probe", "SpeedGate", "is_disturbed"]

#: A run is disturbed where the probe beside it took more than this factor longer or shorter than the reference.
_FACTOR: Final = 1.25
_REPEATS: Final = 15
_CALIBRATION_S: Final = 3.0
_PAUSE_S: Final = 0.05

_Result = TypeVar("_Result")


def is_disturbed(slowdown: float) -> bool:
    """Whether a machine that much slower than the reference, or faster, is another machine for our purpose."""
    return not 1 / _FACTOR <= slowdown <= _FACTOR


class Probe:
    """A few milliseconds of what ops do: Python, reading scattered rows, and arithmetic on them.

    No matrix product: MKL guards its buffers with a lock that spins, and a lane that ends may still hold it.

    Args:
        device: on which the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.rows = torch.rand((1 << 18, 32), generator=generator).to(device)
        self.chosen = torch.randint(1 << 18, (8192,), generator=generator).to(device)

    def time_ns(self) -> int:
        """The mean time of a few repetitions in nanoseconds."""
        start_ns = time.monotonic_ns()
        for _ in range(_REPEATS):
            total = 0
            for number in range(10_000):
                total += number * number % 7
            torch.index_select(self.rows, 0, self.chosen).mul_(0.5).add_(1.0).tanh_()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return (time.monotonic_ns() - start_ns) // _REPEATS


@dataclass(slots=True, kw_only=True)
class SpeedGate:
    """Lets runs count whose machine was as fast as when costs were profiled. Every method is a collective call.

    Attributes:
        world: the ranks.
        reference_ns: what the probe takes there; None to find out what it typically takes now.
        patience_s: how long all waits and repetitions may take together.
        waited_s: how long they have taken.
    """

    world: ProcessGroups
    reference_ns: int | None = None
    patience_s: float = 60.0
    waited_s: float = 0.0
    _probe: Probe = field(init=False)

    def __post_init__(self) -> None:
        self._probe = Probe(self.world.device)
        self._now_ns()  # the first is slow
        if self.reference_ns is None:
            until = time.monotonic() + min(_CALIBRATION_S, self.patience_s)
            found = [self._now_ns()]
            while self._agreed(time.monotonic() < until):
                found.append(self._now_ns())
            self.reference_ns = sorted(found)[len(found) // 2]

    def run(self, run: Callable[[], _Result]) -> tuple[_Result, float]:
        """What `run` returns, and how much slower the machine was beside it than the reference.

        Runs again while disturbed and there is patience; the least disturbed run counts.
        """
        best: tuple[_Result, float] | None = None
        while True:
            began = time.monotonic()
            around = [self._calm()]
            result = run()
            around.append(self._slowdown())
            found = result, max(around, key=_distance)
            if best is None or _distance(found[1]) < _distance(best[1]):
                best = found
            if not is_disturbed(found[1]):
                return best
            self.waited_s += time.monotonic() - began
            if self._agreed(self.waited_s >= self.patience_s):
                return best

    def _calm(self) -> float:
        """Wait until the machine is undisturbed, or patience ends; returns the last slowdown."""
        while True:
            began = time.monotonic()
            slowdown = self._slowdown()
            if not is_disturbed(slowdown) or self._agreed(self.waited_s >= self.patience_s):
                return slowdown
            time.sleep(_PAUSE_S)
            self.waited_s += time.monotonic() - began

    def _slowdown(self) -> float:
        assert self.reference_ns is not None, "set when made"
        return self._now_ns() / self.reference_ns

    def _now_ns(self) -> int:
        """The probe's time on the slowest rank."""
        self.world.barrier()
        value = torch.tensor([self._probe.time_ns()])
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())

    def _agreed(self, mine: bool) -> bool:
        """What rank 0 says; clocks differ."""
        value = torch.tensor([int(mine)])
        dist.broadcast(value, src=0)
        return bool(value.item())


def _distance(slowdown: float) -> float:
    """How far from undisturbed, slower and faster alike."""
    return abs(math.log(slowdown))
