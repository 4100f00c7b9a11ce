"""Which schedule a recording shows, and how much of it was understood.

A schedule is known by how many batches ahead of its step each kind of op works.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nestpipe.ir import OpKind

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["classified_share", "own_routing", "recorded_schedule"]

#: (batches ahead at which keys are exchanged, batches ahead at which inputs are copied): the schedule's name
_NAMES = {(1, 2): "sparse_dist", (1, 1): "sparse_dist", (0, 0): "sync"}


def recorded_schedule(frame: pd.DataFrame) -> str:
    """The name in the catalogue, or "plain loop" where no keys are exchanged, or what is ahead of what.

    TorchRec's `TrainPipelineSparseDist` exchanges keys one batch ahead and copies inputs two ahead; without a pipeline
    nothing is ahead.
    """
    ahead = (frame["batch"] - frame["step"]).astype("Int64")

    def of(*kinds: OpKind) -> int | None:
        mine = ahead[frame["kind"].isin([kind.value for kind in kinds])].dropna()
        return None if mine.empty else int(mine.median())

    keys = of(OpKind.ALL_TO_ALL_KEYS)
    copies = of(OpKind.COPY_H2D)
    if keys is None:
        return "plain loop" if not copies else f"plain loop, inputs copied {copies} ahead"
    known = _NAMES.get((keys, keys if copies is None else copies))
    return known or f"keys {keys} ahead, inputs {copies} ahead"


def classified_share(frame: pd.DataFrame) -> float | None:
    """The share of the device time that has an op kind; None where no device op was recorded."""
    device = frame[frame["launch_ns"].notna() & frame["duration_ns"].notna()]
    total = int(device["duration_ns"].sum())
    unknown = int(device.loc[device["kind"] == "unclassified", "duration_ns"].sum())
    return 1 - unknown / total if total else None


def own_routing(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with what a pipeline does to the keys of the current batch counted as part of its lookup.

    Keys that were exchanged a step ahead are put in order when they are looked up; the schedules know routing as what
    comes before that exchange.
    """
    if "batch" not in frame:
        return frame
    routing = frame["kind"].eq(OpKind.DEDUP.value)
    ahead = (frame["batch"] - frame["step"]).fillna(0) > 0
    if not (routing & ahead).any():
        return frame
    late = (routing & ~ahead).to_numpy(dtype=bool)
    return frame.assign(kind=frame["kind"].mask(late, OpKind.LOOKUP.value))
