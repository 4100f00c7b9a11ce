"""`nestpipe schedule check`: proves a schedule, or says what is wrong with it and how to see it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nestpipe.base import ScheduleError, unknown_name
from nestpipe.checks import Report, check_programs, report_document, report_table, report_text
from nestpipe.checks import check as check_loop
from nestpipe.cli._common import digest, provenance
from nestpipe.cli._render import Format, Output, as_csv, heading, render
from nestpipe.ir import STATES, Data, Loop, Program, parse_programs, show, with_micro_batches
from nestpipe.schedules import load, names

__all__ = ["check"]


def check(
    schedule: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A schedule of the catalogue, or a file with a loop or programs.")
    ],
    allow_staleness: Annotated[
        int, typer.Option("--allow-staleness", min=0, metavar="K", help="Accept reads up to K updates behind.")
    ] = 0,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", min=1, metavar="N", help="Check a loop with N micro-batches.")
    ] = None,
    domain_size: Annotated[
        int | None, typer.Option("--domain-size", min=1, metavar="N", help="Ranks per domain, for programs by rank.")
    ] = None,
    buffer_bytes: Annotated[
        list[str] | None,
        typer.Option("--buffer-bytes", metavar="DATA=BYTES", help="Size of one instance of a buffer; one per buffer."),
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Say which version every read sees, or show the race, the deadlock or the broken rule, without running it.

    Exit code 0: synchronous, or stale within --allow-staleness. 1: anything else. 2: the schedule is unreadable.
    """
    loaded = _load(schedule)
    report = _report(loaded, micro_batches, domain_size, _sizes(buffer_bytes or []))
    facts = provenance(
        schedule_digest=digest("".join(map(show, loaded)) if isinstance(loaded, tuple) else show(loaded))
    )
    render(
        output,
        facts=facts,
        document=lambda: report_document(report),
        rows=lambda: heading(facts) + as_csv(report_table(report)),
        text=lambda: "\n" + report_text(report, loaded).removesuffix("\n"),
        indent=2,
    )
    if not report.allowed(allow_staleness):
        raise typer.Exit(1)


def _load(name_or_file: str) -> Loop | tuple[Program, ...]:
    """A loop of the catalogue or of a file; a file may hold programs instead."""
    path = Path(name_or_file)
    if name_or_file not in names() and path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"{path}: cannot be read as UTF-8 text: {error}") from None
        lines = (line.split("#", 1)[0].split() for line in text.splitlines())
        if next((words[0] for words in lines if words), "") == "program":
            return parse_programs(text, source=str(path))
    return load(name_or_file)


def _report(
    loaded: Loop | tuple[Program, ...],
    micro_batches: int | None,
    domain_size: int | None,
    sizes: dict[Data, int] | None,
) -> Report:
    if not isinstance(loaded, tuple):
        if domain_size is not None:
            raise ScheduleError("--domain-size is for programs by rank; a loop is checked for every number of ranks")
        loop = loaded if micro_batches is None else with_micro_batches(loaded, micro_batches)
        return check_loop(loop, size_bytes=sizes)
    if micro_batches is not None:
        raise ScheduleError("--micro-batches is for loops; a program has its micro-batches unrolled")
    return check_programs(loaded, domain_size=domain_size, size_bytes=sizes)


def _sizes(items: list[str]) -> dict[Data, int] | None:
    known = [data.value for data in Data if data not in STATES]
    found: dict[Data, int] = {}
    for item in items:
        name, _, value = item.partition("=")
        if name not in known:
            raise ScheduleError("--buffer-bytes: " + unknown_name("buffer", name, known))
        if not value.isdecimal():
            raise ScheduleError(
                f"--buffer-bytes: {name} must be a whole number of bytes, got {value!r}; write {name}=BYTES"
            )
        found[Data(name)] = int(value)
    return found or None
