"""Predicted against measured: one row per configuration, and the summary that the bars are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from executor.profile import is_disturbed, loop_of
from nestpipe.ir import COLLECTIVES, unroll
from nestpipe.timeline import StepMetrics, Timeline, from_frame, measure
from nestpipe.validate.causes import CAUSES, split_error
from nestpipe.validate.grid import Point
from nestpipe.validate.predict import Prediction

__all__ = ["KEYS", "Outcome", "compare", "kind_errors", "outcome_of", "prediction_rows", "status_of", "summarise"]

KEYS: Final = ("schedule", "micro_batches", "batch_size", "dim", "rate_mbit_per_s", "compute")
_BASELINE: Final = "sync"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """A configuration that was predicted and then run, perhaps several times.

    Attributes:
        point, prediction: what was asked and predicted.
        timelines, metrics: of each run, in order.
        loads: the host's load average when each began.
        slowdowns: how much slower the machine was beside each than when profiled (see `executor.profile.probe`).
    """

    point: Point
    prediction: Prediction
    timelines: tuple[Timeline, ...]
    metrics: tuple[StepMetrics, ...]
    loads: tuple[float, ...]
    slowdowns: tuple[float, ...]

    @property
    def step_ms(self) -> float:
        """The median step latency of the runs."""
        return float(np.median([each.step_latency_ms for each in self.metrics]))

    @property
    def middle(self) -> int:
        """The run whose step latency is nearest to the median."""
        return int(np.argmin([abs(each.step_latency_ms - self.step_ms) for each in self.metrics]))


def outcome_of(point: Point, prediction: Prediction, frames: Sequence[pd.DataFrame]) -> Outcome:
    """What became of a point, from the spans of its runs: of those on an undisturbed machine, if there are any."""
    calm = [frame for frame in frames if not is_disturbed(float(frame["slowdown"].iloc[0]))]
    frames = calm or frames
    timelines = tuple(from_frame(frame, {"schedule": point.config.schedule, "source": "measured"}) for frame in frames)
    return Outcome(
        point=point,
        prediction=prediction,
        timelines=timelines,
        metrics=tuple(measure(timeline) for timeline in timelines),
        loads=tuple(float(frame["load"].iloc[0]) for frame in frames),
        slowdowns=tuple(float(frame["slowdown"].iloc[0]) for frame in frames),
    )


def compare(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row per configuration; times in milliseconds, errors relative to the measured value.

    Columns: `KEYS`, predicted_ms with its interval, measured_ms with its extremes, error, inside (the interval),
    speedups over sync on the same workload, exposed communication, and for each cause its share of the error.
    """
    baseline = {_workload(each): each for each in outcomes if each.point.config.schedule == _BASELINE}
    rows = []
    for each in outcomes:
        predicted, measured = each.prediction.metrics, each.metrics[each.middle]
        row: dict[str, Any] = dict(zip(KEYS, _key(each), strict=True))
        row |= {
            "predicted_ms": predicted.step_latency_ms,
            "low_ms": each.prediction.step_ms_low,
            "high_ms": each.prediction.step_ms_high,
            "measured_ms": each.step_ms,
            "measured_ms_min": min(run.step_latency_ms for run in each.metrics),
            "measured_ms_max": max(run.step_latency_ms for run in each.metrics),
            "error": predicted.step_latency_ms / each.step_ms - 1,
            "inside": each.prediction.step_ms_low <= each.step_ms <= each.prediction.step_ms_high,
            "extrapolated": each.prediction.extrapolated,
            "predicted_exposed_ms": predicted.communication_ms,
            "measured_exposed_ms": measured.communication_ms,
            "load": float(np.median(each.loads)),
            "slowdown": float(np.median(each.slowdowns)),
            "runs": len(each.metrics),
        }
        base = baseline.get(_workload(each))
        if base is not None:
            row["predicted_speedup"] = base.prediction.metrics.step_latency_ms / predicted.step_latency_ms
            row["measured_speedup"] = base.step_ms / each.step_ms
            row["speedup_error"] = row["predicted_speedup"] / row["measured_speedup"] - 1
        program = unroll(loop_of(each.point.config), each.point.config.steps)
        causes = split_error(program, each.prediction.timeline, each.timelines[each.middle])
        row |= {f"cause_{name}_ms": causes[name] for name in CAUSES}
        rows.append(row)
    return pd.DataFrame(rows)


