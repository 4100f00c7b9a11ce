"""ASTRA-sim networks: GB/s are 2^30 bytes, rings are tori."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nestpipe.base.errors import TopologyError
from tests.paths import INPUTS
from topologies.cluster import TierKind
from topologies.fabric import Fabric
from topologies.imports.load import import_topology


def test_astra_sim_gigabytes_are_powers_of_two(tmp_path: Path) -> None:
    path = tmp_path / "net.yml"
    path.write_text("topology: [Switch, Ring]\nnpus_count: [8, 4]\nbandwidth: [400, 50]\nlatency: [936.25, 1000]\n")
    cluster = import_topology(path)
    inner, outer = cluster.tiers
    assert inner.bandwidth_bytes_per_s is not None
    assert inner.bandwidth_bytes_per_s.value == 400 * 2**30
    assert outer.bandwidth_bytes_per_s is not None
    assert outer.bandwidth_bytes_per_s.value == 2 * 50 * 2**30  # a ring has a neighbour on either side
    assert (cluster.ranks_default, cluster.ranks_per_node, inner.latency_ns.value) == (32, 8, 936.25)


def test_a_ring_of_rings_is_a_torus(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    content = {"topologies-per-dim": ["Ring"] * 3, "units-count": [4, 4, 2], "link-latency": [1, 1, 1]}
    path.write_text(json.dumps({**content, "link-bandwidth": [32, 16, 16]}))
    (torus,) = import_topology(path).tiers
    assert (torus.kind, torus.dimensions) == (TierKind.TORUS, (4, 4, 2))


def test_astra_numbers_may_be_written_as_the_yaml_library_reads_as_text(tmp_path: Path) -> None:
    path = tmp_path / "net.yml"
    path.write_text("topology: [Switch]\nnpus_count: [8]\nbandwidth: [5e1]\nlatency: [2e3]\n")
    (tier,) = import_topology(path).tiers
    assert tier.bandwidth_bytes_per_s is not None
    assert (tier.bandwidth_bytes_per_s.value, tier.latency_ns.value) == (50 * 2**30, 2000)
    for wrong in ("true", "fast", ".inf"):
        path.write_text(f"topology: [Switch]\nnpus_count: [8]\nbandwidth: [{wrong}]\nlatency: [5]\n")
        expected = (
            r"bandwidth\[0\] must be finite" if wrong == ".inf" else "dimension 0: bandwidth must be a positive number"
        )
        with pytest.raises(TopologyError, match=expected):
            import_topology(path)


def _rates(path: Path) -> list[float]:
    return [tier.bandwidth_bytes_per_s.value for tier in import_topology(path).tiers if tier.bandwidth_bytes_per_s]


def test_each_pair_of_a_fully_connected_dimension_has_the_whole_bandwidth() -> None:
    cluster = import_topology(INPUTS / "topology-astra2-fullyconnected.yml")
    assert _rates(INPUTS / "topology-astra2-fullyconnected.yml") == [50 * 2**30]
    fabric = Fabric(cluster, 8)
    used = np.unique(fabric.routes(np.zeros(7, dtype=np.int64), np.arange(1, 8)))
    sends = sum(fabric.layers[0].capacity[link] for link in used if link < fabric.num_links)
    assert sends == pytest.approx(7 * 50 * 2**30)  # to its seven neighbours


def test_version_1_says_how_many_links_an_npu_has(tmp_path: Path) -> None:
    # a ring of two, whose two links lead to the one neighbour; outer dimensions count all links of an NPU
    path = INPUTS / "topology-astra1-fullyconnected.json"
    assert _rates(path) == [2 * 200 * 2**30, 7 * 20 * 2**30, 10 * 2**30]
    document = json.loads(path.read_text(encoding="utf-8"))
    other = tmp_path / "net.json"
    for links, rates in (
        ([4, 14, 2], [400 * 2, 280, 20]),
        ([1, 1, 1], [200, 20, 10]),
    ):
        other.write_text(json.dumps({**document, "links-count": links}))
        assert _rates(other) == pytest.approx([rate * 2**30 for rate in rates])
    for links in ([0, 7, 1], [2, 7], 3):
        other.write_text(json.dumps({**document, "links-count": links}))
        with pytest.raises(TopologyError, match="links-count must"):
            import_topology(other)


def test_what_the_file_does_not_say_is_assumed_and_not_under_another_machines_source() -> None:
    cluster = import_topology(INPUTS / "topology-astra2-fullyconnected.yml")
    assert cluster.accelerator.name.startswith("assumed: ")
    for part in (cluster.accelerator, cluster.host):
        numbers = [getattr(part, name) for name in part.__slots__]
        assert all(number.assumed for number in numbers if hasattr(number, "assumed"))
