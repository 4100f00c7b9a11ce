"""Tables as plain text and CSV: columns aligned, numbers to the right, units in the header, provenance in a column.

A table is a data frame, or a mapping of columns, and a tuple of `Column`s that say how to print it. Text is for people
and rounds; CSV is for programs and does not. Nothing here imports pandas, which costs more than most commands take.
"""

from __future__ import annotations

import csv as csv_file
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from nestpipe.base import TraceError, unknown_name
from nestpipe.timeline import METRICS, PARTS, Metric

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Column", "Table", "cell", "csv", "parts", "results", "table", "text"]

#: Columns by name, all of one length.
Table: TypeAlias = "pd.DataFrame | Mapping[str, Sequence[Any]]"

_GAP: Final = "  "
_NONE: Final = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a printed table.

    Attributes:
        name: the column of the frame.
        header: what is printed above it; the name if empty.
        digits: decimal places of numbers; None prints whole numbers and text as they are.
        scale: factor applied to numbers, such as 100 for a ratio printed in percent.
        sign: whether positive numbers carry a plus sign, as changes and errors do.
    """

    name: str
    header: str = ""
    digits: int | None = None
    scale: float = 1.0
    sign: bool = False


def table(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns of rows with the same fields.

    >>> table([{"rank": 0, "ns": 5}, {"rank": 1, "ns": 7}])
    {'rank': [0, 1], 'ns': [5, 7]}
    """
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def cell(value: Any, digits: int | None = None, *, scale: float = 1.0, sign: bool = False) -> str:
    """One value as text: a dash for what does not apply, thousands apart, no exponent.

    >>> cell(5793.834, 2), cell(0.0061, 2, scale=100, sign=True), cell(None), cell(1536)
    ('5,793.83', '+0.61', '-', '1,536')
    """
    if _missing(value):
        return _NONE
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    plus = "+" if sign else ""
    number = float(value)
    if digits is None:
        return f"{number * scale:{plus},.12g}" if scale != 1 or number != int(number) else f"{int(number):{plus},}"
    shown = f"{number * scale:{plus},.{digits}f}"
    return shown.lstrip("+-") if float(shown.replace(",", "")) == 0 else shown


def text(frame: Table, columns: Sequence[Column] | None = None, *, title: str = "") -> str:
    """The table as aligned text, without a trailing newline.

    Args:
        frame: the values.
        columns: what to print, in order; by default every column as it is.
        title: a line above the table.

    >>> print(text({"method": ["sync"], "step_ms": [5793.8]}, [
    ...     Column(name="method"), Column(name="step_ms", header="step (ms)", digits=2)]))
    method  step (ms)
    sync     5,793.80
    """
    columns = _columns(frame, columns)
    heads = [column.header or column.name for column in columns]
    body = [[cell(value, c.digits, scale=c.scale, sign=c.sign) for value in frame[c.name]] for c in columns]
    right = [_is_numeric(frame[column.name]) for column in columns]
    widths = [max(map(len, [head, *values])) for head, values in zip(heads, body, strict=True)]

    def line(values: Sequence[str]) -> str:
        padded = (v.rjust(w) if r else v.ljust(w) for v, w, r in zip(values, widths, right, strict=True))
        return _GAP.join(padded).rstrip()

    lines = [line(heads), *(line(row) for row in zip(*body, strict=True))]
    return "\n".join([title, *lines] if title else lines)


def csv(frame: Table, columns: Sequence[Column] | None = None) -> str:
    """The table as CSV with the table's own column names and unrounded values; empty where a value does not apply."""
    columns = _columns(frame, columns)
    out = io.StringIO()
    writer = csv_file.writer(out, lineterminator="\n")
    writer.writerow([column.name for column in columns])
    cells = [[None if _missing(value) else value for value in frame[column.name]] for column in columns]
    writer.writerows(zip(*cells, strict=True))
    return out.getvalue()


