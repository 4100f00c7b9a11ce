"""Ends every rank within seconds when one fails, dies or hangs, and says who waits for whom.

Each rank publishes where its streams stand, a few times a second, in the store that the ranks met at. A rank that fails
leaves its message there and every other rank stops when it sees it. A rank whose streams make no progress for too long
works out which ranks of the group have not arrived at the collective, from what they published, and fails with that.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

from torch._C._distributed_c10d import TCPStore

from executor.runtime.groups import ProcessGroups, partition_of
from executor.runtime.lanes import Runtime
from nestpipe.base import NS_PER_S, ExecutorError
from nestpipe.ir import COLLECTIVES, Op, op_name

__all__ = ["RankState", "Watchdog", "diagnose"]

_POLL_S = 0.2
_LINGER_S = 3.0
_FAILURE = "watchdog/failure"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What a rank published: a counter that grows while it lives, and for each stream its position and ops."""

    beat: int
    lanes: tuple[Mapping[str, Any], ...]

    def text(self) -> str:
        """The state as JSON."""
        return json.dumps({"beat": self.beat, "lanes": list(self.lanes)})


def _state_of(runtime: Runtime | None, beat: int) -> RankState:
    def name(op: Op | None) -> str | None:
        return None if op is None else op_name(op)

    lanes = [] if runtime is None else runtime.lanes
    return RankState(
        beat=beat,
        lanes=tuple(
            {
                "stream": lane.plan.name,
                "finished": lane.finished,
                "status": lane.status,
                "op": name(lane.current),
                "last": name(lane.last),
            }
            for lane in lanes
        ),
    )


def diagnose(
    rank: int,
    runtime: Runtime,
    peers: Mapping[int, RankState],
    silent: frozenset[int],
    groups: Mapping[int, tuple[int, ...]],
) -> str:
    """Which op this rank is stuck in and whom it waits for, as a message.

    Args:
        rank: this rank.
        runtime: its streams.
        peers: what the other ranks published last.
        silent: ranks that have stopped publishing.
        groups: the ranks of the group of each communicator stream, by stream index.
    """
    lines = []
    for index, lane in enumerate(runtime.lanes):
        op = lane.current
        if op is None or lane.status != "running":
            continue
        seconds = (time.monotonic_ns() - lane.since_ns) / NS_PER_S
        where = f"batch {op.batch}" + ("" if op.micro_batch is None else f", micro-batch {op.micro_batch}")
        line = f"{op_name(op)} ({where}) on stream {lane.plan.name}"
        if op.kind in COLLECTIVES and index in groups:
            line += f", group {lane.plan.resource} of ranks {_list(groups[index])},"
            late = [peer for peer in groups[index] if peer != rank and _is_late(peers.get(peer), index, lane.finished)]
            waits = f" waits for rank {_list(late)}" if late else " has all its ranks; the network or a peer stalls"
            line += f"{waits} since {seconds:.1f} s"
        else:
            line += f" has been running for {seconds:.1f} s"
        lines.append(line)
    if not lines:
        lines = [
            f"stream {lane.plan.name} waits before {op_name(lane.current)}" for lane in runtime.lanes if lane.current
        ]
    for peer in sorted(peers):
        lines += [f"rank {peer} gives no sign of life"] * (peer in silent)
        for state in peers[peer].lanes:
            if state["status"] == "running":
                seen = f"{state['op']} on stream {state['stream']}, last completed {state['last']}"
                lines.append(f"rank {peer} was last seen in {seen}")
    return "\n  ".join(lines)


def _is_late(state: RankState | None, lane: int, finished: int) -> bool:
    if state is None or lane >= len(state.lanes):
        return True
    theirs = state.lanes[lane]
    return bool(theirs["finished"] < finished or (theirs["finished"] == finished and theirs["status"] != "running"))


def _list(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks))


