"""The commands of `nestpipe testbed`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import CaseError
from nestpipe.cli import app
from nestpipe.cli.testbed import rates_of
from tests.executor.testbed.common import MBIT, of_this_process


def test_one_rate_stands_for_all_ranks_and_a_wrong_number_of_rates_is_an_error() -> None:
    assert rates_of(3, [200]) == (200 * MBIT,) * 3
    assert rates_of(2, [200, 100]) == (200 * MBIT, 100 * MBIT)
    with pytest.raises(CaseError, match="expected 1 or 3 values"):
        rates_of(3, [1, 2])


@pytest.mark.usefixtures("testbed_allowed")
def test_run_prints_rank_0_and_exits_1_when_a_rank_fails() -> None:
    runner = CliRunner()
    words = ["testbed", "run", "--world-size", "2", "--", "sh", "-c"]
    good = runner.invoke(app, [*words, "echo rank $RANK of $WORLD_SIZE"])
    assert (good.exit_code, good.stdout) == (0, "rank 0 of 2\n")
    bad = runner.invoke(app, [*words, "exit $RANK"])
    assert bad.exit_code == 1
    assert "rank 1: 1" in bad.output
    assert not of_this_process()
