"""A testbed: its description anywhere, the real thing where this system allows it, else skipped with the reason."""

from __future__ import annotations

import os
import subprocess

import pytest

from executor.testbed import namespaces as testbed
from executor.testbed.namespaces import Testbed, TestbedError
from tests.executor.testbed.common import MBIT


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "Bad Name", "rates_bits_per_s": (MBIT,)}, "lower-case letters and digits, got 'Bad Name'"),
        ({"name": "x", "rates_bits_per_s": ()}, "1 to 250 ranks, got 0"),
        ({"name": "x", "rates_bits_per_s": (MBIT, 0)}, "rate of rank 1 must be 1 Mbit/s to 100 Gbit/s, got 0 bit/s"),
        ({"name": "x", "rates_bits_per_s": (MBIT,), "burst_bytes": 1}, "burst_bytes must be 64 KiB to 64 MiB, got 1"),
    ],
)
def test_an_impossible_testbed_is_refused_with_the_value(values: dict[str, object], expected: str) -> None:
    with pytest.raises(TestbedError, match=expected.replace("(", r"\(")):
        Testbed(**values)  # type: ignore[arg-type]


def test_without_iproute2_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.shutil, "which", lambda _: None)
    assert "install iproute2" in (testbed.refusal() or "")


def test_without_root_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    assert "needs root" in (testbed.refusal() or "")


@pytest.mark.usefixtures("testbed_allowed")
def test_a_named_testbed_stays_until_down_and_is_not_made_twice() -> None:
    bed = Testbed(name=f"named{os.getpid()}", rates_bits_per_s=(100 * MBIT,) * 2)
    testbed.set_up(bed)
    try:
        with pytest.raises(TestbedError, match="is up already"):
            testbed.set_up(bed)
        assert bed.name not in testbed.remove_stale()
    finally:
        assert testbed.tear_down(bed.name) == 3
    assert bed.name not in testbed.existing()


@pytest.mark.usefixtures("testbed_allowed")
def test_a_half_made_testbed_is_made_anew() -> None:
    bed = Testbed(name=f"half{os.getpid()}", rates_bits_per_s=(100 * MBIT,) * 2)
    subprocess.run(["ip", "netns", "add", bed.namespace(0)], check=True)
    testbed.set_up(bed)
    assert testbed.tear_down(bed.name) == 3
