"""From measured spans to a cost table: what each op took at its size, and how long lanes take to hand over.

Costs are taken from runs of a schedule in which nothing overlaps. The sizes come from `size_run`, not from the spans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from executor.profile.run import RunConfig, loop_of
from executor.profile.schedules import SERIAL
from executor.profile.sizes import RunSizes
from nestpipe.base import BITS_PER_BYTE, NS_PER_S, CaseError
from nestpipe.ir import COLLECTIVES, OpKind, OpRef, Program, unroll
from traces.workloads import CostFit, CostTable, costs_of, fit_kind, summarise

__all__ = ["ProfiledRun", "ShapedLinks", "check_separate", "cost_rows", "gaps", "op_samples"]

_WARM_UP: Final = 2
_ROUNDS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedLinks:
    """The NICs of the ranks: rate each way, and what an idle one lets through at once."""

    bits_per_s: tuple[int, ...]
    burst_bytes: int

    @property
    def bytes_per_ns(self) -> npt.NDArray[np.float64]:
        """float64 (ranks,)."""
        return np.array(self.bits_per_s, dtype=np.float64) / BITS_PER_BYTE / NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfiledRun:
    """A measured run of the serial schedule.

    Attributes:
        frame: its spans, columns as a Timeline's.
        config, sizes, links: what was run.
        name: tells it from the others.

    Raises:
        CaseError: if the schedule lets ops overlap, since an op is then not seen alone.
    """

    frame: pd.DataFrame
    config: RunConfig
    sizes: RunSizes
    links: ShapedLinks
    name: str

    def __post_init__(self) -> None:
        if self.config.schedule != SERIAL:
            raise CaseError(f"costs are profiled with a schedule in which ops run alone; got {self.config.schedule}")


def cost_rows(runs: Sequence[ProfiledRun], *, source: str) -> pd.DataFrame:
    """The rows of a cost table of measured runs, all of one variant.

    The wire time of a transfer depends on what its link has saved by the time the first bytes leave, so on the
    collective's own constant cost, half of which comes before: fitted, used, and fitted again until both agree.
    """
    variants = {run.config.variant for run in runs}
    if len(variants) != 1:
        raise CaseError(f"expected runs of one variant, got {', '.join(sorted(variants)) or 'none'}")
    variant = variants.pop()
    fits: dict[OpKind, CostFit] = {}
    rows = pd.DataFrame()
    for _ in range(_ROUNDS):
        rows = summarise(pd.concat([op_samples(run, fits) for run in runs], ignore_index=True), source=source)
        kinds = [kind for kind in COLLECTIVES if kind.value in set(rows["kind"])]
        fits = {kind: fit_kind(rows, kind, variant, costs_of(kind)) for kind in kinds}
    return rows


def op_samples(run: ProfiledRun, fits: Mapping[OpKind, CostFit]) -> pd.DataFrame:
    """What each op of a run took, with its sizes, in the form that `traces.workloads.cost_table.summarise` takes.

    Args:
        run: the run.
        fits: of collectives, for the local part that precedes the wire; none counts as 0.
    """
    frame, config, sizes, links = run.frame, run.config, run.sizes, run.links
    frame = frame.assign(micro_batch=frame["micro_batch"].astype("Int64"))
    collective = frame["kind"].isin([kind.value for kind in COLLECTIVES])
    identity = ["rank", "kind", "batch", "micro_batch"]
    spans = frame[[*identity, "start_ns", "end_ns"]].astype({"kind": str})
    local = spans[~collective.to_numpy()].merge(sizes.table, on=identity, how="left")
    local = local.assign(time_ns=local["end_ns"] - local["start_ns"], wire_ns=0.0)
    shared = _collective_samples(spans[collective.to_numpy()], sizes, links, fits)
    samples = pd.concat([local, shared], ignore_index=True)
    samples = samples[samples["batch"] >= _WARM_UP]
    micro = samples["micro_batch"].astype("string").fillna("-")
    # micro-batches are of one size, but only the first finds a rested link
    part = np.where(samples["kind"].isin([kind.value for kind in COLLECTIVES]), micro, "-")
    return samples.assign(
        point=[f"{run.name}:{name}" for name in part],
        variant=config.variant,
        world_size=len(links.bits_per_s),
        link_bits_per_s=min(links.bits_per_s),
    )


def _collective_samples(
    spans: pd.DataFrame, sizes: RunSizes, links: ShapedLinks, fits: Mapping[OpKind, CostFit]
) -> pd.DataFrame:
    """One row per collective: from the last arrival to the last departure, with the time that its links need."""
    groups = spans.groupby(["kind", "batch", "micro_batch"], dropna=False, sort=False)
    table = groups.agg(start_ns=("start_ns", "max"), end_ns=("end_ns", "max")).reset_index().sort_values("start_ns")
    identity = ["kind", "batch", "micro_batch"]
    largest = (
        sizes.table.groupby(identity, dropna=False)[["samples", "keys", "unique_keys", "bytes"]].max().reset_index()
    )
    table = table.merge(largest, on=identity, how="left")
    wire = _Wire(links)
    wire_ns = []
    columns = (table[name].tolist() for name in (*identity, "start_ns", "end_ns"))
    for kind, batch, micro, start_ns, end_ns in zip(*columns, strict=True):
        name = (OpKind(kind), int(batch), None if pd.isna(micro) else int(micro))
        local_ns = fits[name[0]].constant_ns / 2 if name[0] in fits else 0.0
        wire_ns.append(wire.transfer(sizes.traffic[name], min(start_ns + local_ns, end_ns), end_ns))
    return table.assign(wire_ns=wire_ns, time_ns=table["end_ns"] - table["start_ns"], rank=-1)


class _Wire:
    """How long the busiest link needs for each of a series of transfers that do not overlap.

    An idle link saves up to its burst, and lets that through at once.
    """

    def __init__(self, links: ShapedLinks) -> None:
        self.rate = np.concatenate([links.bytes_per_ns, links.bytes_per_ns])
        self.burst = float(links.burst_bytes)
        self.saved = np.full(len(self.rate), self.burst)
        self.since_ns = 0.0

    def transfer(self, traffic: npt.NDArray[np.float64], start_ns: float, end_ns: float) -> float:
        """Nanoseconds on the wire of a transfer of `traffic` bytes, (ranks, ranks), that began and ended then."""
        load = np.concatenate([traffic.sum(axis=1), traffic.sum(axis=0)])
        saved = np.minimum(self.burst, self.saved + self.rate * max(start_ns - self.since_ns, 0.0))
        free = np.minimum(saved, load)
        self.saved, self.since_ns = saved - free, end_ns
        return float(((load - free) / self.rate).max())


def gaps(frame: pd.DataFrame, config: RunConfig) -> dict[str, Any]:
    """How long a lane takes to start an op that is ready: after another stream (`handoff`), after its own (`issue`).

    Returns:
        For each of the two its median and upper quartile in nanoseconds and how often it was seen; measured.
    """
    program = unroll(loop_of(config), config.steps)
    found: dict[str, list[int]] = {"handoff": [], "issue": []}
    for _, spans in frame.groupby("rank"):
        _gaps_of_rank(spans, program, found)
    return {
        name: {
            "p50_ns": round(float(np.median(values))) if values else 0,
            "p75_ns": round(float(np.quantile(values, 0.75))) if values else 0,
            "count": len(values),
        }
        for name, values in found.items()
    }


def _gaps_of_rank(spans: pd.DataFrame, program: Program, found: dict[str, list[int]]) -> None:
    times = {
        OpRef(kind=OpKind(kind), batch=int(batch), micro_batch=None if pd.isna(micro) else int(micro)): (start, end)
        for kind, batch, micro, start, end in zip(
            spans["kind"].astype(str),
            spans["batch"],
            spans["micro_batch"],
            spans["start_ns"],
            spans["end_ns"],
            strict=True,
        )
    }
    for stream in program.streams:
        own = 0
        for op in stream.ops:
            start, end = times[op.ref]
            others = max((times[ref][1] for ref in op.after), default=0)
            if op.batch >= _WARM_UP:
                found["handoff" if others > own else "issue"].append(int(start - max(others, own)))
            own = end


def check_separate(table: CostTable, configs: Sequence[RunConfig]) -> None:
    """Refuse to validate on what was profiled.

    Args:
        table: its meta holds the values of every profiled configuration.
        configs: what is to be validated.

    Raises:
        CaseError: if a configuration's batch, width and micro-batches were profiled, or its seed was.
        TraceError: if the table does not say what was profiled.
    """
    profiled = table.value("configurations")
    names = ("batch_size", "dim", "micro_batches", "seed")
    for each in profiled if isinstance(profiled, list) and profiled else [profiled]:
        if not isinstance(each, Mapping) or not all(isinstance(each.get(name), int) for name in names):
            raise table.problem(["configurations"], f"must say {', '.join(names)} of each, got {each!r:.60}")
    used = {(each["batch_size"], each["dim"], each["micro_batches"]) for each in profiled}
    seeds = {each["seed"] for each in profiled}
    for config in configs:
        what = (config.batch_size, config.dim, config.micro_batches)
        if what in used or config.seed in seeds:
            raise CaseError(
                f"configuration {config.schedule} N={config.micro_batches} batch={config.batch_size} dim={config.dim} "
                f"seed={config.seed} was used in the profile; validate only on what no fit has seen"
            )
