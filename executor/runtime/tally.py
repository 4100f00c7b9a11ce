"""What is kept of a run however long it is: 24 bytes a batch, and sums over ops."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from executor.runtime.lanes import OpRecord
from nestpipe.ir import OpKind

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """One rank's sums.

    Attributes:
        losses: the sum of the loss of each batch on this rank; 0 for batches before a resume.
        terms: the global number of its loss terms; 0 for batches before a resume.
        ends_ns: when the last `update` of each batch that was trained here ended, on this rank's clock.
        start_ns: when the first op began.
        bytes: moved by each lane.
        keys: of each op kind: keys handled, and how many were distinct.
    """

    losses: array[float] = field(default_factory=lambda: array("d"))
    terms: array[int] = field(default_factory=lambda: array("q"))
    ends_ns: array[int] = field(default_factory=lambda: array("q"))
    start_ns: int | None = None
    bytes: dict[int, int] = field(default_factory=dict)
    keys: dict[OpKind, tuple[int, int]] = field(default_factory=dict)

    def add_batch(self, batch: int, loss: float, terms: int) -> None:
        """Note a batch, after all before it."""
        missing = batch - len(self.losses)
        self.losses.extend([0.0] * missing + [loss])
        self.terms.extend([0] * missing + [terms])

    def add_ops(self, records: Iterable[OpRecord], steps: int) -> None:
        """Add the ops of the next `steps` batches, numbered from 0."""
        ends_ns = array("q", [0] * steps)
        for op, lane, start_ns, end_ns, cost in records:
            self.start_ns = start_ns if self.start_ns is None else min(self.start_ns, start_ns)
            self.bytes[lane] = self.bytes.get(lane, 0) + cost.bytes
            keys, distinct = self.keys.get(op.kind, (0, 0))
            self.keys[op.kind] = (keys + cost.keys, distinct + cost.unique_keys)
            if op.kind == OpKind.UPDATE:
                ends_ns[op.batch] = max(ends_ns[op.batch], end_ns)
        self.ends_ns.extend(ends_ns)