class Watchdog:
    """Watches one rank; a thread from `start` to `stop`.

    Args:
        world: the ranks; the store at its address is used on a connection of its own.
        timeout_s: how long no stream may make progress.
        exit: how to end the process, for tests.
    """

    def __init__(self, world: ProcessGroups, *, timeout_s: float, exit: Callable[[int], NoReturn] = os._exit) -> None:
        if not timeout_s > 0:
            raise ExecutorError(f"the watchdog's timeout must be positive, got {timeout_s:g} s")
        self.world, self.timeout_s, self._exit = world, timeout_s, exit
        host, port = world.address
        self._store = TCPStore(host, port, None, False, timedelta(seconds=min(timeout_s, 30.0)), False)
        self._prefix = world.prefix
        self._runtime: Runtime | None = None
        self._groups: dict[int, tuple[int, ...]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failing = False
        self._turned = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)
        self._guard = threading.Thread(target=self._guard_store, name="watchdog-guard", daemon=True)

    def start(self) -> None:
        """Begin to watch; the other ranks know of this one from now on."""
        self._publish(0)
        self._turned = time.monotonic()
        self._thread.start()
        self._guard.start()

    def stop(self) -> None:
        """Stop watching, before the rank leaves."""
        self._ended.set()
        self._thread.join()
        self._guard.join()
        faulthandler.cancel_dump_traceback_later()

    def watch(self, runtime: Runtime, domain_size: int) -> None:
        """Watch this runtime from now on."""
        groups = {}
        for index, lane in enumerate(runtime.lanes):
            if any(task.op.kind in COLLECTIVES for task in lane.plan.tasks):
                parts = partition_of(lane.plan.resource, self.world.world_size, domain_size)
                groups[index] = next(part for part in parts if self.world.rank in part)
        self._groups, self._runtime = groups, runtime

    def fail(self, message: str, code: int = 1) -> NoReturn:
        """Tell every rank why, print the message and end this process."""
        with self._lock:
            self._failing = True
            runtime = self._runtime
            if runtime is not None and ("closed by peer" in message or "reset by peer" in message):
                cause, _ = self._failure() or (None, 1)
                message += f"\n  {self._who_is_silent(runtime)}" if cause is None else f"\n  because {cause}"
            self._announce(message, code)
            print(message, file=sys.stderr, flush=True)
            self._linger()
            self._exit(code)

    def _announce(self, message: str, code: int) -> None:
        try:
            self._store.compare_set(self._key(_FAILURE), "", f"{self.world.rank}|{code}|{message}")
        except RuntimeError:
            print(f"rank {self.world.rank}: the store of rank 0 is gone as well", file=sys.stderr)

    def _linger(self) -> None:
        """Rank 0 holds the store: let the others read the failure, or fail themselves, before it goes."""
        others = range(1, self.world.world_size)
        deadline = time.monotonic() + _LINGER_S
        with suppress(RuntimeError):
            self._store.set(self._key(f"watchdog/ended/{self.world.rank}"), "")
            while self.world.rank == 0 and others and time.monotonic() < deadline:
                if self._store.check([self._key(f"watchdog/ended/{rank}") for rank in others]):
                    return
                time.sleep(_POLL_S / 4)

    def _who_is_silent(self, runtime: Runtime) -> str:
        deadline = time.monotonic() + 5 * _POLL_S
        self._beats.clear()
        while time.monotonic() < deadline:
            try:
                peers = self._peers()
            except RuntimeError:
                return "rank 0, which holds the store, gives no sign of life"
            time.sleep(_POLL_S)
        return diagnose(self.world.rank, runtime, peers, self._silent(3 * _POLL_S), self._groups)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _publish(self, beat: int) -> None:
        self._store.set(self._key(f"watchdog/{self.world.rank}"), _state_of(self._runtime, beat).text())

    def _guard_store(self) -> None:
        """End this process if the store does not answer: a stopped rank 0 keeps the connection and says nothing."""
        patience_s = max(self.timeout_s, 2 * _LINGER_S)
        while not self._ended.wait(_POLL_S):
            if time.monotonic() - self._turned > patience_s:
                message = f"rank {self.world.rank}: the store of rank 0 has not answered for {patience_s:g} s"
                print(f"{message}; rank 0 is stopped or unreachable", file=sys.stderr, flush=True)
                self._exit(1)

    def _loop(self) -> None:
        beat, seen, since = 0, -1, time.monotonic()
        while not self._ended.wait(_POLL_S):
            self._turned = time.monotonic()
            faulthandler.dump_traceback_later(2 * self.timeout_s + 10, exit=True)
            beat += 1
            runtime = self._runtime
            try:
                self._publish(beat)
                self._obey()
                finished = -1 if runtime is None else sum(lane.finished for lane in runtime.lanes)
                busy = runtime is not None and any(lane.current is not None for lane in runtime.lanes)
                if finished != seen or not busy:
                    seen, since = finished, time.monotonic()
                if time.monotonic() - since > self.timeout_s / 2:
                    self._peers()
                if runtime is not None and time.monotonic() - since > self.timeout_s:
                    silent = self._silent(self.timeout_s / 4)
                    report = diagnose(self.world.rank, runtime, self._peers(), silent, self._groups)
                    self.fail(f"rank {self.world.rank}: no progress for {self.timeout_s:g} s\n  {report}")
            except RuntimeError:
                if not self._ended.is_set() and not self._failing:
                    self.fail(f"rank {self.world.rank}: lost the store of rank 0; rank 0 has died or is unreachable")

    def _obey(self) -> None:
        """Stop if another rank has failed."""
        failure = self._failure()
        if failure is not None:
            cause, code = failure
            with self._lock:
                print(f"rank {self.world.rank}: stopping because {cause}", file=sys.stderr, flush=True)
                self._linger()
                self._exit(code)

    def _failure(self) -> tuple[str, int] | None:
        """What another rank has announced, and its exit status."""
        try:
            if not self._store.check([self._key(_FAILURE)]):
                return None
            origin, code, message = self._store.get(self._key(_FAILURE)).decode().split("|", 2)
        except RuntimeError:
            return None
        return None if int(origin) == self.world.rank else (f"rank {origin} failed: {message}", int(code))

    def _peers(self) -> dict[int, RankState]:
        """What the others published last; notes when each counter moved."""
        found = {}
        for rank in range(self.world.world_size):
            key = self._key(f"watchdog/{rank}")
            if rank == self.world.rank or not self._store.check([key]):
                continue
            fields = json.loads(self._store.get(key))
            found[rank] = RankState(beat=fields["beat"], lanes=tuple(fields["lanes"]))
            if self._beats.get(rank, (-1, 0.0))[0] != found[rank].beat:
                self._beats[rank] = (found[rank].beat, time.monotonic())
        return found

    def _silent(self, after_s: float) -> frozenset[int]:
        now = time.monotonic()
        return frozenset(rank for rank, (_, moved) in self._beats.items() if now - moved > after_s)
