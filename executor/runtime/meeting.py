"""Where the ranks meet: a store at rank 0's address, and the check that they want the same.

Each rank leaves its world size and its terms there: the options that all ranks need alike, as text. Before anything
else is set up every rank reads what the others left, and all of them come to the same verdict.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from torch._C._distributed_c10d import PrefixStore, TCPStore

from nestpipe.base import ExecutorError

__all__ = ["Meeting", "meet", "number_from", "ranks_text"]

_T = TypeVar("_T")
_LOOK_S: Final = 0.5
_LINGER_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """This process among its peers, before they share anything but a store."""

    rank: int
    world_size: int
    address: tuple[str, int]
    prefix: str
    store: TCPStore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """What a rank left for the others."""

    world_size: int
    terms: Mapping[str, str]


def meet(*, wait_s: float, terms: Mapping[str, str]) -> Meeting:
    """Meet the other ranks, which torchrun or plain environment variables describe.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; without them this process is the whole world.

    Args:
        wait_s: how long to wait for the others.
        terms: what has to be the same on every rank: its name, and its value as text.

    Raises:
        ExecutorError: if a variable is wrong, the port is taken, a rank does not come in time or comes twice, or the
            ranks differ in their world size or terms; it names ranks and values.
    """
    rank, world_size = number_from("RANK", 0), number_from("WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ExecutorError(f"RANK must lie in 0 to WORLD_SIZE - 1 = {world_size - 1}, got {rank}")
    # a world of one meets nobody, so it takes any free port
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), number_from("MASTER_PORT", 29500 if world_size > 1 else 0)
    if port >= 1 << 16:
        raise ExecutorError(f"environment variable MASTER_PORT must be a port below {1 << 16}, got {port}")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run, restart = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    prefix = f"nestpipe/{run}/{restart}"
    mine = _Arrival(world_size=world_size, terms=terms)

    def come() -> TCPStore:
        store = TCPStore(host, port, None, rank == 0 and not agent, timedelta(seconds=wait_s), False)
        _agree(PrefixStore(f"{prefix}/arrivals", store), rank, mine, wait_s)
        return store

    try:
        store = _within(wait_s + _LINGER_S, come)
    except (RuntimeError, ValueError) as error:
        raise ExecutorError(_problem(error, host, port, rank, world_size, wait_s)) from None
    return Meeting(rank=rank, world_size=world_size, address=(host, store.port), prefix=prefix, store=store)


def _agree(store: PrefixStore, rank: int, mine: _Arrival, wait_s: float) -> None:
    """Wait for all ranks and compare what they left."""
    if store.add(f"processes/{rank}", 1) > 1:
        raise ExecutorError(f"rank {rank} was started twice; give every process a RANK of its own")
    store.set(str(rank), json.dumps([mine.world_size, dict(mine.terms)]))
    arrivals: dict[int, _Arrival] = {}
    deadline = time.monotonic() + wait_s
    problem = None
    while problem is None and len(arrivals) < mine.world_size:
        missing = [other for other in range(mine.world_size) if other not in arrivals]
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            problem = f"rank {ranks_text(missing)} of {mine.world_size} did not come within {wait_s:g} s"
            problem += "; check that all of them were started, with the same MASTER_ADDR and MASTER_PORT"
            break
        arrivals |= _arrived(store, missing, min(left_s, _LOOK_S))
        problem = _differing({other: {"WORLD_SIZE": str(each.world_size)} for other, each in arrivals.items()})
    if problem is None:
        problem = _differing({other: each.terms for other, each in arrivals.items()})
    if problem is not None:
        _let_read(store, rank, arrivals)
        raise ExecutorError(f"rank {rank}: {problem}")


def _arrived(store: PrefixStore, ranks: Sequence[int], wait_s: float) -> dict[int, _Arrival]:
    """Which of the ranks have come, waiting a moment for all of them."""
    names = [str(rank) for rank in ranks]
    deadline = time.monotonic() + wait_s
    # asking, since a wait that ends without the others would say so in torch's own words on stderr, again and again
    while not store.check(names) and time.monotonic() < deadline:
        time.sleep(_LOOK_S / 10)
    found = {}
    for rank in (rank for rank, name in zip(ranks, names, strict=True) if store.check([name])):
        world_size, terms = json.loads(store.get(str(rank)))
        found[rank] = _Arrival(world_size=world_size, terms=terms)
    return found


def _differing(terms: Mapping[int, Mapping[str, str]]) -> str | None:
    """What the ranks do not agree about, None if there is nothing.

    >>> print(_differing({0: {"--lr": "0.1", "--seed": "1"}, 1: {"--lr": "0.1", "--seed": "2"}}))
    the ranks differ in --seed: 1 on rank 0, 2 on rank 1; start all of them with the same
    """
    problems = []
    for name in dict.fromkeys(name for each in terms.values() for name in each):
        holders: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(terms):
            holders[terms[rank].get(name, "nothing")].append(rank)
        if len(holders) > 1:
            values = ", ".join(f"{value} on rank {ranks_text(ranks)}" for value, ranks in holders.items())
            problems.append(f"{name}: {values}")
    return f"the ranks differ in {'; in '.join(problems)}; start all of them with the same" if problems else None


def _let_read(store: PrefixStore, rank: int, arrivals: Mapping[int, _Arrival]) -> None:
    """Rank 0 holds the store: let those that have come read what is in it, before it goes."""
    store.set(f"read/{rank}", "")
    deadline = time.monotonic() + _LINGER_S
    while rank == 0 and time.monotonic() < deadline:
        if store.check([f"read/{other}" for other in arrivals]):
            return
        time.sleep(_LOOK_S / 10)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in a message.

    >>> ranks_text([0, 1, 2, 3, 7])
    '0 to 3, 7'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(parts)


def _within(seconds: float, action: Callable[[], _T]) -> _T:
    """What `action` returns, given up after a while: a stranger, or a stopped rank 0, may accept and never answer."""
    results: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if problems:
        raise problems[0]
    if not results:
        raise RuntimeError("the process that listens there does not answer")
    return results[0]


def number_from(name: str, default: int) -> int:
    """A whole number from an environment variable.

    Raises:
        ExecutorError: if it is none.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise ExecutorError(f"environment variable {name} must be a whole number, got {text!r}")
    return int(text)


def _problem(error: Exception, host: str, port: int, rank: int, world_size: int, wait_s: float) -> str:
    if "EADDRINUSE" in str(error) or "already in use" in str(error):
        return f"rank {rank}: port {port} on {host} is in use; set MASTER_PORT to a free port"
    return (
        f"rank {rank} of {world_size} could not meet the others at {host}:{port} within {wait_s:g} s; check that "
        f"rank 0 runs there and that all {world_size} ranks were started: {str(error).splitlines()[0]}"
    )
