"""Sizes are known before a run."""

from __future__ import annotations

import pytest

from executor.profile.sizes import ring_traffic


def test_a_ring_all_reduce_sends_twice_the_share_to_the_next_rank() -> None:
    assert ring_traffic(2, 100.0).tolist() == [[0.0, 100.0], [100.0, 0.0]]
    assert ring_traffic(4, 100.0).sum() == pytest.approx(4 * 150.0)
    assert ring_traffic(1, 100.0).sum() == 0
