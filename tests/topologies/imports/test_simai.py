"""SimAI topologies: bandwidths are bits, ports add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.base.errors import TopologyError
from tests.paths import INPUTS
from topologies.imports.load import import_topology


def test_simai_bandwidths_are_bits(tmp_path: Path) -> None:
    path = tmp_path / "net.topo"
    rows = ["4 2 1 1 4 H100", "2 3", "0 2 2880Gbps 0.000025ms 0", "1 2 2880Gbps 0.000025ms 0",
            "0 3 400Gbps 0.0005ms 0", "1 3 400Gbps 0.0005ms 0"]  # fmt: skip
    path.write_text("\n".join(rows))
    first, second = import_topology(path).tiers
    assert first.bandwidth_bytes_per_s is not None
    assert second.bandwidth_bytes_per_s is not None
    assert (first.bandwidth_bytes_per_s.value, first.latency_ns.value) == (360e9, 25)
    assert (second.bandwidth_bytes_per_s.value, second.latency_ns.value) == (50e9, 500)
    path.write_text("\n".join([*rows[:-1], "1 3 400 0.0005ms 0"]))
    with pytest.raises(TopologyError, match="link line 6: bandwidth must be a number with bps or Bps"):
        import_topology(path)


def test_simai_gpus_with_two_ports_have_both_and_none_may_lack_one(tmp_path: Path) -> None:
    path = tmp_path / "net.topo"
    nvlink = [f"{gpu} {4 + gpu // 2} 2880Gbps 0.000025ms 0" for gpu in range(4)]
    ports = [f"{gpu} {6 + 2 * (gpu % 2) + plane} 200Gbps 0.0005ms 0" for gpu in range(4) for plane in range(2)]
    up = [f"{switch} 10 200Gbps 0.0005ms 0" for switch in range(6, 10)]
    header = ["11 2 2 5 16 H100", "4 5 6 7 8 9 10"]
    path.write_text("\n".join([*header, *nvlink, *ports, *up]))
    _, access, trunk = import_topology(path).tiers
    assert access.bandwidth_bytes_per_s is not None
    assert trunk.oversubscription is not None
    assert access.bandwidth_bytes_per_s.value == 2 * 25e9
    assert trunk.oversubscription.value == 2.0  # 2 x 200 Gbit/s below each switch, 200 above
    path.write_text("\n".join(["11 2 2 5 15 H100", header[1], *nvlink, *ports[1:], *up]))
    with pytest.raises(TopologyError, match="every GPU must have as many access links"):
        import_topology(path)
    path.write_text("\n".join([*header, *nvlink, "x 6 200Gbps 0.0005ms 0", *ports[1:], *up]))
    with pytest.raises(TopologyError, match="link line 7 must start with two node numbers"):
        import_topology(path)


def test_what_a_link_loses_is_noted_as_not_modelled(tmp_path: Path) -> None:
    path = INPUTS / "topology-simai-error-rate.topo"
    cluster = import_topology(path)
    assert "error_rate of up to 0.01 is not modelled" in cluster.description
    assert all("0.01 is not modelled" in tier.bandwidth_bytes_per_s.source for tier in cluster.tiers
               if tier.bandwidth_bytes_per_s is not None)  # fmt: skip
    other = tmp_path / "net.topo"
    other.write_text(path.read_text(encoding="utf-8").replace(" 0.01\n", " 0\n"))
    assert "error_rate" not in import_topology(other).description
    other.write_text(path.read_text(encoding="utf-8").replace(" 0.01\n", " 1.5\n"))
    with pytest.raises(TopologyError, match=r"link line 3: error_rate must be a number from 0 to 1, got '1.5'"):
        import_topology(other)
