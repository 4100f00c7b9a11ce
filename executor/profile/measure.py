"""The whole profile: serial runs over sizes and link rates, emulated and real, and pairs of ops at the same time.

Result: a cost table whose meta holds everything else that a prediction needs and where it comes from.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final

import numpy as np
import pandas as pd

from executor.compute import Compute, EmulatedDevice
from executor.profile.probe import is_disturbed
from executor.profile.run import RunConfig, sizes_of_run
from executor.profile.samples import ProfiledRun, ShapedLinks, cost_rows, gaps
from executor.profile.schedules import PAIRS, SERIAL, TURNS
from executor.profile.sizes import RunSizes
from nestpipe.base import BITS_PER_BYTE, NS_PER_S
from nestpipe.ir import COLLECTIVES, OpKind
from nestpipe.timeline import from_frame, measure
from traces.workloads import CostTable

__all__ = ["SEED", "ProfilePlan", "full_plan", "measure_costs", "quick_plan", "undisturbed"]

#: The seed of the keys that are profiled; validation must not use it.
SEED: Final = 101
_PAIR: Final = (256, 64, 4)
_WIDE: Final = (640, 256, 1)
#: Schedules that are run whole, on sizes that are profiled, to see how far predictions are off on this machine.
_REHEARSED: Final = ("sync", "sparse_dist", "dbp", "fwp", "nestpipe")
_WARM_UP: Final = 2

#: Runs configurations at a link rate (bit/s) and returns their spans, as `executor.profile.driver.run_on_testbed` does.
Runner = Callable[[Sequence[RunConfig], int], pd.DataFrame]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What to measure: workloads (batch per rank, width, micro-batches), link rates in bit/s, steps, and how often."""

    workloads: tuple[tuple[int, int, int], ...]
    rates_bits_per_s: tuple[int, ...]
    steps: int
    repeats: int
    devices: tuple[EmulatedDevice | None, ...]

    def configs(self) -> list[RunConfig]:
        """The serial runs of one link rate, all of them once before any is repeated."""
        return [
            _config(SERIAL, workload, self.steps, device)
            for _ in range(self.repeats)
            for device in self.devices
            for workload in self.workloads
        ]


def full_plan(devices: tuple[EmulatedDevice | None, ...]) -> ProfilePlan:
    """A profile of a few minutes."""
    return ProfilePlan(
        workloads=(
            *((48, 16, 1), (48, 16, 4), (48, 128, 2), (160, 48, 1), (160, 48, 8)),
            *((256, 64, 1), (256, 64, 8), (640, 16, 2), (640, 128, 1), (640, 256, 4)),
            *((1280, 96, 8), (1920, 48, 4), (1920, 192, 2)),
        ),
        rates_bits_per_s=(150_000_000, 700_000_000),
        steps=10,
        repeats=2,
        devices=devices,
    )


def quick_plan(devices: tuple[EmulatedDevice | None, ...]) -> ProfilePlan:
    """A profile of under a minute, for CI."""
    return ProfilePlan(
        workloads=((48, 16, 1), (48, 16, 4), (256, 64, 1), (256, 64, 8), (560, 128, 4)),
        rates_bits_per_s=(330_000_000,),
        steps=8,
        repeats=1,
        devices=devices,
    )


def _config(schedule: str, workload: tuple[int, int, int], steps: int, device: EmulatedDevice | None) -> RunConfig:
    batch_size, dim, micro_batches = workload
    return RunConfig(
        schedule=schedule,
        micro_batches=micro_batches,
        batch_size=batch_size,
        dim=dim,
        steps=steps,
        seed=SEED,
        device=device,
    )


