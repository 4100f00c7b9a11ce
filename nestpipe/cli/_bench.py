"""Options of the commands that run on a testbed, or on the ranks of torchrun."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["PANEL", "Backend", "Device", "Patience", "Realtime", "Timeout", "WorldSize"]

PANEL = "Where it runs"

WorldSize = Annotated[int, typer.Option(rich_help_panel=PANEL, help="Ranks of the testbed.")]
Realtime = Annotated[bool, typer.Option(rich_help_panel=PANEL, help="Run ranks before everything else on the machine.")]
Backend = Annotated[str, typer.Option(rich_help_panel=PANEL, help="Under torchrun: the backend.")]
Device = Annotated[str, typer.Option(rich_help_panel=PANEL, help="Under torchrun: cpu or cuda.")]
Timeout = Annotated[
    float, typer.Option(rich_help_panel=PANEL, help="End the runs at one link rate after this many seconds.")
]
Patience = Annotated[
    float,
    typer.Option(
        min=0, rich_help_panel=PANEL, help="At each link rate, wait this long for the machine to be undisturbed."
    ),
]
