"""NCCL and RCCL topology XML: one node, with PCIe speeds in GT/s per lane and GPUs told by their `gpu` element."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

from nestpipe.base import TopologyError
from topologies.cluster import Cluster, TierKind, load_cluster
from topologies.imports.filled import filled
from topologies.reading import Quantity

__all__ = ["read", "sniff"]

_LANE_BYTES_PER_S = {  # PCI-SIG: GT/s to bytes/s of one lane after 8b/10b or 128b/130b coding
    2.5: 0.25e9,
    5.0: 0.5e9,
    8.0: 8e9 * 128 / 130 / 8,
    16.0: 16e9 * 128 / 130 / 8,
    32.0: 32e9 * 128 / 130 / 8,
    64.0: 64e9 * 242 / 256 / 8,
}

_GPU_CLASSES = ("0x0302", "0x1200", "0x0300", "0x0380")  # 3D, accelerator, VGA and other display (AMD) controllers
_NIC_CLASSES = ("0x0207", "0x0200")  # InfiniBand, Ethernet

_UNSET_GT_PER_S, _UNSET_LANES = 8.0, 16  # NCCL src/graph/topo.cc: what it takes where a file or VM does not say


def _pcie_rate(element: ElementTree.Element, where: str) -> tuple[float, str]:
    """Bytes per second of a device's PCIe link, GT/s per lane times lanes less coding, and what was assumed."""
    speed, width = element.get("link_speed", "").strip(), element.get("link_width", "").strip()
    unset = [name for name, text in (("link_speed", speed), ("link_width", width)) if text in ("", "0", "Unknown")]
    match = re.match(r"([0-9]+(?:\.[0-9]+)?)\s*GT/s", speed)
    rate = _UNSET_GT_PER_S if "link_speed" in unset else float(match[1]) if match else 0.0
    lanes = _UNSET_LANES if "link_width" in unset else int(width) if width.isdigit() else 0
    if rate not in _LANE_BYTES_PER_S or not lanes:
        raise TopologyError(
            f"{where}: link_speed must be such as '16 GT/s' and link_width lanes, got {speed!r}, {width!r}"
        )
    assumed = f"assumed: no {' and '.join(unset)}, PCIe 3.0 x16 as NCCL does; " if unset else ""
    return _LANE_BYTES_PER_S[rate] * lanes, assumed


def _devices(root: ElementTree.Element, tag: str, classes: tuple[str, ...]) -> list[ElementTree.Element]:
    """The `<pci>` elements that hold such a device; by their class in a file that names no device of the kind."""
    holding = [pci for pci in root.iter("pci") if pci.find(tag) is not None]
    return holding or [pci for pci in root.iter("pci") if pci.get("class", "")[:6] in classes]


def sniff(_path: Path, text: str) -> bool:
    """Whether this is XML."""
    return text.lstrip().startswith("<")


def read(path: Path, text: str, like: str) -> Cluster:
    """One node from an NCCL or RCCL topology XML: GPUs, NICs, PCIe switches, xGMI links.

    GPUs and NICs are told by the `gpu` or `nic` element they hold; where a file has none, by PCI class.

    Source: NCCL src/graph/xml.cc; PCI class 0x0604 is a bridge.

    Raises:
        TopologyError: invalid XML, or no GPU in it.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise TopologyError(f"{path}: not valid XML: {error}") from None
    if root.tag != "system":
        raise TopologyError(f"{path}: the root element must be <system>, got <{root.tag}>")
    gpus = _devices(root, "gpu", _GPU_CLASSES)
    nics = _devices(root, "nic", _NIC_CLASSES)
    if not gpus:
        raise TopologyError(
            f"{path}: no GPU found: no <pci> holds a <gpu>, and none has a class of {', '.join(_GPU_CLASSES)}"
        )
    where = f"{path}: GPU {gpus[0].get('busid')}"
    lane, assumed = _pcie_rate(gpus[0], where)
    switches = [
        sum(child in gpus for child in e.iter("pci")) for e in root.iter("pci") if e.get("class", "")[:6] == "0x0604"
    ]
    shared = max([n for n in switches if n and len(gpus) % n == 0], default=1)
    base = load_cluster(like)
    links = [e for e in root.iter() if e.tag in ("xgmi", "nvlink")]
    source = f"{assumed}{path.name}: link_speed x link_width, less coding"
    tier = base.tiers[0]
    if any(e.tag == "xgmi" for e in links) and len(links) == len(gpus) * (len(gpus) - 1):
        rate = Quantity(64e9, "AMD MI300X datasheet: 128 GB/s a link over two directions; the file has no speed")
        tier = replace(tier, name="xgmi", kind=TierKind.MESH, ranks_per_group=None, bandwidth_bytes_per_s=rate)
    else:
        kept = Quantity(tier.bandwidth_bytes_per_s.value if tier.bandwidth_bytes_per_s else lane, f"assumed: as {like}")
        tier = replace(tier, kind=TierKind.SWITCH, ranks_per_group=None, bandwidth_bytes_per_s=kept)
    description = f"one node of {len(gpus)} GPUs and {len(nics)} NICs, imported from NCCL XML"
    cluster = filled(path, description, like, [tier], len(gpus), len(gpus))
    host = replace(
        cluster.host,
        accelerators_per_pcie_switch=shared,
        pcie_bandwidth_bytes_per_s=Quantity(lane, source),
        pcie_switch_bandwidth_bytes_per_s=Quantity(lane, f"{source}; one uplink for {shared}"),
    )
    return replace(cluster, host=host)
