"""What a key file gives a DLRM: keys, labels and dense values, by the names of its columns or as the caller names them.

What the file does not have is made from the sample's number, so that a model can be trained on keys alone; `synthetic`
says what that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nestpipe.base import ExecutorError
from traces.keys import KeyStream, detect_layout, read_columns

__all__ = ["DenseScale", "LabeledKeys", "read_labeled_keys"]


class DenseScale(StrEnum):
    """What is done to dense values: nothing, or log(1 + max(x, 0)), as is usual for Criteo's counts."""

    RAW = "raw"
    LOG = "log"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LabeledKeys:
    """The samples of a file. labels: float32 (samples,). dense: float32 (samples, values); None where it has none."""

    keys: KeyStream
    labels: npt.NDArray[np.float32] | None
    dense: npt.NDArray[np.float32] | None
    label: str | None
    dense_columns: tuple[str, ...]

    @property
    def synthetic(self) -> tuple[str, ...]:
        """What the file does not give."""
        return tuple(name for name in ("labels", "dense") if getattr(self, name) is None)


def read_labeled_keys(
    path: Path,
    *,
    label: str | None = None,
    dense: Sequence[str] | None = None,
    sparse: Sequence[str] | None = None,
    scale: DenseScale = DenseScale.LOG,
) -> LabeledKeys:
    """Read a key file with its labels and dense values.

    Args:
        path: a file that `read_keys` reads.
        label: column of 0 and 1, or NAME>=NUMBER to make it one; by default a column with the name of a label.
        dense: columns of numbers, an empty cell is 0; by default those with the names of dense values (Criteo's I1).
        sparse: columns of keys; by default the layout's.
        scale: what is done to the dense values.

    Raises:
        TraceError: if the file is invalid, or lacks a column.
        ExecutorError: if a label is not 0 or 1.
    """
    layout = detect_layout(path)
    name, _, bound = (label or layout.label_column or "").partition(">=")
    columns = layout.dense_columns if dense is None else tuple(dense)
    keys, numbers = read_columns(path, keys=sparse, numbers=[*filter(None, [name]), *columns])
    labels, values = (numbers[:, 0], numbers[:, 1:]) if name else (None, numbers)
    if labels is not None:
        labels = _labels(path, name, bound, labels, required=label is not None)
    if scale == DenseScale.LOG:
        values = np.log1p(np.maximum(values, 0.0))
    return LabeledKeys(
        keys=keys,
        labels=None if labels is None else labels.astype(np.float32),
        dense=values.astype(np.float32) if columns else None,
        label=None if labels is None else name + (f">={bound}" if bound else ""),
        dense_columns=columns,
    )


def _labels(
    path: Path, name: str, bound: str, values: npt.NDArray[np.float64], *, required: bool
) -> npt.NDArray[np.float64] | None:
    """The column as 0 and 1; None if it was not asked for and holds no labels at all."""
    if bound:
        try:
            return (values >= float(bound)).astype(np.float64)
        except ValueError:
            raise ExecutorError(f"--label {name}>={bound}: expected a number after >=") from None
    if not required and np.isnan(values).all():
        return None
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        raise ExecutorError(
            f"{path}: column {name}, sample {bad[0]}: a label must be 0 or 1, got {values[bad[0]]:g}; "
            f"give --label '{name}>=NUMBER' to make it one"
        )
    return values