def results(frame: Table, *, title: str = "") -> str:
    """Predicted against published, one row per method, world size and metric, each in its own unit.

    Args:
        frame: long format, columns method, world_size, metric, value, published (NaN if none), status; `relative_error`
            is worked out.
        title: a line above the table.

    Raises:
        TraceError: if a column is missing or a metric unknown.
    """
    needed = ("method", "world_size", "metric", "value", "published", "status")
    need_columns(frame, needed, "results")
    rows = []
    for method, world_size, name, value, published, status in zip(*(frame[each] for each in needed), strict=True):
        metric = METRICS.get(name)
        if metric is None:
            raise TraceError(f"results: {unknown_name('metric', name, METRICS)}")
        known = not (_missing(published) or _missing(value) or published == 0)
        rows.append(
            {
                "method": method,
                "workers": world_size,
                "metric": f"{metric.title} ({metric.unit})",
                "published": _rounded(published, metric),
                "value": _rounded(value, metric),
                "error": f"{100 * (value / published - 1):+.2f}" if known else _NONE,
                "status": status,
            }
        )
    names = ("method", "workers", "metric", "published", "value", "error", "status")
    columns = [Column(name=name, header="error (%)" if name == "error" else "") for name in names]
    return text({name: [row[name] for row in rows] for name in names}, columns, title=title)


def parts(parts_ms: Mapping[str, Mapping[str, float]], *, title: str = "", share: bool = True) -> str:
    """How a step's time is spent: one row per part that takes time anywhere, one column per method, and the sum.

    Args:
        parts_ms: for each method the milliseconds of each part, as in `StepMetrics.parts_ms`.
        title: a line above the table.
        share: whether each column of milliseconds is followed by its share of the step.
    """
    present = [part for part in PARTS if any(each.get(part, 0.0) > 0 for each in parts_ms.values())]
    frame: dict[str, list[Any]] = {"part": [*present, "step"]}
    columns = [Column(name="part")]
    for method, each in parts_ms.items():
        values = [each.get(part, 0.0) for part in present]
        total = sum(values)
        frame[method] = [*values, total]
        columns.append(Column(name=method, header=f"{method} (ms)", digits=2))
        if share:
            frame[f"{method} %"] = [100 * value / total if total else 0.0 for value in [*values, total]]
            columns.append(Column(name=f"{method} %", header="(%)", digits=1))
    return text(frame, columns, title=title)


def need_columns(frame: Table, names: Sequence[str], what: str) -> None:
    """Raises a TraceError that names the columns which `frame` lacks."""
    missing = [name for name in names if name not in frame]
    if missing:
        raise TraceError(f"{what}: missing column {', '.join(missing)}; expected {', '.join(names)}")


def _columns(frame: Table, columns: Sequence[Column] | None) -> Sequence[Column]:
    columns = [Column(name=str(name)) for name in frame] if columns is None else columns
    need_columns(frame, [column.name for column in columns], "table")
    return columns


def _is_numeric(values: Iterable[Any]) -> bool:
    """Whether a column is set to the right: numbers, or text that is all numbers and dashes."""
    kind = getattr(getattr(values, "dtype", None), "kind", "O")
    if kind != "O":
        return kind in "iufc"
    shown = [value for value in values if value is not None]
    if any(isinstance(value, bool | np.bool_) for value in shown):
        return False
    texts = [str(value) for value in shown if not _missing(value)]
    if shown and all(isinstance(value, Real) for value in shown):
        return True
    digits = [value.replace(",", "").lstrip("+-").replace(".", "", 1) for value in texts if value != _NONE]
    return bool(digits) and all(value.isdigit() for value in digits)


def _missing(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA, which alone do not say that they equal themselves."""
    equal = value == value
    return value is None or not isinstance(equal, bool | np.bool_) or not equal


def _rounded(value: Any, metric: Metric) -> str:
    return cell(value, metric.digits, scale=metric.scale)
