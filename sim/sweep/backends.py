"""Where the chunks of a sweep are evaluated: this process, processes on this machine, or a Dask cluster.

Every backend is a generator: it takes chunks, keeps a few in flight per worker, and yields them with their results as
they finish, in any order. What a chunk gives does not depend on where it ran.
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

import pyarrow as pa

from nestpipe.base import NestPipeError
from sim.scenario import Evaluator, Grid
from sim.sweep.store import schema_of, table_of

__all__ = [
    "DASK_TIMEOUT_S",
    "Backend",
    "Chunk",
    "Finished",
    "backend",
    "evaluate_chunk",
    "uninterrupted",
]

DASK_TIMEOUT_S = 5
_IN_FLIGHT_PER_WORKER = 3


class Chunk(NamedTuple):
    """Some points of the grid to evaluate together, with how many seeds."""

    number: int
    rung: int
    indices: tuple[int, ...]
    max_seeds: int | None


Finished: TypeAlias = tuple[Chunk, pa.Table]
#: Evaluates chunks of a pickled grid.
Backend: TypeAlias = Callable[[bytes, Iterator[Chunk]], Iterator[Finished]]


@lru_cache(maxsize=4)
def _loaded(packed: bytes, max_seeds: int | None) -> tuple[Evaluator, pa.Schema]:
    grid: Grid = pickle.loads(packed)
    return Evaluator(grid=grid, max_seeds=max_seeds), schema_of(grid)


def evaluate_chunk(packed: bytes, chunk: Chunk) -> pa.Table:
    """The rows of one chunk.

    Args:
        packed: the pickled grid, so that a worker needs nothing but the package; it is unpacked once per process.
        chunk: what to evaluate.
    """
    evaluator, schema = _loaded(packed, chunk.max_seeds)
    rows = [evaluator.row(evaluator.grid[index]) | {"rung": chunk.rung} for index in chunk.indices]
    return table_of(rows, schema)


def on_this_process(packed: bytes, chunks: Iterator[Chunk]) -> Iterator[Finished]:
    """One after the other, here."""
    for chunk in chunks:
        yield chunk, evaluate_chunk(packed, chunk)


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


def _run(chunk: Chunk) -> pa.Table:
    if _GIVEN_UP[0].poll():  # chunks already handed to this process cannot be taken back
        return pa.table({})
    return evaluate_chunk(_PACKED[0], chunk)


def on_processes(packed: bytes, chunks: Iterator[Chunk], workers: int) -> Iterator[Finished]:
    """On `workers` processes of this machine.

    Raises:
        NestPipeError: if one of them dies.
    """
    context = get_context("spawn")
    given_up, wanted = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(packed, given_up))
    running: dict[Future[pa.Table], Chunk] = {}
    try:
        for chunk in islice(chunks, _IN_FLIGHT_PER_WORKER * workers):
            with uninterrupted():
                running[pool.submit(_run, chunk)] = chunk
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                chunk = running.pop(future)
                table = future.result()
                for more in islice(chunks, 1):
                    with uninterrupted():
                        running[pool.submit(_run, more)] = more
                yield chunk, table
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
) -> Iterator[Finished]:
    as_completed = importlib.import_module("distributed").as_completed
    running: dict[str, Chunk] = {}
    prefix = f"nestpipe-{uuid.uuid4().hex}"

    def submit(chunk: Chunk) -> Any:
        future = client.submit(evaluate_chunk, packed, chunk, key=f"{prefix}-{chunk.rung}-{chunk.number}", pure=False)
        running[future.key] = chunk
        return future

    completed = as_completed([submit(chunk) for chunk in islice(chunks, in_flight)], loop=client.loop)
    for future in completed:
        chunk, table = running.pop(future.key), _result(future, address)
        for more in islice(chunks, 1):
            completed.add(submit(more))
        yield chunk, table


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


def _result(future: Any, address: str) -> pa.Table:
    try:
        table: pa.Table = future.result()
    except NestPipeError:
        raise
    except Exception as error:
        raise NestPipeError(
            f"--dask {address}: a chunk failed on a worker: {type(error).__name__}: {error}; the workers need the same "
            "version of nestpipe; what had finished is kept"
        ) from error
    return table


@contextmanager
def backend(workers: int, dask: str | None) -> Iterator[Backend]:
    """Where to evaluate: a Dask cluster if an address is given, otherwise `workers` processes of this machine."""
    if dask is not None:
        with dask_cluster(dask) as cluster:
            yield cluster
    else:
        yield partial(on_processes, workers=workers) if workers > 1 else on_this_process
