"""The Pareto front of a table, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

__all__ = ["pareto"]


def pareto(frame: pd.DataFrame, axes: Sequence[tuple[str, bool]]) -> pd.DataFrame:
    """The rows that no other row beats: at least as good on every axis and better on one. Equal rows all stay.

    Args:
        frame: the candidates.
        axes: column and whether less is better.

    >>> points = pd.DataFrame({"cost": [1, 2, 2, 3], "qps": [5, 9, 8, 9]})
    >>> pareto(points, [("cost", True), ("qps", False)]).index.tolist()
    [0, 1]
    """
    if frame.empty or not axes:
        return frame
    values = np.stack([frame[name].to_numpy(dtype=np.float64) * (1 if less else -1) for name, less in axes], axis=1)
    unique, inverse = np.unique(values, axis=0, return_inverse=True)
    kept = _undominated(unique)[inverse.reshape(-1)]
    order = [name for name, _ in axes]
    return frame[kept].sort_values(order, ascending=[less for _, less in axes], kind="stable")


def _undominated(values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """bool (rows,): which of different rows, in lexicographic order, no other one beats; less is better.

    Only a row earlier in that order can beat a later one, and then one of those kept so far does.
    """
    kept: list[int] = []
    front = np.empty((0, values.shape[1]))
    for i, row in enumerate(values):
        if not (front <= row).all(axis=1).any():
            kept.append(i)
            front = values[kept]
    mask = np.zeros(len(values), dtype=bool)
    mask[kept] = True
    return mask
