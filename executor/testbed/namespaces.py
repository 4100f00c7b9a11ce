"""A cluster of network namespaces on one Linux machine: one namespace per rank, every NIC shaped to a chosen rate.

Communication between ranks then takes real time without taking the CPU, so that overlap and contention are real even
where ranks share a machine. The layout is a switch with one cable per rank::

    namespace r0: eth0 ──veth── r0 ┐
    namespace r1: eth0 ──veth── r1 ├ bridge, namespace hub
    namespace r2: eth0 ──veth── r2 ┘

`tbf` shapes both ends of each cable, so that sending and receiving are limited alike and a receiver of many is too. The
bridge lives in a namespace of its own without a route anywhere: the network of the host is not touched nor reachable.

Nothing outlives its owner for long: a testbed's name says whose it is (`owned_name`), and each `up` first removes those
whose owner is gone, whatever killed it. Needs root, `ip` and `tc` (Debian: iproute2), and a kernel with network
namespaces, veth, bridge and tbf.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from nestpipe.base import BITS_PER_BYTE, KIB, MIB, ExecutorError

__all__ = [
    "INTERFACE",
    "MAX_RANKS",
    "Testbed",
    "TestbedError",
    "existing",
    "owned_name",
    "rate_text",
    "refusal",
    "remove_stale",
    "set_up",
    "tear_down",
    "temporary",
]

#: The name of every rank's NIC inside its namespace; what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are set to.
INTERFACE: Final = "eth0"
PREFIX: Final = "nestpipe"
_HUB: Final = "hub"
_READY: Final = "ready"
_LOCK: Final = Path("/run/lock/nestpipe-testbed.lock")
_NAME: Final = re.compile(r"[a-z0-9]{1,32}")
_OWNED: Final = re.compile(r"pid(\d+)at(\d+)")
MAX_RANKS: Final = 250
_MTU_BYTES: Final = 9000
_QUEUE_BYTES: Final = 64 * MIB
#: TCP as on a cluster's own network: no restart of slow start after each computing phase, windows that never limit.
#: reno, because the only alternatives that a namespace may choose model the path and halve a link used both ways.
_SYSCTLS: Final = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv4/tcp_congestion_control": "reno",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/tcp_rmem": "4096 8388608 33554432",
    "net/ipv4/tcp_wmem": "4096 8388608 33554432",
    # a NIC takes turns among connections. tbf's queue is first in, first out: were it deep, a small message would wait
    # for all of a large one (12 ms behind 4 MiB at 1 Gbit/s with the kernel's 4 MiB, 0.9 ms with this)
    "net/ipv4/tcp_limit_output_bytes": "65536",
}


class TestbedError(ExecutorError):
    """Making, using or removing a testbed failed; names the command, the reason and the way out."""

    __test__ = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """One namespace per rank and the rate of each rank's NIC.

    Attributes:
        name: lower-case letters and digits; the namespaces are nestpipe-NAME-r0, ... and nestpipe-NAME-hub.
        rates_bits_per_s: for each rank the rate of its NIC, in each direction.
        burst_bytes: what a NIC that was idle lets through at once. Below 128 KiB tbf drops under the set rate.

    Raises:
        TestbedError: if a value is invalid.
    """

    __test__ = False

    name: str
    rates_bits_per_s: tuple[int, ...]
    burst_bytes: int = 256 * KIB

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise TestbedError(f"testbed name must be 1 to 32 lower-case letters and digits, got {self.name!r}")
        if not 1 <= self.world_size <= MAX_RANKS:
            raise TestbedError(f"a testbed has 1 to {MAX_RANKS} ranks, got {self.world_size}")
        for rank, rate in enumerate(self.rates_bits_per_s):
            if not 1_000_000 <= rate <= 100_000_000_000:
                raise TestbedError(f"rate of rank {rank} must be 1 Mbit/s to 100 Gbit/s, got {rate} bit/s")
        if not 64 * KIB <= self.burst_bytes <= 64 * MIB:
            raise TestbedError(f"burst_bytes must be 64 KiB to 64 MiB, got {self.burst_bytes}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.rates_bits_per_s)

    def namespace(self, rank: int) -> str:
        """The name of a rank's namespace."""
        return f"{PREFIX}-{self.name}-r{rank}"

    @property
    def hub(self) -> str:
        """The name of the namespace that holds the bridge."""
        return f"{PREFIX}-{self.name}-{_HUB}"

    def address(self, rank: int) -> str:
        """The IPv4 address of a rank, from a private range that exists only inside the namespaces.

        >>> Testbed(name="doc", rates_bits_per_s=(10**9, 10**9)).address(1)
        '10.231.0.2'
        """
        return f"10.231.0.{rank + 1}"