def kind_errors(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """For each op kind the relative error of its predicted time: mean, mean absolute, and share of all op time."""
    parts = []
    for each in outcomes:
        predicted = _kind_ms(each.prediction.timeline)
        measured = _kind_ms(each.timelines[each.middle])
        parts.append(pd.DataFrame({"predicted_ms": predicted, "measured_ms": measured}))
    table = pd.concat(parts).rename_axis("kind").reset_index()
    table["error"] = table["predicted_ms"] / table["measured_ms"] - 1
    groups = table.groupby("kind", sort=True)
    found = groups.agg(error=("error", "mean"), measured_ms=("measured_ms", "mean")).reset_index()
    found["absolute_error"] = groups["error"].agg(lambda values: float(np.abs(values).mean())).to_numpy()
    return found


def _kind_ms(timeline: Timeline) -> pd.Series[float]:
    """Mean time of an op by kind: of a collective from the last arrival to the last departure."""
    kinds = timeline.ops["kind"].astype(str)
    collective = kinds.isin([kind.value for kind in COLLECTIVES]).to_numpy()
    own = (timeline.end_ns - timeline.start_ns).mean(axis=0)
    shared = timeline.end_ns.max(axis=0) - timeline.start_ns.max(axis=0)
    steady = (timeline.ops["batch"] >= 2).to_numpy()
    times = pd.Series(np.where(collective, shared, own), index=kinds)[steady]
    return times.groupby(level=0).mean() / 1e6


def summarise(table: pd.DataFrame) -> dict[str, Any]:
    """The numbers that the bars are about; fractions, not per cent."""
    right, judged = _ranking(table)
    errors = table["error"].abs()
    calm = errors[~table["slowdown"].map(is_disturbed)]
    speedups = table.loc[table["schedule"] != _BASELINE, "speedup_error"] if "speedup_error" in table else pd.Series()
    return {
        "configurations": len(table),
        "mean_absolute_error": float(errors.mean()),
        "worst_absolute_error": float(errors.max()),
        "bias": float(table["error"].mean()),
        "disturbed": len(errors) - len(calm),
        "mean_absolute_error_undisturbed": float(calm.mean()) if len(calm) else None,
        "worst_absolute_error_undisturbed": float(calm.max()) if len(calm) else None,
        "mean_absolute_speedup_error": float(speedups.abs().mean()) if len(speedups) else None,
        "mean_absolute_exposed_error_of_step": float(
            ((table["predicted_exposed_ms"] - table["measured_exposed_ms"]).abs() / table["measured_ms"]).mean()
        ),
        "extrapolated": int((table["extrapolated"] > 0).sum()),
        "inside_interval": int(table["inside"].sum()),
        "rankings_right": right,
        "rankings_judged": judged,
        "mean_cause_ms": {name: float(table[f"cause_{name}_ms"].mean()) for name in CAUSES},
        "load_average": {"min": float(table["load"].min()), "max": float(table["load"].max())},
    }


def _ranking(table: pd.DataFrame) -> tuple[int, int]:
    """Pairs of schedules on one workload that are further apart than both are uncertain: ranked right, and judged."""
    right = judged = 0
    for _, rows in table.groupby(list(KEYS[1:])):
        values = rows[
            ["predicted_ms", "measured_ms", "measured_ms_min", "measured_ms_max", "low_ms", "high_ms"]
        ].to_numpy()
        for one in range(len(values)):
            for other in range(one + 1, len(values)):
                a, b = values[one], values[other]
                uncertain = sum((row[5] - row[4]) / 2 + (row[3] - row[2]) / 2 for row in (a, b))
                if abs(a[1] - b[1]) > uncertain:
                    judged += 1
                    right += int((a[0] - b[0]) * (a[1] - b[1]) > 0)
    return right, judged


def _key(outcome: Outcome) -> tuple[Any, ...]:
    config = outcome.point.config
    return (
        config.schedule,
        config.micro_batches,
        config.batch_size,
        config.dim,
        outcome.point.rate_bits_per_s / 1e6,
        config.compute.value,
    )


def _workload(outcome: Outcome) -> tuple[Any, ...]:
    return _key(outcome)[1:]


def status_of(extrapolated: float) -> str:
    """What a prediction is called of which that share of the op time rests on sizes that were not profiled."""
    return "extrapolated" if extrapolated else "predicted"


def prediction_rows(points: Sequence[Point], predictions: Sequence[Prediction]) -> list[Mapping[str, Any]]:
    """What is written down before anything runs."""
    return [
        {
            "schedule": point.config.schedule,
            "micro_batches": point.config.micro_batches,
            "batch_size": point.config.batch_size,
            "dim": point.config.dim,
            "rate_bits_per_s": point.rate_bits_per_s,
            "device": None if point.config.device is None else asdict(point.config.device),
            "seed": point.config.seed,
            "predicted_ms": prediction.metrics.step_latency_ms,
            "low_ms": prediction.step_ms_low,
            "high_ms": prediction.step_ms_high,
            "extrapolated": prediction.extrapolated,
            "status": status_of(prediction.extrapolated),
        }
        for point, prediction in zip(points, predictions, strict=True)
    ]