def measure_costs(
    plan: ProfilePlan, run: Runner, *, world_size: int, burst_bytes: int, conditions: Mapping[str, Any]
) -> CostTable:
    """Measure everything that the plan says.

    Args:
        plan: what to measure.
        run: runs configurations at a link rate.
        world_size: number of ranks.
        burst_bytes: what an idle link lets through at once.
        conditions: facts about how it is run, kept in the table's meta.
    """
    began = time.time()
    frames = [run(plan.configs(), rate) for rate in plan.rates_bits_per_s]
    runs = _profiled_runs(plan, frames, world_size, burst_bytes)
    pairs = run(_pair_configs(plan), max(plan.rates_bits_per_s))
    slowest = min(plan.rates_bits_per_s)
    turns = run(_turn_configs(plan), slowest)
    rehearsal = run(_rehearsal_configs(plan), max(plan.rates_bits_per_s))
    frames += [pairs, turns, rehearsal]
    disturbed = sum(int(frame.groupby("run")["slowdown"].first().map(is_disturbed).sum()) for frame in frames)
    runs = undisturbed(runs)
    variants = sorted({run.config.variant for run in runs})
    source = f"measured on {platform.node() or 'this host'}, median of ops in serial runs"
    rows = [cost_rows([each for each in runs if each.config.variant == name], source=source) for name in variants]
    interference = _interference(pairs, plan)
    meta = {
        **conditions,
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "duration_s": round(time.time() - began, 1),
        "world_size": world_size,
        "burst_bytes": burst_bytes,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": _loads(runs),
        "probe_ns": int(frames[0]["probe_ns"].iloc[0]),
        "disturbed_runs": {"count": disturbed, "of": sum(frame["run"].nunique() for frame in frames)},
        **_lane_gaps(runs),
        "repeatability_cv": _repeatability(runs),
        "interference": interference,
        "transfer_cores": _transfer_cores(interference),
        "turn_bytes": _turn_bytes(turns, slowest),
        "rehearsal": _rehearsal(rehearsal, plan),
        "configurations": [
            {**asdict(config), "schedule": "serial"}
            for config in (*plan.configs(), *_pair_configs(plan)[:1], *_turn_configs(plan)[:1])  # sizes, not schedules
        ],
        "rates_bits_per_s": list(plan.rates_bits_per_s),
    }
    return CostTable(rows=pd.concat(rows, ignore_index=True), meta=meta)


def _profiled_runs(
    plan: ProfilePlan, frames: Sequence[pd.DataFrame], world_size: int, burst_bytes: int
) -> list[ProfiledRun]:
    """The serial runs, from the spans of each link rate."""
    sizes: dict[tuple[int, int, int], RunSizes] = {}
    runs = []
    for rate, frame in zip(plan.rates_bits_per_s, frames, strict=True):
        links = ShapedLinks(bits_per_s=(rate,) * world_size, burst_bytes=burst_bytes)
        for number, config in enumerate(plan.configs()):
            key = (config.batch_size, config.dim, config.micro_batches)
            if key not in sizes:
                sizes[key] = sizes_of_run(config, world_size)
            runs.append(
                ProfiledRun(
                    frame=frame[frame["run"] == number],
                    config=config,
                    sizes=sizes[key],
                    links=links,
                    name=f"{rate}:{number % (len(plan.workloads) * len(plan.devices))}",
                )
            )
    return runs


def undisturbed(runs: Sequence[ProfiledRun]) -> list[ProfiledRun]:
    """The runs whose machine was undisturbed; of a workload that has none, all."""
    calm = [run for run in runs if not is_disturbed(float(run.frame["slowdown"].iloc[0]))]
    names = {run.name for run in calm}
    return [*calm, *(run for run in runs if run.name not in names)]


def _loads(runs: Sequence[ProfiledRun]) -> dict[str, float]:
    loads = [float(run.frame["load"].iloc[0]) for run in runs]
    return {"min": min(loads), "median": float(np.median(loads)), "max": max(loads)}


def _lane_gaps(runs: Sequence[ProfiledRun]) -> dict[str, Any]:
    found = [gaps(run.frame, run.config) for run in runs]
    return {
        name: {
            "p50_ns": round(float(np.median([each[name]["p50_ns"] for each in found]))),
            "p75_ns": round(float(np.median([each[name]["p75_ns"] for each in found]))),
            "count": sum(each[name]["count"] for each in found),
        }
        for name in ("handoff", "issue")
    }


def _repeatability(runs: Sequence[ProfiledRun]) -> dict[str, float]:
    """Coefficient of variation of the step time over repeated runs of one configuration, by who computes.

    From the median distance of two runs, so that one that hung says no more than any other; 0 where nothing was
    repeated. Source: the difference of two normal values has sqrt(2) of their deviation, its median is 0.6745 of that.
    """
    steps: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        key = (run.config.compute.value, run.name)
        steps.setdefault(key, []).append(measure(from_frame(run.frame)).step_latency_ms)
    found = {}
    for compute in sorted({who for who, _ in steps}):
        pairs = [pair for (who, _), times in steps.items() if who == compute for pair in combinations(times, 2)]
        apart = [abs(one - other) / (one + other) * 2 for one, other in pairs]
        found[compute] = float(np.median(apart)) / (0.6745 * math.sqrt(2)) if apart else 0.0
    return found


