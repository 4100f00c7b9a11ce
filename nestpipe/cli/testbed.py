"""`nestpipe testbed up|down|run|check`: a namespace per rank on this machine, with links shaped to a chosen rate."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from executor.testbed import (
    Testbed,
    check_links,
    existing,
    launch,
    rate_text,
    remove_stale,
    set_up,
    tear_down,
    temporary,
)
from nestpipe.base import CaseError
from nestpipe.cli._render import Format, Output, render

__all__ = ["check", "down", "rates_of", "run", "up"]


WorldSize = Annotated[int, typer.Option(help="Number of ranks.")]
Rate = Annotated[
    list[float] | None, typer.Option("--rate-mbit-per-s", help="Link rate in Mbit/s; once, or once per rank.")
]
Burst = Annotated[int, typer.Option(help="Bytes that an idle link lets through at once.")]


def rates_of(world_size: int, rates_mbit_per_s: list[float] | None) -> tuple[int, ...]:
    """The rate of every rank in bit/s; one value stands for all.

    Raises:
        CaseError: if there is neither one rate nor one for each rank.

    >>> rates_of(2, [200])
    (200000000, 200000000)
    """
    rates = rates_mbit_per_s or [1000.0]
    if len(rates) not in (1, world_size):
        raise CaseError(f"--rate-mbit-per-s: expected 1 or {world_size} values (one per rank), got {len(rates)}")
    return tuple(round(rate * 1e6) for rate in (rates * world_size if len(rates) == 1 else rates))


def up(
    name: Annotated[str, typer.Argument(help="Lower-case letters and digits.")] = "default",
    world_size: WorldSize = 2,
    rate: Rate = None,
    burst_bytes: Burst = 262_144,
) -> None:
    """Make a testbed that stays until `nestpipe testbed down`."""
    bed = Testbed(name=name, rates_bits_per_s=rates_of(world_size, rate), burst_bytes=burst_bytes)
    set_up(bed)
    for rank, bits in enumerate(bed.rates_bits_per_s):
        print(f"{bed.namespace(rank)}  {bed.address(rank)}  {rate_text(bits)} each way")


def down(
    name: Annotated[str, typer.Argument(help="The testbed's name.")] = "default",
    everything: Annotated[bool, typer.Option("--all", help="Remove every testbed of this machine.")] = False,
) -> None:
    """Remove a testbed and end what runs in it; also removes testbeds whose owner is gone."""
    removed = sum(tear_down(each) for each in (list(existing()) if everything else [name]))
    stale = remove_stale()
    print(f"removed {removed} namespaces" + (f" and {len(stale)} stale testbeds" if stale else ""))


def run(
    command: Annotated[list[str], typer.Argument(help="Program and arguments, run on every rank.")],
    world_size: WorldSize = 2,
    rate: Rate = None,
    burst_bytes: Burst = 262_144,
    timeout_s: Annotated[float, typer.Option(help="End all ranks after this many seconds.")] = 3600.0,
) -> None:
    """Run a command on every rank of a testbed made for it, as torchrun would.

    Rank 0's output is printed; the first failing rank's error output and exit 1 tell of a failure.
    """
    with temporary(rates_of(world_size, rate), burst_bytes=burst_bytes) as bed:
        results = launch(bed, command, timeout_s=timeout_s, check=False)
    sys.stdout.write(results[0].stdout)
    sys.stderr.write(results[0].stderr)
    failed = [result for result in results if result.returncode != 0]
    if failed:
        for result in failed[:1] if failed[0].rank else ():
            sys.stderr.write(result.stderr)
        codes = ", ".join(f"rank {result.rank}: {result.returncode}" for result in failed)
        print(f"failed ranks and their exit codes: {codes}", file=sys.stderr)
        raise typer.Exit(1)


def check(
    world_size: WorldSize = 2,
    rate: Rate = None,
    burst_bytes: Burst = 262_144,
    seconds: Annotated[float, typer.Option(help="How long each stream takes.")] = 0.5,
    tolerance: Annotated[
        float, typer.Option(help="Largest allowed difference from the set rate, as a fraction.")
    ] = 0.05,
    output: Output = Format.TEXT,
) -> None:
    """Measure what shaped links really carry here; exit 1 if a rate is off by more than the tolerance."""
    with temporary(rates_of(world_size, rate), burst_bytes=burst_bytes) as bed:
        found = check_links(bed, seconds=seconds)
    rows = [
        {
            "rank": link.rank,
            "mode": link.mode,
            "shaped_bits_per_s": link.shaped_bits_per_s,
            "measured_bits_per_s": round(link.measured_bits_per_s),
            "status": "measured",
        }
        for link in found
    ]
    lines = (
        f"rank {link.rank}  {link.mode:<12} shaped {link.shaped_bits_per_s / 1e6:g} Mbit/s  "
        f"measured {link.measured_bits_per_s / 1e6:.1f} Mbit/s  ratio {link.ratio:.3f}"
        for link in found
    )
    render(output, document=lambda: {"rows": rows}, rows=lambda: rows, text=lambda: "\n".join(lines), indent=2)
    if any(abs(link.ratio - 1) > tolerance for link in found):
        raise typer.Exit(1)
