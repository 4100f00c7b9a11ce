"""The report page: one self-contained HTML file about one or several runs, for a browser, for print, for a spreadsheet.

Everything is inside the file: styles, script, figures as SVG and the spans of the interactive timeline. It fetches
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import pandas as pd

from nestpipe.base import TraceError, ns_to_ms
from nestpipe.ir import OpKind
from nestpipe.timeline import METRICS, PARTS, Window, steady_window
from reports.figures import KINDS, PARTS_MARKS, breakdown, has_places, load_figure, text_colour
from reports.html import tables as tables
from reports.html.curve import figures_of, merged, table_of
from reports.html.svg import inline_svg
from reports.html.timeline import choose, kinds_payload, timeline_payload
from reports.runs import ResultRow, SavedRun, cell, compare, summary

__all__ = ["page"]

#: What a character takes of the width of a card, so that a bar is named only where the name fits.
_CHARACTER: Final = 0.0195
#: The most spans that one page ships, shared out among its runs; 3 MB at most.
_NUM_SPANS: Final = 100_000
_CARD_FACTS: Final = ("qps", "scaling_efficiency", "speedup", "utilization", "lookup_ms", "communication_ms")


def page(
    runs: Sequence[SavedRun],
    *,
    title: str = "",
    ranks: Sequence[int] | None = None,
    curve_rows: Sequence[ResultRow] = (),
    made: str = "",
    base: Path | None = None,
) -> str:
    """The page as HTML text.

    Args:
        runs: what to report on; the first is the one that others are compared with.
        title: the heading; by default made from the runs' names.
        ranks: which ranks the timelines show; by default chosen and named.
        curve_rows: results to draw as scaling curves, before those that the runs carry themselves.
        made: a line at the end that says how the page was made.
        base: the folder the page will lie in, for links to exported traces.

    Raises:
        TraceError: if there is no run, a run has no steady state or does not hold a rank that was asked for.
    """
    from jinja2 import Environment, StrictUndefined

    if not runs:
        raise TraceError("a report needs at least one run; give directories written by nestpipe simulate --out DIR")
    runs = _distinct_names(runs)
    windows = [_window(run) for run in runs]
    payloads = [
        _timeline(run, window, ranks, _NUM_SPANS // len(runs)) for run, window in zip(runs, windows, strict=True)
    ]
    context = {
        **_tables(runs, windows),
        **_curve(runs, merged(runs, curve_rows)),
        "title": title or _title(runs),
        "cards": [_card(run) for run in runs],
        "relative": _relative(runs),
        "timelines": [
            {"name": run.name, "words": words, "links": _links(run, base)}
            for run, (_, words) in zip(runs, payloads, strict=True)
        ],
        "limits": [limit for run in runs if (limit := _limit(run)) is not None],
        "changes": [_change(runs[0], run) for run in runs[1:]],
        "made": made,
        "data": _script_json({"kinds": kinds_payload(), "runs": [payload for payload, _ in payloads]}),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
    }
    context["sections"] = _sections(context)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html")).render(context)


def _tables(runs: Sequence[SavedRun], windows: Sequence[Window]) -> dict[str, Any]:
    """The tables that every page has, and the figure of the partition."""
    figure = breakdown({run.name: run.record.parts_ms for run in runs}, title="")
    return {
        "metrics": tables.metrics(runs),
        "breakdown": inline_svg(figure, "parts", "Partition of each run's step"),
        "parts": tables.parts(runs),
        "resources": [
            {"table": tables.resources(run, window), "map": _load_map(run, f"load{number}")}
            for number, (run, window) in enumerate(zip(runs, windows, strict=True))
        ],
        "assumptions": tables.assumptions(runs),
        "provenance": tables.provenance(runs),
    }


def _load_map(run: SavedRun, name: str) -> str | None:
    """The heat map of a run's links and hosts as SVG; None where its resources are not numbered places."""
    uses = run.record.resources
    load = pd.DataFrame({"resource": [use.resource for use in uses], "utilisation": [use.busy for use in uses]})
    if not has_places(load):
        return None
    return inline_svg(load_figure(load, f"Load of links and hosts, {run.name}"), name, f"Load of {run.name}")


def _curve(runs: Sequence[SavedRun], rows: Sequence[ResultRow]) -> dict[str, Any]:
    """The scaling curves and their points; empty where no metric has two sizes."""
    bases = [base for run in runs if (base := run.record.scaling_efficiency_relative_to) is not None]
    figures = figures_of(rows, base=min(bases, default=None))
    return {"curves": figures, "curve_table": table_of(rows) if figures else None}


def _asset(name: str) -> str:
    return (files("reports.html") / name).read_text(encoding="utf-8")


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _distinct_names(runs: Sequence[SavedRun]) -> list[SavedRun]:
    """The runs, those of one name told apart by a number."""
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        named.append(run if seen[run.name] == 1 else replace(run, name=f"{run.name} ({seen[run.name]})"))
    return named


def _window(run: SavedRun) -> Window:
    try:
        return steady_window(run.timeline)
    except TraceError as error:
        raise TraceError(f"{run.path}: {error}") from None


def _timeline(run: SavedRun, window: Window, ranks: Sequence[int] | None, num_spans: int) -> tuple[dict[str, Any], str]:
    try:
        choice = choose(run.timeline, window, ranks=ranks, num_spans=num_spans)
    except TraceError as error:
        raise TraceError(f"{run.path}: {error}") from None
    return timeline_payload(run.timeline, window, choice, run.name), choice.words