def owned_name() -> str:
    """A name that says that this process owns the testbed; it is removed by anyone once this process has ended."""
    return f"pid{os.getpid()}at{_start_ticks(os.getpid())}"


def refusal() -> str | None:
    """Why no testbed can be made here, with what to do about it; None if one can."""
    if sys.platform != "linux":
        return f"a testbed needs Linux network namespaces; this is {sys.platform}"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"a testbed needs the commands ip and tc, {' and '.join(missing)} not found; install iproute2"
    if os.geteuid() != 0:
        return "a testbed needs root to make network namespaces; run as root (or with sudo)"
    probe = f"{PREFIX}-{owned_name()}-probe"
    steps = (
        ("network namespaces", f"ip netns add {probe}"),
        ("a bridge", f"ip -n {probe} link add br0 type bridge"),
        ("veth pairs", f"ip -n {probe} link add v0 type veth peer name v1"),
        ("the tbf qdisc", f"tc -n {probe} qdisc add dev v0 root tbf rate 1gbit burst 256kb limit 1mb"),
    )
    try:
        for what, command in steps:
            result = _try(command)
            if result is not None:
                return f"this system does not allow {what}: '{command}' says: {result}"
        return None
    finally:
        _try(f"ip netns del {probe}")


def set_up(bed: Testbed) -> None:
    """Make the namespaces, cables and shaping of `bed`, after removing testbeds whose owner is gone.

    Raises:
        TestbedError: if this system cannot (see `refusal`), a testbed of that name is up already, or a command fails;
            nothing is left behind.
    """
    reason = refusal()
    if reason is not None:
        raise TestbedError(reason)
    with _locked():
        _remove_stale()
        if _is_ready(bed):
            raise TestbedError(f"testbed {bed.name!r} is up already; remove it first (nestpipe testbed down)")
        _remove(bed.name)
        try:
            _build(bed)
        except BaseException:
            _remove(bed.name)
            raise


def tear_down(name: str) -> int:
    """Remove the testbed of that name, ending every process in it; returns the number of namespaces removed."""
    with _locked():
        return _remove(name)


def existing() -> dict[str, list[str]]:
    """The testbeds there are: for each name its namespaces."""
    found: dict[str, list[str]] = {}
    folder = Path("/run/netns")
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        parts = entry.name.split("-")
        if len(parts) == 3 and parts[0] == PREFIX:
            found.setdefault(parts[1], []).append(entry.name)
    return found


def remove_stale() -> list[str]:
    """Remove the testbeds whose owner has ended, and return their names."""
    with _locked():
        return _remove_stale()


