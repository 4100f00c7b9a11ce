"""`nestpipe topology`: the clusters of the catalogue, and what a description amounts to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nestpipe.base import TopologyError, TraceError
from nestpipe.cli._render import Format, Output, render
from sim.network import Collectives, read_curves
from topologies.cluster import Cluster, Quantity, load_cluster, names
from topologies.fabric import Fabric
from topologies.imports import load_topology

__all__ = ["list_", "measured", "show_"]


def list_(output: Output = Format.TEXT) -> None:
    """The clusters of the catalogue, one line each."""
    clusters = [load_cluster(name) for name in names()]
    columns = "name,accelerator,ranks_per_node,ranks_default,ranks_max\n"
    render(
        output,
        document=lambda: {"topologies": [{"name": c.name, "description": c.description} for c in clusters]},
        rows=lambda: (
            columns
            + "".join(
                f'{c.name},"{c.accelerator.name}",{c.ranks_per_node},{c.ranks_default},{c.ranks_max}\n'
                for c in clusters
            )
        ),
        text=lambda: "\n".join(f"{c.name:<14} up to {c.ranks_max:>6,} ranks  {c.description}" for c in clusters),
    )


def show_(
    name: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="Catalogue name, YAML file, or another tool's file.")
    ],
    world_size: Annotated[int | None, typer.Option("--world-size", min=1, help="Ranks; the cluster's default.")] = None,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="TIER=RANKS", help="Another group size in a tier, repeatable."),
    ] = None,
    like: Annotated[
        str, typer.Option("--like", help="Whose accelerators and hosts fill in what another tool's file leaves out.")
    ] = "dgx_h100",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw it to a .png, .svg or .pdf file.")] = None,
    output: Output = Format.TEXT,
) -> None:
    """Tiers, bisection bandwidth, memory and host resources of a cluster, with the source of each number."""
    cluster = _cluster(name, like, group or [])
    ranks = cluster.ranks_default if world_size is None else world_size
    facts = _facts(cluster, Fabric(cluster, ranks))
    if plot is not None:
        from reports.figures import save, topology_figure

        save(topology_figure(cluster, ranks), plot)
    render(
        output,
        document=lambda: facts,
        rows=lambda: (
            "where,key,value,source\n"
            + "".join(f'{row["where"]},{row["key"]},{row["value"]!r},"{row["source"]}"\n' for row in facts["numbers"])
        ),
        text=lambda: _text(facts),
    )


def measured(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="nccl-tests, RCCL or HCCL output, or a table of them.")],
    name: Annotated[str, typer.Option("--topology", metavar="NAME|FILE", help="The cluster that was measured.")],
    group: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="TIER=RANKS", help="Another group size in a tier, repeatable."),
    ] = None,
    collective: Annotated[
        str | None, typer.Option("--collective", help="Only this one, for example all_to_all.")
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Measured collectives beside a cluster: leave-one-size-out residuals, and the share of the hardware reached."""
    cluster = _cluster(name, "dgx_h100", group or [])
    rows = [_measured_row(cluster, curve) for curve in read_curves(log, collective)]
    render(
        output,
        document=lambda: {"topology": cluster.name, "curves": rows},
        rows=lambda: rows or "collective\n",
        text=lambda: "\n".join([f"{log} beside {cluster.name}; {_RESIDUALS}", _HEAD, *map(_measured_line, rows)]),
    )


_RESIDUALS: Final = "residuals: each inner size predicted from the others"
_HEAD: Final = (
    f"{'collective':<16}{'ranks':>6} {'dtype':<8}{'place':<5}{'sizes':>6}{'median':>9}{'worst':>9}"
    f"{'at bytes':>14}{'largest bytes':>15}{'measured ms':>13}{'hardware ms':>13}{'reached':>9}"
)


def _measured_line(row: dict[str, Any]) -> str:
    residuals = [row["residual_median"], row["residual_worst"]]
    shown = "".join(f"{'-' if value is None else f'{value:.1%}':>9}" for value in residuals)
    hardware = "-" if row["hardware_ns"] is None else f"{row['hardware_ns'] / 1e6:.4g}"
    reached = "-" if row["reached"] is None else f"{row['reached']:.1%}"
    return (
        f"{row['collective']:<16}{row['world_size']:>6} {row['dtype']:<8}{'in' if row['in_place'] else 'out':<5}"
        f"{row['num_sizes']:>6}{shown}{row['residual_worst_bytes'] or '-':>14}{row['largest_bytes']:>15}"
        f"{row['measured_ns'] / 1e6:>13.4g}{hardware:>13}{reached:>9}"
    )


