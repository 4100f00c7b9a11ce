"""Measured costs in the simulator: transfers on shared links, cores, turns, spread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simpy

from executor.profile.run import loop_of
from nestpipe.base.errors import CaseError
from nestpipe.ir import OpKind, unroll
from sim.costs.calibrated import CalibratedCosts, Machine, OpSizes
from sim.engine.engine import simulate
from sim.engine.folding import World
from tests.nestpipe.validate.by_hand import CONFIG, fit_by_hand


def _simulated_transfers(machine: Machine, kinds: tuple[str, ...], *, first_bytes: float = 1000.0) -> dict[str, float]:
    """End of the first collective of each stream, in ns, for a loop of collectives that start at once.

    Each sends 1000 bytes both ways, the first one `first_bytes`.
    """
    lines = [f"  stream s{i} on world\n    {kind:<20}t" for i, kind in enumerate(kinds)]
    program = unroll(loop_of(replace(CONFIG, schedule="loop v1 t micro_batches=1\n" + "\n".join(lines) + "\n")), 1)
    both_ways = np.array([[0.0, 1000.0], [1000.0, 0.0]])
    traffic = {(OpKind(kind), 0, None): both_ways for kind in kinds}
    traffic[OpKind(kinds[0]), 0, None] = both_ways * first_bytes / 1000.0
    sizes = OpSizes(of=[{name: {"bytes": 2000.0} for name in traffic} for _ in range(2)], traffic=traffic)
    fits = {OpKind(kind): fit_by_hand(OpKind(kind), one=100.0, wire_ns=1.0) for kind in kinds}
    costs = CalibratedCosts(program=program, fits=fits, sizes=sizes, machine=machine)
    timeline = simulate(program, costs, World(world_size=2), fold_ranks=False)
    return dict(zip(timeline.ops["kind"], timeline.end_ns.max(axis=0).tolist(), strict=True))


def links(**values: Any) -> Machine:
    return Machine(link_bytes_per_s=(1e9, 1e9), **values)  # 1 byte/ns


def test_a_transfer_takes_its_local_part_and_then_its_bytes_on_the_wire() -> None:
    assert _simulated_transfers(links(), ("all_reduce",)) == {"all_reduce": 1100}


def test_a_rested_link_lets_its_burst_through_at_once() -> None:
    assert _simulated_transfers(links(burst_bytes=400), ("all_reduce",)) == {"all_reduce": 700}
    assert _simulated_transfers(links(burst_bytes=5000), ("all_reduce",)) == {"all_reduce": 100}


def test_two_transfers_at_once_share_the_links() -> None:
    ends = _simulated_transfers(links(), ("all_reduce", "all_to_all[keys]"))
    assert ends == {"all_reduce": 2100, "all_to_all[keys]": 2100}


def test_local_parts_share_the_cores_or_queue_for_them() -> None:
    kinds = ("all_reduce", "all_to_all[keys]")
    # two ranks with two collectives each want four cores and have two
    shared = _simulated_transfers(links(cores=2), kinds)
    assert shared == {"all_reduce": 2200, "all_to_all[keys]": 2200}
    queued = _simulated_transfers(links(cores=2, run_to_completion=True), kinds)
    # the first in line starts its transfer after 50 ns, has the wire to itself for 50 ns, and needs a core for 50 after
    assert queued["all_reduce"] == 2050
    assert queued["all_to_all[keys]"] == 2100


@pytest.mark.parametrize(
    ("kind", "turn_bytes", "end_ns"),
    [
        ("all_reduce", 0, 120),  # 50 before, 10 bytes at half the rate, 50 after
        ("all_reduce", 300, 420),  # then 300 bytes of the other pass
        ("all_reduce", 5000, 1060),  # or all that the other has
        ("all_to_all[grads]", 300, 120),  # sends all it has at once, so has no turn to wait for
    ],
)
def test_a_small_collective_beside_a_large_one_waits_its_turns(kind: str, turn_bytes: float, end_ns: int) -> None:
    machine = links(turn_bytes={OpKind(kind): turn_bytes})
    ends = _simulated_transfers(machine, (kind, "all_to_all[keys]"), first_bytes=10.0)
    assert ends == {kind: end_ns, "all_to_all[keys]": 1110}  # the large one loses only what the small one sends


def test_turns_cost_nothing_on_a_link_that_nobody_else_uses() -> None:
    machine = links(turn_bytes={OpKind.ALL_REDUCE: 1e6})
    assert _simulated_transfers(machine, ("all_reduce",)) == {"all_reduce": 1100}


def test_costs_that_were_measured_in_a_crowd_hold_the_queue_already() -> None:
    alone = _simulated_transfers(links(cores=4, run_to_completion=True), ("all_reduce",))
    crowd = _simulated_transfers(links(cores=4, run_to_completion=True, crowding=2.0), ("all_reduce",))
    assert (alone["all_reduce"], crowd["all_reduce"]) == (1100, 1050)
    # and where two ranks share one core, the queue doubles them again
    again = _simulated_transfers(links(cores=1, run_to_completion=True, crowding=2.0), ("all_reduce",))
    assert again["all_reduce"] == 1100
    with pytest.raises(CaseError, match=r"crowding must be 1 or more, got 0\.5"):
        links(crowding=0.5)


def test_an_impossible_machine_is_refused() -> None:
    with pytest.raises(CaseError, match="link_bytes_per_s of rank 1 must be positive, got 0"):
        Machine(link_bytes_per_s=(1.0, 0.0))
    with pytest.raises(CaseError, match="handoff_ns must not be negative, got -1"):
        links(handoff_ns=-1)
    with pytest.raises(CaseError, match="turn_bytes of all_reduce must not be negative, got -5"):
        links(turn_bytes={OpKind.ALL_REDUCE: -5})


def test_a_schedule_with_ops_that_were_not_profiled_is_refused_by_kind() -> None:
    program = unroll(loop_of(CONFIG), 6)
    with pytest.raises(CaseError, match=r"the cost table has no cost of all_reduce, .*profile again"):
        CalibratedCosts(program=program, fits={}, sizes=OpSizes(of=(), traffic={}), machine=links())


def test_costs_that_vary_have_a_mean_factor_of_one() -> None:
    fits = {OpKind.FORWARD: fit_by_hand(OpKind.FORWARD, one=1e6)}
    program = unroll(
        loop_of(replace(CONFIG, schedule="loop v1 t micro_batches=1\n  stream s on compute\n    forward t\n")), 400
    )
    sizes = OpSizes(of=[{(OpKind.FORWARD, batch, None): {} for batch in range(400)}], traffic={})
    costs = CalibratedCosts(
        program=program, fits=fits, sizes=sizes, machine=links(), spread={OpKind.FORWARD: 0.2}, seed=1
    )
    times = [work.time_ns for work in costs.local(program.ops, 0)]
    assert np.mean(times) == pytest.approx(1e6, rel=0.03)
    assert np.std(times) == pytest.approx(2e5, rel=0.15)
    assert isinstance(costs.start(simpy.Environment(), costs.local(program.ops, 0)[0]), simpy.Event)
