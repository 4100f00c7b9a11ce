"""`nestpipe network`: evaluate a file of network cases with the exact flow-level solver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from nestpipe.cli._common import progress
from nestpipe.cli._render import Format, Output, render

__all__ = ["network"]


def network(
    cases: Annotated[Path, typer.Argument(metavar="CASES.json", help="Case file, format network-oracle-1.")],
    only: Annotated[
        str | None, typer.Option("--only", metavar="PATTERN", help="Part of a case's id, or a shell pattern (*, ?).")
    ] = None,
    draws: Annotated[
        int, typer.Option("--draws", min=0, help="Perturbed runs that give the range of a chaotic case; 0: none.")
    ] = 0,
    output: Output = Format.TEXT,
) -> None:
    """Completion times of communication on shared links, as a max-min fair fluid, flow by flow.

    Traffic and schedules are rebuilt from the file's rules; a file's own answers are not read. Where ranks go from
    round to round on their own, rounding noise can move the answer by per cent; --draws 5 runs such cases with
    bandwidths changed by 1e-9 and prints the range beside the answer.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the systems are small: threads would cost more than they give
    from nestpipe.base import CaseError, TopologyError
    from sim.network.oracle import evaluate_cases, read_cases

    file = read_cases(cases)
    try:
        with progress() as told:
            found = evaluate_cases(file, only=only, num_draws=draws, progress=told)
    except (CaseError, TopologyError) as error:
        raise type(error)(f"{cases}: {error}") from None
    render(
        output,
        document=lambda: found,
        rows=lambda: _rows(found),
        text=lambda: "\n".join(_lines(found, draws)),
        indent=None,
    )


def _rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per case, and per flow of a basic case."""
    return [
        *(
            {"id": case["id"], "flow": None, "time_s": case["completion_time_s"], "wall_s": f"{case['wall_s']:.6f}"}
            for case in found["cases"]
        ),
        *(
            {"id": case["id"], "flow": flow, "time_s": finish, "wall_s": None}
            for case in found["basic_cases"]
            for flow, finish in enumerate(case["finish_s"])
        ),
    ]


def _lines(found: dict[str, Any], draws: int) -> list[str]:
    width = max((len(case["id"]) for case in [*found["cases"], *found["basic_cases"]]), default=4)
    lines = [f"{'case':<{width}} {'completion_s':>14} {'flows':>9} {'rows':>9} {'wall_s':>9}  note"]
    for case in found["cases"]:
        note = ""
        if case["chaos"] == "chaotic":
            drawn = case["draws_s"]
            note = f"chaotic: {min(drawn):.6g} to {max(drawn):.6g} s in {len(drawn)} draws"
        elif draws and case["chaos"] == "not tried":
            note = "not tried whether it is chaotic: too many flows"
        lines.append(
            f"{case['id']:<{width}} {case['completion_time_s']:>14.9g} {case['flows']:>9} {case['rows']:>9} "
            f"{case['wall_s']:>9.4f}  {note}".rstrip()
        )
    for case in found["basic_cases"]:
        finish = case["finish_s"]
        lines.append(f"{case['id']:<{width}} {max(finish, default=0.0):>14.9g} {len(finish):>9}")
    return lines
