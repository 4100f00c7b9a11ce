"""TorchRec as oracle, where it is installed; `torchrec_oracle` says what environment it needs."""

from __future__ import annotations

import importlib.util

import pytest

from executor.models.optimizers import OptimizerKind
from tests.executor.jobs import pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchrec") is None,
        reason="torchrec is not installed; it needs an environment of its own, see torchrec_oracle.py",
    ),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("distinct", [True, False])
def test_sgd_equals_torchrec_bit_for_bit_over_ten_steps(distinct: bool) -> None:
    from tests.executor.models.torchrec_oracle import Keys, difference

    # with at most two keys a bag both add the same numbers, whatever the shard of each
    found = pool(2).run(difference, Keys(longest=2, distinct=distinct), OptimizerKind.SGD)
    assert all(rank.equal for rank in found)


def test_rowwise_adagrad_is_within_a_millionth_of_torchrec_over_ten_steps() -> None:
    from tests.executor.models.torchrec_oracle import Keys, difference

    found = pool(2).run(difference, Keys(longest=2, distinct=False), OptimizerKind.ROWWISE_ADAGRAD)
    assert max(rank.tables for rank in found) < 1e-6
    assert max(rank.logits for rank in found) < 5e-6
