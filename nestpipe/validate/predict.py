"""Predicts a configuration from a cost table: sizes from the data, costs from the fits, the rest from the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from executor.compute import Compute
from executor.profile import RunConfig, RunSizes, config_from, loop_of, sizes_of_run
from nestpipe.base import BITS_PER_BYTE, CaseError
from nestpipe.ir import OpKind
from nestpipe.timeline import StepMetrics, Timeline
from nestpipe.validate.grid import Point
from sim.costs import Machine, OpSizes, Options, TableWorkload, run
from traces.workloads import CostFit, CostTable, costs_of, fit_kind, resample

__all__ = ["Prediction", "Rehearsed", "differences", "machine_of", "model_error", "predict", "predict_all", "rehearse"]

_QUARTILE: Final = 0.6745
_NINE_OF_TEN: Final = 1.645  # standard deviations, normal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """What a configuration will do.

    Attributes:
        config: what is predicted.
        timeline, metrics: of the simulation with the fitted costs.
        step_ms_low, step_ms_high: the interval in which 9 of 10 runs are expected, from the spread of single ops, the
            sampling error of the profile's means, what the fits leave unexplained, the repeatability of whole runs, and
            how far predictions were off on whole schedules in the profile (`rehearse`).
        extrapolated: share of the ops' predicted time that lies outside the sizes profiled.
        draws: how many seeds the interval rests on.
    """

    config: RunConfig
    timeline: Timeline
    metrics: StepMetrics
    step_ms_low: float
    step_ms_high: float
    extrapolated: float
    draws: int


def machine_of(table: CostTable, rates_bits_per_s: Sequence[int]) -> Machine:
    """The machine that a cost table was measured on, with links of the given rates.

    Raises:
        TraceError: if the table lacks one of the machine's values, or has an invalid one.
    """
    cores = table.number("cores")
    if not cores:
        raise table.problem(["cores"], "must be positive, got 0")
    priority = table.value("priority")
    if not isinstance(priority, str):
        raise table.problem(["priority"], f"must be text, got {priority!r}")
    turns = table.value("turn_bytes")
    known = {kind.value for kind in OpKind}
    if not isinstance(turns, Mapping) or not turns.keys() <= known:
        raise table.problem(["turn_bytes"], f"must be bytes by op kind, got {turns!r}")
    return Machine(
        link_bytes_per_s=tuple(rate / BITS_PER_BYTE for rate in rates_bits_per_s),
        burst_bytes=table.number("burst_bytes"),
        cores=cores,
        crowding=max(table.number("world_size") / cores, 1.0),
        run_to_completion="realtime" in priority,
        transfer_cores=table.number("transfer_cores"),
        turn_bytes={OpKind(kind): table.number("turn_bytes", kind) for kind in turns},
        handoff_ns=int(table.number("handoff", "p50_ns")),
        issue_ns=int(table.number("issue", "p50_ns")),
    )


def differences(table: CostTable, conditions: Mapping[str, object]) -> list[str]:
    """Where what is predicted runs otherwise than what was profiled, in words; predictions are for the latter."""
    meta = table.meta
    return [
        f"{name} is {value} here and was {meta[name]} in the profile"
        for name, value in conditions.items()
        if name in meta and meta[name] != value
    ]


def predict(
    config: RunConfig,
    table: CostTable,
    machine: Machine,
    *,
    draws: int = 16,
    seed: int = 0,
    sizes: RunSizes | None = None,
    bias: float = 0.0,
) -> Prediction:
    """Predict one configuration; nothing is run.

    Args:
        config: what to predict.
        table: measured costs, which must have the configuration's variant.
        machine: shared resources; its number of links is the world size.
        draws: simulations with redrawn costs for the interval.
        seed: of these.
        sizes: of the configuration's ops, if they are known already.
        bias: relative error of predictions on this machine, part of the interval (`model_error`).

    Raises:
        TraceError: if the table has no costs for what the schedule needs.
    """
    loop = loop_of(config)
    sizes = sizes_of_run(config, machine.world_size) if sizes is None else sizes
    op_sizes = _op_sizes(sizes, machine.world_size)
    kinds = sorted({op.kind for op in loop.ops} - {OpKind.WAIT})
    fits = _fits(table, config.variant, kinds)
    # what an emulated op really does, before it waits, is what the op takes where it is not emulated
    busy = None if config.device is None else _fits(table, replace(config, device=None).variant, kinds)
    if table.meta.get("device") == "cuda":
        busy = {}  # an accelerator of its own
    options = Options(world_size=machine.world_size, steps=config.steps, fold_ranks=False)
    workload = TableWorkload(fits=fits, sizes=op_sizes, machine=machine, busy=busy, batch_per_worker=config.batch_size)
    predicted = run(loop, workload, None, options)
    spread = {kind: fit.spread / _QUARTILE for kind, fit in fits.items()}
    steps = []
    for number, drawn in enumerate(_redrawn(table, config.variant, kinds, draws, seed)):
        again = replace(workload, fits=drawn, spread=spread, seed=seed * 1000 + number)
        steps.append(run(loop, again, None, options).metrics.step_latency_ms)
    step_ms = predicted.metrics.step_latency_ms
    drawn_ms = float(np.std(steps, ddof=1)) if len(steps) > 1 else 0.0
    repeats = table.number("repeatability_cv", config.compute)
    half_ms = _NINE_OF_TEN * float(np.hypot(drawn_ms, np.hypot(repeats, bias) * step_ms))
    return Prediction(
        config=config,
        timeline=predicted.timeline,
        metrics=predicted.metrics,
        step_ms_low=step_ms - half_ms,
        step_ms_high=step_ms + half_ms,
        extrapolated=_extrapolated(fits, op_sizes),
        draws=draws,
    )


def _redrawn(
    table: CostTable, variant: str, kinds: Sequence[OpKind], draws: int, seed: int
) -> Iterator[dict[OpKind, CostFit]]:
    """Fits as other runs of the profile might have given them."""
    generator = np.random.default_rng(seed)
    for _ in range(draws):
        fits = _fits(replace(table, rows=resample(table.rows, generator)), variant, kinds)
        yield {kind: _moved(fit, generator) for kind, fit in fits.items()}


def predict_all(
    points: Sequence[Point],
    table: CostTable,
    world_size: int,
    *,
    draws: int,
    seed: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Prediction]:
    """Predict the points of a grid; intervals hold the error of the rehearsed schedules.

    Args:
        points: what to predict, each at its link rate.
        table: measured costs.
        world_size: ranks.
        draws, seed: of each interval.
        tell: called with what is being done.

    Raises:
        TraceError: if the table lacks something.
    """
    rehearsed = rehearse(table)
    sizes: dict[RunConfig, RunSizes] = {}
    found = []
    for point in points:
        config = point.config
        tell(f"predicting {config.schedule}")
        workload = replace(config, schedule="sync")  # sizes do not depend on the schedule
        if workload not in sizes:
            sizes[workload] = sizes_of_run(config, world_size)
        machine = machine_of(table, [point.rate_bits_per_s] * world_size)
        bias = model_error(rehearsed, config.compute)
        found.append(predict(config, table, machine, draws=draws, seed=seed, sizes=sizes[workload], bias=bias))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A whole schedule that ran in the profile, and its prediction from the costs; nothing is fitted on it."""

    config: RunConfig
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted_ms / self.measured_ms - 1


