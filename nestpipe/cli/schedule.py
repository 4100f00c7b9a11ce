"""`nestpipe schedule`: list the catalogue, show a schedule as text."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Annotated

import typer

from nestpipe.cli._common import Format
from nestpipe.ir import show, unroll, with_micro_batches
from nestpipe.schedules import load, names

__all__ = ["list_", "show_"]


ScheduleName = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A catalogue name or a file of schedule text.")]


def list_(output: Annotated[Format, typer.Option("--format")] = Format.TEXT) -> None:
    """The schedules of the catalogue, one line each."""
    rows = [{"name": name, "description": load(name).doc.replace("\n", " ")} for name in names()]
    if output is Format.JSON:
        typer.echo(json.dumps({"schedules": rows}, indent=1))
        return
    if output is Format.CSV:
        table = io.StringIO()
        writer = csv.DictWriter(table, ("name", "description"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        typer.echo(table.getvalue(), nl=False)
        return
    for row in rows:
        typer.echo(
            f"{row['name']:<16} {row['description'].removeprefix(row['name'] + ': ').split('. ')[0].rstrip('.')}"
        )


def show_(
    name: ScheduleName,
    unrolled: Annotated[
        bool, typer.Option("--unrolled", help="The program: prologue, steady state, epilogue.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Batches of the program.")] = 4,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Micro-batches per batch.")] = None,
) -> None:
    """The canonical text of a schedule: the loop or, with --unrolled, the program both interpreters run."""
    loop = load(name)
    if micro_batches is not None:
        loop = with_micro_batches(loop, micro_batches)
    typer.echo(show(unroll(replace(loop, doc=""), steps) if unrolled else loop), nl=False)
