"""What shaped links carry."""

from __future__ import annotations

import pytest

from executor.testbed import namespaces as testbed
from executor.testbed.launch import launch
from executor.testbed.links import check_links
from executor.testbed.namespaces import Testbed, TestbedError
from tests.executor.testbed.common import MBIT, of_this_process


@pytest.mark.usefixtures("testbed_allowed")
@pytest.mark.slow  # a rate measured beside other tests says little
def test_links_carry_the_rate_they_are_shaped_to_both_ways_at_once() -> None:
    with testbed.temporary([100 * MBIT] * 2) as bed:
        rates = check_links(bed, seconds=0.4)
    assert [(rate.mode, rate.rank) for rate in rates] == [("one way", 1), ("all at once", 0), ("all at once", 1)]
    # headers take about a hundredth; a shaped link never carries more than its rate
    assert all(0.8 < rate.ratio < 1.02 for rate in rates), rates
    assert not of_this_process()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    bed = Testbed(name="t", rates_bits_per_s=(MBIT, MBIT))
    with pytest.raises(TestbedError, match="a stream takes more than 0"):
        check_links(bed, seconds=seconds)
    if not seconds > 0:
        with pytest.raises(TestbedError, match="the timeout must be positive"):
            launch(bed, ["true"], timeout_s=seconds)
