"""One configuration of a scenario as one row of results.

Without jitter and stragglers the step time is the cycle bound of `sim.engine.bound`, which equals the simulation's;
with them it is the mean over seeds of the recursion of `sim.engine.recursion`, which equals the simulation's too. A
configuration that cannot be (a domain that does not divide the world, more micro-batches than samples) is a row that
says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from nestpipe.base import NS_PER_S, ORIGINS, NestPipeError, ns_to_ms, parse_bytes
from nestpipe.ir import COMPUTE, Loop
from sim.costs import CaseWorkload, Options, Run, num_owners, run
from sim.engine import Bound, Jitter
from sim.scenario.assumptions import assumed_values, drawn_assumptions
from sim.scenario.changes import Changed
from sim.scenario.file import Scenario
from sim.scenario.goodput import goodput
from sim.scenario.grid import Configuration, Grid, Value, loop_of, with_value
from sim.scenario.memory import Need, memory_need
from sim.scenario.sections import ClusterChoice

__all__ = ["COLUMNS", "Evaluator", "Row", "Steps", "with_keys_known"]

#: Accelerators that share a host's memory where neither scenario nor topology says it.
RANKS_PER_HOST: Final = 8
_BASES_MAX: Final = 4096
Row: TypeAlias = dict[str, Any]
#: The columns of every result, less those of the swept keys, with their types; all but the first may be missing.
COLUMNS: Final[Mapping[str, type]] = {
    "index": int,
    "cluster": str,
    "schedule": str,
    "micro_batches": int,
    "domain_size": int,
    "world_size": int,
    "batch_per_worker": int,
    "status": str,
    "reason": str,
    "staleness": int,
    "step_ms": float,
    "step_ms_low": float,
    "step_ms_high": float,
    "qps": float,
    "qps_low": float,
    "qps_high": float,
    "scaling_efficiency": float,
    "scaling_efficiency_low": float,
    "scaling_efficiency_high": float,
    "utilization": float,
    "goodput": float,
    "expected_qps": float,
    "cost_per_hour": float,
    "cost_per_million_samples": float,
    "device_bytes": int,
    "device_bytes_max": int,
    "host_bytes": int,
    "host_bytes_max": int,
    "busiest": str,
    "busiest_share": float,
    "limit": str,
    **dict.fromkeys(ORIGINS, float),
    "how": str,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The step time of one configuration.

    Attributes:
        plain: without jitter, stragglers and contention, at the workload's own assumptions.
        step_ns: float64 (seeds,); one entry if nothing is random.
        how: in words.
    """

    plain: Run
    step_ns: npt.NDArray[np.float64]
    how: str

    @property
    def mean_ns(self) -> float:
        """Mean over seeds."""
        return float(self.step_ns.mean())

    @property
    def bound(self) -> Bound:
        """The plain step time and its critical cycle."""
        return self.plain.bound

    def interval_ns(self) -> tuple[float, float]:
        """5th and 95th percentile over seeds."""
        low, high = np.percentile(self.step_ns, [5, 95])
        return float(low), float(high)


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Evaluates configurations of a grid, remembering what several of them share.

    `max_seeds` limits the number of seeds (0: as if nothing were random), for cheap first looks.
    """

    grid: Grid
    max_seeds: int | None = None
    _bases: dict[tuple[object, ...], npt.NDArray[np.float64] | None] = field(default_factory=dict)
    _scenarios: dict[tuple[tuple[str, Value], ...], Scenario] = field(default_factory=dict)

    def row(self, configuration: Configuration) -> Row:
        """The result of one configuration."""
        found: Row = dict.fromkeys(COLUMNS)
        found |= {
            "index": configuration.index,
            "cluster": configuration.cluster,
            "schedule": configuration.variant.schedule,
            "micro_batches": configuration.variant.micro_batches,
            "domain_size": configuration.variant.domain_size,
            "world_size": configuration.world_size,
            **dict(configuration.settings),
        }
        try:
            found |= self._results(configuration)
            found["status"] = "ok"
        except NestPipeError as error:
            found |= {"status": "invalid", "reason": str(error).splitlines()[0]}
        return found

    def scenario_of(self, configuration: Configuration) -> Scenario:
        """The scenario with the settings of the configuration."""
        if configuration.settings not in self._scenarios:
            scenario = self.grid.scenario
            for key, value in configuration.settings:
                scenario = with_value(scenario, key, value)
            self._scenarios.clear()  # neighbours share settings; more would only fill memory
            self._scenarios[configuration.settings] = scenario
        return self._scenarios[configuration.settings]

    def steps(self, configuration: Configuration) -> Steps:
        """The step time of one configuration.

        Raises:
            NestPipeError: if it cannot be.
        """
        scenario = self.scenario_of(configuration)
        contention = scenario.contention and configuration.cluster in self.grid.hardware
        plain = self._run(configuration, scenario, Jitter(), contention=False)
        if not scenario.is_random and contention:
            shared = self._run(configuration, scenario, Jitter(), contention=True)
            return Steps(plain=plain, step_ns=np.array([shared.step_ns]), how="simulation")
        seeds = scenario.seeds if self.max_seeds is None else min(scenario.seeds, self.max_seeds)
        if not scenario.is_random or seeds == 0:
            return Steps(plain=plain, step_ns=np.array([plain.step_ns]), how="cycle bound")
        drawn = []
        for seed in range(scenario.seed, scenario.seed + seeds):
            slow = _stragglers(scenario, configuration.world_size, seed)
            jitter = Jitter(cv=scenario.jitter.cv, stragglers=slow, seed=seed)
            values = _drawn(self.grid, scenario, seed) if scenario.vary_assumptions else None
            drawn.append(self._run(configuration, scenario, jitter, values, contention=contention).step_ns)
        return Steps(plain=plain, step_ns=np.array(drawn), how=f"{seeds} seeds")

    def _run(
        self,
        configuration: Configuration,
        scenario: Scenario,
        jitter: Jitter,
        assumptions: Mapping[str, float] | None = None,
        *,
        contention: bool,
    ) -> Run:
        """One run of a configuration; `assumptions` are a case's if they are drawn."""
        workload = self.grid.workload
        if isinstance(workload, CaseWorkload):
            values = assumed_values(workload.case, scenario) if assumptions is None else assumptions
            workload = replace(workload, values=values)
        factors = _cluster(scenario, configuration.cluster).factors.combined(scenario.factors)
        return run(
            loop_of(self.grid, configuration.variant),
            Changed(workload=workload, factors=factors, micro_batching=scenario.micro_batching),
            self.grid.hardware.get(configuration.cluster),
            Options(
                world_size=configuration.world_size,
                domain_size=configuration.variant.domain_size,
                batch_per_worker=batch_per_worker(self.grid, configuration),
                steps=scenario.steps,
                jitter=jitter,
                contention=contention,
                compute_efficiency=scenario.workload.compute_efficiency,
            ),
        )

    def _results(self, configuration: Configuration) -> Row:
        scenario = self.scenario_of(configuration)
        cluster = _cluster(scenario, configuration.cluster)
        steps = self.steps(configuration)
        loop = loop_of(self.grid, configuration.variant)
        batch = batch_per_worker(self.grid, configuration)
        samples = batch * configuration.world_size
        low, high = steps.interval_ns()
        if not low > 0:
            raise NestPipeError("a step takes no time: every op's time is 0; see factors and assumptions")
        qps = samples * NS_PER_S / steps.mean_ns
        share = _goodput(scenario, configuration.world_size)
        busiest, busiest_share = busiest_stream(loop, steps)
        found: Row = {
            "batch_per_worker": batch,
            "staleness": self.grid.stale(configuration.variant),
            "step_ms": ns_to_ms(steps.mean_ns),
            "step_ms_low": ns_to_ms(low),
            "step_ms_high": ns_to_ms(high),
            "qps": qps,
            "qps_low": samples * NS_PER_S / high,
            "qps_high": samples * NS_PER_S / low,
            "utilization": sum(steps.plain.batch_ns.get(kind, 0) for kind in COMPUTE) / steps.mean_ns,
            "goodput": None if scenario.failures is None else share,
            "expected_qps": qps * share,
            "busiest": busiest,
            "busiest_share": busiest_share,
            "limit": steps.bound.text(),
            "how": steps.how,
            **self._efficiency(configuration, steps, batch),
        }
        found |= {**dict.fromkeys(ORIGINS, 0.0), **steps.plain.rests_on}
        if cluster.accelerator_hour is not None:
            per_hour = cluster.accelerator_hour * configuration.world_size
            found |= {"cost_per_hour": per_hour, "cost_per_million_samples": per_hour / (qps * share) / 3600 * 1e6}
        need = self.need(configuration)
        if need is not None:
            found |= {
                "device_bytes": need.device_bytes,
                "device_bytes_max": _bytes(cluster.device_memory_bytes),
                "host_bytes": need.host_bytes(cluster.accelerators_per_host or RANKS_PER_HOST),
                "host_bytes_max": _bytes(cluster.host_memory_bytes),
            }
        return found

    def need(self, configuration: Configuration) -> Need | None:
        """What has to fit into memory, if the scenario says how large things are."""
        scenario = self.scenario_of(configuration)
        if scenario.memory is None:
            return None
        factors = _cluster(scenario, configuration.cluster).factors.combined(scenario.factors)
        loop = loop_of(self.grid, configuration.variant)
        per_doubling = scenario.micro_batching.row_duplication_per_doubling
        return memory_need(
            scenario.memory,
            loop,
            world_size=configuration.world_size,
            batch_per_worker=batch_per_worker(self.grid, configuration),
            domain_size=configuration.variant.domain_size,
            row_duplication=factors.row_duplication * per_doubling ** np.log2(loop.micro_batches),
            skew=factors.skew,
        )

    def _efficiency(self, configuration: Configuration, steps: Steps, batch: int) -> Row:
        """QPS per worker over that at the base size, its spread compared seed by seed; nothing without a base."""
        base = base_world_size(self.grid)
        there = configuration.at(base)
        key = (there.cluster, there.variant, there.batch_per_worker, there.global_batch, there.settings)
        if len(self._bases) > _BASES_MAX:
            self._bases.clear()
        if configuration.world_size == base:
            self._bases[key] = steps.step_ns / batch
        elif key not in self._bases:
            try:
                self._bases[key] = self.steps(there).step_ns / batch_per_worker(self.grid, there)
            except NestPipeError:
                self._bases[key] = None
        base_ns = self._bases[key]
        if base_ns is None:
            return {}
        low, high = np.percentile(base_ns / (steps.step_ns / batch), [5, 95])
        return {
            "scaling_efficiency": float(base_ns.mean() / (steps.mean_ns / batch)),
            "scaling_efficiency_low": float(low),
            "scaling_efficiency_high": float(high),
        }


