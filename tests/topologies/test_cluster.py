"""Cluster descriptions: catalogue, layouts and routes, units and sources, importers, command line, picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import TopologyError
from nestpipe.cli import app
from tests.paths import ROOT
from tests.topologies.catalogue import text_of
from topologies.cluster import TierKind, load_cluster, names, parse_cluster
from topologies.fabric import Fabric

EXPECTED = {
    "ascend_910b", "aws_p4d", "aws_p5", "azure_ndv2", "azure_ndv5", "cloudmatrix384", "dgx2_v100", "dgx_a100",
    "dgx_b200", "dgx_b300", "dgx_h100", "dgx_h200", "ethernet_25g", "gb200_nvl72", "gb300_nvl72", "gcp_a3", "l40s",
    "laptop", "mi300x", "mi355x", "torus2d", "zionex_a100", "zionex_v100",
}  # fmt: skip


def test_the_catalogue_is_complete_and_every_number_has_a_source() -> None:
    assert set(names()) == EXPECTED
    for name in names():
        cluster = load_cluster(name)
        assert cluster.name == name
        for tier in cluster.tiers:
            assert tier.latency_ns.source
            assert tier.kind is TierKind.TRUNK or tier.bandwidth_bytes_per_s is not None


def test_a_rack_may_be_used_in_part() -> None:
    cluster = load_cluster("gb200_nvl72").with_group("nvlink", 64)
    fabric = Fabric(cluster, 128)
    assert fabric.shared_tier(np.array([0, 0]), np.array([63, 64])).tolist() == [0, 1]
    with pytest.raises(TopologyError, match=r"unknown tier 'nvlnk'.*did you mean 'nvlink'"):
        cluster.with_group("nvlnk", 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ranks_default: 256", "ranks_defualt: 256", "unknown key 'ranks_defualt'|ranks_default is missing"),
        (
            "bandwidth_bytes_per_s: {value: 50e9",
            "bandwidth_gbps: {value: 400",
            "wrong unit; give bandwidth_bytes_per_s",
        ),
        ("value: 50e9", "value: 50", r"tiers\[1\].bandwidth_bytes_per_s.value must be in bytes per second, got 50"),
        ("value: 50e9", "value: 400Gbps", "must be a number of bytes per second.*got '400Gbps'"),
        ("value: 50e9", "value: -50e9", "must be positive, got -5"),
        ("value: 50e9", "value: .inf", "must be finite, got inf"),
        ("memory_capacity_bytes:", "memory_capacity_gib:", "wrong unit; give memory_capacity_bytes"),
        ("{value: 50e9, source", "{value: 50e9, sauce", "source is missing"),
        ("kind: rail", "kind: rial", "did you mean 'rail'"),
        ("kind: trunk", "kind: switch", "bandwidth_bytes_per_s is missing"),
        ("ranks_per_group: 256", "ranks_per_group: 12", "must be a multiple of 8, got 12"),
        ("format: nestpipe-topology-1", "format: nestpipe-topology-9", "format must be"),
        ("name: dgx_h100", "name: dgx_h100\nname: twice", "given twice"),
        ("tiers:", "tiers: [", "not valid YAML"),
        ("accelerators_per_pcie_switch: 1", "accelerators_per_pcie_switch: 3", "must divide accelerators_per_host"),
        ("  cores:", "  {}:", "a key must be plain text"),
        ("{value: 50e9, source", "{value: 50e9, 7", "source is missing"),
    ],
)
def test_a_wrong_description_is_refused_with_the_path_and_the_way_out(old: str, new: str, message: str) -> None:
    text = text_of("dgx_h100")
    assert old in text
    with pytest.raises(TopologyError, match=message) as caught:
        parse_cluster(text.replace(old, new, 1), "my.yaml")
    assert str(caught.value).startswith("my.yaml: ")


def test_list_and_show(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["topology", "list", "--format", "json"])
    assert {row["name"] for row in json.loads(run.stdout)["topologies"]} == EXPECTED
    picture = tmp_path / "out" / "cluster.svg"
    run = CliRunner().invoke(app, ["topology", "show", "ascend_910b", "--world-size", "64", "--plot", str(picture)])
    assert run.exit_code == 0, run.output
    assert "64 ranks (Ascend 910B (64 GB)) on 8 hosts" in run.stdout
    assert "numbers are assumed" in run.stdout
    assert picture.read_bytes().startswith(b"<?xml")
    facts = json.loads(
        CliRunner().invoke(app, ["topology", "show", "gb200_nvl72", "--group", "nvlink=64", "--format", "json"]).stdout
    )
    assert facts["tiers"][0]["ranks_per_group"] == 64
    assert all(row["source"] for row in facts["numbers"])


@pytest.mark.parametrize("name", ["ascend_910b", "ethernet_25g", "laptop", "torus2d"])
def test_a_cluster_of_each_shape_can_be_drawn(name: str) -> None:
    from reports.figures.topology import topology_figure

    cluster = load_cluster(name)
    figure = topology_figure(cluster, cluster.ranks_default)
    (axes,) = figure.axes
    assert axes.get_title(loc="left").startswith(f"{name}: {cluster.ranks_default:,} ranks")
    assert len(axes.lines) >= cluster.ranks_default if cluster.ranks_default < 64 else len(axes.lines) > 32
    legend = axes.get_legend()
    assert legend is not None
    assert cluster.tiers[0].name in legend.get_texts()[0].get_text()


def test_the_example_of_the_documentation_is_a_cluster() -> None:
    page = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    example = page.split("```yaml\n")[1].split("```")[0]
    fabric = Fabric(parse_cluster(example, "docs/hardware.md"), 8)
    assert fabric.bisection_bytes_per_s() == 4 * 12.5e9


def test_measured_prints_residuals_and_the_share_reached(shared_data: Path) -> None:
    log = shared_data / "real" / "collectives" / "nccl_a100x8_alltoall.log"
    run = CliRunner().invoke(app, ["topology", "measured", str(log), "--topology", "dgx_a100", "--format", "json"])
    assert run.exit_code == 0, run.output
    first = json.loads(run.stdout)["curves"][0]
    assert (first["collective"], first["world_size"], first["num_sizes"]) == ("all_to_all", 8, 29)
    assert first["residual_median"] < 0.02
    assert 0.5 < first["reached"] < 1
    assert "29" in CliRunner().invoke(app, ["topology", "measured", str(log), "--topology", "dgx_a100"]).stdout
