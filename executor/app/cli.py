"""`python -m executor`: train a model with a schedule, on the ranks that torchrun or plain environment variables give.

    torchrun --nproc-per-node 2 -m executor --schedule nestpipe --model hstu --steps 50

The last line on rank 0's stdout is one JSON object: losses, step times, counters and digests. Everything else goes to
stderr. Exit status: 0 trained, 1 a rank failed while training, 2 bad usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from executor.app.options import CommDtype, ModelKind, RunOptions, load_loop, make_trainer
from executor.app.session import Outputs, last_batch, train
from executor.compute import EmulatedDevice
from executor.data import Pooling
from executor.models import OptimizerKind
from executor.runtime import Delay, NanPolicy, ProcessGroups, Watchdog, join_world, latest, restore
from nestpipe.base import ExecutorError, NestPipeError

__all__ = ["check_process", "main", "run"]

_LONGEST_S: Final = 1e6


def run(
    schedule: Annotated[str, typer.Option(help="Catalogue name or file of schedule text.")] = "nestpipe",
    model: Annotated[ModelKind, typer.Option(help="Which model.")] = ModelKind.DLRM,
    steps: Annotated[int, typer.Option(help="Batches to train; 0 trains until the data end.")] = 20,
    batch: Annotated[int, typer.Option(help="Samples per rank and batch.")] = 256,
    micro_batches: Annotated[int | None, typer.Option(help="Per batch; the schedule's if not given.")] = None,
    dim: Annotated[int, typer.Option(help="Width of embedding rows.")] = 32,
    num_rows: Annotated[int, typer.Option(help="Rows of each table.")] = 100_000,
    num_tables: Annotated[int, typer.Option(help="Tables of a DLRM on generated data.")] = 4,
    hidden: Annotated[str, typer.Option(help="Widths of the DLRM's hidden layers, comma-separated.")] = "64",
    layers: Annotated[int, typer.Option(help="Blocks of a sequence model.")] = 2,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 2,
    max_length: Annotated[int, typer.Option(help="Longest sequence, target included.")] = 50,
    num_negatives: Annotated[int, typer.Option(help="Sampled negatives of a sequence.")] = 32,
    data: Annotated[
        Path | None, typer.Option(help="Key file, MovieLens ratings or KuaiRand log; generated if none.")
    ] = None,
    exponent: Annotated[float, typer.Option(help="Zipf exponent of generated keys.")] = 1.05,
    mean_length: Annotated[float, typer.Option(help="Mean keys per bag of generated data.")] = 2.0,
    pooling: Annotated[Pooling, typer.Option(help="Of the DLRM's bags.")] = Pooling.SUM,
    weighted: Annotated[bool, typer.Option(help="Generate a weight for every key of a DLRM.")] = False,
    epochs: Annotated[int, typer.Option(help="Passes over the sequences of a file.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of data, tables and parameters.")] = 0,
    cluster: Annotated[bool, typer.Option(help="Put samples that share keys into one micro-batch.")] = False,
    optimizer: Annotated[OptimizerKind, typer.Option(help="Of rows and parameters.")] = OptimizerKind.ROWWISE_ADAGRAD,
    lr: Annotated[float, typer.Option(help="Learning rate of the rows.")] = 0.05,
    dense_lr: Annotated[float, typer.Option(help="Learning rate of the dense parameters.")] = 0.01,
    domain_size: Annotated[int | None, typer.Option(help="Ranks per domain, for 2D schedules.")] = None,
    comm_dtype: Annotated[CommDtype, typer.Option(help="Of rows and gradients on the wire.")] = CommDtype.FLOAT32,
    loss_scale: Annotated[float, typer.Option(help="Multiplies the loss before backward, for float16.")] = 1.0,
    nan: Annotated[NanPolicy, typer.Option(help="What to do about NaN and infinity.")] = NanPolicy.STOP,
    debug: Annotated[bool, typer.Option(help="Fingerprint collectives, check and poison buffers.")] = False,
    allow_staleness: Annotated[int, typer.Option(help="Steps by which rows may be stale.")] = 0,
    unchecked: Annotated[
        bool, typer.Option(help="Run a schedule that the checks reject, to see what happens.")
    ] = False,
    storage: Annotated[Path | None, typer.Option(help="Keep tables in memory-mapped files here.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Directory of checkpoints.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Batches between checkpoints.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Write the measured Timeline as Parquet.")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write Kineto/Chrome traces into this directory.")] = None,
    delay: Annotated[list[str] | None, typer.Option(help="KIND:RANK:MS before each such op; RANK may be *.")] = None,
    emulate: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of an emulated device that local ops wait for, such as forward_us_per_sample."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="gloo, nccl, or another that torch knows.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads per rank for torch's CPU kernels.")] = 1,
    timeout_s: Annotated[float, typer.Option(help="End all ranks after this long without progress.")] = 120.0,
    rendezvous_s: Annotated[float, typer.Option(help="How long to wait for the other ranks.")] = 60.0,
) -> None:
    """Train with a schedule and print what came out as one JSON line."""
    options = RunOptions(
        schedule=schedule,
        model=model,
        steps=steps or None,
        batch_size=batch,
        micro_batches=micro_batches,
        dim=dim,
        num_rows=num_rows,
        num_tables=num_tables,
        hidden=_widths(hidden),
        layers=layers,
        heads=heads,
        max_length=max_length,
        num_negatives=num_negatives,
        data=data,
        exponent=exponent,
        mean_length=mean_length,
        pooling=pooling,
        weighted=weighted,
        epochs=epochs,
        seed=seed,
        cluster=cluster,
        optimizer=optimizer,
        lr=lr,
        dense_lr=dense_lr,
        domain_size=domain_size,
        comm_dtype=comm_dtype,
        loss_scale=loss_scale,
        nan=nan,
        debug=debug,
        allow_staleness=allow_staleness,
        checked=not unchecked,
        storage=storage,
        delays=tuple(Delay.parse(text) for text in delay or ()),
        emulated=EmulatedDevice.parse(emulate or ()),
    )
    outputs = Outputs(
        checkpoint=checkpoint, checkpoint_every=checkpoint_every, resume=resume, timeline=timeline, chrome=chrome
    )
    load_loop(options)
    check_process(device, threads, timeout_s, rendezvous_s)
    torch.set_num_threads(threads)
    if device == "cuda":
        _use_cuda(options)
    world = join_world(backend=backend, device=device, timeout_s=10 * timeout_s, rendezvous_s=rendezvous_s)
    _work(world, options, outputs, timeout_s)


def _work(world: ProcessGroups, options: RunOptions, outputs: Outputs, timeout_s: float) -> None:
    """Train under a watchdog; rank 0 prints the result."""
    watchdog = Watchdog(world, timeout_s=timeout_s)
    watchdog.start()
    result = _guarded(world, watchdog, options, outputs)
    watchdog.stop()
    world.leave()
    if world.rank == 0:
        print(json.dumps(result), flush=True)


def _widths(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise ExecutorError(f"--hidden must be positive widths such as 64 or 256,64, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def check_process(device: str, threads: int, timeout_s: float, rendezvous_s: float) -> None:
    """Refuse what no rank could start with."""
    try:
        torch.device(device)
    except RuntimeError:
        raise ExecutorError(f"--device {device}: torch has no such device here; use cpu or cuda") from None
    if threads < 1:
        raise ExecutorError(f"--threads must be at least 1, got {threads}")
    for name, value in (("--timeout-s", timeout_s), ("--rendezvous-s", rendezvous_s)):
        if not 0 < value <= _LONGEST_S:
            raise ExecutorError(f"{name} must be more than 0 and at most {_LONGEST_S:g} seconds, got {value:g}")


def _use_cuda(options: RunOptions) -> None:
    if not torch.cuda.is_available():
        raise ExecutorError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if options.emulated is not None:
        raise ExecutorError("--emulate waits on the host, which a CUDA stream does not notice; use --device cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def _guarded(world: ProcessGroups, watchdog: Watchdog, options: RunOptions, outputs: Outputs) -> dict[str, Any]:
    """The run's result; any failure ends this process, and the others through the watchdog."""
    code = 2
    try:
        trainer = make_trainer(world, options)
        trainer.on_runtime = lambda runtime: watchdog.watch(runtime, trainer.domain_size)
        if outputs.resume:
            found = latest(outputs.checkpoint) if outputs.checkpoint is not None else None
            if found is None:
                raise ExecutorError(f"--resume: no checkpoint in {outputs.checkpoint}; give --checkpoint a directory")
            restore(trainer, found)
        end = last_batch(trainer, options.steps)
        problem = world.gather(outputs.prepare() if world.rank == 0 else None)[0]
        if problem is not None:
            raise ExecutorError(problem)
        code = 1
        return train(trainer, options, outputs, end)
    except NestPipeError as error:
        watchdog.fail(f"error: {error}" if code == 2 else str(error), code)
    except KeyboardInterrupt:
        watchdog.fail(f"rank {world.rank}: interrupted", 130)
    except BaseException:
        watchdog.fail(f"rank {world.rank}: {traceback.format_exc()}")


def main() -> None:
    """Entry point: an error of the user's is one message on stderr and exit status 2."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(run)
    try:
        app()
    except NestPipeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
