"""Links that give less than described: what it costs, and who is named."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.base.errors import TopologyError
from nestpipe.ir.kinds import OpKind
from nestpipe.ir.model import Resource
from sim.costs.demand import Demand
from sim.costs.hardware import HardwareCosts
from sim.network.classes import PairTraffic, transfer
from sim.network.cost import Collectives, group_transfer
from tests.sim.network.test_collectives import exact
from tests.topologies.catalogue import text_of
from topologies.cluster import load_cluster, parse_cluster
from topologies.fabric import Fabric

MB = 1e6
H100 = load_cluster("dgx_h100")
SLOW = H100.with_degraded({"rail 3 of node 2": 0.5})


def test_a_description_may_name_degraded_links() -> None:
    text = text_of("dgx_h100") + "degrade: {rail 3 of node 2: 0.5, nvlink of node 0: 0.25}\n"
    fabric = Fabric(parse_cluster(text, "test.yaml"), 32)
    assert fabric.degraded_ranks().tolist() == [*range(8), 19]
    rail = fabric.layers[1]
    assert np.flatnonzero(rail.capacity == 25e9).tolist() == [2 * 19, 2 * 19 + 1]
    assert Fabric(SLOW, 16).capacity.tolist() == Fabric(H100, 16).capacity.tolist()  # node 2 takes no part


@pytest.mark.parametrize(
    ("text", "share", "message"),
    [
        ("rail 3", 0.5, "must name links like 'rail 3 of node 17', got 'rail 3'"),
        ("rial 3 of node 1", 0.5, "unknown tier 'rial'.*did you mean 'rail'"),
        ("spine 3 of node 1", 0.5, "must be a tier of kind switch or rail, is trunk"),
        ("rail 8 of node 1", 0.5, "local ranks 0 to 7, got 8"),
        ("rail 3 of node 1", 0.0, "above 0 and at most 1, got 0"),
    ],
)
def test_what_is_no_degraded_link_is_refused(text: str, share: float, message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        H100.with_degraded({text: share})


@pytest.mark.parametrize("kind", ["even", "hot"])
def test_the_class_model_with_a_slow_link_is_the_exact_solver(kind: str) -> None:
    fabric = Fabric(SLOW, 32)
    recv = np.ones(32)
    recv[0] = 16 if kind == "hot" else 1
    traffic = PairTraffic(ranks=np.arange(32), send=np.full(32, MB), recv=recv, label=np.zeros(32, dtype=np.int64))
    found = transfer(fabric, traffic)
    assert found.time_s == pytest.approx(exact(fabric, traffic), rel=0.02)
    if kind == "even":
        assert found.time_s == pytest.approx(24 * MB / 25e9, rel=0.01)


def test_rings_wait_for_the_slow_link() -> None:
    slow, whole = (Collectives(Fabric(each, 32)).cost("all_reduce", 1e9, algorithm="ring") for each in (SLOW, H100))
    assert slow.time_s == pytest.approx(2 * whole.time_s, rel=0.02)


def test_groups_wait_for_the_one_with_the_slow_link() -> None:
    slow, whole = (
        group_transfer(Fabric(each, 32), OpKind.ALL_REDUCE_TABLES, Resource.REPLICA, 8, 1e9) for each in (SLOW, H100)
    )
    assert slow.time_s > 1.9 * whole.time_s


def test_the_slow_link_is_named_as_the_limit() -> None:
    costs = HardwareCosts(SLOW, {OpKind.ALL_TO_ALL_ROWS: Demand(sent_bytes=1e9)}, world_size=32)
    assert costs.stages()["busiest_resource"].tolist() == ["rail up (rail 3 of node 2 at 50%)"]
