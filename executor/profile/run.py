"""Runs a list of configurations on the ranks of this process group, one after the other, and keeps every span.

It is the worker behind `nestpipe profile` and `nestpipe validate`: started on every rank, by a testbed or by torchrun,
it reads a job file and rank 0 writes one table of spans. The same job runs on gloo and CPU or on NCCL and CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from executor.compute import Compute, EmulatedDevice
from executor.data import Feature, Layout, SyntheticSource, TableSpec, make_layout
from executor.models import DLRM, OptimizerKind, sparse_optimizer
from executor.process import fine_timers
from executor.profile.probe import SpeedGate
from executor.profile.sizes import RunSizes, size_run
from executor.runtime import (
    ProcessGroups,
    Settings,
    Trainer,
    Wrap,
    emulating,
    gather_timeline,
    join_world,
)
from nestpipe.base import CaseError, atomic_file
from nestpipe.ir import Loop, parse, with_micro_batches
from nestpipe.schedules import load

__all__ = ["RunConfig", "config_from", "loop_of", "run_configs", "sizes_of_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One configuration: schedule, micro-batches, workload, model, and what computes.

    Attributes:
        schedule: a name of the catalogue, a file of schedule text, or the text itself.
        micro_batches: N.
        batch_size: samples per rank and batch.
        dim: width of the embedding rows.
        num_features: key columns, each with a table of its own.
        num_rows: rows of each table.
        exponent: of the Zipf law of the keys.
        mean_length: mean keys per bag.
        hidden: width of the model's hidden layers.
        steps: batches to train.
        seed: of keys and parameters.
        device: an emulated device; None computes for real.
    """

    schedule: str
    micro_batches: int
    batch_size: int
    dim: int
    num_features: int = 2
    num_rows: int = 50_000
    exponent: float = 0.9
    mean_length: float = 4.0
    hidden: int = 16
    steps: int = 12
    seed: int = 0
    device: EmulatedDevice | None = None

    def __post_init__(self) -> None:
        for name in ("micro_batches", "batch_size", "dim", "num_features", "num_rows", "hidden", "steps"):
            if getattr(self, name) < 1:
                raise CaseError(f"configuration {self.schedule}: {name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batches > self.batch_size:
            raise CaseError(
                f"configuration {self.schedule}: micro_batches {self.micro_batches} is more than the "
                f"batch of {self.batch_size} samples"
            )

    @property
    def workload(self) -> tuple[Any, ...]:
        """Everything but the schedule, steps and seed: two configurations with equal workloads train the same model."""
        return tuple(
            value for name, value in self.values().items() if name not in ("schedule", "micro_batches", "steps", "seed")
        )

    @property
    def compute(self) -> Compute:
        """Who computes."""
        return Compute.REAL if self.device is None else Compute.EMULATED

    @property
    def variant(self) -> str:
        """What a cost depends on besides its sizes: who computes, and the model."""
        return f"{self.compute} dlrm features={self.num_features} hidden={self.hidden}"

    def values(self) -> dict[str, Any]:
        """The attributes as plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


def config_from(values: dict[str, Any]) -> RunConfig:
    """The configuration that `asdict` has taken apart."""
    device = values.get("device")
    return RunConfig(**{**values, "device": None if device is None else EmulatedDevice(**device)})


def loop_of(config: RunConfig) -> Loop:
    """The schedule of a configuration with its micro-batches."""
    text = config.schedule
    return with_micro_batches(parse(text) if text.startswith("loop ") else load(text), config.micro_batches)


def _features(config: RunConfig) -> tuple[str, ...]:
    return tuple(f"f{index}" for index in range(config.num_features))


def _model(config: RunConfig) -> DLRM:
    names = _features(config)
    torch.manual_seed(config.seed)
    return DLRM(
        [TableSpec(name=name, num_rows=config.num_rows, dim=config.dim) for name in names],
        [Feature(name=name, table=name) for name in names],
        num_dense=4,
        hidden=(config.hidden,),
    )


def _source(config: RunConfig) -> SyntheticSource:
    return SyntheticSource(
        features=_features(config),
        batch_size=config.batch_size,
        num_keys=config.num_rows,
        exponent=config.exponent,
        mean_length=config.mean_length,
        seed=config.seed,
    )


def sizes_of_run(config: RunConfig, world_size: int) -> RunSizes:
    """The sizes of every op of a configuration, worked out from its data without running it."""
    model = _model(config)
    layout: Layout = make_layout(model.tables, world_size)
    optimizer = sparse_optimizer(OptimizerKind.ROWWISE_ADAGRAD, lr=Settings().lr)
    return size_run(
        source=_source(config),
        model=model,
        layout=layout,
        moment_widths=[optimizer.width(group.dim) for group in layout.groups],
        world_size=world_size,
        micro_batches=config.micro_batches,
        batches=config.steps,
    )


def run_configs(
    world: ProcessGroups, configs: Sequence[RunConfig], *, probe_ns: int | None = None, patience_s: float = 0.0
) -> pd.DataFrame:
    """Run every configuration on this process group, in the given order. A collective call.

    Args:
        world: the ranks.
        configs: what to run; a configuration may appear several times.
        probe_ns: what `Probe` takes on the undisturbed machine, if that is known.
        patience_s: how long to wait in all, and to repeat runs, for the machine to be undisturbed.

    Returns:
        The spans of all ranks, columns as a Timeline's table plus `run` (position in `configs`), `load` (the host's
        load average over the last minute when the run began), `probe_ns` (what the probe takes on the undisturbed
        machine) and `slowdown` (what it took beside this run, over that).
    """
    gate = SpeedGate(world=world, reference_ns=probe_ns, patience_s=patience_s)
    frames = []
    for number, config in enumerate(configs):
        began = time.monotonic()
        load_average = os.getloadavg()[0]
        frame, slowdown = gate.run(partial(_run_config, world, config))
        frames.append(frame.assign(run=number, load=load_average, probe_ns=gate.reference_ns, slowdown=slowdown))
        if world.rank == 0:
            seconds = time.monotonic() - began
            print(
                f"{number + 1}/{len(configs)} {loop_of(config).name} N={config.micro_batches} "
                f"batch={config.batch_size} dim={config.dim}: {seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
    return pd.concat(frames, ignore_index=True)


def _run_config(world: ProcessGroups, config: RunConfig) -> pd.DataFrame:
    wraps: list[Wrap] = [] if config.device is None else [emulating(config.device)]
    trainer = Trainer(world, loop_of(config), _model(config), _source(config), Settings(), wraps=wraps)
    trainer.run(config.steps)
    return gather_timeline(trainer).frame()


def write_job(path: Path, configs: Sequence[RunConfig], out: Path, **options: object) -> None:
    """Write the job file that `main` reads."""
    job = {"configs": [asdict(config) for config in configs], "out": str(out), **options}
    path.write_text(json.dumps(job), encoding="utf-8")


def main(path: str) -> None:
    """One rank of a job."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    configs = [config_from(values) for values in job["configs"]]
    torch.set_num_threads(1)
    fine_timers()
    world = join_world(
        backend=job.get("backend", "gloo"), device=job.get("device", "cpu"), timeout_s=job.get("timeout_s", 120.0)
    )
    # the first collectives of a process are slow; they belong to no configuration
    _run_config(world, replace(configs[0], steps=4))
    frame = run_configs(world, configs, probe_ns=job.get("probe_ns"), patience_s=job.get("patience_s", 0.0))
    if world.rank == 0:
        with atomic_file(job["out"]) as file:
            frame.to_parquet(file)
    world.leave()


if __name__ == "__main__":
    main(sys.argv[1])
