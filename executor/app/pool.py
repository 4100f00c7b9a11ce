"""Local ranks for tests, benchmarks and the equality grid: a pool that stays up and runs one job after another.

Importing torch takes seconds; ranks are forked from one server process that has done so, and a pool keeps them for many
jobs. Ranks die with their parent, and a job that fails or hangs on one rank ends the pool.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from executor.process import die_with_parent, reserved_port
from executor.runtime import ProcessGroups, join_world
from nestpipe.base import ExecutorError

__all__ = ["RankPool", "rank_context"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def rank_context() -> ForkServerContext:
    """How to start processes that have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["executor.app.cli"])
    return context


class RankPool:
    """`world_size` processes, each a rank of one gloo world. Use as a context manager.

    Args:
        world_size: number of ranks.
        timeout_s: how long a job may take.
    """

    def __init__(self, world_size: int, *, timeout_s: float = 300.0) -> None:
        context = rank_context()
        self._resources = ExitStack()
        port = self._resources.enter_context(reserved_port())
        self.world_size, self.timeout_s, self.closed = world_size, timeout_s, False
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, job: Callable[Concatenate[ProcessGroups, _P], _T], *args: _P.args, **kwargs: _P.kwargs) -> list[_T]:
        """Call `job(world, ...)` on every rank; the results by rank.

        Raises:
            ExecutorError: if a rank raises, dies or takes too long; the pool is closed then.
        """
        if self.closed:
            raise ExecutorError("the pool has been closed; make another one")
        for pipe in self._pipes:
            pipe.send((job, args, kwargs))
        results: dict[int, _T] = {}
        deadline = time.monotonic() + self.timeout_s
        while len(results) < self.world_size:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                self._abandon(f"ranks {[r for r in range(self.world_size) if r not in results]} did not finish in time")
            for rank, pipe in enumerate(self._pipes):
                if pipe not in ready:
                    continue
                try:
                    problem, value = pipe.recv()
                except EOFError:
                    self._abandon(f"rank {rank} died")
                if problem is not None:
                    self._abandon(f"rank {rank} raised\n{problem}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _abandon(self, reason: str) -> None:
        self.close()
        raise ExecutorError(f"the pool of {self.world_size} ranks failed: {reason}")

    def close(self) -> None:
        """End the ranks."""
        self.closed = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._resources.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    """A rank's life: join the world, run jobs until the pipe closes."""
    die_with_parent()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    import torch

    torch.set_num_threads(1)
    world = join_world()
    while True:
        try:
            job, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        answer: tuple[str | None, Any]
        try:
            answer = (None, job(world, *args, **kwargs))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
