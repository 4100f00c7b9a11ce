"""Op costs out of a trace table, so that what was measured can be replayed under another schedule and at another scale.

A trace holds many kernels or calls per op kind; what counts for a schedule is how long a kind takes per batch. For a
local kind that is the sum over the rank's ops of that kind in a step; for a collective it is the transfer alone: for
each exchange the shortest over the ranks, since the rest is waiting for a late one.

Every way of going beyond the recording is an assumption with a name, listed in `TraceCosts.assumptions`; the share of a
critical path that rests on each origin is worked out from `TraceCosts.origin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simpy

from nestpipe.base import TraceError, ns_to_us, split_evenly
from nestpipe.ir import COLLECTIVES, Loop, Op, OpKind, Resource
from sim.costs.demand import Demand
from sim.costs.workload import OpCosts, Options, blocks_of
from sim.engine import Anchor, Awaited, HostLane, Work, issue_order
from sim.network import network_costs
from topologies.cluster import Cluster
from traces.recording import HostUse, host_use, own_routing, recording

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CollectiveCost", "Mode", "TraceCosts", "TraceWorkload", "costs_from_trace"]

#: Nanoseconds of a collective of so many bytes per rank on so many ranks.
CollectiveCost: TypeAlias = Callable[[OpKind, float, int], float]


class Mode(StrEnum):
    """How a recorded duration stands for a future one."""

    MEAN = "mean"
    STEP = "step"
    DISTRIBUTION = "distribution"
    FITTED = "fitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCosts:
    """Costs per op kind and batch, as recorded; implements `sim.engine.costs.Costs`.

    Attributes:
        batch_ns: for each kind float64 (samples,): nanoseconds per batch, one sample per recorded step (mode step), per
            recorded rank and step (mode distribution), or one (modes mean and fitted).
        mode: how samples are used: in turn by batch, drawn at random, or the only one.
        micro_batches: micro-batches split a batch's time evenly.
        seed: of the draws in mode distribution.
        origin: for each kind measured, fitted, extrapolated or assumed.
        assumptions: what was assumed, in words.
        host: the thread that issues the ops; None where the trace does not show it.
    """

    batch_ns: Mapping[OpKind, npt.NDArray[np.float64]]
    mode: Mode
    micro_batches: int
    seed: int
    origin: Mapping[OpKind, str]
    assumptions: tuple[str, ...] = field(default_factory=tuple)
    host: HostLane | None = None

    def op_ns(self, op: Op) -> int:
        """Nanoseconds of one op: of its step in mode step, otherwise the mean."""
        samples = self.batch_ns.get(op.kind)
        if samples is None:
            return 0
        total = samples[op.batch % len(samples)] if self.mode is Mode.STEP else samples.mean()
        return self._share(op, float(total))

    def _share(self, op: Op, total: float) -> int:
        whole = round(total)
        return whole if op.micro_batch is None else split_evenly(whole, self.micro_batches, op.micro_batch)

    def colours(self, world_size: int) -> Sequence[int] | None:
        """Ranks differ where durations are drawn, and where their hosts do: recorded ranks repeat."""
        if self.mode is Mode.DISTRIBUTION:
            return range(world_size)
        hosts = 1 if self.host is None else len(self.host.work_ns)
        return [rank % hosts for rank in range(world_size)] if hosts > 1 else None

    def local(self, ops: Sequence[Op], rank: int) -> Sequence[Work]:
        """See `Costs.local`."""
        if self.mode is not Mode.DISTRIBUTION:
            return [0 if op.kind in COLLECTIVES else self.op_ns(op) for op in ops]
        generator = np.random.default_rng([self.seed, rank])
        draws = generator.random(len(ops))
        return [self._drawn(op, draw) for op, draw in zip(ops, draws, strict=True)]

    def _drawn(self, op: Op, draw: float) -> int:
        samples = self.batch_ns.get(op.kind)
        return 0 if samples is None else self._share(op, float(samples[int(draw * len(samples))]))

    def collective(self, op: Op, resource: Resource, ranks: Sequence[int], group_size: int) -> Work:  # noqa: ARG002
        """See `Costs.collective`."""
        if self.mode is not Mode.DISTRIBUTION:
            return self.op_ns(op)
        micro_batch = -1 if op.micro_batch is None else op.micro_batch
        seed = [self.seed, 1 + list(OpKind).index(op.kind), op.batch, 1 + micro_batch, min(ranks)]
        return self._drawn(op, np.random.default_rng(seed).random())

    def start(self, env: simpy.Environment, work: Work) -> simpy.Event:  # noqa: ARG002
        """See `Costs.start`; recorded work is always a number of nanoseconds."""
        raise TypeError(f"recorded work must be an int of nanoseconds, got {work!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWorkload:
    """A recorded trace under another schedule; it has times and no demands.

    Attributes:
        frame: a trace table.
        mode: how recorded durations are used.
        batch_scale: batch per rank over the recorded one.
        network: the cluster whose network scales transfers to another number of ranks; None for none.
        seed: of the draws in mode distribution.
        batch_per_worker: samples a rank trained per step, if that is known; options with another batch scale by it.
        use: the host's part of a step, where the trace shows it.
        without: steps that stall by themselves, and are no part of the steady pace.
        anchor: what the recorded step comes out as; None where it cannot be predicted again.
    """

    frame: pd.DataFrame
    mode: Mode = Mode.MEAN
    batch_scale: float = 1.0
    network: Cluster | None = None
    seed: int = 0
    batch_per_worker: int | None = None
    use: HostUse | None = None
    without: tuple[int, ...] = ()
    anchor: Anchor | None = None

    @classmethod
    def of(cls, frame: pd.DataFrame, found: Anchor | None, **more: Any) -> TraceWorkload:
        """A trace with its host, if it was recorded and anchored; `more` are other attributes."""
        if found is None:
            return cls(frame=frame, **more)
        without = tuple(stall.step for stall in found.stalls)
        return cls(frame=frame, use=host_use(recording(frame), without), without=without, anchor=found, **more)

    @property
    def domain_size(self) -> None:
        """A trace does not say whether it has domains."""
        return

    @property
    def world_size(self) -> int:
        """Number of ranks that were recorded."""
        sizes = self.frame["group_size"]
        return max(1, int(sizes.max()) if sizes.notna().any() else int(self.frame["rank"].nunique()))

    def recorded(self, loop: Loop, cluster: Cluster | None, options: Options) -> TraceCosts:
        """What the ops of `loop` cost; see `costs_from_trace`.

        A trace has times and no demands: a cluster scales transfers to another number of ranks, as `network` does, and
        what runs on the device takes as long as on the recorded one.

        Raises:
            TraceError: if the trace has none of the ops, or is asked for more ranks without a network.
        """
        network = cluster or self.network
        scale = self.batch_scale
        if self.batch_per_worker and options.batch_per_worker:
            scale *= options.batch_per_worker / self.batch_per_worker
        return costs_from_trace(
            self.frame,
            loop,
            mode=self.mode,
            batch_scale=scale,
            world_size=options.world_size,
            collective_ns=None if network is None else network_costs(network, loop, options.domain_size),
            seed=self.seed,
            use=self.use,
            without=self.without,
        )

    def host(self, loop: Loop) -> HostLane | None:
        """The thread that issues the ops of a schedule; None where the trace does not show it."""
        return None if self.use is None else _lane(self.use, loop)

    def without_rank(self, rank: int) -> TraceWorkload:
        """The same without the host of a rank: the other recorded hosts stand for it."""
        ranks = sorted({int(each) for each in self.frame["rank"].fillna(0)})
        if self.use is None or len(ranks) < 2:
            return self
        at = ranks.index(rank)
        work, gaps = ((*each[:at], *each[at + 1 :]) for each in (self.use.work_ns, self.use.gap_ns))
        return replace(self, use=replace(self.use, work_ns=work, gap_ns=gaps))

    def demands(self, loop: Loop, cluster: Cluster | None, options: Options) -> dict[OpKind, Demand]:
        """See `ByKind.demands`; the mean of what was recorded."""
        costs = self.recorded(loop, cluster, options)
        return {
            kind: Demand(fixed_ns=round(float(samples.mean())), origin=costs.origin[kind])
            for kind, samples in costs.batch_ns.items()
        }

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        """See `Workload.costs`."""
        costs = self.recorded(loop, cluster, options)
        return OpCosts(costs=costs, op_ns=costs.op_ns, origin=costs.origin)


def costs_from_trace(
    frame: pd.DataFrame,
    loop: Loop,
    *,
    mode: Mode = Mode.MEAN,
    batch_scale: float = 1.0,
    world_size: int | None = None,
    collective_ns: CollectiveCost | None = None,
    seed: int = 0,
    use: HostUse | None = None,
    without: Sequence[int] = (),
) -> TraceCosts:
    """What the ops of `loop` cost according to a trace.

    Args:
        frame: a trace table.
        loop: the schedule; its kinds that the trace lacks take no time, and are named in the assumptions.
        mode: how recorded durations are used.
        batch_scale: batch per rank over the recorded one.
        world_size: ranks to predict for; the recorded number by default.
        collective_ns: what a collective costs on a network; scales recorded transfers to another world size.
        seed: of the draws in mode distribution.

    Raises:
        TraceError: if the table has no durations of any kind that the schedule has, or the scale is not positive.
    """
    if not 0 < batch_scale < 1e6:
        raise TraceError(f"batch_scale must be positive, got {batch_scale}")
    recorded_world = int(frame["group_size"].max()) if frame["group_size"].notna().any() else frame["rank"].nunique()
    target_world = world_size or recorded_world
    frame = own_routing(frame)
    if without:
        frame = frame[~frame["step"].isin(list(without)).fillna(False).astype(bool)]
    assumptions: list[str] = []
    batch_ns: dict[OpKind, npt.NDArray[np.float64]] = {}
    origin: dict[OpKind, str] = {}
    missing = []
    for kind in dict.fromkeys(op.kind for op in loop.ops):
        rows = frame[(frame["kind"] == kind.value) & frame["duration_ns"].notna()]
        if rows.empty:
            missing.append(kind.value)
            continue
        samples = _samples(rows, kind, mode)
        origin[kind] = "measured"
        if mode is Mode.FITTED or batch_scale != 1:
            samples, origin[kind], note = _scaled(rows, kind, samples, batch_scale, mode)
            assumptions.append(note)
        if kind in COLLECTIVES and target_world != recorded_world:
            factor, note = _world_factor(rows, kind, recorded_world, target_world, batch_scale, collective_ns)
            samples, origin[kind] = samples * factor, "extrapolated"
            assumptions.append(note)
        if use is not None and (beside := use.overlap_ns.get(kind, 0)):
            # the schedule knows the batch's computation as a whole, and would have the transfer wait for all of it
            samples = np.maximum(samples - beside, 0)
            assumptions.append(
                f"{kind}: {ns_to_us(beside):.4g} us run beside their own batch's computation, as recorded"
            )
        batch_ns[kind] = samples
    if not batch_ns:
        raise TraceError(f"the trace has no durations of any op of {loop.name}: {', '.join(missing)}")
    if missing:
        assumptions.append(f"not in the trace, taken to cost nothing: {', '.join(missing)}")
    if loop.micro_batches > 1:
        assumptions.append(f"a batch's time splits evenly over {loop.micro_batches} micro-batches")
    return TraceCosts(
        batch_ns=batch_ns,
        mode=mode,
        micro_batches=loop.micro_batches,
        seed=seed,
        origin=origin,
        assumptions=(*assumptions, *(() if use is None else _HOST_ASSUMED)),
        host=None if use is None else _lane(use, loop),
    )


_HOST_ASSUMED = (
    "one host thread issues every op, in recorded order as far as the schedule allows; its work moves with its op",
    "each micro-batch costs the host the calls of a whole batch; further ranks are as the recorded ones, in turn",
)


def _lane(use: HostUse, loop: Loop) -> HostLane:
    """The host of a schedule: calls are made anew for each micro-batch, gaps between them are split."""
    awaits = {kind: tuple(Awaited(*one) for one in each) for kind, each in use.awaits.items()}
    inner = blocks_of(loop)
    work = [
        {kind: ns + round(gaps.get(kind, 0) / (loop.micro_batches if kind in inner else 1)) for kind, ns in own.items()}
        for own, gaps in zip(use.work_ns, use.gap_ns, strict=True)
    ]
    return HostLane(order=issue_order(loop, use.order), work_ns=work, awaits=awaits)


def _exchanges(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per exchange of a collective kind: step, transfer_ns (the shortest over the ranks) and bytes."""
    import pandas as pd

    rows = rows.sort_values(["rank", "start_ns"], kind="stable")
    step = rows["step"].fillna(0)
    which = rows.groupby([rows["rank"].fillna(0), step], sort=False).cumcount()
    transfer = rows["duration_ns"] - rows["wait_ns"].fillna(0)
    table = pd.DataFrame({"step": step, "which": which, "transfer_ns": transfer, "bytes": rows["bytes"]})
    return table.groupby(["step", "which"]).agg({"transfer_ns": "min", "bytes": "max"}).reset_index()


