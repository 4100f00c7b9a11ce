"""`nestpipe profile`: measure what ops cost on the devices at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from executor.compute import Compute
from nestpipe.base import CaseError, write_text
from nestpipe.cli._bench import Backend, Device, Patience, Realtime, Timeout, WorldSize
from nestpipe.cli._render import Format, Output, render

if TYPE_CHECKING:
    from traces.workloads import CostTable

__all__ = ["profile"]


def profile(
    out: Annotated[Path, typer.Option("--out", "-o", help="The cost table to write (JSON).")] = Path("out/costs.json"),
    topology: Annotated[Path | None, typer.Option("--topology", help="Also write a topology file (YAML).")] = None,
    world_size: WorldSize = 2,
    compute: Annotated[Compute, typer.Option(help="Whether compute is real or emulated.")] = Compute.EMULATED,
    rate: Annotated[
        list[float] | None, typer.Option("--rate-mbit-per-s", help="Link rates to profile at; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A minute, not several.")] = False,
    realtime: Realtime = True,
    backend: Backend = "gloo",
    device: Device = "cpu",
    timeout_s: Timeout = 600.0,
    patience_s: Patience = 60.0,
    output: Output = Format.TEXT,
) -> None:
    """Measure op costs: serial runs over sizes and link rates, and pairs of ops at the same time.

    Runs on a testbed of network namespaces made for it (Linux, root), or on the ranks of torchrun if that started it.
    """
    from executor.profile import full_plan, measure_costs, quick_plan
    from nestpipe import validate as library

    library.links_given(rate)
    if topology is not None and device != "cpu":
        raise CaseError(f"--topology describes ranks that are cores of a host, not {device}; start from the catalogue")
    # emulated ops keep a core busy for as long as their real work takes, so that is profiled, too
    plan = (quick_plan if quick else full_plan)(tuple(dict.fromkeys((compute.device, None))))
    rates = tuple(dict.fromkeys(library.bits_per_s(each) for each in rate or ()))
    options = library.BenchOptions(
        world_size=world_size,
        realtime=realtime,
        backend=backend,
        device=device,
        timeout_s=timeout_s,
        patience_s=patience_s,
    )
    with library.open_bench(options) as bench:
        library.check_writable(*((out, topology) if bench.first else ()))
        table = measure_costs(
            replace(plan, rates_bits_per_s=rates) if rates else plan,
            bench.run,
            world_size=bench.world_size,
            burst_bytes=bench.burst_bytes,
            conditions={**bench.conditions, "compute": compute.value, "plan": "quick" if quick else "full"},
        )
        if bench.first:
            write_text(out, table.to_json())
            if topology is not None:
                write_text(topology, library.topology_text(table))
            _show(table, out, output)


def _show(table: CostTable, out: Path, output: Format) -> None:
    from nestpipe.validate import cost_fits, costs_text
    from traces.workloads import COST_COLUMNS

    def document() -> dict[str, object]:
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
            for fit in cost_fits(table)
        ]
        return {"cost_table": str(out), "digest": table.digest, "meta": dict(table.meta), "rows": rows}

    render(
        output,
        document=document,
        rows=lambda: table.rows[list(COST_COLUMNS)],
        text=lambda: costs_text(table, str(out)),
        indent=None,
    )
