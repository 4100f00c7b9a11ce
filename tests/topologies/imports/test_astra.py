"""ASTRA-sim networks: GB/s are 2^30 bytes, rings are tori."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nestpipe.base.errors import TopologyError
from topologies.cluster import TierKind
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
    for wrong in (".inf", "true", "fast"):
        path.write_text(f"topology: [Switch]\nnpus_count: [8]\nbandwidth: [{wrong}]\nlatency: [5]\n")
        with pytest.raises(TopologyError, match="dimension 0: bandwidth must be a positive number"):
            import_topology(path)
