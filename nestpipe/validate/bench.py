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

__all__ = ["Bench", "BenchOptions", "bits_per_s", "check_writable", "links_given", "open_bench"]

#: What an idle shaped link lets through at once.
BURST_BYTES: Final = 262_144
_PRIORITIES: Final = {True: "realtime (SCHED_RR)", False: "normal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Where and how to run.

    Attributes:
        world_size: ranks of a testbed; torchrun says its own.
        realtime: run testbed ranks before everything else on the machine.
        backend, device: for torchrun's ranks.
        timeout_s: of each list of configurations.
        patience_s: of these, for waiting until the machine is undisturbed (see `executor.profile.probe`).
    """

    world_size: int = 2
    realtime: bool = True
    backend: str = "gloo"
    device: str = "cpu"
    timeout_s: float = 600.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise CaseError(f"--timeout-s must be positive, got {self.timeout_s:g}")
        if not self.patience_s >= 0:
            raise CaseError(f"--patience-s must not be negative, got {self.patience_s:g}")


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
    """Whether links are as the machine has them, as under torchrun, and not shaped; their rate is then required.

    Raises:
        CaseError: if it is missing.
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
    """Refuse output files that are not writable, before minutes of measuring; makes their folders.

    Raises:
        NestPipeError: if a folder is not writable, or a path is a folder.
    """
    for path in filter(None, paths):
        folder = output_dir(path.parent)
        if path.is_dir() or not os.access(folder, os.W_OK):
            raise CaseError(f"{path}: not writable: {'it is a folder' if path.is_dir() else 'permission denied'}")


@contextmanager
def open_bench(options: BenchOptions, *, probe_ns: int | None = None) -> Iterator[Bench]:
    """The ranks of torchrun where it started this process, else a testbed per call.

    Args:
        options: where and how to run.
        probe_ns: what the probe takes on the undisturbed machine, if that is known.

    Raises:
        CaseError: if an option does not fit where this runs.
        TestbedError: if no testbed can be made here.
    """
    if links_given(True):
        yield from _torchrun(options, probe_ns)
        return
    if (options.backend, options.device) != ("gloo", "cpu"):
        raise CaseError(
            f"--backend {options.backend} --device {options.device}: a testbed has gloo and cpu only; start the "
            "command with torchrun"
        )
    yield _testbed(options, probe_ns)


def _testbed(options: BenchOptions, probe_ns: int | None) -> Bench:
    from executor.profile import run_on_testbed
    from executor.testbed import MAX_RANKS, TestbedError, refusal

    world_size = options.world_size
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
            realtime=options.realtime,
            timeout_s=options.timeout_s,
            probe_ns=probe_ns,
            patience_s=options.patience_s,
        )
        probe_ns = int(frame["probe_ns"].iloc[0])
        return frame

    return Bench(
        run=run,
        world_size=world_size,
        first=True,
        conditions=_conditions(
            "network namespaces, tbf on both ends of each link", options.realtime, options.backend, options.device
        ),
        burst_bytes=BURST_BYTES,
    )


def _torchrun(options: BenchOptions, probe_ns: int | None) -> Iterator[Bench]:
    from executor.process import is_realtime
    from executor.profile import run_configs
    from executor.runtime import join_world

    world = join_world(backend=options.backend, device=options.device, timeout_s=options.timeout_s, threads=1)
    yield Bench(
        run=lambda configs, _: run_configs(world, configs, probe_ns=probe_ns, patience_s=options.patience_s),
        world_size=world.world_size,
        first=world.rank == 0,
        conditions=_conditions("torchrun", is_realtime(), options.backend, options.device),
        burst_bytes=0,
    )
    # not after a failure: the other ranks would not come, and torchrun ends them
    world.leave()


def _conditions(bench: str, realtime: bool, backend: str, device: str) -> dict[str, object]:
    return {"bench": bench, "priority": _PRIORITIES[realtime], "backend": backend, "device": device}
