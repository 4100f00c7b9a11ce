"""The testbed: its description anywhere; the real thing where this system allows it, else skipped with the reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from typer.testing import CliRunner

from executor.testbed import namespaces as testbed
from executor.testbed.launch import launch, rank_environment
from executor.testbed.links import check_links
from executor.testbed.namespaces import Testbed, TestbedError
from nestpipe.base.errors import CaseError
from nestpipe.cli.testbed import app, rates_of
from tests.paths import ROOT

MBIT = 1_000_000


@pytest.fixture(scope="module")
def allowed() -> None:
    """Skips where no testbed can be made, and says why."""
    reason = testbed.refusal()
    if reason is not None:
        pytest.skip(reason)


def _of_this_process() -> list[str]:
    return [name for name in testbed.existing() if name == testbed.owned_name()]


def test_a_rank_finds_torchruns_variables_and_the_name_of_its_nic() -> None:
    bed = Testbed(name="t", rates_bits_per_s=(MBIT, MBIT, MBIT))
    environment = rank_environment(bed, 2, {"EXTRA": "1"})
    wanted = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "10.231.0.1", "GLOO_SOCKET_IFNAME": "eth0", "EXTRA": "1"}
    assert wanted.items() <= environment.items()


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


def test_one_rate_stands_for_all_ranks_and_a_wrong_number_of_rates_is_an_error() -> None:
    assert rates_of(3, [200]) == (200 * MBIT,) * 3
    assert rates_of(2, [200, 100]) == (200 * MBIT, 100 * MBIT)
    with pytest.raises(CaseError, match="expected 1 or 3 values"):
        rates_of(3, [1, 2])


def test_without_iproute2_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.shutil, "which", lambda _: None)
    assert "install iproute2" in (testbed.refusal() or "")


def test_without_root_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(testbed.os, "geteuid", lambda: 1000)
    assert "needs root" in (testbed.refusal() or "")


@pytest.mark.usefixtures("allowed")
@pytest.mark.slow  # a rate measured beside other tests says little
def test_links_carry_the_rate_they_are_shaped_to_both_ways_at_once() -> None:
    with testbed.temporary([100 * MBIT] * 2) as bed:
        rates = check_links(bed, seconds=0.4)
    assert [(rate.mode, rate.rank) for rate in rates] == [("one way", 1), ("all at once", 0), ("all at once", 1)]
    # headers take about a hundredth; a shaped link never carries more than its rate
    assert all(0.8 < rate.ratio < 1.02 for rate in rates), rates
    assert not _of_this_process()


@pytest.mark.usefixtures("allowed")
def test_ranks_see_only_their_own_network() -> None:
    script = "import socket; print(sorted(name for _, name in socket.if_nameindex()), open('/proc/net/route').read())"
    with testbed.temporary([100 * MBIT] * 2) as bed:
        first = launch(bed, [sys.executable, "-c", script], timeout_s=120)[0]
    names, _, routes = first.stdout.partition("]")
    assert names == "['eth0', 'lo'"
    # one route, to the testbed's own addresses, and no default route
    assert len(routes.strip().splitlines()) == 2
    assert "\t00000000\t00000000\t0001\t0\t0\t0\t00000000" not in routes


@pytest.mark.usefixtures("allowed")
def test_a_failing_rank_ends_all_and_is_named_with_the_end_of_its_output() -> None:
    script = "import os, sys, time; sys.exit('no more keys') if os.environ['RANK'] == '1' else time.sleep(60)"
    with (
        testbed.temporary([100 * MBIT] * 2) as bed,
        pytest.raises(TestbedError, match=r"rank 1 of 2 ended with 1\n  rank 1: no more keys"),
    ):
        launch(bed, [sys.executable, "-c", script], timeout_s=60, grace_s=0.1)
    assert not _of_this_process()


@pytest.mark.usefixtures("allowed")
def test_ranks_that_hang_are_ended_at_the_timeout() -> None:
    with testbed.temporary([100 * MBIT] * 2) as bed, pytest.raises(TestbedError, match="rank 0, 1 still ran after"):
        launch(bed, ["sleep", "60"], timeout_s=0.3)


@pytest.mark.usefixtures("allowed")
def test_what_a_killed_owner_left_is_removed_by_the_next_one() -> None:
    script = textwrap.dedent(
        """
        import sys
        from executor.testbed import namespaces as testbed
        from executor.testbed.launch import launch
        with testbed.temporary([10**8] * 2) as bed:
            print(bed.name, flush=True)
            launch(bed, ["sleep", "600"], timeout_s=600)
        """
    )
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    assert len(testbed.existing()[name]) == 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    testbed.remove_stale()  # unless another process that makes a testbed has been first
    assert name not in testbed.existing()


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_an_owner_that_is_asked_to_end_leaves_nothing_behind(number: signal.Signals, code: int) -> None:
    script = textwrap.dedent(
        """
        import signal
        import time
        from executor.testbed import namespaces as testbed
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job starts with it ignored
        with testbed.temporary([10**8] * 2) as bed:
            print(bed.name, flush=True)
            time.sleep(600)
        """
    )
    command = [sys.executable, "-c", script]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    assert len(testbed.existing()[name]) == 3
    owner.send_signal(number)
    _, errors = owner.communicate(timeout=120)
    assert owner.returncode == code
    assert name not in testbed.existing()
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    assert errors.startswith(f"{word}; the testbed is removed\n")


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    bed = Testbed(name="t", rates_bits_per_s=(MBIT, MBIT))
    with pytest.raises(TestbedError, match="a stream takes more than 0"):
        check_links(bed, seconds=seconds)
    if not seconds > 0:
        with pytest.raises(TestbedError, match="the timeout must be positive"):
            launch(bed, ["true"], timeout_s=seconds)


@pytest.mark.usefixtures("allowed")
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


@pytest.mark.usefixtures("allowed")
def test_a_half_made_testbed_is_made_anew() -> None:
    bed = Testbed(name=f"half{os.getpid()}", rates_bits_per_s=(100 * MBIT,) * 2)
    subprocess.run(["ip", "netns", "add", bed.namespace(0)], check=True)
    testbed.set_up(bed)
    assert testbed.tear_down(bed.name) == 3


@pytest.mark.usefixtures("allowed")
def test_run_prints_rank_0_and_exits_1_when_a_rank_fails() -> None:
    runner = CliRunner()
    good = runner.invoke(app, ["run", "--world-size", "2", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"])
    assert (good.exit_code, good.stdout) == (0, "rank 0 of 2\n")
    bad = runner.invoke(app, ["run", "--world-size", "2", "--", "sh", "-c", "exit $RANK"])
    assert bad.exit_code == 1
    assert "rank 1: 1" in bad.output
    assert not _of_this_process()
