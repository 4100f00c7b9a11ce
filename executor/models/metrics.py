"""How good predictions are."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["AreaUnderCurve", "area_under_curve"]

_BINS: Final = 1 << 16


class AreaUnderCurve:
    """Counts predictions by class and probability, to the 65,536th part, in memory that does not grow.

    Args:
        device: where the predictions are.
    """

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2 * _BINS, dtype=torch.int64, device=device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count logits, float (samples,), of labels 0 or 1, float (samples,). What is not finite counts as 0."""
        bins = (torch.sigmoid(logits.float()).nan_to_num_(0.0) * (_BINS - 1)).round_().long()
        at = bins + labels.long() * _BINS
        self.counts.index_add_(0, at, torch.ones_like(at))


def area_under_curve(counts: Tensor) -> float | None:
    """The probability that a sample of class 1 is given more than one of class 0, where equal counts half.

    Args:
        counts: of `AreaUnderCurve`, of all ranks added.

    Returns:
        None where a class is missing.

    Source: the Mann-Whitney U statistic over the number of pairs (Hanley and McNeil 1982).

    >>> curve = AreaUnderCurve(torch.device("cpu"))
    >>> curve.add(torch.tensor([-1.0, 0.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    >>> area_under_curve(curve.counts)
    0.875
    """
    negative, positive = counts.cpu().view(2, -1)
    pairs = int(negative.sum()) * int(positive.sum())
    if not pairs:
        return None
    twice_below = 2 * (negative.cumsum(0) - negative) + negative
    return int((positive * twice_below).sum()) / (2 * pairs)
