"""Measures what the links of a testbed carry, with sockets of its own: one way, and all ranks at once.

Run on every rank (`launch` does), it prints one JSON object per rank. The rate is taken between the first and the last
byte received after the burst that a shaped link lets through at once, so that it is the rate of a steady stream.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executor.testbed.launch import launch
from executor.testbed.namespaces import Testbed, TestbedError
from nestpipe.base import BITS_PER_BYTE, KIB, MIB

__all__ = ["LinkRate", "check_links"]

_PORT: Final = 29_400
_CHUNK_BYTES: Final = 64 * KIB
_SKIP_BYTES: Final = 1 * MIB
_CONNECT_S: Final = 10.0
_MAX_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """The rate at which a rank received a steady stream, against the rate that its link is shaped to."""

    rank: int
    mode: str
    shaped_bits_per_s: int
    measured_bits_per_s: float

    @property
    def ratio(self) -> float:
        """Measured over shaped; payload can reach about 0.99 of the rate, the rest is headers."""
        return self.measured_bits_per_s / self.shaped_bits_per_s


def check_links(bed: Testbed, *, seconds: float = 0.5) -> list[LinkRate]:
    """Measured rates of a testbed that is up: `one way` from rank 0 to 1, then `all at once` around the ring.

    Args:
        bed: at least two ranks.
        seconds: how long each stream should take.

    Raises:
        TestbedError: if there is only one rank, the time is invalid, or a rank fails.
    """
    if bed.world_size < 2:
        raise TestbedError("measuring a link takes at least 2 ranks")
    if not 0 < seconds <= _MAX_S:
        raise TestbedError(f"a stream takes more than 0 and at most {_MAX_S:g} seconds, got {seconds:g}")
    rates = bed.rates_bits_per_s
    plan = [
        int(seconds * min(rates[rank], rates[rank - 1]) / BITS_PER_BYTE) + _SKIP_BYTES for rank in range(bed.world_size)
    ]
    command = [sys.executable, "-m", "executor.testbed.links", json.dumps(plan)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    results = launch(bed, command, timeout_s=20 * seconds + 30, extra_environment={"PYTHONPATH": path})
    found = []
    for result in results:
        for mode, measured in json.loads(result.stdout).items():
            shaped = min(rates[result.rank], rates[result.rank - 1])
            found.append(LinkRate(rank=result.rank, mode=mode, shaped_bits_per_s=shaped, measured_bits_per_s=measured))
    return sorted(found, key=lambda rate: (rate.mode != "one way", rate.rank))


def _receive(connection: socket.socket, num_bytes: int) -> float:
    """Bits per second of a stream of `num_bytes`, without its first `_SKIP_BYTES`."""
    buffer = bytearray(_CHUNK_BYTES * 4)
    got, since_bytes, since_s = 0, 0, 0.0
    while got < num_bytes:
        size = connection.recv_into(buffer)
        if size == 0:
            raise ConnectionError(f"the sender closed after {got} of {num_bytes} bytes")
        got += size
        if since_bytes == 0 and got >= _SKIP_BYTES:
            since_bytes, since_s = got, time.monotonic()
    return (got - since_bytes) * BITS_PER_BYTE / max(time.monotonic() - since_s, 1e-9)


def _send(connection: socket.socket, num_bytes: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    while num_bytes > 0:
        part = min(num_bytes, _CHUNK_BYTES)
        connection.sendall(chunk[:part])
        num_bytes -= part


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=_CONNECT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _main(plan: Sequence[int]) -> None:
    """One rank: listen for the rank before, connect to the rank after, stream one way, then all at once."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = os.environ["MASTER_ADDR"].rpartition(".")[0]
    after = (rank + 1) % world_size
    with socket.create_server((f"{network}.{rank + 1}", _PORT)) as server:
        outgoing = _connect(f"{network}.{after + 1}")
        incoming, _ = server.accept()
    rates = {}
    with outgoing, incoming:
        if rank == 0:
            _send(outgoing, plan[after])
        elif rank == 1:
            rates["one way"] = _receive(incoming, plan[1])
        # a token around the ring, so that nobody streams before the first stream is over
        if rank == 0:
            incoming.recv(1)
            outgoing.sendall(b"g")
            incoming.recv(1)
        else:
            if rank == 1:
                outgoing.sendall(b"d")
            else:
                outgoing.sendall(incoming.recv(1))
            outgoing.sendall(incoming.recv(1))
        sender = threading.Thread(target=_send, args=(outgoing, plan[after]))
        sender.start()
        rates["all at once"] = _receive(incoming, plan[rank])
        sender.join()
    print(json.dumps(rates))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
