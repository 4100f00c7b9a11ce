"""`nestpipe profile`: measure what ops cost on the devices at hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nestpipe.base import CaseError, write_text
from nestpipe.cli._common import Format

if TYPE_CHECKING:
    from executor.compute import EmulatedDevice
    from executor.profile import Plan
    from traces.workloads import CostTable

__all__ = ["Compute", "devices_of", "profile"]


class Compute(StrEnum):
    """Who computes: the CPU or GPU at hand, or waits of calibrated length."""

    REAL = "real"
    EMULATED = "emulated"


def devices_of(compute: Compute) -> tuple[EmulatedDevice | None, ...]:
    """What has to be profiled: emulated ops keep a core busy for as long as their real work takes, so both."""
    from executor.compute import EmulatedDevice

    return (None,) if compute is Compute.REAL else (EmulatedDevice(), None)


def profile(
    out: Annotated[Path, typer.Option("--out", help="The cost table to write (JSON).")] = Path("out/costs.json"),
    topology: Annotated[Path | None, typer.Option("--topology", help="Also write a topology file (YAML).")] = None,
    world_size: Annotated[int, typer.Option(help="Ranks of the testbed.")] = 2,
    compute: Annotated[Compute, typer.Option(help="Whether compute is real or emulated.")] = Compute.EMULATED,
    rate: Annotated[
        list[float] | None, typer.Option("--rate-mbit-per-s", help="Link rates to profile at; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute, not several.")] = False,
    realtime: Annotated[bool, typer.Option(help="Run ranks before everything else on the machine.")] = True,
    backend: Annotated[str, typer.Option(help="Under torchrun: the backend.")] = "gloo",
    device: Annotated[str, typer.Option(help="Under torchrun: cpu or cuda.")] = "cpu",
    timeout_s: Annotated[float, typer.Option(help="End a list of runs after this many seconds.")] = 600.0,
    patience_s: Annotated[
        float, typer.Option(min=0, help="At each link rate, wait this long for the machine to be as fast as typical.")
    ] = 60.0,
    output: Annotated[Format, typer.Option("--format", help="How to print the result.")] = Format.TEXT,
) -> None:
    """Measure op costs: serial runs over sizes and link rates, and pairs of ops at the same time.

    Runs on a testbed of network namespaces made for it (Linux, root), or on the ranks of torchrun if that started it.
    """
    from executor.profile import measure_costs
    from nestpipe.validate import bench, check_writable, links_given, topology_text

    links_given(rate)
    if topology is not None and device != "cpu":
        raise CaseError(f"--topology describes ranks that are cores of a host, not {device}; start from the catalogue")
    plan = _plan(quick, compute, rate or ())
    with bench(
        world_size=world_size,
        realtime=realtime,
        backend=backend,
        device=device,
        timeout_s=timeout_s,
        patience_s=patience_s,
    ) as here:
        check_writable(*((out, topology) if here.first else ()))
        table = measure_costs(
            plan,
            here.run,
            world_size=here.world_size,
            burst_bytes=here.burst_bytes,
            conditions={**here.conditions, "compute": compute.value, "plan": "quick" if quick else "full"},
        )
        if here.first:
            write_text(out, table.to_json())
            if topology is not None:
                write_text(topology, topology_text(table))
            _show(table, out, output)


def _plan(quick: bool, compute: Compute, rates_mbit_per_s: Sequence[float]) -> Plan:
    from dataclasses import replace

    from executor.profile import full_plan, quick_plan
    from nestpipe.validate import bits_per_s

    plan = (quick_plan if quick else full_plan)(devices_of(compute))
    rates = tuple(dict.fromkeys(bits_per_s(rate) for rate in rates_mbit_per_s))
    return replace(plan, rates_bits_per_s=rates) if rates else plan


def _show(table: CostTable, out: Path, output: Format) -> None:
    from nestpipe.ir import OpKind
    from nestpipe.validate import rehearse
    from traces.workloads import COST_COLUMNS, costs_of, fit_kind

    if output is Format.CSV:
        typer.echo(table.rows[list(COST_COLUMNS)].to_csv(index=False), nl=False)
        return
    variants = sorted(set(table.rows["variant"]))
    pairs = [(variant, OpKind(kind)) for variant in variants for kind in sorted(set(table.rows["kind"]))]
    fits = [fit_kind(table.rows, kind, variant, costs_of(kind)) for variant, kind in pairs]
    if output is Format.JSON:
        rows = [
            {
                "variant": fit.variant,
                "kind": fit.kind.value,
                "coefficients_ns": dict(fit.coefficients),
                "fit_error": fit.error,
                "spread": fit.spread,
                "points": fit.num_points,
                "status": "fitted",
            }
            for fit in fits
        ]
        typer.echo(json.dumps({"cost_table": str(out), "digest": table.digest, "meta": dict(table.meta), "rows": rows}))
        return
    meta = table.meta
    disturbed = meta["disturbed_runs"]
    typer.echo(
        f"cost table {out} (digest {table.digest}): {len(table.rows)} rows measured in {meta['duration_s']} s, "
        f"{meta['world_size']} ranks, load average {meta['load_average']['median']:.1f}, "
        f"machine faster or slower than typical beside {disturbed['count']} of {disturbed['of']} runs"
    )
    typer.echo("fitted cost of an op, ns = sum of coefficient x size; error and spread are relative")
    for fit in fits:
        terms = " + ".join(f"{value:.4g} {name}" for name, value in fit.coefficients.items() if value)
        typer.echo(
            f"  {fit.variant.split()[0]:<9}{fit.kind:<19} {terms:<58} error {fit.error:.3f} spread {fit.spread:.3f}"
        )
    hand = {name: meta[name]["p50_ns"] / 1000 for name in ("handoff", "issue")}
    typer.echo(
        f"hand-over to a waiting lane {hand['handoff']:.0f} us, to a lane's next op {hand['issue']:.0f} us (measured)"
    )
    typer.echo("whole schedules, step time (ms); nothing is fitted on them, and their error widens predicted intervals")
    for each in rehearse(table):
        who, name = each.config.variant.split()[0], each.config.schedule
        times = f"predicted {each.predicted_ms:7.2f}  measured {each.measured_ms:7.2f}"
        typer.echo(f"  {who:<9}{name:<19} {times}  {each.error:+.1%}")
    typer.echo("interference, time together over time alone (measured)")
    for row in meta["interference"]:
        typer.echo(f"  {row['compute']:<9}{row['pair']:<44} {row['kind']:<19} {row['slowdown']:.2f}")
