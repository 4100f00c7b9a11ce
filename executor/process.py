"""What a process asks of its system: memory that it keeps, precise waits, real time, an end with its parent, a port."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from nestpipe.base import MIB

__all__ = ["die_with_parent", "fine_timers", "is_realtime", "keep_freed_memory", "reserved_port", "run_in_real_time"]

# loaded here, because a child between fork and exec must not load anything
_LIBC: Final = ctypes.CDLL(None)
# of sys/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_SLACK_NS: Final = 1000
# of malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES: Final = 1024 * MIB
_MAPPED_BYTES: Final = 32 * MIB  # the most that glibc takes


def keep_freed_memory() -> None:
    """Let malloc keep what a step frees for the next one, whichever lane's thread asks for it; glibc only.

    Otherwise memory goes back to the system, or stays in the arena of a thread that does not need it, and every step
    faults its pages in again. With tensors of a megabyte on several lanes backward then takes a quarter longer, and
    update half as long again, as where one lane runs at a time (docs/executor.md). A thread that has an arena keeps
    it, so this comes before lanes have threads.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_ARENA_MAX, 1)


def fine_timers() -> None:
    """Let waits of this thread, and of threads that it starts, end within microseconds, not the usual 50; Linux."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends; Linux."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_realtime() -> bool:
    """Whether this thread keeps its core before all others until it waits (SCHED_RR, SCHED_FIFO); Linux only."""
    return sys.platform == "linux" and os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)


def run_in_real_time() -> None:
    """Run before everything else on the machine (SCHED_RR); Linux, root."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that nobody else is given inside the `with` block, yet that a rank's store can listen on.

    The kernel does not hand out a port that a socket is bound to, while a server with SO_REUSEADDR, as the store is,
    may listen on it as long as the socket that holds it does not.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
