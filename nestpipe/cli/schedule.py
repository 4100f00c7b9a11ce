"""`nestpipe schedule`: list the catalogue, show a schedule as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from nestpipe.cli._render import Format, Output, render
from nestpipe.ir import show, unroll, with_micro_batches
from nestpipe.schedules import load, names

__all__ = ["list_", "show_"]


ScheduleName = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A catalogue name or a file of schedule text.")]


def list_(output: Output = Format.TEXT) -> None:
    """The schedules of the catalogue, one line each."""
    rows = [{"name": name, "description": load(name).doc.replace("\n", " ")} for name in names()]
    render(output, document=lambda: {"schedules": rows}, rows=lambda: rows, text=lambda: "\n".join(map(_line, rows)))


def _line(row: dict[str, str]) -> str:
    return f"{row['name']:<16} {row['description'].removeprefix(row['name'] + ': ').split('. ')[0].rstrip('.')}"


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
