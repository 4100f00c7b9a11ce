"""Tables as plain text and CSV: columns aligned, numbers to the right, units in the header, provenance in a column.

A table is a data frame and a tuple of `Column`s that say how to print it. Text is for people and rounds; CSV is for
programs and does not.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from nestpipe.base import TraceError, unknown_name
from nestpipe.timeline import METRICS, PARTS, Metric

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Column", "cell", "csv", "parts", "results", "text"]

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


def cell(value: Any, digits: int | None = None, *, scale: float = 1.0, sign: bool = False) -> str:
    """One value as text: a dash for what does not apply, thousands apart, no exponent.

    >>> cell(5793.834, 2), cell(0.0061, 2, scale=100, sign=True), cell(None), cell(1536)
    ('5,793.83', '+0.61', '-', '1,536')
    """
    import pandas as pd

    if value is None or value is pd.NA or (isinstance(value, float) and value != value):  # NaN is not itself
        return _NONE
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    plus = "+" if sign else ""
    number = float(value)
    if digits is None:
        return f"{number * scale:{plus},.12g}" if scale != 1 or number != int(number) else f"{int(number):{plus},}"
    shown = f"{number * scale:{plus},.{digits}f}"
    return shown.lstrip("+-") if float(shown.replace(",", "")) == 0 else shown


def text(frame: pd.DataFrame, columns: Sequence[Column] | None = None, *, title: str = "") -> str:
    """The table as aligned text, without a trailing newline.

    Args:
        frame: the values.
        columns: what to print, in order; by default every column as it is.
        title: a line above the table.

    >>> print(text(pd.DataFrame({"method": ["sync"], "step_ms": [5793.8]}), [
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


def csv(frame: pd.DataFrame, columns: Sequence[Column] | None = None) -> str:
    """The table as CSV with the frame's own column names and unrounded values; empty where a value does not apply."""
    columns = _columns(frame, columns)
    out = io.StringIO()
    frame[[column.name for column in columns]].to_csv(out, index=False, lineterminator="\n")
    return out.getvalue()


def results(frame: pd.DataFrame, *, title: str = "") -> str:
    """Predicted against published, one row per method, world size and metric, each in its own unit.

    Args:
        frame: long format, columns method, world_size, metric, value, published (NaN if none), status; `relative_error`
            is worked out.
        title: a line above the table.

    Raises:
        TraceError: if a column is missing or a metric unknown.
    """
    import pandas as pd

    need_columns(frame, ("method", "world_size", "metric", "value", "published", "status"), "results")
    rows = []
    for row in frame.to_dict("records"):
        metric = METRICS.get(row["metric"])
        if metric is None:
            raise TraceError(f"results: {unknown_name('metric', row['metric'], METRICS)}")
        value, published = row["value"], row["published"]
        known = not (pd.isna(published) or pd.isna(value) or published == 0)
        rows.append(
            {
                "method": row["method"],
                "workers": row["world_size"],
                "metric": f"{metric.title} ({metric.unit})",
                "published": _rounded(published, metric),
                "value": _rounded(value, metric),
                "error": f"{100 * (value / published - 1):+.2f}" if known else _NONE,
                "status": row["status"],
            }
        )
    table = pd.DataFrame(rows, columns=["method", "workers", "metric", "published", "value", "error", "status"])
    columns = [Column(name=name) for name in table.columns]
    columns[5] = Column(name="error", header="error (%)")
    return text(table, columns, title=title)


def parts(parts_ms: Mapping[str, Mapping[str, float]], *, title: str = "", share: bool = True) -> str:
    """How a step's time is spent: one row per part that takes time anywhere, one column per method, and the sum.

    Args:
        parts_ms: for each method the milliseconds of each part, as in `StepMetrics.parts_ms`.
        title: a line above the table.
        share: whether each column of milliseconds is followed by its share of the step.
    """
    import pandas as pd

    present = [part for part in PARTS if any(each.get(part, 0.0) > 0 for each in parts_ms.values())]
    frame = pd.DataFrame({"part": [*present, "step"]})
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


def need_columns(frame: pd.DataFrame, names: Sequence[str], what: str) -> None:
    """Raises a TraceError that names the columns which `frame` lacks."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise TraceError(f"{what}: missing column {', '.join(missing)}; expected {', '.join(names)}")


def _columns(frame: pd.DataFrame, columns: Sequence[Column] | None) -> Sequence[Column]:
    columns = [Column(name=str(name)) for name in frame.columns] if columns is None else columns
    need_columns(frame, [column.name for column in columns], "table")
    return columns


def _is_numeric(values: pd.Series[Any]) -> bool:
    """Whether a column is set to the right: numbers, or text that is all numbers and dashes."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(values):
        return False
    if pd.api.types.is_numeric_dtype(values):
        return True
    shown = [str(value) for value in values if not pd.isna(value)]
    digits = [value.replace(",", "").lstrip("+-").replace(".", "", 1) for value in shown if value != _NONE]
    return bool(digits) and all(value.isdigit() for value in digits)


def _rounded(value: Any, metric: Metric) -> str:
    import pandas as pd

    return cell(None if pd.isna(value) else value, metric.digits, scale=metric.scale)
