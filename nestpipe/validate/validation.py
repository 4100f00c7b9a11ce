"""A whole validation: predict a grid, write the predictions down, run it, compare, and write what came out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from executor.profile import check_separate
from nestpipe.base import atomic_file, write_text
from nestpipe.validate.bench import Bench
from nestpipe.validate.compare import (
    Outcome,
    compare,
    kind_errors,
    outcome_of,
    prediction_rows,
    status_of,
    summarise,
)
from nestpipe.validate.grid import Point
from nestpipe.validate.predict import predict_all
from traces.workloads import CostTable

__all__ = ["Validation", "run_validation", "to_json"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Validation:
    """What came of a grid.

    Attributes:
        provenance: where it comes from.
        summary: the numbers that are judged, with grid, compute and world size; fractions, not per cent.
        kinds: a row for each op kind with its time in milliseconds and the error of its prediction.
        rows: a row for each configuration, as `compare` has them.
        outcomes: the configurations themselves.
    """

    provenance: Mapping[str, object]
    summary: Mapping[str, Any]
    kinds: pd.DataFrame
    rows: pd.DataFrame
    outcomes: Sequence[Outcome]

    def records(self) -> list[dict[str, Any]]:
        """The rows as dicts, each with what its prediction is called."""
        return [
            {**{str(name): value for name, value in row.items()}, "status": status_of(row["extrapolated"])}
            for row in self.rows.to_dict("records")
        ]

    def to_json(self, indent: int | None = None) -> str:
        """The document as JSON text."""
        return to_json(self.document(), indent)

    def document(self) -> dict[str, object]:
        """Everything but the outcomes."""
        return {
            "provenance": self.provenance,
            "summary": self.summary,
            "kinds": self.kinds.to_dict("records"),
            "rows": self.records(),
        }

    def to_csv(self) -> str:
        """The rows as CSV."""
        return pd.DataFrame(self.records()).to_csv(index=False)

    def write(self, folder: Path) -> None:
        """Write `validation.json`, `validation.csv` and the figures."""
        from reports.figures import predicted_against_measured, save, timeline_pair

        write_text(folder / "validation.json", self.to_json(indent=1))
        write_text(folder / "validation.csv", self.rows.to_csv(index=False))
        save(predicted_against_measured(self.rows), folder / "predicted_against_measured.png")
        for schedule in ("sync", "nestpipe"):
            for each in [each for each in self.outcomes if each.point.config.schedule == schedule][:1]:
                pair = timeline_pair(each.prediction.timeline, each.timelines[each.middle], name=schedule)
                save(pair, folder / f"timeline_{schedule}.png")


def to_json(value: object, indent: int | None = None) -> str:
    """JSON text of a value that holds numpy scalars."""
    return json.dumps(value, indent=indent, default=lambda scalar: scalar.item())


def run_validation(
    points: Sequence[Point],
    table: CostTable,
    bench: Bench,
    out: Path,
    *,
    grid: str,
    provenance: Mapping[str, object],
    repeats: int = 3,
    draws: int = 8,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> Validation | None:
    """Predict all points, write the predictions down, run them, and compare. Every rank of the bench calls it.

    Args:
        points: what to validate on, none of which was profiled.
        table: measured costs.
        bench: what runs the points.
        out: folder for `predictions.json`, written before anything runs, `spans.parquet` and the results.
        grid: the name of the points.
        provenance: facts that every file starts with.
        repeats: how often each point runs; the median counts.
        draws, seed: simulations behind each predicted interval.
        tell: called with what is being predicted.

    Returns:
        The validation on the first rank, None on the others.

    Raises:
        CaseError: if a point was profiled.
        TraceError: if the table lacks something.
    """
    check_separate(table, [point.config for point in points])
    if not bench.first:
        _measure(points, bench, repeats)
        return None
    predictions = predict_all(points, table, bench.world_size, draws=draws, seed=seed, tell=tell)
    write_text(
        out / "predictions.json",
        json.dumps({"provenance": provenance, "rows": prediction_rows(points, predictions)}, indent=1),
    )
    spans = _measure(points, bench, repeats)
    with atomic_file(out / "spans.parquet") as file:
        spans.to_parquet(file)
    outcomes = [
        outcome_of(point, prediction, [runs for _, runs in spans[spans["point"] == number].groupby("repeat")])
        for number, (point, prediction) in enumerate(zip(points, predictions, strict=True))
    ]
    rows = compare(outcomes)
    conditions = {"grid": grid, "compute": points[0].config.compute.value, "world_size": bench.world_size}
    found = Validation(
        provenance=provenance,
        summary={**conditions, **summarise(rows)},
        kinds=kind_errors(outcomes),
        rows=rows,
        outcomes=outcomes,
    )
    found.write(out)
    return found


def _measure(points: Sequence[Point], bench: Bench, repeats: int) -> pd.DataFrame:
    """Run all points of a link rate one after the other, then all of them again, so that repeats lie apart.

    Returns:
        The spans, with columns `point` (position in `points`) and `repeat`.
    """
    frames = []
    for rate in sorted({point.rate_bits_per_s for point in points}):
        chosen = [number for number, point in enumerate(points) if point.rate_bits_per_s == rate]
        frame = bench.run([points[number].config for number in chosen] * repeats, rate)
        numbers = pd.Series(chosen * repeats)
        frames.append(frame.assign(point=frame["run"].map(numbers), repeat=frame["run"] // len(chosen)))
    return pd.concat(frames, ignore_index=True)
