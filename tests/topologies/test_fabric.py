"""Clusters laid out: every route is a walk, bisection by hand, large machines in little memory."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import numpy as np
import pytest

from nestpipe.base.errors import TopologyError
from tests.topologies.catalogue import text_of
from topologies.cluster import load_cluster, parse_cluster
from topologies.fabric import Fabric
from topologies.imports.load import import_topology

EXPECTED = {
    "ascend_910b", "dgx_a100", "dgx_h100", "dgx_h200", "ethernet_25g", "gb200_nvl72", "laptop", "torus2d",
    "zionex_a100", "zionex_v100",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_every_route_is_a_walk_from_source_to_destination(name: str) -> None:
    cluster = load_cluster(name)
    fabric = Fabric(cluster, min(cluster.ranks_max, 40))
    graph = fabric.graph()
    assert nx.is_strongly_connected(graph)
    ends = {data["link"]: (src, dst) for src, dst, data in graph.edges(data=True) if "link" in data}
    src, dst = np.divmod(np.arange(fabric.world_size**2), fabric.world_size)
    for row, route in zip(range(len(src)), fabric.routes(src, dst), strict=True):
        at = f"rank{src[row]}"
        for link in route[route < fabric.num_links].tolist():
            assert ends[link][0] == at, link
            at = ends[link][1]
        assert at == f"rank{dst[row]}"


def test_bisection_bandwidth_by_hand() -> None:
    assert Fabric(load_cluster("ascend_910b"), 1536).bisection_bytes_per_s() == 768 * 25e9
    assert Fabric(load_cluster("ascend_910b"), 8).bisection_bytes_per_s() == 16 * 28e9
    assert Fabric(load_cluster("dgx_h100"), 8).bisection_bytes_per_s() == 4 * 450e9
    assert Fabric(load_cluster("ethernet_25g"), 128).bisection_bytes_per_s() == pytest.approx(64 * 1.5625e9 / 4)
    assert Fabric(load_cluster("torus2d"), 64).bisection_bytes_per_s() == 2 * 8 * 82e9


def test_a_hundred_thousand_ranks_are_laid_out_without_pairs() -> None:
    text = text_of("dgx_h100").replace("ranks_max: 16384", "ranks_max: 200000")
    fabric = Fabric(parse_cluster(text, "big.yaml"), 100_000)
    assert fabric.num_links > 400_000
    assert fabric.routes(np.array([0]), np.array([99_999])).shape == (1, 4)


def test_ranks_beyond_the_machine_are_refused() -> None:
    with pytest.raises(TopologyError, match="must be 1 to 16,384"):
        Fabric(load_cluster("dgx_h100"), 10**9)
    lonely = text_of("laptop").replace("kind: switch", "kind: switch\n    ranks_per_group: 2")
    with pytest.raises(TopologyError, match="so 4 ranks fall apart"):
        Fabric(parse_cluster(lonely, "lonely.yaml"), 4)
    with pytest.raises(TopologyError, match="did you mean 'dgx_h100'"):
        load_cluster("dgx_h10")


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ("[Switch, Switch]", "world_size must be at most 1,000,000 ranks, got 1,000,000,000"),
        ("[FullyConnected]", "tiers.dim0 is a mesh of 100,000 ranks"),
    ],
)
def test_machines_that_cannot_be_laid_out_are_refused_before_memory_is_taken(
    tmp_path: Path, kinds: str, message: str
) -> None:
    count = "[1000, 1000000]" if "," in kinds else "[100000]"
    bandwidth = "[1.0, 1.0]" if "," in kinds else "[1.0]"
    path = tmp_path / "big.yml"
    text = f"topology: {kinds}\nnpus_count: {count}\nbandwidth: {bandwidth}\nlatency: {bandwidth}\n"
    path.write_text(text, encoding="utf-8")
    cluster = import_topology(path)
    with pytest.raises(TopologyError, match=message):
        Fabric(cluster, cluster.ranks_default)
