"""An emulated device."""

from __future__ import annotations

import pytest

from executor.compute import EmulatedDevice
from nestpipe.base.errors import CaseError
from nestpipe.ir import OpKind


def test_an_emulated_device_takes_its_time_by_kind_and_size() -> None:
    from executor.runtime.lanes import Cost

    device = EmulatedDevice(launch_us=10, forward_us_per_sample=2, lookup_ns_per_row=5)
    assert device.time_ns(OpKind.FORWARD, Cost(), 100) == 210_000
    assert device.time_ns(OpKind.BACKWARD, Cost(), 100) == 410_000
    assert device.time_ns(OpKind.LOOKUP, Cost(keys=7, unique_keys=4), 0) == 10_020
    assert device.time_ns(OpKind.ALL_REDUCE, Cost(bytes=1 << 20), 0) == 0
    with pytest.raises(CaseError, match=r"unknown attribute 'lunch_us'.*did you mean 'launch_us'"):
        EmulatedDevice.parse(["lunch_us=1"])
