"""Protocols of software: by hand, as fitted, and what in-switch reduction saves."""

from __future__ import annotations

import pytest

from nestpipe.base.errors import TopologyError
from sim.network.cost import Collectives
from sim.network.protocols import Pattern, Protocol, Software, StepOnWire, load_fits, software
from topologies.cluster import load_cluster, names
from topologies.fabric import Fabric

MB = 1e6


def protocol(base_ns: float, share: float) -> Protocol:
    return Protocol(base_ns=base_ns, step_ns=100.0, step_across_ns=500.0, share=share, share_across=0.9)


def step(moving_s: float, inside_s: float, across_s: float, share_across: float) -> StepOnWire:
    return StepOnWire(
        times=3,
        hops=2,
        latency_s=1e-6,
        moving_s=moving_s,
        inside_s=inside_s,
        across_s=across_s,
        share_across=share_across,
    )


def test_the_protocol_that_is_least_for_the_size_is_taken() -> None:
    found = Software(
        protocols={Pattern.CHAIN: (protocol(1000, 0.25), protocol(21_000, 0.5))}, own_copy={Pattern.CHAIN: 0.0}
    )
    waiting = 3 * 2 * (1e-6 + 100e-9)
    assert found.time_s([step(1e-6, 1e-6, 0, 0)], Pattern.CHAIN, 8)[0] == pytest.approx(1e-6 + waiting + 3 * 4e-6)
    assert found.time_s([step(1e-4, 1e-4, 0, 0)], Pattern.CHAIN, 8) == pytest.approx(
        (21e-6 + waiting + 3 * 2e-4, 21e-6 + waiting)
    )


def test_links_outside_a_domain_have_a_share_and_a_latency_of_their_own() -> None:
    found = Software(protocols={Pattern.CHAIN: (protocol(0, 0.5),)}, own_copy={Pattern.CHAIN: 0.7})
    waiting = 3 * 2 * (1e-6 + 300e-9)
    time_s = found.time_s([step(1e-4, 0.1e-4, 1e-4, 0.5)], Pattern.CHAIN, 8)[0]
    assert time_s == pytest.approx(waiting + 3 * 1e-4 / 0.9)
    inside_s = found.time_s([step(1e-4, 1e-4, 0, 0)], Pattern.CHAIN, 8)[0]
    assert inside_s == pytest.approx(3 * 2 * 1.1e-6 + 3 * 1e-4 / 0.5 * (1 + 0.7 / 7))


def test_shares_and_latencies_are_those_of_a_generation_and_the_mean_where_it_was_not_measured() -> None:
    hopper, unknown = software("hopper"), software("some day")
    assert hopper.protocols[Pattern.CHAIN][0].base_ns < unknown.protocols[Pattern.CHAIN][0].base_ns
    assert all(0 < each.share <= 1 for rows in unknown.protocols.values() for each in rows)
    assert set(load_fits().fits) > {"all", "without_gb200", "without_h100_table"}
    with pytest.raises(TopologyError, match="unknown fit 'without_me'"):
        software("hopper", "without_me")


@pytest.mark.parametrize("name", [name for name in names() if load_cluster(name).accelerator.generation])
def test_software_is_never_faster_than_the_wire(name: str) -> None:
    cluster = load_cluster(name)
    fabric = Fabric(cluster, min(16, cluster.ranks_max))
    wire, real = Collectives(fabric), Collectives.predicting(fabric)
    for collective in ("all_to_all", "all_reduce", "all_gather"):
        for size in (1e4, 1e7, 1e9):
            assert real.cost(collective, size).time_s > wire.cost(collective, size).time_s
        size = real.size_bytes(collective, real.cost(collective, 64 * MB).time_s)
        assert size == pytest.approx(64 * MB, rel=1e-3)


def test_reducing_in_the_switch_halves_the_bytes_of_a_ring() -> None:
    fabric = Fabric(load_cluster("gb200_nvl72"), 72)
    on = Collectives(fabric)
    switch, ring = (on.cost("all_reduce", 720 * MB, algorithm=name) for name in ("in_switch", "ring"))
    assert switch.time_s == pytest.approx(1e-6 + 720 * MB / 900e9)
    assert switch.loads[0].bytes_per_link / ring.loads[0].bytes_per_link == pytest.approx(72 / 71 / 2)


def test_the_rings_of_a_mesh_use_all_of_its_links() -> None:
    found = Collectives(Fabric(load_cluster("mi355x"), 16)).cost("all_reduce", 16 * MB, algorithm="ring")
    inside = next(load for load in found.loads if load.name == "xgmi")
    assert inside.num_links == 2 * 8 * 7
    assert inside.bytes_per_link == pytest.approx(2 * 15 * MB / 8)  # one ring of eight a link
