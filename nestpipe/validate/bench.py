"""Where configurations run for real: on a testbed made here, or on the ranks that torchrun has started."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd

from executor.profile import RunConfig
from nestpipe.base import CaseError, output_dir

__all__ = ["Bench", "bench", "bits_per_s", "check_writable", "links_given"]

#: What an idle shaped link lets through at once.
BURST_BYTES: Final = 262_144
_PRIORITIES: Final = {True: "realtime (SCHED_RR)", False: "normal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Something that runs configurations.

    Attributes:
        run: configurations and a link rate in bit/s to a table of spans.
        world_size: number of ranks.
        first: whether this process is the one that reports (rank 0, or the only one).
        conditions: how it runs, for the provenance of results.
        burst_bytes: what an idle link lets through at once.
    """

    run: Callable[[Sequence[RunConfig], int], pd.DataFrame]
    world_size: int
    first: bool
    conditions: dict[str, object]
    burst_bytes: int


def links_given(rate_mbit_per_s: object) -> bool:
    """Whether links are what they are, as under torchrun, and not shaped; their rate must then be told.

    Raises:
        CaseError: if it is not.
    """
    given = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if given and not rate_mbit_per_s:
        raise CaseError(
            "--rate-mbit-per-s is missing: under torchrun links are not shaped, so say what a rank's link carries "
            "(for several GPUs behind one NIC, its share)"
        )
    return given


def bits_per_s(rate_mbit_per_s: float) -> int:
    """A link rate as users give it, in bit/s.

    Raises:
        CaseError: if it is not positive and finite.
    """
    if not 0 < rate_mbit_per_s < math.inf:
        raise CaseError(f"--rate-mbit-per-s must be a positive number, got {rate_mbit_per_s:g}")
    return round(rate_mbit_per_s * 1e6)


def check_writable(*paths: Path | None) -> None:
    """Refuse files that could not be written, before minutes of measuring; makes their folders.

    Raises:
        NestPipeError: if a folder cannot be made or written to, or a path is one.
    """
    for path in filter(None, paths):
        folder = output_dir(path.parent)
        if path.is_dir() or not os.access(folder, os.W_OK):
            raise CaseError(f"{path}: cannot be written: {'it is a folder' if path.is_dir() else 'permission denied'}")


@contextmanager
def bench(
    *,
    world_size: int,
    realtime: bool,
    backend: str,
    device: str,
    timeout_s: float,
    patience_s: float = 0.0,
    probe_ns: int | None = None,
) -> Iterator[Bench]:
    """The ranks of torchrun where it started this process, else a testbed per call.

    Args:
        world_size: ranks of a testbed; torchrun says its own.
        realtime: run testbed ranks before everything else on the machine.
        backend, device: for torchrun's ranks.
        timeout_s: of each list of configurations.
        patience_s: of these, for waiting until the machine is undisturbed (see `executor.profile.probe`).
        probe_ns: what its probe takes on the undisturbed machine, if that is known.

    Raises:
        CaseError: for an option that is impossible, or is not for where this runs.
        TestbedError: if no testbed can be made here.
    """
    if not timeout_s > 0:
        raise CaseError(f"--timeout-s must be positive, got {timeout_s:g}")
    if not patience_s >= 0:
        raise CaseError(f"--patience-s must not be negative, got {patience_s:g}")
    if links_given(True):
        yield from _torchrun(backend, device, timeout_s, patience_s, probe_ns)
        return
    if (backend, device) != ("gloo", "cpu"):
        raise CaseError(
            f"--backend {backend} --device {device}: a testbed has gloo and cpu only; start the command with torchrun"
        )
    yield _testbed(world_size, realtime, timeout_s, patience_s, probe_ns)


def _testbed(world_size: int, realtime: bool, timeout_s: float, patience_s: float, probe_ns: int | None) -> Bench:
    from executor.profile import run_on_testbed
    from executor.testbed import MAX_RANKS, TestbedError, refusal

    if not 2 <= world_size <= MAX_RANKS:
        raise CaseError(f"--world-size must be 2 to {MAX_RANKS}, got {world_size}")
    reason = refusal()
    if reason is not None:
        raise TestbedError(f"{reason}; on a cluster start this command with torchrun instead")

    def run(configs: Sequence[RunConfig], rate: int) -> pd.DataFrame:
        nonlocal probe_ns
        print(f"running {len(configs)} configurations on {world_size} ranks at {rate / 1e6:g} Mbit/s", file=sys.stderr)
        frame = run_on_testbed(
            configs,
            [rate] * world_size,
            burst_bytes=BURST_BYTES,
            realtime=realtime,
            timeout_s=timeout_s,
            probe_ns=probe_ns,
            patience_s=patience_s,
        )
        probe_ns = int(frame["probe_ns"].iloc[0])
        return frame

    conditions: dict[str, object] = {
        "bench": "network namespaces, tbf on both ends of each link",
        "priority": _PRIORITIES[realtime],
        "backend": "gloo",
        "device": "cpu",
    }
    return Bench(run=run, world_size=world_size, first=True, conditions=conditions, burst_bytes=BURST_BYTES)


def _torchrun(backend: str, device: str, timeout_s: float, patience_s: float, probe_ns: int | None) -> Iterator[Bench]:
    from executor.process import is_realtime
    from executor.profile import run_configs
    from executor.runtime import join_world

    world = join_world(backend=backend, device=device, timeout_s=timeout_s, threads=1)
    conditions: dict[str, object] = {
        "bench": "torchrun",
        "priority": _PRIORITIES[is_realtime()],
        "backend": backend,
        "device": device,
    }
    yield Bench(
        run=lambda configs, _: run_configs(world, configs, probe_ns=probe_ns, patience_s=patience_s),
        world_size=world.world_size,
        first=world.rank == 0,
        conditions=conditions,
        burst_bytes=0,
    )
    # not after a failure: the other ranks would not come, and torchrun ends them
    world.leave()
