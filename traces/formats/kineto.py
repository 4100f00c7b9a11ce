"""The format of PyTorch profiler traces (Kineto, Chrome JSON), one file per rank."""

from __future__ import annotations

from pathlib import Path

from traces.formats.format import Found, Head, Options
from traces.formats.kineto_events import read_events
from traces.formats.kineto_join import Joined, join

__all__ = ["read", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether this is a Chrome trace: an object with `traceEvents`, or a list of events."""
    if not head.is_json:
        return False
    known = ("traceEvents", "schemaVersion", "deviceProperties", "distributedInfo", "ph")
    if head.has("schema") and head.has("nodes") and not head.has("traceEvents"):
        return False  # an execution trace that holds device events as well
    is_object = head.stripped.startswith(b"{")
    return "traceEvents" in head.lists or (head.has(*known) if is_object else head.has("ph"))


def read(path: Path, options: Options) -> Joined:
    """The events of a rank, tied to their launches and host ranges."""
    return join(read_events(path, partial=options.partial, on_progress=options.on_progress))


def summarise(trace: Joined) -> Found:
    """The rank's trace, which waits for the other ranks' (clocks, waiting, sizes per peer)."""
    return Found(rank=trace.events.rank, trace=trace)
