"""`nestpipe topology accuracy`: predicted against measured collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nestpipe.base import GIB, MIB
from nestpipe.cli._render import Format, Output, render
from sim.network import Given, Predicted, predict_log
from topologies.imports import load_topology

__all__ = ["accuracy"]

_BANDS = (("below 1 MiB", 0, MIB), ("1 to 16 MiB", MIB, 16 * MIB), ("16 to 256 MiB", 16 * MIB, 256 * MIB))
_ABOVE = ("256 MiB and more", 256 * MIB, 1024 * GIB)


def accuracy(
    logs: Annotated[list[Path], typer.Argument(metavar="LOG...", help="nccl-tests, RCCL or HCCL output, or tables.")],
    topology: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="What was measured; by the accelerator that a log names by default."),
    ] = None,
    curves: Annotated[
        Given, typer.Option(help="What of a log is given as a curve: nothing, or every second size.")
    ] = Given.NONE,
    fit: Annotated[
        str, typer.Option(metavar="NAME", help="A fit of the protocols: all, or one without a machine's logs.")
    ] = "all",
    output: Output = Format.TEXT,
) -> None:
    """What a simulation would charge for every measured collective, and how far off that is."""
    cluster = None if topology is None else load_topology(topology)
    rows = [row for log in logs for row in predict_log(log, cluster, given=curves, fit=fit)]
    render(
        output,
        document=lambda: {"curves": curves, "fit": fit, "rows": [_record(row) for row in rows]},
        rows=lambda: [_record(row) for row in rows],
        text=lambda: _text(rows),
    )


def _record(row: Predicted) -> dict[str, Any]:
    return {
        "file": row.file,
        "topology": row.topology,
        "collective": row.collective,
        "ranks": row.ranks,
        "dtype": row.dtype,
        "in_place": row.in_place,
        "bytes": row.bytes,
        "measured_s": row.measured_s,
        "predicted_s": row.predicted_s,
        "relative_error": row.relative_error,
        "basis": str(row.basis),
    }


def _text(rows: list[Predicted]) -> str:
    """Errors by collective and band of sizes, and the worst of each."""
    lines = [f"{'collective':<16}{'bytes per rank':<18}{'sizes':>6}{'median':>9}{'90 %':>9}{'worst':>9}  worst one"]
    for collective in sorted({row.collective for row in rows}):
        for name, least, most in (*_BANDS, _ABOVE):
            part = [row for row in rows if row.collective == collective and least <= row.bytes < most]
            if part:
                errors = sorted(abs(row.relative_error) for row in part)
                worst = max(part, key=lambda row: abs(row.relative_error))
                lines.append(
                    f"{collective:<16}{name:<18}{len(part):>6}{_median(errors):>9.1%}"
                    f"{errors[int(0.9 * (len(errors) - 1))]:>9.1%}{worst.relative_error:>+9.0%}  "
                    f"{worst.ranks} ranks of {worst.topology}, {worst.bytes:,} B ({worst.file})"
                )
    lines.append("errors are of predicted over measured time; median and 90 % of their size")
    return "\n".join(lines)


def _median(values: list[float]) -> float:
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2
