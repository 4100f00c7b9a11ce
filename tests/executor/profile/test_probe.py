"""The probe of the machine's speed, and the gate that waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor.profile.probe import Probe, SpeedGate, is_disturbed
from executor.runtime.groups import ProcessGroups, join_world


@pytest.fixture
def world() -> Iterator[ProcessGroups]:
    alone = join_world()
    yield alone
    alone.leave()


def _gate(world: ProcessGroups, monkeypatch: pytest.MonkeyPatch, times: list[int], patience_s: float) -> SpeedGate:
    """A gate with a reference of 100 ns whose probe takes the given times, the last one from then on."""
    gate = SpeedGate(world=world, reference_ns=100, patience_s=patience_s)

    def next_time(_: Probe) -> int:
        return times.pop(0) if len(times) > 1 else times[0]

    monkeypatch.setattr(Probe, "time_ns", next_time)
    return gate


def test_a_machine_is_another_one_when_a_quarter_slower_or_faster() -> None:
    assert [is_disturbed(each) for each in (0.7, 0.85, 1.0, 1.2, 1.3)] == [True, False, False, False, True]


def test_an_undisturbed_run_counts_at_once(world: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _gate(world, monkeypatch, [110, 105], 60.0)
    assert gate.run(lambda: "run") == ("run", 1.1)
    assert gate.waited_s == 0


def test_a_disturbed_run_is_repeated_once_the_machine_is_calm(
    world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter(["disturbed", "calm"])
    # calm, disturbed behind the first run; disturbed, then calm before the second, and calm behind it
    gate = _gate(world, monkeypatch, [100, 180, 170, 105, 100], 60.0)
    assert gate.run(lambda: next(runs)) == ("calm", 1.05)
    assert 0 < gate.waited_s < 60


def test_without_patience_the_least_disturbed_run_counts_and_says_so(
    world: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = _gate(world, monkeypatch, [60], 0.0)
    assert gate.run(lambda: "run") == ("run", 0.6)
    assert is_disturbed(0.6)


def test_without_a_reference_the_typical_time_becomes_it(world: ProcessGroups) -> None:
    gate = SpeedGate(world=world, patience_s=0.05)
    assert gate.reference_ns is not None
    assert gate.reference_ns > 0