def _pair_configs(plan: ProfilePlan) -> list[RunConfig]:
    schedules = [SERIAL, *(schedule for schedule, _ in PAIRS.values())]
    return [_config(schedule, _PAIR, plan.steps, device) for device in plan.devices for schedule in schedules]


def _turn_configs(plan: ProfilePlan) -> list[RunConfig]:
    return [_config(schedule, _WIDE, plan.steps, None) for schedule in (SERIAL, *TURNS.values())]


def _rehearsal_configs(plan: ProfilePlan) -> list[RunConfig]:
    return [_config(schedule, _PAIR, plan.steps, device) for device in plan.devices for schedule in _REHEARSED]


def _rehearsal(frame: pd.DataFrame, plan: ProfilePlan) -> list[dict[str, Any]]:
    """What whole schedules took: nothing is fitted on it, so predictions can be held against it before any grid is."""
    rate = max(plan.rates_bits_per_s)
    return [
        {
            "config": asdict(config),
            "rate_bits_per_s": rate,
            "step_ms": round(measure(from_frame(frame[frame["run"] == number])).step_latency_ms, 4),
        }
        for number, config in enumerate(_rehearsal_configs(plan))
    ]


def _turn_bytes(turns: pd.DataFrame, bits_per_s: int) -> dict[str, float]:
    """By kind, the bytes of others that a collective lets pass on a busy link: how much longer it takes, at their rate.

    The exchange of keys is two All2Alls, their sizes and the keys; that of rows or gradients is one.
    """
    alone, *together = (_times(turns[turns["run"] == number]) for number in range(len(TURNS) + 1))
    passed = {
        kind: max(times[kind] - alone[kind], 0.0) / NS_PER_S * bits_per_s / BITS_PER_BYTE
        for kind, times in zip(TURNS, together, strict=True)
    }
    passed |= dict.fromkeys((OpKind.ALL_TO_ALL_ROWS, OpKind.ALL_TO_ALL_GRADS), passed[OpKind.ALL_TO_ALL_KEYS] / 2)
    return {kind.value: round(num_bytes) for kind, num_bytes in passed.items()}


def _interference(pairs: pd.DataFrame, plan: ProfilePlan) -> list[dict[str, Any]]:
    """For each pair and op of it: its median time alone and together, and the slowdown."""
    found = []
    runs = [_times(pairs[pairs["run"] == number]) for number in range(len(plan.devices) * (len(PAIRS) + 1))]
    for index, device in enumerate(plan.devices):
        alone, *together = runs[index * (len(PAIRS) + 1) : (index + 1) * (len(PAIRS) + 1)]
        for (name, (_, kinds)), times in zip(PAIRS.items(), together, strict=True):
            for kind in kinds:
                found.append(
                    {
                        "pair": name,
                        "kind": kind.value,
                        "compute": (Compute.REAL if device is None else Compute.EMULATED).value,
                        "alone_ns": round(alone[kind]),
                        "together_ns": round(times[kind]),
                        "slowdown": round(times[kind] / alone[kind], 3),
                    }
                )
    return found


def _transfer_cores(interference: Sequence[Mapping[str, Any]]) -> float:
    """Cores that a flow takes at full rate: what computing lost while rows were on their way, where that is real."""
    slow = [
        row["slowdown"] - 1.0
        for row in interference
        if (row["compute"], row["kind"]) == (Compute.REAL, OpKind.FORWARD)
        and row["pair"].startswith("forward and backward with")
    ]
    return float(max(np.mean(slow), 0.0)) if slow else 0.0


def _times(frame: pd.DataFrame) -> dict[OpKind, float]:
    """Median time of each kind: of a collective from the last arrival to the last departure."""
    frame = frame[frame["batch"] >= _WARM_UP]
    found = {}
    for kind, spans in frame.groupby(frame["kind"].astype(str)):
        if OpKind(kind) in COLLECTIVES:
            groups = spans.groupby(["batch", "micro_batch"], dropna=False)
            times = groups["end_ns"].max() - groups["start_ns"].max()
        else:
            times = spans["end_ns"] - spans["start_ns"]
        found[OpKind(kind)] = float(times.median())
    return found
