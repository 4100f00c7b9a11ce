"""The errors a caller may catch, all of them `NestPipeError`, and the way unknown names are reported."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CaseError",
    "DeadlockError",
    "ExecutorError",
    "NestPipeError",
    "ScheduleError",
    "TopologyError",
    "TraceError",
    "unknown_name",
]


class NestPipeError(Exception):
    """Anything wrong with what the user gave; the command line prints it and exits 2."""


class ScheduleError(NestPipeError):
    """A schedule whose text is invalid or that breaks a rule of the IR."""


class DeadlockError(NestPipeError):
    """A program that cannot finish; names each stuck stream, its op and what it waits for."""


class TopologyError(NestPipeError):
    """A cluster description that cannot be true or cannot be simulated."""


class TraceError(NestPipeError):
    """A trace, log, key file or table that cannot be read as what it claims to be."""


class CaseError(NestPipeError):
    """A case or scenario file with a missing, contradictory or impossible value."""


class ExecutorError(NestPipeError):
    """A real run that failed: names the rank, the group, the op, its batch and micro-batch."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is not one of `known`, with the nearest one as a suggestion.

    >>> unknown_name("stream", "com", ["comm", "compute"])
    "unknown stream 'com'; expected one of comm, compute (did you mean 'comm'?)"
    """
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {what} {name!r}; expected one of {', '.join(choices)}{hint}"
