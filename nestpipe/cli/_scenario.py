"""What `scale`, `sweep` and `plan` share: reading the scenario, the dry run, progress of a sweep, printing rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from nestpipe.base import NestPipeError
from nestpipe.cli._common import progress, provenance
from nestpipe.cli._render import Format, flat, render
from sim.costs import TraceWorkload
from sim.scenario import Grid, load_scenario, warnings, with_keys_known
from sim.sweep import Estimate, digest, estimate

__all__ = ["CORES", "Dask", "DryRun", "ScenarioFile", "Workers", "counting", "dry_run", "facts_of", "load"]

CORES: Final = os.cpu_count() or 1

ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario file (YAML).")]
Workers = Annotated[int, typer.Option(min=1, help="Processes on this machine; by default one per core.")]
Dask = Annotated[str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler to use instead, tcp://host:8786.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would run and how long it takes.")]


def load(path: Path) -> Grid:
    """The grid of a scenario file."""
    scenario = load_scenario(path)
    for each in warnings(scenario):
        typer.echo(f"warning: {path}: {each}", err=True)
    try:
        return Grid.of(scenario)
    except NestPipeError as error:
        raise type(error)(f"{path}: {error}") from None


def facts_of(grid: Grid, **more: object) -> dict[str, object]:
    """Where a result comes from: scenario, workload, digest, seeds."""
    scenario = grid.scenario
    choice = scenario.workload
    name = choice.case or choice.trace or choice.model
    return provenance(
        scenario=scenario.scenario,
        scenario_digest=digest(grid),
        workload=name,
        workload_source=None if grid.case is None else grid.case.source,
        **key_facts(grid),
        anchor=_anchor(grid),
        seeds=f"{scenario.seed} to {scenario.seed + scenario.seeds - 1}" if scenario.is_random else None,
        **more,
    )


def _anchor(grid: Grid) -> str | None:
    """Of a trace, what its own step comes out as; nothing of other workloads."""
    if not isinstance(grid.workload, TraceWorkload):
        return None
    found = grid.workload.anchor
    if found is None:
        return "unanchored: the trace holds no steps and launches, so its own step cannot be predicted again"
    return "; ".join([found.lines()[0], *found.warnings])


def key_facts(grid: Grid) -> dict[str, object]:
    """Which keys size a model's lookups, and what of that is not measured; nothing without keys."""
    keys = with_keys_known(grid).keys
    if keys is None:
        return {}
    ranks = {origin: ", ".join(f"{size:,}" for size in sizes) for origin, sizes in keys.origins().items()}
    own = f"{keys.lookups_per_sample:.4g} keys a sample"
    return {
        "keys": f"{', '.join(keys.facts['files'])} ({keys.facts['file_format']}, {keys.facts['order']} order)",
        "keys_digest": keys.digest,
        "keys_at_owners": "; ".join(f"{origin} at {sizes} ranks" for origin, sizes in ranks.items()),
        "keys_assumed": f"the model's lookups repeat as those of {own} do; ranks wait for the busiest owner",
    }


@contextmanager
def counting(total: int, what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for a sweep: told how many of how many configurations are done."""
    with progress(total) as say:
        shown = 0

        def tell(done: int, of: int) -> None:
            nonlocal shown
            for _ in range(done - shown):
                say(f"{what}, {of:,} configurations")
            shown = max(shown, done)

        yield tell


def dry_run(grid: Grid, output: Format, *, workers: int, dask: str | None, where: Path | None) -> None:
    """Prints what would be run and how long it would take, measured on a small sample."""
    found = estimate(grid)
    axes: dict[str, list[object]] = {
        "cluster": list(grid.clusters),
        "schedule": [_variant(each) for each in grid.variants],
        "world_size": list(grid.scenario.world_sizes),
        "batch": [each for each in grid.batches if each is not None] or ["as the workload has it"],
        **{key: list(values) for key, values in grid.axes.items()},
    }
    seconds = found.seconds(workers)
    facts = facts_of(grid)
    document = {
        "axes": axes,
        "grid_size": found.grid_size,
        "configurations": found.num_points,
        "rungs": [{"configurations": num, "seeds": seeds} for num, seeds in found.rungs],
        "sampled": found.sampled,
        "invalid_in_sample": found.invalid,
        "seconds_per_configuration": found.point_s,
        "workers": workers,
        "estimated_seconds": seconds,
        "out": None if where is None else str(where),
    }
    on = f"each worker of {dask}" if dask else f"{workers} worker{'s' if workers > 1 else ''}"
    last = "Writes nothing" if where is None else f"Would write to {where}"
    render(
        output,
        facts=facts,
        document=lambda: document,
        rows=lambda: flat({"provenance": facts, **document}, separator="; "),
        text=lambda: "\n".join([*_would(found, axes), f"Takes about {_duration(seconds)} on {on}", last]),
    )


def _would(found: Estimate, axes: Mapping[str, list[object]]) -> list[str]:
    lines = ["", f"Would evaluate {found.num_points:,} of {found.grid_size:,} configurations:"]
    for name, values in axes.items():
        shown = ", ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in values[:12]) + (
            ", ..." if len(values) > 12 else ""
        )
        lines.append(f"  {name:<34}{len(values):>6,}  {shown}")
    if len(found.rungs) > 1:
        for number, (num, seeds) in enumerate(found.rungs):
            lines.append(f"  rung {number}: {num:,} configurations, {'all' if seeds is None else seeds} seeds")
    invalid = f", {found.invalid} of the sample invalid" if found.invalid else ""
    return [*lines, "", f"Measured on {found.sampled} of them: {1000 * found.point_s:.1f} ms each on one core{invalid}"]


def _variant(variant: Any) -> str:
    domain = "" if variant.domain_size is None else f" G={variant.domain_size}"
    return f"{variant.schedule} N={variant.micro_batches}{domain}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
