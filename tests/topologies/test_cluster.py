"""Cluster descriptions: catalogue, layouts and routes, units and sources, importers, command line, picture."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import TopologyError
from nestpipe.cli import app as main_app
from nestpipe.cli.topology import app
from tests.paths import ROOT
from topologies.cluster import TierKind, load_cluster, names, parse_cluster
from topologies.fabric import Fabric
from topologies.imports.load import import_topology, load_topology

EXPECTED = {
    "ascend_910b", "dgx_a100", "dgx_h100", "dgx_h200", "ethernet_25g", "gb200_nvl72", "laptop", "torus2d",
    "zionex_a100", "zionex_v100",
}  # fmt: skip


def text_of(name: str) -> str:
    return (ROOT / "topologies" / "catalogue" / f"{name}.yaml").read_text(encoding="utf-8")


def test_the_catalogue_is_complete_and_every_number_has_a_source() -> None:
    assert set(names()) == EXPECTED
    for name in names():
        cluster = load_cluster(name)
        assert cluster.name == name
        for tier in cluster.tiers:
            assert tier.latency_ns.source
            assert tier.kind is TierKind.TRUNK or tier.bandwidth_bytes_per_s is not None


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
            assert ends[link][0] == at, fabric.link_name(link)
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


def test_a_rack_may_be_used_in_part() -> None:
    cluster = load_cluster("gb200_nvl72").with_group("nvlink", 64)
    fabric = Fabric(cluster, 128)
    assert fabric.shared_tier(np.array([0, 0]), np.array([63, 64])).tolist() == [0, 1]
    with pytest.raises(TopologyError, match=r"unknown tier 'nvlnk'.*did you mean 'nvlink'"):
        cluster.with_group("nvlnk", 8)


# bad input -------------------------------------------------------------------------------------------------------


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
        ("value: 50e9", "value: .inf", "must be positive, got inf"),
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


# importers -------------------------------------------------------------------------------------------------------


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


def test_an_unknown_like_is_an_error_with_a_way_out() -> None:
    run = CliRunner().invoke(app, ["show", "torus2d", "--like", "dgx_h10"])
    assert isinstance(run.exception, TopologyError)
    assert "did you mean 'dgx_h100'" in str(run.exception)


def test_nccl_xml_speed_is_lanes_times_transfers(tmp_path: Path) -> None:
    path = tmp_path / "topo.xml"
    device = '<pci busid="{}" class="{}" link_speed="16 GT/s" link_width="16"/>'
    inside = device.format("1", "0x030200") + device.format("2", "0x030200") + device.format("3", "0x020700")
    bridge = f'<pci busid="0" class="0x060400" link_speed="16 GT/s" link_width="16">{inside}</pci>'
    path.write_text(f'<system version="1"><cpu numaid="0">{bridge}</cpu></system>')
    cluster = import_topology(path)
    assert (cluster.ranks_default, cluster.host.accelerators_per_pcie_switch) == (2, 2)
    assert cluster.host.pcie_bandwidth_bytes_per_s.value == pytest.approx(16 * 16e9 * 128 / 130 / 8)
    unset = inside.replace('link_speed="16 GT/s"', 'link_speed=""').replace('link_width="16"', 'link_width="0"')
    path.write_text(f'<system version="1"><cpu numaid="0">{unset}</cpu></system>')
    rate = import_topology(path).host.pcie_bandwidth_bytes_per_s
    assert rate.value == pytest.approx(16 * 8e9 * 128 / 130 / 8)
    assert rate.source.startswith("assumed: no link_speed and link_width")
    path.write_text("<system version='1'/>")
    with pytest.raises(TopologyError, match="no GPU found"):
        import_topology(path)


@pytest.mark.parametrize(
    ("file", "ranks"),
    [
        ("astra1_sample_Torus3D.json", 64),
        ("astra2_Ring_FullyConnected_Switch.yml", 64),
        ("astra2_hgx_h100_16gpu.yml", 16),
        ("nccl_aws_p4d_a100x8.xml", 8),
        ("nccl_azure_ndv4_a100x8.xml", 8),
        ("rccl_topo_8p_940.xml", 8),
        ("simai_Rail_Opti_SingleToR_32g_H100.topo", 32),
        ("simai_Spectrum-X_8g_H100.topo", 8),
    ],
)
def test_real_files_import_to_the_machines_they_say(shared_data: Path, file: str, ranks: int) -> None:
    cluster = import_topology(shared_data / "real" / "topology" / file)
    assert cluster.ranks_default == ranks
    assert Fabric(cluster, ranks).bisection_bytes_per_s() > 0


def test_a_file_that_is_no_network_is_refused(shared_data: Path) -> None:
    with pytest.raises(TopologyError, match=r"nor an ASTRA-sim network, .* got scheduling-policy"):
        import_topology(shared_data / "real" / "topology" / "astra2_sys_hgx_h100_16gpu.json")


# command line ----------------------------------------------------------------------------------------------------


def test_a_run_takes_another_tools_file_and_a_description_of_our_own_without_its_first_line_is_told_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.yml"
    path.write_text("topology: [Switch]\nnpus_count: [8]\nbandwidth: [100.0]\nlatency: [500]\n", encoding="utf-8")
    assert load_topology(str(path)) == import_topology(path)
    run = CliRunner().invoke(main_app, ["simulate", "--schedule", "sync", "--model", "dlrm", "--topology", str(path)])
    assert run.exit_code == 0, run.output
    assert "dim0 up 0" in run.output
    path.write_text(text_of("dgx_h100").partition("\n")[2], encoding="utf-8")
    with pytest.raises(TopologyError, match="format is missing"):
        load_topology(str(path))


def test_list_and_show(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["list", "--format", "json"])
    assert {row["name"] for row in json.loads(run.stdout)["topologies"]} == EXPECTED
    picture = tmp_path / "out" / "cluster.svg"
    run = CliRunner().invoke(app, ["show", "ascend_910b", "--world-size", "64", "--plot", str(picture)])
    assert run.exit_code == 0, run.output
    assert "64 ranks (Ascend 910B (64 GB)) on 8 hosts" in run.stdout
    assert "numbers are assumed" in run.stdout
    assert picture.read_bytes().startswith(b"<?xml")
    facts = json.loads(
        CliRunner().invoke(app, ["show", "gb200_nvl72", "--group", "nvlink=64", "--format", "json"]).stdout
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
    run = CliRunner().invoke(app, ["measured", str(log), "--topology", "dgx_a100", "--format", "json"])
    assert run.exit_code == 0, run.output
    first = json.loads(run.stdout)["curves"][0]
    assert (first["collective"], first["world_size"], first["num_sizes"]) == ("all_to_all", 8, 29)
    assert first["residual_median"] < 0.02
    assert 0.5 < first["reached"] < 1
    assert "29" in CliRunner().invoke(app, ["measured", str(log), "--topology", "dgx_a100"]).stdout