@contextmanager
def temporary(rates_bits_per_s: Sequence[int], *, burst_bytes: int = 256 * KIB) -> Iterator[Testbed]:
    """A testbed that is there inside the `with` block and gone after it, however the block ends."""
    bed = Testbed(name=owned_name(), rates_bits_per_s=tuple(rates_bits_per_s), burst_bytes=burst_bytes)
    with _terminated_as_exit():
        set_up(bed)
        try:
            yield bed
        finally:
            tear_down(bed.name)


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """While there is a testbed, SIGTERM unwinds the stack as Ctrl-C does, so that it and its ranks are removed."""

    def leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        print("terminated; the testbed is removed", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not in the main thread: the owner of that thread cleans up
        yield
        return
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the testbed is removed", file=sys.stderr, flush=True)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _build(bed: Testbed) -> None:
    _run(f"ip netns add {bed.hub}")
    _run(f"ip -n {bed.hub} link add br0 type bridge")
    _run(f"ip -n {bed.hub} link set br0 mtu {_MTU_BYTES} up")
    for rank, rate in enumerate(bed.rates_bits_per_s):
        mine, port = bed.namespace(rank), f"r{rank}"
        _run(f"ip netns add {mine}")
        _set_sysctls(mine)
        _run(f"ip -n {bed.hub} link add {port} mtu {_MTU_BYTES} type veth peer name {INTERFACE} netns {mine}")
        _run(f"ip -n {bed.hub} link set {port} mtu {_MTU_BYTES} master br0 up")
        _run(f"ip -n {mine} addr add {bed.address(rank)}/24 dev {INTERFACE}")
        _run(f"ip -n {mine} link set {INTERFACE} mtu {_MTU_BYTES} up")
        _run(f"ip -n {mine} link set lo up")
        shape = f"root tbf rate {rate}bit burst {bed.burst_bytes}b limit {_QUEUE_BYTES}b"
        _run(f"tc -n {mine} qdisc add dev {INTERFACE} {shape}")
        _run(f"tc -n {bed.hub} qdisc add dev {port} {shape}")
    # the last thing made marks a testbed as whole
    _run(f"ip -n {bed.hub} link add {_READY} type bridge")


def _set_sysctls(namespace: str) -> None:
    """Settings that a kernel lacks are left out: they make the network steadier, none is needed."""
    script = "; ".join(f"echo '{value}' > /proc/sys/{name}" for name, value in _SYSCTLS.items())
    subprocess.run(["ip", "netns", "exec", namespace, "sh", "-c", script], capture_output=True, check=False)


def _is_ready(bed: Testbed) -> bool:
    return bed.hub in existing().get(bed.name, []) and _try(f"ip -n {bed.hub} link show {_READY}") is None


def _remove_stale() -> list[str]:
    stale = []
    for name in existing():
        match = _OWNED.fullmatch(name)
        if match and _start_ticks(int(match[1])) != int(match[2]):
            _remove(name)
            stale.append(name)
    return stale


def _remove(name: str) -> int:
    namespaces = existing().get(name, [])
    for namespace in namespaces:
        _end_processes(namespace)
    for namespace in namespaces:
        # deleting a namespace deletes the cables that end in it
        problem = _try(f"ip netns del {namespace}")
        if problem is not None and (Path("/run/netns") / namespace).exists():
            raise TestbedError(f"cannot remove {namespace}: {problem}; remove it with 'ip netns del {namespace}'")
    return len(namespaces)


def _end_processes(namespace: str) -> None:
    """End what still runs in a namespace: only our own ranks ever enter it."""
    listing = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for word in listing.stdout.split():
        if int(word) != os.getpid():
            try:
                os.kill(int(word), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot, which tells a reused id; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


@contextmanager
def _locked() -> Iterator[None]:
    """One testbed is made or removed at a time; the lock ends with its holder, however that ends."""
    folder = _LOCK.parent if _LOCK.parent.is_dir() else Path("/tmp")
    with open(folder / _LOCK.name, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: str) -> None:
    problem = _try(command)
    if problem is not None:
        raise TestbedError(f"'{command}' failed: {problem}")


def _try(command: str) -> str | None:
    """Run a command; what it says if it fails, None if it works."""
    result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else (result.stderr or result.stdout).strip() or f"exit {result.returncode}"


def rate_text(rate_bits_per_s: float) -> str:
    """A rate for people.

    >>> rate_text(25_000_000)
    '25 Mbit/s (3.125 MB/s)'
    """
    return f"{rate_bits_per_s / 1e6:g} Mbit/s ({rate_bits_per_s / 1e6 / BITS_PER_BYTE:g} MB/s)"
