"""The Timeline: when each op of each rank ran, simulated or measured, in one table with the same columns.

Both interpreters run the same ops on every rank, so a Timeline is dense: one table of ops and, for each rank, the times
of these ops. A simulated Timeline may hold one representative of several ranks that are alike; `weights` says of how
many. `frame()` gives the table of spans that everything else reads, writes and plots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from nestpipe.base import TraceError
from nestpipe.ir import COLLECTIVES, OpKind, Program, op_name

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["COLUMNS", "Span", "Timeline", "build", "from_frame", "with_waits"]

Int64: TypeAlias = npt.NDArray[np.int64]

COLUMNS: Final = (
    "step",
    "batch",
    "micro_batch",
    "rank",
    "stream",
    "kind",
    "op",
    "start_ns",
    "end_ns",
    "wait_ns",
    "bytes",
    "keys",
    "unique_keys",
)
_SIZES: Final = ("bytes", "keys", "unique_keys")
_IDENTITY: Final = ("step", "batch", "micro_batch", "stream", "kind")


class Span(NamedTuple):
    """One op of one rank as it ran. Times are nanoseconds on a clock that all ranks share.

    `wait_ns` is the part of a collective's span, at its start, that is spent waiting for the last rank to arrive; it is
    0 for other ops. `micro_batch`, `bytes`, `keys` and `unique_keys` are None where they do not apply or are not known.
    """

    step: int
    batch: int
    micro_batch: int | None
    rank: int
    stream: str
    kind: str
    start_ns: int
    end_ns: int
    wait_ns: int = 0
    bytes: int | None = None
    keys: int | None = None
    unique_keys: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """When each op of each rank ran.

    Attributes:
        columns: of each op, int64 (ops,) step and batch, object (ops,) micro_batch (None for whole-batch ops), and
            str (ops,) stream, kind and op.
        ranks: int64 (ranks,), the ranks shown.
        weights: int64 (ranks,), how many ranks each stands for; all 1 unless folded.
        start_ns, end_ns, wait_ns: int64 (ranks, ops); see `Span`. `end_ns` < 0 marks an op that the rank did not run.
        sizes: float64 (ranks, ops) or (1, ops) for each of bytes, keys and unique_keys that is known; NaN for unknown.
        meta: where it comes from: schedule, source ("simulated" or "measured"), world_size, micro_batches, ...
    """

    columns: Mapping[str, npt.NDArray[Any]]
    ranks: Int64
    weights: Int64
    start_ns: Int64
    end_ns: Int64
    wait_ns: Int64
    sizes: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ops(self) -> pd.DataFrame:
        """The columns as a table, one row per op; micro_batch is Int64, NA for whole-batch ops."""
        import pandas as pd

        table = pd.DataFrame({name: self.columns[name].tolist() for name in (*_IDENTITY, "op")})
        return table.astype({"step": np.int64, "batch": np.int64, "micro_batch": "Int64"})

    @property
    def makespan_ns(self) -> int:
        """From the first start to the last end."""
        return int(self.end_ns.max()) - int(self.start_ns[self.end_ns >= 0].min())

    def frame(self, ranks: Iterable[int] | None = None) -> pd.DataFrame:
        """The spans as a table with `COLUMNS`, ordered by rank, start and stream.

        Args:
            ranks: which of the shown ranks; None for all.
        """
        import pandas as pd

        chosen = np.arange(len(self.ranks)) if ranks is None else np.flatnonzero(np.isin(self.ranks, list(ranks)))
        num_ops = len(self.columns["op"])
        ops = self.ops
        frame = pd.DataFrame({name: np.tile(ops[name].array, len(chosen)) for name in ("step", "batch")})
        frame["micro_batch"] = pd.array(np.tile(ops["micro_batch"].to_numpy(), len(chosen)), dtype="Int64")
        frame["rank"] = np.repeat(self.ranks[chosen], num_ops)
        for name in ("stream", "kind", "op"):
            codes, labels = pd.factorize(ops[name])
            frame[name] = pd.Categorical.from_codes(np.tile(codes, len(chosen)), categories=labels)
        for name, values in (("start_ns", self.start_ns), ("end_ns", self.end_ns), ("wait_ns", self.wait_ns)):
            frame[name] = values[chosen].reshape(-1)
        for name in _SIZES:
            known = self.sizes.get(name)
            if known is None:
                frame[name] = pd.arrays.IntegerArray(np.zeros(len(frame), np.int64), np.ones(len(frame), np.bool_))
            else:
                rows = np.broadcast_to(known, (len(self.ranks), num_ops))[chosen].reshape(-1)
                frame[name] = pd.Series(rows).round().astype("Int64")
        frame = frame[frame["end_ns"] >= 0]
        order = np.lexsort((frame["stream"].cat.codes, frame["end_ns"], frame["start_ns"], frame["rank"]))
        return frame.iloc[order].reset_index(drop=True)[list(COLUMNS)]


def op_columns(ops: Iterable[tuple[int, int, int | None, str, str, str]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of a Timeline, from step, batch, micro_batch, stream, kind and name of every op."""
    values = zip(*ops, strict=True)
    types = (np.int64, np.int64, np.object_, np.str_, np.str_, np.str_)
    return {
        name: np.array(column, dtype=dtype)
        for name, column, dtype in zip((*_IDENTITY, "op"), values, types, strict=True)
    }


