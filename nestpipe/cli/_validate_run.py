"""Where configurations run for real: on a testbed made here, or on the ranks that torchrun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pandas as pd

from executor.profile_run import RunConfig
from nestpipe.errors import CaseError

__all__ = ["Bench", "bench", "links_given"]

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
        patience_s: of these, for waiting until the machine is undisturbed (see `executor.testbed_probe`).
        probe_ns: what its probe takes on the undisturbed machine, if that is known.
    """
    if links_given(True):
        yield from _torchrun(backend, device, timeout_s, patience_s, probe_ns)
        return
    from executor.profile_driver import run_on_testbed
    from executor.testbed import TestbedError, refusal

    reason = refusal()
    if reason is not None:
        raise TestbedError(f"{reason}; on a cluster start this command with torchrun instead")
    if world_size < 2:
        raise CaseError(f"--world-size must be at least 2, got {world_size}")

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
    yield Bench(run=run, world_size=world_size, first=True, conditions=conditions, burst_bytes=BURST_BYTES)


def _torchrun(backend: str, device: str, timeout_s: float, patience_s: float, probe_ns: int | None) -> Iterator[Bench]:
    from executor.lanes import is_realtime
    from executor.profile_run import run_configs
    from executor.world import join_world

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