def _samples(rows: pd.DataFrame, kind: OpKind, mode: Mode) -> npt.NDArray[np.float64]:
    """Nanoseconds per batch, as `TraceCosts.batch_ns`."""
    if kind in COLLECTIVES:
        per_step = _exchanges(rows).groupby("step")["transfer_ns"].sum()
    else:
        by = [rows["step"].fillna(0), rows["rank"].fillna(0)]
        per_rank = rows.groupby(by)["duration_ns"].sum()
        if mode is Mode.DISTRIBUTION:
            return per_rank.to_numpy(dtype=np.float64)
        per_step = per_rank.groupby(level=0).mean()
    values: npt.NDArray[np.float64] = per_step.to_numpy(dtype=np.float64)
    return values if mode in (Mode.STEP, Mode.DISTRIBUTION) else np.array([values.mean()])


def _scaled(
    rows: pd.DataFrame, kind: OpKind, samples: npt.NDArray[np.float64], batch_scale: float, mode: Mode
) -> tuple[npt.NDArray[np.float64], str, str]:
    """The samples at another batch size: by the fit of cost against bytes where there is one, else in proportion."""
    exchanges = _exchanges(rows) if kind in COLLECTIVES else _plain(rows)
    known = exchanges.dropna(subset=["bytes"])
    sizes = known["bytes"].to_numpy(dtype=np.float64)
    if len(np.unique(sizes)) < 2:
        note = f"{kind}: time in proportion to the batch (the trace has one size only)"
        return samples * batch_scale, "measured" if batch_scale == 1 else "assumed", note
    from scipy.optimize import nnls

    times = known["transfer_ns"].to_numpy(dtype=np.float64)
    (latency, per_byte), _ = nnls(np.stack([np.ones_like(sizes), sizes], axis=1), times)
    scaled = sizes * batch_scale
    if mode is Mode.FITTED:
        steps = max(1, known["step"].nunique())
        samples = np.array([float((latency + per_byte * scaled).sum()) / steps])
    else:
        samples = samples * float((latency + per_byte * scaled).sum() / (latency + per_byte * sizes).sum())
    outside = scaled.max() > sizes.max() * (1 + 1e-9) or scaled.min() < sizes.min() * (1 - 1e-9)
    note = f"{kind}: {ns_to_us(latency):.3g} us + {per_byte:.3g} ns per byte, fitted on {len(sizes)} ops"
    return samples, "extrapolated" if outside else "fitted", note + (", outside the recorded sizes" if outside else "")


