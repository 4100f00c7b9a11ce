"""`python -m executor`: train a model with a schedule, on the ranks that torchrun or plain environment variables give.

    torchrun --nproc-per-node 2 -m executor --schedule nestpipe --model hstu --steps 50

The last line on rank 0's stdout is one JSON object: losses, step times, counters and digests. Everything else goes to
stderr. Exit status: 0 trained, 1 a rank failed while training, 2 bad usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from executor.app.options import RunOptions
from executor.app.session import Outputs, last_batch, train
from executor.app.workload import load_loop, make_trainer
from executor.options import Scope, option, read_options, terms
from executor.runtime import ProcessGroups, Watchdog, join_world, latest, restore
from nestpipe.base import ExecutorError, NestPipeError

__all__ = ["ProcessOptions", "main", "run"]

_LONGEST_S: Final = 1e6
_PROCESS: Final = "Processes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """How each rank's process runs and meets the others."""

    backend: str | None = option(None, "gloo, nccl, or another that torch knows.", group=_PROCESS, scope=Scope.RUN)
    device: str = option("cpu", "cpu or cuda.", group=_PROCESS, scope=Scope.RUN)
    threads: int = option(1, "Threads per rank for torch's CPU kernels.", group=_PROCESS, scope=Scope.RANK)
    timeout_s: float = option(
        120.0, "End all ranks after this long without progress.", group=_PROCESS, scope=Scope.RANK
    )
    rendezvous_s: float = option(60.0, "How long to wait for the other ranks.", group=_PROCESS, scope=Scope.RANK)

    def __post_init__(self) -> None:
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ExecutorError(f"--device {self.device}: torch has no such device here; use cpu or cuda") from None
        if self.threads < 1:
            raise ExecutorError(f"--threads must be at least 1, got {self.threads}")
        for name, value in (("--timeout-s", self.timeout_s), ("--rendezvous-s", self.rendezvous_s)):
            if not 0 < value <= _LONGEST_S:
                raise ExecutorError(f"{name} must be more than 0 and at most {_LONGEST_S:g} seconds, got {value:g}")


def run(arguments: Sequence[str]) -> None:
    """Train with a schedule and print what came out as one JSON line.

    Raises:
        NestPipeError: for bad input that is found before the ranks meet.
    """
    parser = argparse.ArgumentParser(
        prog="python -m executor",
        usage="%(prog)s [--config FILE] [OPTION ...]",
        description="Train with a schedule and print what came out as one JSON line.",
        allow_abbrev=False,
    )
    options, outputs, process = read_options(parser, [RunOptions, Outputs, ProcessOptions], arguments)
    load_loop(options)
    torch.set_num_threads(process.threads)
    if process.device == "cuda":
        _use_cuda(options)
    world = join_world(
        backend=process.backend,
        device=process.device,
        timeout_s=10 * process.timeout_s,
        rendezvous_s=process.rendezvous_s,
        terms=_terms(options, outputs, process),
    )
    watchdog = Watchdog(world, timeout_s=process.timeout_s)
    watchdog.start()
    result = _guarded(world, watchdog, options, outputs)
    watchdog.stop()
    world.leave()
    if world.rank == 0:
        print(json.dumps(result), flush=True)


def _terms(*options: Any) -> dict[str, str]:
    """What every rank must have alike."""
    found = {"the version of torch": str(torch.__version__)}
    for each in options:
        found |= terms(each, Scope.RESULT, Scope.RUN)
    return found


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
            found = world.gather(latest(outputs.checkpoint) if outputs.checkpoint is not None else None)[0]
            if found is None:
                raise ExecutorError(f"--resume: no checkpoint in {outputs.checkpoint}; give --checkpoint a directory")
            restore(trainer, found, may_change=outputs.may_change)
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
    """Entry point: bad input is one message on stderr and exit status 2."""
    try:
        run(sys.argv[1:])
    except NestPipeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
