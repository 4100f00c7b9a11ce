"""Starts one process per rank in its namespace, as torchrun would, and ends them all when one fails.

Ranks get torchrun's own environment variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and the name of their
NIC for gloo and NCCL. They die with the launcher, even if that is killed, and their output goes to files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from executor.process import die_with_parent, run_in_real_time
from executor.testbed.namespaces import INTERFACE, Testbed, TestbedError

__all__ = ["RankResult", "launch", "rank_environment"]

_PORT: Final = 29_500
_POLL_S: Final = 0.02
_TAIL_LINES: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What became of one rank: its exit code and what it wrote."""

    rank: int
    returncode: int
    stdout: str
    stderr: str


def rank_environment(bed: Testbed, rank: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a rank: ours, torchrun's variables, and the NIC's name."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(bed.world_size),
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": bed.address(0),
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


def launch(
    bed: Testbed,
    command: Sequence[str],
    *,
    timeout_s: float,
    grace_s: float = 5.0,
    extra_environment: Mapping[str, str] | None = None,
    realtime: bool = False,
    check: bool = True,
) -> list[RankResult]:
    """Run `command` on every rank of a testbed that is up, and wait for all.

    Args:
        bed: the testbed.
        command: program and arguments, the same for every rank.
        timeout_s: after this many seconds all ranks are ended.
        grace_s: how long the other ranks may take to notice when one has failed.
        extra_environment: further variables for every rank.
        realtime: run the ranks before everything else on the machine (SCHED_RR), so that other load does not show.
        check: raise if a rank failed.

    Raises:
        TestbedError: on a timeout, and, with `check`, if a rank failed; names the rank and the end of its stderr.
            If the timeout is not positive.
    """
    if not timeout_s > 0:
        raise TestbedError(f"the timeout must be positive, got {timeout_s:g} s")
    with tempfile.TemporaryDirectory(prefix="nestpipe-ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(bed.world_size):
                ranks.append(_start(bed, rank, command, Path(folder), extra_environment, realtime))
            late = _wait(ranks, timeout_s, grace_s)
        finally:
            for started in ranks:
                started.end()
        results = [started.result() for started in ranks]
    if late:
        raise TestbedError(f"rank {', '.join(map(str, late))} still ran after {timeout_s:g} s{_tail(results[late[0]])}")
    failed = [result for result in results if result.returncode != 0]
    if check and failed:
        # a rank that fails by itself comes before those that were ended because of it
        first = min(failed, key=lambda result: (result.returncode < 0, result.rank))
        raise TestbedError(f"rank {first.rank} of {bed.world_size} ended with {first.returncode}{_tail(first)}")
    return results


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def end(self) -> None:
        """End the rank and its children, if any of them still runs."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self) -> RankResult:
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read().decode("utf-8", errors="replace"))
            file.close()
        return RankResult(rank=self.rank, returncode=self.process.returncode, stdout=texts[0], stderr=texts[1])


def _start(
    bed: Testbed,
    rank: int,
    command: Sequence[str],
    folder: Path,
    extra_environment: Mapping[str, str] | None,
    realtime: bool,
) -> _Rank:
    stdout = open(folder / f"rank{rank}.out", "w+b")  # noqa: SIM115 (closed by `result`)
    stderr = open(folder / f"rank{rank}.err", "w+b")  # noqa: SIM115

    def prepare() -> None:
        die_with_parent()
        if realtime:
            run_in_real_time()

    process = subprocess.Popen(
        ["ip", "netns", "exec", bed.namespace(rank), *command],
        env=rank_environment(bed, rank, extra_environment),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=prepare,
    )
    return _Rank(rank=rank, process=process, stdout=stdout, stderr=stderr)


def _wait(ranks: Sequence[_Rank], timeout_s: float, grace_s: float) -> list[int]:
    """Wait until all have ended, or one has failed and the others had their grace; returns the ranks that timed out."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while True:
        codes = [started.process.poll() for started in ranks]
        if all(code is not None for code in codes):
            return []
        if not failed and any(code not in (None, 0) for code in codes):
            failed = True
            deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() >= deadline:
            return [] if failed else [started.rank for started, code in zip(ranks, codes, strict=True) if code is None]
        time.sleep(_POLL_S)


def _tail(result: RankResult) -> str:
    lines = result.stderr.strip().splitlines()[-_TAIL_LINES:]
    return "".join(f"\n  rank {result.rank}: {line}" for line in lines)
