"""The schedules of a profile pass every check."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from executor.profile.run import loop_of
from executor.profile.schedules import PAIRS, SERIAL, TURNS
from nestpipe.base.errors import CaseError
from nestpipe.checks.check import require_safe
from nestpipe.ir import Op, unroll
from tests.executor.profile.common import CONFIG, profiled


@pytest.mark.parametrize("text", [SERIAL, *(schedule for schedule, _ in PAIRS.values()), *TURNS.values()])
def test_profiled_schedules_pass_every_check(text: str) -> None:
    require_safe(loop_of(replace(CONFIG, schedule=text, micro_batches=3)))


def test_the_serial_schedule_has_every_op_and_overlaps_none() -> None:
    program = unroll(loop_of(CONFIG), 4)
    catalogue = {op.kind for name in ("sync", "sparse_dist", "dbp", "fwp", "nestpipe") for op in _ops(name)}
    assert catalogue <= {op.kind for op in program.ops}
    with pytest.raises(CaseError, match="ops run alone; got dbp"):
        profiled(pd.DataFrame(), replace(CONFIG, schedule="dbp"))


def _ops(name: str) -> tuple[Op, ...]:
    return unroll(loop_of(replace(CONFIG, schedule=name)), 4).ops