def _measured_row(cluster: Cluster, curve: Any) -> dict[str, Any]:
    largest, time_ns = curve.size_bytes[-1], curve.time_ns[-1]
    hardware_ns: int | None = None
    if curve.world_size <= cluster.ranks_max and curve.collective in (
        "all_to_all", "all_reduce", "all_gather", "reduce_scatter",
    ):  # fmt: skip
        hardware_ns = Collectives(Fabric(cluster, curve.world_size)).cost(curve.collective, largest).time_ns
    try:
        residuals = curve.leave_one_out()
        worst = max(range(len(residuals.error)), key=lambda n: abs(residuals.error[n]))
        found = (residuals.median, residuals.worst, residuals.size_bytes[worst])
    except TraceError:
        found = (None, None, None)
    return {
        "collective": curve.collective,
        "world_size": curve.world_size,
        "dtype": curve.dtype,
        "in_place": curve.in_place,
        "num_sizes": len(curve.size_bytes),
        "residual_median": found[0],
        "residual_worst": found[1],
        "residual_worst_bytes": found[2],
        "largest_bytes": largest,
        "measured_ns": time_ns,
        "hardware_ns": hardware_ns,
        "reached": None if not hardware_ns else hardware_ns / time_ns,
    }


def _cluster(name: str, like: str, groups: list[str]) -> Cluster:
    cluster = load_topology(name, like)
    for text in groups:
        tier, _, ranks = text.partition("=")
        if not ranks.isdigit():
            raise TopologyError(f"--group must be TIER=RANKS, got {text!r}")
        cluster = cluster.with_group(tier, int(ranks))
    return cluster


def _facts(cluster: Cluster, fabric: Any) -> dict[str, Any]:
    numbers = []

    def add(where: str, holder: Any) -> None:
        for key in holder.__slots__:
            value: Quantity | None = getattr(holder, key)
            if hasattr(value, "source"):
                assert value is not None
                numbers.append({"where": where, "key": key, "value": value.value, "source": value.source})

    add("accelerator", cluster.accelerator)
    add("host", cluster.host)
    for tier in cluster.tiers:
        add(f"tiers.{tier.name}", tier)
    price = cluster.price_usd_per_accelerator_hour
    return {
        "name": cluster.name,
        "description": cluster.description,
        "accelerator": cluster.accelerator.name,
        "world_size": fabric.world_size,
        "num_hosts": fabric.num_hosts,
        "num_links": fabric.num_links,
        "memory_bytes": fabric.world_size * cluster.accelerator.memory_capacity_bytes.value,
        "dram_bytes": fabric.num_hosts * cluster.host.dram_capacity_bytes.value,
        "bisection_bytes_per_s": fabric.bisection_bytes_per_s(),
        "price_usd_per_hour": None if price is None else price.value * fabric.world_size,
        "tiers": [
            {
                "name": tier.name,
                "kind": tier.kind.value,
                "ranks_per_group": tier.ranks_per_group or fabric.world_size,
                "num_links": len(layer.capacity),
                "bandwidth_bytes_per_s": float(layer.capacity[0]),
                "latency_ns": tier.latency_ns.value,
                "oversubscription": None if tier.oversubscription is None else tier.oversubscription.value,
            }
            for tier, layer in zip(cluster.tiers, fabric.layers, strict=True)
        ],
        "numbers": numbers,
    }


def _text(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['name']}: {facts['description']}",
        f"{facts['world_size']:,} ranks ({facts['accelerator']}) on {facts['num_hosts']:,} hosts, "
        f"{facts['num_links']:,} directed links",
        f"bisection bandwidth  {facts['bisection_bytes_per_s'] / 1e9:,.1f} GB/s one way (GB = 10^9 bytes)",
        f"accelerator memory   {facts['memory_bytes'] / 1e12:,.2f} TB",
        f"host memory          {facts['dram_bytes'] / 1e12:,.2f} TB",
    ]
    price = facts["price_usd_per_hour"]
    lines.append(f"price                {'not given' if price is None else f'{price:,.2f} USD per hour'}")
    lines += [
        "",
        f"{'tier':<14}{'kind':<8}{'ranks':>9}{'links':>10}{'GB/s a link':>14}{'latency us':>12}{'oversub.':>10}",
    ]
    for tier in facts["tiers"]:
        over = "" if tier["oversubscription"] is None else f"{tier['oversubscription']:g}:1"
        lines.append(
            f"{tier['name']:<14}{tier['kind']:<8}{tier['ranks_per_group']:>9,}{tier['num_links']:>10,}"
            f"{tier['bandwidth_bytes_per_s'] / 1e9:>14.4g}{tier['latency_ns'] / 1e3:>12.4g}{over:>10}".rstrip()
        )
    lines += ["", "numbers and where they come from"]
    width = max(len(f"{row['where']}.{row['key']}") for row in facts["numbers"])
    for row in facts["numbers"]:
        lines.append(f"  {row['where'] + '.' + row['key']:<{width}}  {row['value']:>12.6g}  {row['source']}")
    assumed = sum(row["source"].lower().startswith("assumed") for row in facts["numbers"])
    lines.append(f"{assumed} of {len(facts['numbers'])} numbers are assumed")
    return "\n".join(lines)