def build(
    program: Program,
    *,
    ranks: Sequence[int],
    weights: Sequence[int],
    start_ns: Int64,
    end_ns: Int64,
    wait_ns: Int64,
    sizes: Mapping[str, npt.NDArray[np.float64]] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Timeline:
    """A Timeline of the ops of `program`, in program order. Arrays are int64 (ranks, ops), in nanoseconds."""
    return Timeline(
        columns=op_columns(
            (op.step, op.batch, op.micro_batch, stream.name, op.kind.value, op_name(op))
            for stream in program.streams
            for op in stream.ops
        ),
        ranks=np.asarray(ranks, dtype=np.int64),
        weights=np.asarray(weights, dtype=np.int64),
        start_ns=start_ns,
        end_ns=end_ns,
        wait_ns=wait_ns,
        sizes=dict(sizes or {}),
        meta={"schedule": program.name, "micro_batches": program.micro_batches, "steps": program.steps, **(meta or {})},
    )


def from_frame(frame: pd.DataFrame, meta: Mapping[str, Any] | None = None) -> Timeline:
    """The Timeline that a table of spans describes; `op` and `wait_ns` may be left out.

    Raises:
        TraceError: if a column is missing, an end lies before its start or a rank has an op twice.
    """
    import pandas as pd

    missing = [name for name in (*_IDENTITY, "rank", "start_ns", "end_ns") if name not in frame.columns]
    if missing:
        raise TraceError(f"timeline: missing column {', '.join(missing)}; expected {', '.join(COLUMNS)}")
    backwards = frame.index[frame["end_ns"] < frame["start_ns"]]
    if len(backwards):
        row = frame.loc[backwards[0]]
        raise TraceError(f"timeline: row {backwards[0]}: end_ns {row['end_ns']} lies before start_ns {row['start_ns']}")
    frame = frame.astype({"micro_batch": "Int64"})
    identity = list(_IDENTITY)
    ops = frame[identity].drop_duplicates().sort_values(["stream", "step"], kind="stable").reset_index(drop=True)
    ops["op"] = [_name(*row) for row in ops[["kind", "batch", "micro_batch"]].itertuples(index=False)]
    keys = ops[identity].assign(column=np.arange(len(ops)))
    columns = frame[identity].merge(keys, on=identity, how="left")["column"].to_numpy()
    ranks, rows = np.unique(frame["rank"].to_numpy(), return_inverse=True)
    if np.bincount(rows * len(ops) + columns, minlength=1).max() > 1:
        raise TraceError("timeline: an op appears twice on a rank; each (rank, kind, batch, micro_batch) runs once")

    def dense(name: str, fill: float, dtype: Any) -> Any:
        values = np.full((len(ranks), len(ops)), fill, dtype=dtype)
        values[rows, columns] = pd.to_numeric(frame[name]).to_numpy(dtype=dtype, na_value=fill)
        return values

    return Timeline(
        columns=op_columns(
            (*row[:2], None if pd.isna(row[2]) else int(row[2]), *row[3:]) for row in ops.itertuples(index=False)
        ),
        ranks=ranks.astype(np.int64),
        weights=np.ones(len(ranks), dtype=np.int64),
        start_ns=dense("start_ns", 0, np.int64),
        end_ns=dense("end_ns", -1, np.int64),
        wait_ns=dense("wait_ns", 0, np.int64) if "wait_ns" in frame else np.zeros((len(ranks), len(ops)), np.int64),
        sizes={n: dense(n, np.nan, np.float64) for n in _SIZES if n in frame and frame[n].notna().any()},
        meta=dict(meta or {}),
    )


def with_waits(spans: pd.DataFrame, group_of: Mapping[str, Sequence[int]]) -> pd.DataFrame:
    """The spans with `wait_ns` of every collective: from a rank's start to the last start in its group.

    Args:
        spans: a table of spans of all ranks on one clock.
        group_of: for each stream that is bound to a group, the group's number of every rank.
    """
    spans = spans.copy()
    spans["wait_ns"] = 0
    for stream, groups in group_of.items():
        mine = spans[(spans["stream"] == stream) & spans["kind"].isin([kind.value for kind in COLLECTIVES])]
        if mine.empty:
            continue
        group = np.asarray(groups)[mine["rank"].to_numpy()]
        micro = mine["micro_batch"].astype("Int64").fillna(-1)
        last = mine.groupby([mine["kind"].astype(str), mine["batch"], micro, group])["start_ns"].transform("max")
        wait = np.minimum(last, mine["end_ns"]) - mine["start_ns"]
        spans.loc[mine.index, "wait_ns"] = wait.astype(np.int64)
    return spans


def _name(kind: str, batch: int, micro_batch: Any) -> str:
    import pandas as pd

    return f"{OpKind(kind)} {batch}" + ("" if pd.isna(micro_batch) else f".{micro_batch}")
