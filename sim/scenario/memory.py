"""What a configuration needs in device and host memory, from the schedule's own buffers.

Per rank: the shard of the tables and their optimiser rows in host memory; every buffer that the schedule declares,
times its slots (the two `rows` and `moments` slots of dual-buffer pipelining, the micro-batches of embeddings and
gradients in flight, the activations of each batch in flight); one packed send buffer per row or gradient All2All; dense
parameters and optimiser. Sizes are means over ranks; rows that a busy owner holds grow with `skew`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.base import CaseError, bytes_text, parse_bytes
from nestpipe.ir import ALL_TO_ALLS, Data, Loop, OpKind, Place, Resource
from sim.scenario.sections import Memory

__all__ = ["Need", "buffer_sizes", "memory_need"]

_MOST_BYTES = 1 << 60
_INVERSE_BYTES = 4  # dedup keeps for every key its place among the unique ones, int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one rank by what they are for; host memory is shared by the ranks of a host."""

    device: Mapping[str, int]
    host: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Device memory of one rank."""
        return sum(self.device.values())

    def host_bytes(self, ranks_per_host: int) -> int:
        """Host memory of one host."""
        return ranks_per_host * sum(self.host.values())

    def largest(self, place: Place) -> str:
        """What takes most there, in words."""
        parts = self.device if place is Place.DEVICE else self.host
        name = max(parts, key=lambda part: parts[part])
        return f"{name} {bytes_text(parts[name])}"


def memory_need(
    memory: Memory,
    loop: Loop,
    *,
    world_size: int,
    batch_per_worker: int,
    domain_size: int | None = None,
    row_duplication: float = 1.0,
    skew: float = 1.0,
) -> Need:
    """Bytes that one rank needs.

    Args:
        memory: sizes per row, key, sample and worker.
        loop: the schedule, with its number of micro-batches.
        world_size: number of ranks that share the tables.
        batch_per_worker: samples per rank and step.
        domain_size: ranks that share one copy of the tables, where the schedule has domains.
        row_duplication: rows sent with micro-batches over rows sent without.
        skew: rows of the busiest owner over the mean.

    Raises:
        CaseError: if the schedule has a buffer whose size is not known.
    """
    sizes = buffer_sizes(memory, batch_per_worker, loop.micro_batches, row_duplication=row_duplication, skew=skew)
    shards = domain_size if domain_size is not None and _has_domains(loop) else world_size
    rows = memory.table_rows / shards
    device = {
        "dense parameters": parse_bytes(memory.dense_parameter_bytes),
        "dense optimiser": parse_bytes(memory.dense_optimizer_bytes),
        "reserved": parse_bytes(memory.reserved_device_bytes),
    }
    host = {
        "tables": round(rows * parse_bytes(memory.row_bytes)),
        "optimiser rows": round(rows * parse_bytes(memory.optimizer_row_bytes)),
        "reserved": parse_bytes(memory.reserved_host_bytes),
    }
    for buffer in loop.buffers:
        if buffer.data not in sizes:
            raise CaseError(f"memory: the size of buffer {buffer.data} is not known")
        place = device if buffer.place is Place.DEVICE else host
        place[f"{buffer.data} x {buffer.slots}"] = buffer.slots * sizes[buffer.data]
    device["All2All send buffers"] = _in_flight(loop, sizes)
    for where, parts in (("device", device), ("host", host)):
        largest = max(parts, key=lambda part: parts[part])
        if sum(parts.values()) > _MOST_BYTES:
            raise CaseError(
                f"memory: one rank needs more than 1 EiB of {where} memory, most of it for {largest}; check the sizes "
                "and their units"
            )
    return Need(device=device, host=host)


def buffer_sizes(
    memory: Memory, batch_per_worker: int, micro_batches: int, *, row_duplication: float = 1.0, skew: float = 1.0
) -> dict[Data, int]:
    """Bytes of one instance of each buffer on one rank."""
    keys = batch_per_worker * memory.keys_per_sample
    unique = keys * memory.unique_ratio
    row, moments = parse_bytes(memory.row_bytes), parse_bytes(memory.optimizer_row_bytes)
    samples = batch_per_worker * parse_bytes(memory.sample_bytes) + keys * memory.key_bytes
    micro_rows = unique * (row_duplication if micro_batches > 1 else 1.0) * row / micro_batches
    owned = unique * skew
    activations = batch_per_worker * parse_bytes(memory.activation_bytes_per_sample) / micro_batches
    sizes = {
        Data.SAMPLES: samples,
        Data.BATCH: samples,
        Data.KEYS: unique * memory.key_bytes + keys * _INVERSE_BYTES,
        Data.OWNED: owned * memory.key_bytes,
        Data.ROWS: owned * row,
        Data.MOMENTS: owned * moments,
        Data.EMBEDDINGS: micro_rows,
        Data.ACTIVATIONS: activations,
        Data.ROW_GRADS: micro_rows,
        Data.OWNED_GRADS: owned * row,
        Data.DENSE_GRADS: float(parse_bytes(memory.dense_parameter_bytes)),
    }
    return {data: round(size) for data, size in sizes.items()}


def _in_flight(loop: Loop, sizes: Mapping[Data, int]) -> int:
    """One packed send buffer per stream that exchanges rows or gradients, as large as the largest of its messages."""
    message = {OpKind.ALL_TO_ALL_ROWS: Data.EMBEDDINGS, OpKind.ALL_TO_ALL_GRADS: Data.ROW_GRADS}
    total = 0
    for stream in loop.streams:
        kinds = {op.kind for op in stream.ops} & ALL_TO_ALLS & message.keys()
        total += max((sizes[message[kind]] for kind in kinds), default=0)
    return total


def _has_domains(loop: Loop) -> bool:
    return any(stream.resource is Resource.DOMAIN for stream in loop.streams)
