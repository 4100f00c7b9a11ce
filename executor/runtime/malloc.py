"""What malloc does with the memory that a step frees."""

from __future__ import annotations

import ctypes
from typing import Final

from nestpipe.base import MIB

__all__ = ["keep_freed_memory"]

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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_ARENA_MAX, 1)