def _title(runs: Sequence[SavedRun]) -> str:
    names = [run.name for run in runs]
    if len(names) > 3:
        return f"nestpipe: {names[0]} and {len(names) - 1} other runs"
    return "nestpipe: " + (names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1])


def _sections(context: dict[str, Any]) -> list[tuple[str, str]]:
    found = [
        ("summary", "Summary", True),
        ("curve", "Curve", context["curves"]),
        ("partition", "Step", True),
        ("timelines", "Timelines", True),
        ("limits", "Limits", context["limits"]),
        ("resources", "Resources", True),
        ("comparison", "Comparison", context["changes"]),
        ("provenance", "Provenance", True),
    ]
    return [(name, title) for name, title, present in found if present]


def _card(run: SavedRun) -> dict[str, Any]:
    """The head of a run: its step, how it is spent, a few metrics and what limits it."""
    values = {row.metric: row for row in run.record.rows if row.value is not None}
    facts = [
        {"title": METRICS[name].title, "unit": METRICS[name].unit, "value": _metric_text(values[name])}
        for name in _CARD_FACTS
        if name in values
    ]
    folded = len(run.timeline.ranks) < run.record.world_size
    ranks = f"{run.record.world_size:,} rank{'' if run.record.world_size == 1 else 's'}"
    return {
        "name": run.name,
        "schedule": f"schedule {run.record.schedule}",
        "ranks": ranks + (f" ({len(run.timeline.ranks):,} simulated, the others alike)" if folded else ""),
        "step": _metric_text(values["step_latency_ms"]) if "step_latency_ms" in values else "-",
        "status": run.record.status,
        "parts": _parts_strip(run.record.parts_ms),
        "facts": facts,
        "limit": run.record.limit.text if run.record.limit else "",
    }


def _parts_strip(parts_ms: dict[str, float]) -> list[dict[str, Any]]:
    """The partition of a step as a strip of bars, the wide ones named."""
    total = sum(parts_ms.values())
    strip = []
    for part in PARTS:
        value = parts_ms.get(part, 0.0)
        if value > 0:
            mark, share = PARTS_MARKS[part], value / total
            words = f"{mark.short} {100 * share:.0f} %"
            words = words if share > _CHARACTER * len(words) else ""
            strip.append({**_bar(part, share, mark.colour, f"{value:,.2f} ms"), "words": words})
    return strip


def _metric_text(row: ResultRow) -> str:
    metric = METRICS[row.metric]
    return cell(row.value, metric.digits, scale=metric.scale)


def _bar(name: str, share: float, fill: str, words: str) -> dict[str, Any]:
    return {"share": share, "fill": fill, "text": text_colour(fill), "title": f"{name}: {words}, {100 * share:.1f} %"}


def _relative(runs: Sequence[SavedRun]) -> str:
    """What speedup and scaling efficiency are relative to, in words."""
    words = []
    for attribute, text in (
        ("speedup_relative_to", "Speedup is relative to {}."),
        ("scaling_efficiency_relative_to", "Scaling efficiency is relative to {} workers."),
    ):
        known = {getattr(run.record, attribute) for run in runs} - {None}
        if known:
            words.append(
                text.format(" or ".join(f"{each:,}" if isinstance(each, int) else str(each) for each in known))
            )
    return " ".join(words)


def _limit(run: SavedRun) -> dict[str, Any] | None:
    """The critical cycle as a strip, a table and a sentence."""
    table = tables.cycle(run)
    limit = run.record.limit
    if limit is None or table is None:
        return None
    total = sum(op.ns for op in limit.cycle) or 1
    strip = []
    for op in limit.cycle:
        if op.ns:
            mark = KINDS[OpKind(op.kind)]
            micro = "" if op.micro_batch is None else f" m{op.micro_batch}"
            bar = _bar(op.kind, op.ns / total, mark.colour, f"t{op.batch:+d}{micro}, {ns_to_ms(op.ns):,.3f} ms")
            fits = op.ns / total > _CHARACTER / 3 * len(mark.short)  # this strip is as wide as three cards
            strip.append({**bar, "words": mark.short if fits else ""})
    steps = "every step" if limit.iterations == 1 else f"every {limit.iterations} steps"
    words = (
        f"These ops wait for one another in a circle that turns once {steps}. Without contention and with all "
        f"ranks alike a step takes {ns_to_ms(limit.step_ns):,.3f} ms; to shorten it, one of these ops must get faster "
        "or leave the circle."
    )
    return {"name": run.name, "words": words, "strip": strip, "table": table}


def _change(first: SavedRun, other: SavedRun) -> dict[str, Any]:
    diff = compare(first.timeline, other.timeline, names=(first.name, other.name))
    words = summary(diff)
    return {"words": words[:1].upper() + words[1:], "table": tables.changes(diff)}


def _links(run: SavedRun, base: Path | None) -> list[dict[str, str]]:
    """Links to exported traces that lie in the run's directory."""
    links = []
    for kind, name in sorted(run.record.exports.items()):
        path = run.path / Path(name).name
        if path.is_file():
            href = os.path.relpath(path.resolve(), (base or Path.cwd()).resolve())
            links.append({"href": Path(href).as_posix(), "text": f"{kind} trace"})
    return links