def base_world_size(grid: Grid) -> int:
    """The size that scaling efficiency is relative to: the scenario's, the case's, or the smallest one tried."""
    if grid.scenario.base_world_size is not None:
        return grid.scenario.base_world_size
    return min(grid.scenario.world_sizes) if grid.case is None else grid.case.base_world_size


def batch_per_worker(grid: Grid, configuration: Configuration) -> int:
    """Samples per rank and step.

    Raises:
        NestPipeError: if a fixed global batch cannot be shared evenly, or there are more micro-batches than samples.
    """
    if configuration.global_batch is not None:
        batch, rest = divmod(configuration.global_batch, configuration.world_size)
        if rest or not batch:
            raise NestPipeError(
                f"global_batch {configuration.global_batch} is not a multiple of {configuration.world_size}"
            )
    elif configuration.batch_per_worker is not None:
        batch = configuration.batch_per_worker
    elif grid.batch_per_worker is not None:
        batch = grid.batch_per_worker
    else:
        raise NestPipeError("batch_per_worker is missing; the workload does not say how large a batch is")
    if configuration.variant.micro_batches > batch:
        raise NestPipeError(f"{configuration.variant.micro_batches} micro-batches of {batch} samples per worker")
    return batch


def with_keys_known(grid: Grid) -> Grid:
    """The grid, its key statistics worked out for every configuration, so that no worker needs the keys themselves."""
    if grid.keys is None:
        return grid
    sizes = dict.fromkeys([*grid.scenario.world_sizes, base_world_size(grid)])
    for variant, size, chosen in product(grid.variants, sizes, grid.batches):
        loop = loop_of(grid, variant)
        fixed = grid.scenario.global_batch is not None
        there = Configuration(
            index=0,
            cluster="",
            variant=variant,
            world_size=size,
            batch_per_worker=None if fixed else chosen,
            global_batch=chosen if fixed else None,
        )
        with suppress(NestPipeError):  # such a configuration becomes a row that says why
            batch = batch_per_worker(grid, there)
            grid.keys.at(batch, num_owners(loop, size, variant.domain_size), loop.micro_batches)
    return grid


