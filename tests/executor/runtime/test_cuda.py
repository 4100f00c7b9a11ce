"""The CUDA path on one GPU: a lane per stream, host-memory tables, the same bits as sequential, and real overlap."""

from __future__ import annotations

import os

import pytest
import torch

from executor.app.options import ModelKind, RunOptions
from executor.app.workload import make_trainer
from executor.runtime.cursor import plan_lanes
from executor.runtime.groups import ProcessGroups, join_world
from executor.runtime.lanes import Cost, Runtime
from executor.runtime.recorder import gather_timeline
from nestpipe.ir import Op, OpKind, Program, Resource, Stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]


@pytest.fixture(scope="module")
def world() -> ProcessGroups:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return join_world(device="cuda")


def options(schedule: str, **changes: object) -> RunOptions:
    sizes = {"steps": 12, "batch_size": 512, "num_rows": 200_000, "dim": 64, "micro_batches": 4}
    return RunOptions(schedule=schedule, **{**sizes, **changes})


@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nestpipe", "sparse_dist"])
@pytest.mark.parametrize("model", [ModelKind.DLRM, ModelKind.HSTU])
def test_schedules_equal_sequential_training_on_cuda(world: ProcessGroups, schedule: str, model: ModelKind) -> None:
    states = []
    for name in ("sync", schedule):
        trainer = make_trainer(world, options(name, model=model, debug=name != "sync"))
        trainer.run(12)
        states.append(trainer.state())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_lanes_start_after_what_the_caller_has_queued(world: ProcessGroups) -> None:
    value = torch.zeros(1 << 20, device=world.device)
    torch.cuda._sleep(200_000_000)
    value.fill_(1.0)
    seen: list[torch.Tensor] = []

    def look(_: Op) -> Cost:
        seen.append(value.clone())
        return Cost()

    stream = Stream(name="compute", resource=Resource.COMPUTE, body=(Op(kind=OpKind.FORWARD, batch=0),))
    program = Program(name="look", steps=1, micro_batches=1, buffers=(), streams=(stream,))
    Runtime(plan_lanes(program), {OpKind.FORWARD: look}, device=world.device).run()
    assert bool((seen[0] == 1.0).all())


def test_cuda_and_cpu_train_the_same_model_up_to_rounding(world: ProcessGroups) -> None:
    trainer = make_trainer(world, options("nestpipe", steps=4))
    trainer.run(4)
    on_cuda = trainer.losses()
    cpu = ProcessGroups(
        rank=0, world_size=1, device=torch.device("cpu"), backend="gloo", timeout=world.timeout, address=world.address
    )
    trainer = make_trainer(cpu, options("nestpipe", steps=4))
    trainer.run(4)
    assert on_cuda == pytest.approx(trainer.losses(), rel=1e-4)


def test_lookup_overlaps_with_compute_on_cuda(world: ProcessGroups) -> None:
    trainer = make_trainer(world, options("dbp", steps=20, batch_size=4096))
    trainer.run(20)
    frame = gather_timeline(trainer).frame()
    busy = frame[frame["kind"].isin([OpKind.FORWARD.value, OpKind.BACKWARD.value])]
    lookups = frame[frame["kind"] == OpKind.LOOKUP.value]
    hidden = sum(
        ((busy["start_ns"] < row.end_ns) & (busy["end_ns"] > row.start_ns)).any() for row in lookups.itertuples()
    )
    assert hidden > len(lookups) // 2
