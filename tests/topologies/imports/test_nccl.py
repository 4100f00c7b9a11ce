"""NCCL topology XML: PCIe speed is lanes times transfers."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.base.errors import TopologyError
from tests.paths import INPUTS
from topologies.imports.load import import_topology


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


def test_a_pci_that_holds_a_gpu_is_one_whatever_its_class(tmp_path: Path) -> None:
    cluster = import_topology(INPUTS / "topology-amd-class-0380.xml")
    assert (cluster.ranks_default, cluster.ranks_per_node) == (8, 8)
    path = tmp_path / "topo.xml"
    text = (INPUTS / "topology-amd-class-0380.xml").read_text(encoding="utf-8")
    path.write_text(text.replace("0x038000", "0x088000"))
    assert import_topology(path).ranks_default == 8
    # a display controller beside GPUs that are named is none of them
    path.write_text(text.replace("</cpu>", '<pci busid="9" class="0x030000" link_width="1"/></cpu>'))
    assert import_topology(path).ranks_default == 8
