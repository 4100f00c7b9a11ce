"""How every command prints its result: text under a header, JSON or CSV, each made only when it is asked for."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Format", "Output", "as_csv", "as_json", "flat", "heading", "render"]


class Format(StrEnum):
    """How a result is printed."""

    TEXT = "text"
    JSON = "json"
    CSV = "csv"


Output = Annotated[Format, typer.Option("--format", help="How to print the result.")]

#: What CSV is made of: a frame, rows with the same fields, or text that is CSV already.
Rows: TypeAlias = "pd.DataFrame | list[dict[str, Any]] | str"


def render(
    output: Format,
    *,
    document: Callable[[], Mapping[str, Any]],
    rows: Callable[[], Rows],
    text: Callable[[], str],
    facts: Mapping[str, object] | None = None,
    indent: int | None = 1,
) -> None:
    """Prints a result on stdout.

    Args:
        output: text, JSON or CSV.
        document: what JSON holds.
        rows: what CSV holds.
        text: what text shows, without its last line break.
        facts: provenance, the header of the text and `provenance` of the document.
        indent: of the JSON; None for one line.
    """
    if output is Format.JSON:
        typer.echo(as_json(document(), facts, indent))
    elif output is Format.CSV:
        typer.echo(as_csv(rows()), nl=False)
    else:
        typer.echo(heading(facts or {}) + text())


def as_json(document: Mapping[str, Any], facts: Mapping[str, object] | None = None, indent: int | None = 1) -> str:
    """A result as JSON, its provenance first."""
    return json.dumps(_plain(document if facts is None else {"provenance": facts, **document}), indent=indent)


def as_csv(rows: Rows) -> str:
    """Rows as CSV with unrounded values; empty where a value does not apply."""
    from reports.runs import csv as table_csv
    from reports.runs import table

    if isinstance(rows, str):
        return rows
    return table_csv(table(rows) if isinstance(rows, list) else rows)


def heading(facts: Mapping[str, object]) -> str:
    """The provenance as comment lines, each with its line break."""
    return "".join(f"# {key}: {value}\n" for key, value in facts.items())


def flat(document: Mapping[str, Any], separator: str = " ") -> str:
    """A nested result as CSV: a line per value with its dotted path; values of one list apart by the separator."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["name", "value"])
    writer.writerows(_paths("", document, separator))
    return table.getvalue()


def _paths(prefix: str, value: Any, separator: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        dot = f"{prefix}." if prefix else ""
        return [row for name, one in value.items() for row in _paths(f"{dot}{name}", one, separator)]
    if isinstance(value, list) and any(isinstance(one, Mapping | list) for one in value):
        return [row for n, one in enumerate(value) for row in _paths(f"{prefix}.{n}", one, separator)]
    return [(prefix, separator.join(map(str, value)) if isinstance(value, list) else value)]


def _plain(value: Any) -> Any:
    """A value as JSON knows it: numpy's scalars as Python's, null for what is missing or not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if type(value).__name__ == "NAType" else value  # pandas' NA, without importing pandas
