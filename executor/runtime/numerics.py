"""What happens when a loss or a gradient is not finite: every rank learns of it in the same batch and does the same.

The flag rides on the dense all_reduce as one more element, so it costs no collective of its own, and a rank that has
seen nothing wrong still stops, or skips, together with the one that has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor

from nestpipe.base import ExecutorError
from nestpipe.ir import Op, op_name

__all__ = ["NanPolicy", "Numerics"]


class NanPolicy(StrEnum):
    """Stop before the bad batch is applied, skip the batch, or only count it."""

    STOP = "stop"
    SKIP = "skip"
    COUNT = "count"


@dataclass(slots=True, kw_only=True)
class Numerics:
    """Watches the loss and gradients of one rank.

    `bad_batches` are the data positions at which some rank saw NaN or infinity; `first` names this rank's first bad
    tensor of each such batch.
    """

    policy: NanPolicy
    rank: int
    first_batch: int = 0
    bad_batches: list[int] = field(default_factory=list)
    first: dict[int, str] = field(default_factory=dict)

    def check(self, op: Op, **tensors: Tensor) -> float:
        """0.0 if every tensor is finite, else NaN; remembers the name of the first that is not."""
        # NaN and infinity both survive a sum, so one number, read once from the device, mostly settles it
        if math.isfinite(float(torch.stack([tensor.sum() for tensor in tensors.values()]).sum())):
            return 0.0
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                batch = self.first_batch + op.batch
                micro_batch = "" if op.micro_batch is None else f", micro-batch {op.micro_batch}"
                self.first.setdefault(batch, f"{name} of batch {batch}{micro_batch} ({op_name(op)})")
                return math.nan
        return 0.0

    def apply(self, batch: int, flag: float) -> bool:
        """Whether the batch's gradients are to be applied, given the reduced flag.

        Raises:
            ExecutorError: under the stop policy, on every rank.
        """
        if flag == 0.0:
            return True
        self.bad_batches.append(batch)
        if self.policy == NanPolicy.STOP:
            where = self.first.get(batch)
            found = f"first bad tensor here: {where}" if where else "this rank's own tensors are finite"
            raise ExecutorError(
                f"NaN or infinity in batch {batch}; {found}; training stops before its update "
                "(choose --nan skip or --nan count to go on)"
            )
        return self.policy == NanPolicy.COUNT
