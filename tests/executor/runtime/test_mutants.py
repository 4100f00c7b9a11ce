"""Checker and executor against each other: every damaged schedule that is proven safe trains to the same bits.

The runs are disturbed by random delays, differently on each rank, and every read, buffer and collective is checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from executor.app.equality import EqualityCase, train_case
from executor.runtime.groups import ProcessGroups
from executor.runtime.lanes import Cost, Implementation, OpTable
from executor.runtime.worker import Worker
from nestpipe.checks.check import Verdict, check
from nestpipe.ir import Loop, Op, Program, with_micro_batches
from nestpipe.schedules import load
from tests.executor.jobs import pool
from tests.nestpipe.checks.mutants import damaged_buffers, mutants, shifted_micro_batches

CASE = EqualityCase(schedule="sync", micro_batches=2, steps=6, debug=True)


def safe_mutants(schedule: str) -> list[tuple[str, Loop]]:
    loop = with_micro_batches(load(schedule), CASE.micro_batches)
    # an op needs what it needs: accesses left out would make it another op, which the executor does not have
    resized = ((name, mutant) for name, mutant in damaged_buffers(loop) if name.endswith("slots"))
    damaged = chain(mutants(loop), resized, shifted_micro_batches(loop))
    return [(name, mutant) for name, mutant in damaged if check(mutant).verdict == Verdict.SYNCHRONOUS]


def _disturbed(table: OpTable, worker: Worker, program: Program, seed: int) -> OpTable:
    del program
    rng = np.random.default_rng([seed, worker.rank])

    def slow(inner: Implementation, op: Op) -> Cost:
        time.sleep(float(rng.choice([0.0, 0.0, 0.0005, 0.003])))
        return inner(op)

    return {kind: partial(slow, inner) for kind, inner in table.items()}


def unequal(world: ProcessGroups, loops: Iterable[tuple[str, Loop]]) -> list[str]:
    """The names of the loops whose result differs from the sequential one."""
    reference = train_case(world, CASE, load("sync")).state()
    found = []
    for seed, (name, loop) in enumerate(loops):
        state = train_case(world, CASE, loop, (partial(_disturbed, seed=seed),)).state()
        if not all(torch.equal(value, reference[key]) for key, value in state.items()):
            found.append(name)
    return found


@pytest.mark.parametrize("schedule", ["dbp", "nestpipe"])
def test_a_few_mutants_proven_safe_train_to_the_same_bits(schedule: str) -> None:
    mutants_of = safe_mutants(schedule)
    assert len(mutants_of) > 10
    assert pool(2).run(unequal, mutants_of[:: len(mutants_of) // 5]) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["sync", "sparse_dist", "dbp", "fwp", "nestpipe"])
def test_every_mutant_proven_safe_trains_to_the_same_bits(schedule: str) -> None:
    assert pool(2).run(unequal, safe_mutants(schedule)) == [[], []]
