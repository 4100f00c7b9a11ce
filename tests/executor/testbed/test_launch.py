"""Ranks in their namespaces: environment, failures, timeouts, owners that end."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from executor.testbed import namespaces as testbed
from executor.testbed.launch import launch, rank_environment
from executor.testbed.namespaces import Testbed, TestbedError
from tests.executor.testbed.common import MBIT, of_this_process
from tests.paths import ROOT


def test_a_rank_finds_torchruns_variables_and_the_name_of_its_nic() -> None:
    bed = Testbed(name="t", rates_bits_per_s=(MBIT, MBIT, MBIT))
    environment = rank_environment(bed, 2, {"EXTRA": "1"})
    wanted = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "10.231.0.1", "GLOO_SOCKET_IFNAME": "eth0", "EXTRA": "1"}
    assert wanted.items() <= environment.items()


@pytest.mark.usefixtures("testbed_allowed")
def test_ranks_see_only_their_own_network() -> None:
    script = "import socket; print(sorted(name for _, name in socket.if_nameindex()), open('/proc/net/route').read())"
    with testbed.temporary([100 * MBIT] * 2) as bed:
        first = launch(bed, [sys.executable, "-c", script], timeout_s=120)[0]
    names, _, routes = first.stdout.partition("]")
    assert names == "['eth0', 'lo'"
    # one route, to the testbed's own addresses, and no default route
    assert len(routes.strip().splitlines()) == 2
    assert "\t00000000\t00000000\t0001\t0\t0\t0\t00000000" not in routes


@pytest.mark.usefixtures("testbed_allowed")
def test_a_failing_rank_ends_all_and_is_named_with_the_end_of_its_output() -> None:
    script = "import os, sys, time; sys.exit('no more keys') if os.environ['RANK'] == '1' else time.sleep(60)"
    with (
        testbed.temporary([100 * MBIT] * 2) as bed,
        pytest.raises(TestbedError, match=r"rank 1 of 2 ended with 1\n  rank 1: no more keys"),
    ):
        launch(bed, [sys.executable, "-c", script], timeout_s=60, grace_s=0.1)
    assert not of_this_process()


@pytest.mark.usefixtures("testbed_allowed")
def test_ranks_that_hang_are_ended_at_the_timeout() -> None:
    with testbed.temporary([100 * MBIT] * 2) as bed, pytest.raises(TestbedError, match="rank 0, 1 still ran after"):
        launch(bed, ["sleep", "60"], timeout_s=0.3)


@pytest.mark.usefixtures("testbed_allowed")
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


@pytest.mark.usefixtures("testbed_allowed")
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
