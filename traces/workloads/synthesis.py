"""A trace from a model and an accelerator, by roofline: what to simulate before anything was measured. All assumed.

Each op takes the longer of its arithmetic and its memory traffic; a transfer takes its latency and its bytes over the
bandwidth. Nothing overlaps inside an op, and nothing is known of kernel launch or cache effects: these are bounds from
below for an accelerator that reaches the given rates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from nestpipe.base import TraceError, s_to_ns, split_evenly
from nestpipe.ir import OpKind
from traces.keys import KeyStatistics
from traces.workloads.models import FLOAT_BYTES, WorkloadModel

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["SYNTHETIC_COLUMNS", "AcceleratorRates", "KeyCounts", "key_counts", "synthesise"]

SYNTHETIC_COLUMNS = (
    *("rank", "step", "batch", "micro_batch", "kind", "duration_ns", "bytes", "keys", "unique_keys", "flops", "source"),
)
_COUNTED = ("rank", "step", "batch", "micro_batch", "duration_ns", "bytes", "keys", "unique_keys", "flops")
_WHOLE_MAX = 2**63 - 1
_KEY_BYTES = 8
_SORT_PASSES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorRates:
    """What one accelerator and its share of the host and the network sustain. All must be positive.

    Attributes:
        flops_per_s: matrix arithmetic of the data type used.
        memory_bandwidth_bytes_per_s: device memory.
        h2d_bandwidth_bytes_per_s: host to device and back, one way.
        host_read_bandwidth_bytes_per_s: training data into host memory.
        host_memory_bandwidth_bytes_per_s: host memory, random rows, this accelerator's share.
        network_bandwidth_bytes_per_s: what one rank sends in an All2All.
        network_latency_ns: of a collective.
    """

    flops_per_s: float
    memory_bandwidth_bytes_per_s: float
    h2d_bandwidth_bytes_per_s: float
    host_read_bandwidth_bytes_per_s: float
    host_memory_bandwidth_bytes_per_s: float
    network_bandwidth_bytes_per_s: float
    network_latency_ns: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 0 or (value == 0 and field.name != "network_latency_ns"):
                raise TraceError(f"accelerator: {field.name} must be positive, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCounts:
    """Keys of a step of the rank that the others wait for, the one that owns most of them; whole numbers.

    Attributes:
        lookups: of its own batch, before dedup.
        sent: of its own batch, after dedup.
        received: what it gets as an owner, from all ranks: its share of the All2All of keys.
        rows: what its shard reads, after the owner's dedup.
        shared_rows: rows of a shard that were in the previous global batch too: what is copied between buffers.
        rows_by_micro_batch: rows it sends as an owner in each micro-batch, and gets the gradients of; more than
            `received` in all if rows are sent twice.
        source: of the ratios.
    """

    lookups: int
    sent: int
    received: int
    rows: int
    shared_rows: int
    rows_by_micro_batch: tuple[int, ...]
    source: str


def key_counts(model: WorkloadModel, batch: int, micro_batches: int, statistics: KeyStatistics | None) -> KeyCounts:
    """The model's lookups with the ratios of a key stream; without one, no key repeats, none is shared, all own alike.

    Args:
        model: looks up `model.lookups(batch)` keys a rank and step.
        batch: samples a rank takes per step.
        micro_batches: N; its duplication is taken from the statistics (clustered, else in order).
        statistics: of the key stream; it must have a duplication for N > 1.

    Raises:
        TraceError: the statistics say nothing about N micro-batches.
    """
    lookups = model.lookups(batch)
    if statistics is None:
        sent = received = rows = total = lookups
        shared, source = 0, "no key repeats"
    else:
        per_key = lookups * statistics.unique_ratio_per_rank / statistics.unique_keys_per_rank
        sent = round(per_key * statistics.unique_keys_per_rank)
        received = round(per_key * statistics.received_keys_per_owner_max)
        rows = round(per_key * statistics.rows_per_owner_max)
        shared = round(per_key * (statistics.shared_rows_per_owner_max or 0.0))
        total = round(min(sent * _duplication(statistics, micro_batches), lookups) * statistics.owner_skew)
        source = f"key ratios {statistics.origin} from {statistics.source}"
    parts = tuple(split_evenly(total, micro_batches, m) for m in range(micro_batches))
    return KeyCounts(
        lookups=lookups,
        sent=sent,
        received=received,
        rows=rows,
        shared_rows=shared,
        rows_by_micro_batch=parts,
        source=source,
    )


def _duplication(statistics: KeyStatistics, micro_batches: int) -> float:
    if micro_batches == 1:
        return 1.0
    for one in statistics.duplication:
        if one.num_micro_batches == micro_batches:
            return one.in_order if one.clustered is None else one.clustered
    known = ", ".join(str(one.num_micro_batches) for one in statistics.duplication) or "none"
    raise TraceError(f"key statistics have no duplication for {micro_batches} micro-batches; they have {known}")


def synthesise(
    model: WorkloadModel,
    rates: AcceleratorRates,
    *,
    batch: int,
    world_size: int,
    micro_batches: int = 1,
    statistics: KeyStatistics | None = None,
    optimizer_floats_per_row: int = 1,
) -> pd.DataFrame:
    """One step as rows of the trace table: of the rank that the others wait for, see `KeyCounts`.

    Collectives have the bytes that pass its link: what it sends or gets, whichever is more.

    Args:
        model: what the step computes.
        rates: of the accelerator.
        batch: samples a rank takes per step.
        world_size: number of ranks.
        micro_batches: N, from 1 to `batch`.
        statistics: of the key stream; None for keys that never repeat.
        optimizer_floats_per_row: optimizer state beside each row; 1 is row-wise Adagrad.

    Returns:
        `SYNTHETIC_COLUMNS`; times in ns, sizes in bytes, `source` starts with `assumed`.

    Raises:
        TraceError: a size out of range, a number too large for a table, or statistics that do not cover N.
    """
    import pandas as pd

    if not (batch >= 1 and world_size >= 1 and 1 <= micro_batches <= batch):
        raise TraceError(
            f"need batch and world size of at least 1 and at most {batch} micro-batches, "
            f"got {batch}, {world_size} and {micro_batches}"
        )
    counts = key_counts(model, batch, micro_batches, statistics)
    step = _Step(
        model=model, rates=rates, batch=batch, world_size=world_size, optimizer_floats=optimizer_floats_per_row
    )
    rows = [*step.lookup_path(counts), *step.windows(counts), *step.finish(counts)]
    for row in rows:
        _require_countable(dict(zip(SYNTHETIC_COLUMNS, row, strict=True)), batch)
    frame = pd.DataFrame(rows, columns=list(SYNTHETIC_COLUMNS))
    return frame.astype(dict.fromkeys(_COUNTED, "Int64"))


def _require_countable(row: dict[str, object], batch: int) -> None:
    """Raises a TraceError that names the op if one of its numbers does not fit the whole numbers of a table."""
    for name in _COUNTED:
        value = row[name]
        if isinstance(value, int) and value > _WHOLE_MAX:
            raise TraceError(
                f"batch per worker of {batch:,}: {row['kind']} has {name} of {value:.3g}, more than the "
                f"{_WHOLE_MAX:.3g} that a table holds; take a smaller batch or model"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """Turns counts into rows: each method yields the ops of one part of the step."""

    model: WorkloadModel
    rates: AcceleratorRates
    batch: int
    world_size: int
    optimizer_floats: int

    def lookup_path(self, counts: KeyCounts) -> Iterator[tuple[object, ...]]:
        rates, row_bytes = self.rates, self.model.row_bytes
        data = counts.lookups * _KEY_BYTES + self.batch * self.model.dense_features * FLOAT_BYTES
        yield self._moved(OpKind.READ, data, rates.host_read_bandwidth_bytes_per_s, "host read", keys=counts.lookups)
        yield self._moved(OpKind.COPY_H2D, data, rates.h2d_bandwidth_bytes_per_s, "host link", keys=counts.lookups)
        sort = 2 * _SORT_PASSES * counts.lookups * _KEY_BYTES
        memory = rates.memory_bandwidth_bytes_per_s
        yield self._moved(
            OpKind.DEDUP, sort, memory, "radix sort, 8 passes", keys=counts.lookups, unique_keys=counts.sent
        )
        yield self._sent(OpKind.ALL_TO_ALL_KEYS, counts.received * _KEY_BYTES, counts.received)
        found = round(counts.rows * row_bytes)
        slow = min(rates.host_memory_bandwidth_bytes_per_s, rates.h2d_bandwidth_bytes_per_s)
        yield self._moved(
            OpKind.LOOKUP, found, slow, "host rows over the host link", keys=counts.received, unique_keys=counts.rows
        )
        copied = 2 * round(counts.shared_rows * self._stored)
        yield self._moved(OpKind.SYNC, copied, memory, "device copy", unique_keys=counts.shared_rows)

    def windows(self, counts: KeyCounts) -> Iterator[tuple[object, ...]]:
        num = len(counts.rows_by_micro_batch)
        for m, rows in enumerate(counts.rows_by_micro_batch):
            samples = split_evenly(self.batch, num, m)
            size = round(rows * self.model.row_bytes)
            yield self._sent(OpKind.ALL_TO_ALL_ROWS, size, rows, micro_batch=m)
            yield self._computed(OpKind.FORWARD, samples, m)
            yield self._computed(OpKind.BACKWARD, samples, m)
            yield self._sent(OpKind.ALL_TO_ALL_GRADS, size, rows, micro_batch=m)

    def finish(self, counts: KeyCounts) -> Iterator[tuple[object, ...]]:
        size = self.model.dense_parameters * FLOAT_BYTES
        ring = round(2 * (self.world_size - 1) / self.world_size * size)
        yield self._sent(OpKind.ALL_REDUCE, size, None, wire_bytes=ring)
        memory = self.rates.memory_bandwidth_bytes_per_s
        touched = round(counts.rows * (2 * self._stored + self.model.row_bytes)) + 3 * size
        yield self._moved(OpKind.UPDATE, touched, memory, "rows, optimizer and gradient", unique_keys=counts.rows)
        back = round(counts.rows * self._stored)
        slow = min(self.rates.host_memory_bandwidth_bytes_per_s, self.rates.h2d_bandwidth_bytes_per_s)
        yield self._moved(OpKind.WRITE_BACK, back, slow, "rows to host memory", unique_keys=counts.rows)

    @property
    def _stored(self) -> float:
        """Bytes of a row with its optimizer state."""
        return self.model.row_bytes + self.optimizer_floats * FLOAT_BYTES

    def _row(self, kind: OpKind, duration_ns: int, why: str, **values: int | None) -> tuple[object, ...]:
        known = {
            "rank": 0,
            "step": 0,
            "batch": 0,
            "kind": str(kind),
            "duration_ns": duration_ns,
            "source": f"assumed: roofline, {why}; {self.model.source}",
            **values,
        }
        return tuple(known.get(name) for name in SYNTHETIC_COLUMNS)

    def _moved(
        self,
        kind: OpKind,
        size: int,
        bandwidth: float,
        why: str,
        *,
        keys: int | None = None,
        unique_keys: int | None = None,
    ) -> tuple[object, ...]:
        return self._row(kind, s_to_ns(size / bandwidth), why, bytes=size, keys=keys, unique_keys=unique_keys)

    def _sent(
        self,
        kind: OpKind,
        size: int,
        keys: int | None,
        *,
        micro_batch: int | None = None,
        wire_bytes: int | None = None,
    ) -> tuple[object, ...]:
        """A collective: the share for other ranks over the network, and its latency; nothing for a lone rank."""
        wire = size * (self.world_size - 1) / self.world_size if wire_bytes is None else wire_bytes
        latency = self.rates.network_latency_ns if self.world_size > 1 else 0
        duration = latency + s_to_ns(wire / self.rates.network_bandwidth_bytes_per_s)
        return self._row(kind, duration, "network", bytes=size, keys=keys, unique_keys=keys, micro_batch=micro_batch)

    def _computed(self, kind: OpKind, samples: int, micro_batch: int) -> tuple[object, ...]:
        model = self.model
        forward = kind is OpKind.FORWARD
        flops = model.forward_flops(samples) if forward else model.backward_flops(samples)
        size = model.forward_bytes(samples) if forward else model.backward_bytes(samples)
        arithmetic, traffic = flops / self.rates.flops_per_s, size / self.rates.memory_bandwidth_bytes_per_s
        why = "arithmetic bound" if arithmetic >= traffic else "memory bound"
        return self._row(kind, s_to_ns(max(arithmetic, traffic)), why, bytes=size, flops=flops, micro_batch=micro_batch)
