"""Validations and cost tables as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from nestpipe.ir import OpKind
from nestpipe.validate.causes import CAUSES
from nestpipe.validate.predict import rehearse
from nestpipe.validate.validation import Validation
from traces.workloads import CostFit, CostTable, costs_of, fit_kind

__all__ = ["cost_fits", "costs_text", "validation_text"]

_CAUSES_SHOWN: Final = 3
_KINDS_A_LINE: Final = 4


def cost_fits(table: CostTable) -> list[CostFit]:
    """The fits of a cost table by variant and op kind."""
    variants, kinds = (sorted(set(table.rows[name])) for name in ("variant", "kind"))
    return [
        fit_kind(table.rows, OpKind(kind), variant, costs_of(OpKind(kind))) for variant in variants for kind in kinds
    ]


def costs_text(table: CostTable, name: str) -> str:
    """What was profiled: fits, hand-overs, rehearsed schedules, interference; `name` is where the table is."""
    return "\n".join(_costs_lines(table, name))


def _costs_lines(table: CostTable, name: str) -> Iterator[str]:
    meta = table.meta
    disturbed = meta["disturbed_runs"]
    yield (
        f"cost table {name} (digest {table.digest}): {len(table.rows)} rows measured in {meta['duration_s']} s, "
        f"{meta['world_size']} ranks, load average {meta['load_average']['median']:.1f}, "
        f"machine faster or slower than typical beside {disturbed['count']} of {disturbed['of']} runs"
    )
    yield "fitted cost of an op, ns = sum of coefficient x size; error and spread are relative"
    for fit in cost_fits(table):
        terms = " + ".join(f"{value:.4g} {name}" for name, value in fit.coefficients.items() if value)
        compute = fit.variant.split()[0]
        yield f"  {compute:<9}{fit.kind:<19} {terms:<58} error {fit.error:.3f} spread {fit.spread:.3f}"
    hand = {name: meta[name]["p50_ns"] / 1000 for name in ("handoff", "issue")}
    yield f"hand-over to a waiting lane {hand['handoff']:.0f} us, to a lane's next op {hand['issue']:.0f} us (measured)"
    yield "whole schedules, step time (ms); nothing is fitted on them, and their error widens predicted intervals"
    for each in rehearse(table):
        times = f"predicted {each.predicted_ms:7.2f}  measured {each.measured_ms:7.2f}"
        yield f"  {each.config.compute:<9}{each.config.schedule:<19} {times}  {each.error:+.1%}"
    yield "interference, time together over time alone (measured)"
    for row in meta["interference"]:
        yield f"  {row['compute']:<9}{row['pair']:<44} {row['kind']:<19} {row['slowdown']:.2f}"


def validation_text(found: Validation) -> str:
    """A line for each configuration, and the summary."""
    head = (
        f"{'schedule':<12} {'N':>2} {'batch':>5} {'dim':>4} {'Mbit/s':>6} {'predicted':>9} {'interval (ms)':>17} "
        f"{'measured':>9} {'error':>7} {'speedup pred/meas':>18}  main causes (ms)"
    )
    lines = [head, *map(_row_line, found.records()), "", *_summary_lines(found.summary), *_kind_lines(found)]
    return "\n".join([*lines, *_machine_lines(found.summary)])


def _row_line(row: Mapping[str, Any]) -> str:
    causes = {name: row[f"cause_{name}_ms"] for name in CAUSES}
    main = sorted(causes, key=lambda name: -abs(causes[name]))[:_CAUSES_SHOWN]
    known = "predicted_speedup" in row
    speedup = f"{row['predicted_speedup']:.2f} / {row['measured_speedup']:.2f}" if known else "-"
    return (
        f"{row['schedule']:<12} {row['micro_batches']:>2} {row['batch_size']:>5} {row['dim']:>4} "
        f"{row['rate_mbit_per_s']:>6g} {row['predicted_ms']:>9.2f} {row['low_ms']:>8.2f}{row['high_ms']:>8.2f}"
        f"{' ' if row['inside'] else '*'} {row['measured_ms']:>9.2f} {row['error']:>+7.1%} {speedup:>18}  "
        + ", ".join(f"{name} {causes[name]:+.2f}" for name in main)
    )


def _summary_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{summary['configurations']} configurations, {summary['compute']} compute, {summary['world_size']} ranks: "
        f"mean |error| {summary['mean_absolute_error']:.2%}, worst {summary['worst_absolute_error']:.2%}, "
        f"bias {summary['bias']:+.2%}"
    )
    if summary["mean_absolute_speedup_error"] is not None:
        yield f"speedup over sync: mean |error| {summary['mean_absolute_speedup_error']:.2%}"
    exposed = summary["mean_absolute_exposed_error_of_step"]
    yield f"exposed row and gradient communication: mean |error| {exposed:.2%} of the step"
    yield (
        f"measured inside the predicted interval: {summary['inside_interval']} of {summary['configurations']} "
        f"(* outside); schedules further apart than uncertain, ranked right: {summary['rankings_right']} of "
        f"{summary['rankings_judged']}"
    )


def _kind_lines(found: Validation) -> Iterator[str]:
    yield "by op kind, mean time measured (ms) and mean error of its prediction:"
    kinds = [f"{row['kind']} {row['measured_ms']:.2f} {row['error']:+.1%}" for row in found.kinds.to_dict("records")]
    for first in range(0, len(kinds), _KINDS_A_LINE):
        yield "  " + "   ".join(f"{each:<32}" for each in kinds[first : first + _KINDS_A_LINE]).rstrip()


def _machine_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    load = summary["load_average"]
    yield f"load average of the host while it ran: {load['min']:.1f} to {load['max']:.1f}"
    line = f"machine not as fast as when profiled in any run of {summary['disturbed']} of "
    line += f"{summary['configurations']} configurations"
    if 0 < summary["disturbed"] < summary["configurations"]:
        line += f"; mean |error| of the others {summary['mean_absolute_error_undisturbed']:.2%}, worst "
        line += f"{summary['worst_absolute_error_undisturbed']:.2%}"
    yield line
    if summary["extrapolated"]:
        yield f"{summary['extrapolated']} predictions are extrapolated: some of their sizes were not profiled"
