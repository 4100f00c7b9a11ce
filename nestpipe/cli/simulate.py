"""`nestpipe simulate`: one schedule at one size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nestpipe.base import CaseError, ns_to_ms
from nestpipe.cli._common import digest, provenance
from nestpipe.cli._render import Format, render
from nestpipe.ir import show
from nestpipe.schedules import load
from reports.runs import Column, parts, results, table, text, write_run
from sim.costs import (
    CaseWorkload,
    ModelWorkload,
    Options,
    require_runnable,
    run,
    run_record,
    run_status,
)
from sim.engine import Jitter
from sim.network import read_measured
from topologies.imports import load_topology
from traces.keys import KeyRatios, read_key_files
from traces.workloads import preset

__all__ = ["simulate"]


def _stragglers(texts: list[str]) -> dict[int, float]:
    found = {}
    for each in texts:
        match = re.fullmatch(r"(\d+):(\d+(?:\.\d+)?)", each)
        if match is None:
            raise CaseError(f"--straggler must be RANK:FACTOR, for example 17:1.5, got {each!r}")
        found[int(match[1])] = float(match[2])
    return found


def _shares(texts: list[str]) -> dict[str, float]:
    found = {}
    for each in texts:
        match = re.fullmatch(r"(.+)=(\d*\.?\d+)", each)
        if match is None:
            raise CaseError(f"--degrade must be LINKS=SHARE, for example 'rail 3 of node 17=0.5', got {each!r}")
        found[match[1]] = float(match[2])
    return found


def _sizes(texts: list[str]) -> dict[str, int]:
    found = {}
    for each in texts:
        match = re.fullmatch(r"(\w+)=(\d+)", each)
        if match is None:
            raise CaseError(f"--model-size must be NAME=N with a whole number, for example dim=512, got {each!r}")
        found[match[1]] = int(match[2])
    return found


def simulate(
    schedule: Annotated[str, typer.Option(metavar="NAME|FILE", help="A catalogue name or a file of schedule text.")],
    case: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A published cluster: costs per op kind.")
    ] = "nestpipe_paper",
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel="Model", help="Instead of a case: hstu, hstu_large_ml1m, fuxi_alpha or dlrm on --topology."
        ),
    ] = None,
    model_size: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Model", metavar="NAME=N", help="With --model: another size, dim=512; repeatable."
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Hardware that ops share where they overlap.")
    ] = None,
    degrade: Annotated[
        list[str] | None,
        typer.Option(metavar="LINKS=SHARE", help="Slower links: 'rail 3 of node 17=0.5'; repeatable."),
    ] = None,
    curves: Annotated[
        list[Path] | None,
        typer.Option(metavar="LOG", help="Measured collectives of --topology (nccl-tests, HCCL); repeatable."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(help="Number of ranks; the case's headline size by default.")
    ] = None,
    base_world_size: Annotated[int | None, typer.Option(help="Size that scaling efficiency is relative to.")] = None,
    steps: Annotated[int, typer.Option(help="Batches to run.")] = 20,
    batch: Annotated[
        int | None, typer.Option(rich_help_panel="Model", help="Samples per rank and step, with --model.")
    ] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per batch.")] = None,
    domain_size: Annotated[int | None, typer.Option(min=1, help="Ranks per domain, for 2D sparse parallelism.")] = None,
    keys: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel="Keys", metavar="FILE", help="With --model: lookups repeat as in this key file; repeatable."
        ),
    ] = None,
    key_column: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel="Keys", metavar="NAME", help="With --keys: column that holds keys; repeatable."),
    ] = None,
    key_order_by: Annotated[
        str | None,
        typer.Option(rich_help_panel="Keys", metavar="COLUMN", help="With --keys: sort samples by this column."),
    ] = None,
    key_sequence: Annotated[
        int | None,
        typer.Option(
            rich_help_panel="Keys",
            min=1,
            metavar="ITEMS",
            help="With --keys: samples are user histories of this length.",
        ),
    ] = None,
    key_resample: Annotated[
        bool,
        typer.Option(
            "--key-resample",
            rich_help_panel="Keys",
            help="Where the file is too short, draw from it instead of extrapolating.",
        ),
    ] = False,
    compute_efficiency: Annotated[
        float, typer.Option(rich_help_panel="Model", help="Share of peak arithmetic reached, with --model.")
    ] = 1.0,
    communication_share: Annotated[
        float, typer.Option(help="Share of a device that a collective takes at full rate, with --topology; assumed.")
    ] = 0.0,
    jitter: Annotated[
        float, typer.Option(rich_help_panel="Noise", help="Coefficient of variation of each local op of each rank.")
    ] = 0.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel="Noise", metavar="RANK:FACTOR", help="A slower rank; repeatable."),
    ] = None,
    seed: Annotated[
        int, typer.Option(rich_help_panel="Noise", min=0, help="Seed of jitter, of clustering and of samples drawn.")
    ] = 0,
    unfold: Annotated[bool, typer.Option("--unfold", help="Simulate every rank, alike or not.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", rich_help_panel="Output", metavar="DIR", help="Write the run here, for report and diff."
        ),
    ] = None,
    load_plot: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel="Output", help="With --topology: heat map of links and hosts, to a .png, .svg or .pdf file."
        ),
    ] = None,
    output: Annotated[Format, typer.Option("--format", rich_help_panel="Output")] = Format.TEXT,
) -> None:
    """Simulates one schedule and prints its metrics, where the time goes and what limits it."""
    cluster = None if topology is None else load_topology(topology)
    if degrade and cluster is None:
        raise CaseError("--degrade needs --topology, the cluster whose links are slower")
    if degrade and cluster is not None:
        cluster = cluster.with_degraded(_shares(degrade))
    if curves and cluster is None:
        raise CaseError("--curves needs --topology, the cluster that was measured")
    if curves and cluster is not None:
        cluster = replace(cluster, measured=read_measured(curves))
    if communication_share and cluster is None:
        raise CaseError("--communication-share needs --topology NAME|FILE: without one nothing is shared")
    if load_plot is not None and cluster is None:
        raise CaseError("--load-plot needs --topology NAME|FILE: without one there are no links and hosts")
    if batch is not None and model is None:
        raise CaseError(f"--batch {batch} needs --model NAME: a case has the batch that it was measured with")
    ratios = _ratios(
        keys, model, columns=key_column, order_by=key_order_by, sequence=key_sequence, drawn=key_resample, seed=seed
    )
    workload: CaseWorkload | ModelWorkload
    if model is None:
        workload = CaseWorkload.of(case)
        the_case = workload.case
        baseline, sizes = the_case.baseline.schedule, (the_case.headline_world_size, the_case.base_world_size)
    elif cluster is None:
        raise CaseError("--model needs --topology NAME|FILE: times follow from the hardware")
    else:
        the_model = preset(model, _sizes(model_size or []))
        workload = ModelWorkload(model=the_model, keys=ratios, batch_per_worker=512 if batch is None else batch)
        baseline, sizes = "sync", (cluster.ranks_default, cluster.ranks_per_node)
    world_size = sizes[0] if world_size is None else world_size
    base = min(sizes[1], world_size) if base_world_size is None else base_world_size
    loop = workload.loop(load(schedule), micro_batches)
    require_runnable(loop)
    options = Options(
        world_size=world_size,
        domain_size=world_size if domain_size is None and model is not None else domain_size,
        steps=steps,
        jitter=Jitter(cv=jitter, stragglers=_stragglers(straggler or []), seed=seed),
        fold_ranks=not unfold,
        compute_efficiency=1.0 if model is None else compute_efficiency,
        communication_share=communication_share,
    )
    facts = provenance(
        schedule=schedule,
        schedule_digest=digest(show(loop)),
        **workload.facts() | ({} if model is None else {"model": model}),
        topology=None if cluster is None else cluster.name,
        **({"degraded": ", ".join(map(str, cluster.degraded))} if cluster is not None and cluster.degraded else {}),
        **({"curves": ", ".join(path.name for path in curves)} if curves else {}),
        world_size=world_size,
        micro_batches=loop.micro_batches,
        domain_size=domain_size,
        steps=steps,
        communication_share=communication_share or None,
        jitter=jitter,
        seed=seed if jitter or keys else None,
        stragglers=straggler,
    )
    found = run(loop, workload, cluster, options, meta=facts)
    changed = bool(jitter or straggler or micro_batches or domain_size or communication_share)
    status = run_status(found, workload, cluster, baseline=schedule == baseline, changed=changed)
    result = {
        "provenance": facts,
        **run_record(found, workload, cluster, status=status, baseline=baseline, base_world_size=base),
    }
    if out is not None:
        write_run(out, run=result, timeline=found.timeline)
    if load_plot is not None and found.load is not None:
        from reports.figures import load_figure, save

        save(load_figure(found.load, f"{schedule} on {topology}, {world_size:,} ranks"), load_plot)
    render(output, facts=facts, document=lambda: result, rows=lambda: result["rows"], text=lambda: _text(result))


def _ratios(
    keys: list[str] | None,
    model: str | None,
    *,
    columns: list[str] | None,
    order_by: str | None,
    sequence: int | None,
    drawn: bool,
    seed: int,
) -> KeyRatios | None:
    """The key files that were named, read; None without any."""
    if keys is None:
        if columns or order_by or sequence or drawn:
            raise CaseError("--key-column, --key-order-by, --key-sequence and --key-resample need --keys FILE")
        return None
    if model is None:
        raise CaseError("--keys needs --model: a case states times, which keys do not change")
    files = read_key_files(keys, columns=columns, order_by=order_by, sequence=sequence, only=True)
    return KeyRatios(files, drawn=drawn, seed=seed)


def _text(result: dict[str, Any]) -> str:
    base = f"{result['scaling_efficiency_relative_to']:,} workers"
    limit = result["limit"]
    bound_ms = ns_to_ms(limit["step_ns"])
    note = result["steady"]["note"]
    lines = [
        *([] if note is None else [f"# steady state: {note}"]),
        f"# speedup over {result['speedup_relative_to']}, scaling efficiency relative to {base}",
        results(table(result["rows"])),
        "",
        parts({str(result["schedule"]): result["parts_ms"]}, title="Where the step goes"),
        "",
        f"What limits this step without jitter and contention, {bound_ms:,.2f} ms, "
        f"per {limit['iterations']} iteration(s): {limit['text']}",
    ]
    if "load" in result and result["metrics"]["step_latency_ms"] > 1.001 * bound_ms:
        busiest = max(result["load"], key=lambda each: each["utilisation"])
        full = f"{busiest['resource']}, {busiest['utilisation']:.0%} full"
        lines.append(f"The rest is contention or jitter; busiest: {full}")
    if "stages" in result:
        lines += _stages(result)
    if "keys" in result:
        lines += _keys(result["keys"])
    shares = ", ".join(f"{share:.1%} {name}" for name, share in result["critical_cycle_rests_on"].items())
    return "\n".join([*lines, f"The critical cycle rests on numbers that are {shares}"])


def _stages(result: dict[str, Any]) -> list[str]:
    """What sets the time of each op, and how full links and hosts are."""
    columns = [
        Column(name="kind"),
        Column(name="alone_ms", header="alone (ms)", digits=3),
        Column(name="busiest_resource", header="busiest resource"),
        Column(name="utilisation", header="full (%)", digits=1, scale=100),
        Column(name="origin"),
    ]
    load = [Column(name="resource"), Column(name="utilisation", header="full over the run (%)", digits=1, scale=100)]
    return [
        "",
        text(table(result["stages"]), columns, title="What sets the time of each op"),
        "",
        text(table(result["load"]), load, title="Load of links and hosts"),
        "",
    ]


def _keys(keys: dict[str, Any]) -> list[str]:
    """What of the step comes from the key files, and where each ratio is from."""
    columns = [
        Column(name="drives"),
        Column(name="meaning", header="ratio of"),
        Column(name="ratio", digits=4),
        Column(name="keys", header="keys a rank and step", digits=0),
        Column(name="status", header="ratio is"),
        Column(name="basis", header="from"),
    ]
    title = f"Sizes from {', '.join(keys['files'])} ({keys['file_format']}, {keys['order']} order)"
    return [text(table(keys["rows"]), columns, title=title), *(f"note: {note}" for note in keys["notes"]), ""]