def busiest_stream(loop: Loop, steps: Steps) -> tuple[str, float]:
    """The stream that works longest in a step, with its resource, and the share of the step that it works."""
    busy = {}
    for stream in loop.streams:
        kinds = {op.kind for op in stream.ops}
        busy[f"{stream.name} ({stream.resource})"] = sum(steps.plain.batch_ns.get(kind, 0) for kind in kinds)
    name = max(busy, key=lambda each: busy[each])
    return name, busy[name] / steps.mean_ns


def _goodput(scenario: Scenario, world_size: int) -> float:
    """The expected share of wall time that trains, 1 without failures.

    Raises:
        NestPipeError: if it is 0, so that nothing is ever trained.
    """
    if scenario.failures is None:
        return 1.0
    found = goodput(scenario.failures, world_size)
    if found.expected <= 0:
        raise NestPipeError(
            f"failures: {world_size} accelerators fail every {found.mtbf_s:.3g} s, sooner than a checkpoint and a "
            "restart take, so nothing is ever trained"
        )
    return found.expected


def _cluster(scenario: Scenario, name: str) -> ClusterChoice:
    return scenario.clusters[name] if scenario.clusters else ClusterChoice()


def _bytes(size: int | str | None) -> int | None:
    return None if size is None else parse_bytes(size)


def _stragglers(scenario: Scenario, world_size: int, seed: int) -> dict[int, float]:
    """The slow ranks of one seed and how slow they are; the same ones in a larger world, so that sizes compare."""
    model = scenario.stragglers
    if not model.share:
        return {}
    ranks = np.flatnonzero(np.random.default_rng([seed, 1]).random(world_size) < model.share)
    sigma = np.sqrt(np.log1p(model.cv**2))
    spread = np.random.default_rng([seed, 3]).lognormal(-0.5 * sigma**2, sigma, world_size)
    factors = np.maximum(1.0, model.slowdown * spread)
    return {int(rank): float(factors[rank]) for rank in ranks}


def _drawn(grid: Grid, scenario: Scenario, seed: int) -> dict[str, float]:
    """The assumptions of one seed; what the scenario decides itself is not drawn."""
    assert grid.case is not None
    names = [name for name in grid.case.assumptions if name not in ("micro_batches", "domain_size")]
    names = [name for name in names if name not in scenario.workload.assumptions]
    uniforms: Sequence[float] = np.random.default_rng([seed, 2]).random(len(names)).tolist()
    return drawn_assumptions(grid.case, assumed_values(grid.case, scenario), dict(zip(names, uniforms, strict=True)))