def rehearse(table: CostTable) -> list[Rehearsed]:
    """Predict the whole schedules that the profile has run.

    Raises:
        TraceError: if the table does not have them, or one of them is not whole.
    """
    rows = table.value("rehearsal")
    if not isinstance(rows, Sequence):
        raise table.problem(["rehearsal"], f"must be a list, got {rows!r}")
    found = []
    for row in rows:
        try:
            config, rate, step_ms = config_from(row["config"]), int(row["rate_bits_per_s"]), float(row["step_ms"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError, CaseError) as error:
            raise table.problem(["rehearsal"], f"must have config, rate_bits_per_s and step_ms: {error}") from None
        if not 0 < step_ms < np.inf:
            raise table.problem(["rehearsal"], f"must have a positive step_ms, got {step_ms}")
        machine = machine_of(table, [rate] * round(table.number("world_size")))
        predicted_ms = predict(config, table, machine, draws=0).metrics.step_latency_ms
        found.append(Rehearsed(config=config, measured_ms=step_ms, predicted_ms=predicted_ms))
    return found


def model_error(rehearsed: Sequence[Rehearsed], compute: Compute) -> float:
    """The root mean square of the relative errors of one kind of compute, 0 without any."""
    errors = [each.error for each in rehearsed if each.config.compute is compute]
    return float(np.sqrt(np.mean(np.square(errors)))) if errors else 0.0


def _fits(table: CostTable, variant: str, kinds: Sequence[OpKind]) -> dict[OpKind, CostFit]:
    known = set(table.rows["kind"])
    return {kind: fit_kind(table.rows, kind, variant, costs_of(kind)) for kind in kinds if kind.value in known}


def _moved(fit: CostFit, generator: np.random.Generator) -> CostFit:
    """A fit that is off by as much as it was off the rows it was made of: the same for all ops of a kind."""
    factor = float(np.exp(fit.error / _QUARTILE * generator.standard_normal()))
    moved = {name: value if name == "wire_ns" else value * factor for name, value in fit.coefficients.items()}
    return replace(fit, coefficients=moved)


def _op_sizes(sizes: RunSizes, world_size: int) -> OpSizes:
    """The sizes in the form that the simulator takes."""
    of: list[dict[tuple[OpKind, int, int | None], dict[str, float]]] = [{} for _ in range(world_size)]
    columns: list[list[Any]] = [sizes.table[name].tolist() for name in sizes.table.columns]
    for rank, kind, batch, micro, samples, keys, unique_keys, num_bytes in zip(*columns, strict=True):
        micro_batch = micro if isinstance(micro, int) else None
        of[rank][OpKind(kind), batch, micro_batch] = {
            "samples": samples,
            "keys": keys,
            "unique_keys": unique_keys,
            "bytes": num_bytes,
        }
    return OpSizes(of=of, traffic=sizes.traffic)


def _extrapolated(fits: Mapping[OpKind, CostFit], sizes: OpSizes) -> float:
    total = outside = 0.0
    for ops in sizes.of:
        for (kind, _, _), size in ops.items():
            if kind in fits:
                time_ns = fits[kind].time_ns(size)
                total += time_ns
                outside += time_ns if fits[kind].status(size) == "extrapolated" else 0.0
    return outside / total if total else 0.0
