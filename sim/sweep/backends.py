"""Where the chunks of a sweep are evaluated: this process, processes on this machine, or a Dask cluster.

Every backend is a generator: it takes chunks, keeps a few in flight per worker, and yields their rows as they finish,
in any order. What a chunk gives does not depend on where it ran.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from multiprocessing import get_context, parent_process, resource_tracker
from typing import Any, NamedTuple, TypeAlias

from nestpipe.base import NestPipeError
from sim.scenario import Evaluator, Grid
from sim.sweep.store import Kept, columns_of, kept

__all__ = [
    "DASK_TIMEOUT_S",
    "Backend",
    "Chunk",
    "backend",
    "evaluate_chunk",
    "uninterrupted",
]

DASK_TIMEOUT_S = 5
_IN_FLIGHT_PER_WORKER = 3


class Chunk(NamedTuple):
    """Some points of the grid to evaluate together, with how many seeds."""

    rung: int
    indices: tuple[int, ...]
    max_seeds: int | None


#: Evaluates chunks of a pickled grid.
Backend: TypeAlias = Callable[[bytes, Iterator[Chunk]], Iterator[list[Kept]]]


@lru_cache(maxsize=4)
def _loaded(packed: bytes, max_seeds: int | None) -> tuple[Evaluator, dict[str, type]]:
    grid: Grid = pickle.loads(packed)
    return Evaluator(grid=grid, max_seeds=max_seeds), columns_of(grid)


def evaluate_chunk(packed: bytes, chunk: Chunk) -> list[Kept]:
    """The rows of one chunk.

    Args:
        packed: the pickled grid, so that a worker needs nothing but the package; it is unpacked once per process.
        chunk: what to evaluate.
    """
    evaluator, columns = _loaded(packed, chunk.max_seeds)
    return [kept(evaluator.row(evaluator.grid[i]) | {"rung": chunk.rung}, columns) for i in chunk.indices]


def on_this_process(packed: bytes, chunks: Iterator[Chunk]) -> Iterator[list[Kept]]:
    """One after the other, here."""
    for chunk in chunks:
        yield evaluate_chunk(packed, chunk)


#: What a worker process evaluates, and a pipe whose other end is closed once nobody waits for that any more.
_PACKED: list[bytes] = []
_GIVEN_UP: list[Any] = []


def _leave_with(parent: Any) -> None:
    """Ends this process when its parent has: one that was killed cannot tell its workers."""
    parent.join()
    os._exit(1)


def _start(packed: bytes, given_up: Any) -> None:
    threading.Thread(target=_leave_with, args=(parent_process(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _PACKED[:] = [packed]
    _GIVEN_UP[:] = [given_up]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside waits until the end, and processes started inside do not see it at all.

    A process that starts is told what it is for through a pipe: an interrupt of either side leaves half of that.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it would unblock the signal
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # what is started inherits this
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _run(chunk: Chunk) -> list[Kept]:
    if _GIVEN_UP[0].poll():  # chunks already handed to this process cannot be taken back
        return []
    return evaluate_chunk(_PACKED[0], chunk)


def on_processes(packed: bytes, chunks: Iterator[Chunk], workers: int) -> Iterator[list[Kept]]:
    """On `workers` processes of this machine.

    Raises:
        NestPipeError: if one of them dies.
    """
    context = get_context("spawn")
    given_up, wanted = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(packed, given_up))
    running: set[Future[list[Kept]]] = set()
    try:
        for chunk in islice(chunks, _IN_FLIGHT_PER_WORKER * workers):
            with uninterrupted():
                running.add(pool.submit(_run, chunk))
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                running.remove(future)
                rows = future.result()
                for more in islice(chunks, 1):
                    with uninterrupted():
                        running.add(pool.submit(_run, more))
                yield rows
    except BrokenProcessPool:
        raise NestPipeError(
            "a worker process died, perhaps for want of memory; what had finished is kept: run again with the same "
            "--out, with fewer --workers if memory is short"
        ) from None
    finally:
        wanted.close()
        given_up.close()
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def dask_cluster(address: str) -> Iterator[Backend]:
    """A backend that evaluates on the workers of a Dask cluster, connected to before anything else is done.

    Raises:
        NestPipeError: if dask is not installed, the scheduler does not answer or has no workers, or a chunk fails.
    """
    client = _connect(address)
    try:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        if not workers:
            raise NestPipeError(f"--dask {address}: the scheduler has no workers; start some: dask worker {address}")
        yield partial(_on_dask, client=client, address=address, in_flight=_IN_FLIGHT_PER_WORKER * workers)
    finally:
        client.close(timeout=DASK_TIMEOUT_S)


def _on_dask(
    packed: bytes, chunks: Iterator[Chunk], *, client: Any, address: str, in_flight: int
) -> Iterator[list[Kept]]:
    as_completed = importlib.import_module("distributed").as_completed
    prefix = f"nestpipe-{uuid.uuid4().hex}"

    def submit(chunk: Chunk) -> Any:
        key = f"{prefix}-{chunk.rung}-{chunk.indices[0]}"
        return client.submit(evaluate_chunk, packed, chunk, key=key, pure=False)

    completed = as_completed([submit(chunk) for chunk in islice(chunks, in_flight)], loop=client.loop)
    for future in completed:
        rows = _result(future, address)
        for more in islice(chunks, 1):
            completed.add(submit(more))
        yield rows


def _connect(address: str) -> Any:
    try:
        distributed = importlib.import_module("distributed")
    except ImportError:
        raise NestPipeError("--dask needs Dask: pip install 'nestpipe[sweep]'") from None
    try:
        return distributed.Client(address, timeout=DASK_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NestPipeError(
            f"--dask {address}: no Dask scheduler answers within {DASK_TIMEOUT_S} s ({reason}); check the address, "
            "for example tcp://host:8786"
        ) from None


def _result(future: Any, address: str) -> list[Kept]:
    try:
        rows: list[Kept] = future.result()
    except NestPipeError:
        raise
    except Exception as error:
        raise NestPipeError(
            f"--dask {address}: a chunk failed on a worker: {type(error).__name__}: {error}; the workers need the same "
            "version of nestpipe; what had finished is kept"
        ) from error
    return rows


@contextmanager
def backend(workers: int, dask: str | None) -> Iterator[Backend]:
    """Where to evaluate: a Dask cluster if an address is given, otherwise `workers` processes of this machine."""
    if dask is not None:
        with dask_cluster(dask) as cluster:
            yield cluster
    else:
        yield partial(on_processes, workers=workers) if workers > 1 else on_this_process
