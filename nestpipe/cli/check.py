"""`nestpipe schedule check`: proves a schedule, or says what is wrong with it and how to see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from nestpipe.ir import Data, Loop, Program
    from nestpipe.verdicts import Report

__all__ = ["check"]

_FORMATS: Final = ("text", "json")


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
    output_format: Annotated[str, typer.Option("--format", metavar="text|json", help="How to print.")] = "text",
) -> None:
    """Say which version every read sees, or show the race, the deadlock or the broken rule, without running it.

    Exit code 0: synchronous, or stale within --allow-staleness. 1: anything else. 2: the schedule cannot be read.
    """
    from nestpipe.check_text import report_json, report_text
    from nestpipe.errors import ScheduleError, unknown_name

    if output_format not in _FORMATS:
        raise ScheduleError(unknown_name("format", output_format, _FORMATS))
    loaded = _load(schedule)
    report = _report(loaded, micro_batches, domain_size, _sizes(buffer_bytes or []))
    shown = loaded if not isinstance(loaded, tuple) else loaded[0]
    typer.echo(report_json(report) if output_format == "json" else report_text(report, shown), nl=False)
    if not report.allowed(allow_staleness):
        raise typer.Exit(1)


def _load(name_or_file: str) -> Loop | tuple[Program, ...]:
    """A loop of the catalogue or of a file; a file may hold programs instead."""
    from pathlib import Path

    from nestpipe.errors import ScheduleError
    from nestpipe.schedules import load, names
    from nestpipe.text import parse_programs

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
    from nestpipe.checks import check as check_loop
    from nestpipe.checks import check_programs
    from nestpipe.errors import ScheduleError
    from nestpipe.ir import with_micro_batches

    if not isinstance(loaded, tuple):
        if domain_size is not None:
            raise ScheduleError("--domain-size is for programs by rank; a loop is checked for every number of ranks")
        loop = loaded if micro_batches is None else with_micro_batches(loaded, micro_batches)
        return check_loop(loop, size_bytes=sizes)
    if micro_batches is not None:
        raise ScheduleError("--micro-batches is for loops; a program has its micro-batches unrolled")
    return check_programs(loaded, domain_size=domain_size, size_bytes=sizes)


def _sizes(items: list[str]) -> dict[Data, int] | None:
    from nestpipe.errors import ScheduleError, unknown_name
    from nestpipe.ir import STATES, Data

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