def _plain(rows: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {
        "step": rows["step"].fillna(0),
        "transfer_ns": rows["duration_ns"],
        "bytes": rows["bytes"],
    }
    return pd.DataFrame(columns)


def _world_factor(
    rows: pd.DataFrame,
    kind: OpKind,
    recorded: int,
    target: int,
    batch_scale: float,
    collective_ns: CollectiveCost | None,
) -> tuple[float, str]:
    """By how much a transfer changes with the number of ranks, and the assumption behind it."""
    if collective_ns is None and target > recorded:
        raise TraceError(
            f"{kind}: the trace was recorded on {recorded} ranks and says nothing of a network that joins {target}; "
            "give a topology (--topology, or that of a scenario's cluster)"
        )
    if collective_ns is None:
        return 1.0, f"{kind}: transfer as recorded with {recorded} ranks (no topology given to scale it to {target})"
    size = float(_exchanges(rows)["bytes"].fillna(0).mean()) * batch_scale
    if not size:
        return 1.0, f"{kind}: transfer as recorded with {recorded} ranks (the trace does not say how many bytes)"
    before = collective_ns(kind, size, recorded)
    if not before:
        return 1.0, f"{kind}: transfer as recorded (the network model says that {recorded} ranks exchange nothing)"
    factor = collective_ns(kind, size, target) / before
    return factor, f"{kind}: transfer x {factor:.3g}, the network model's ratio of {target} to {recorded} ranks"
