"""Topologies of other tools, told apart by content; files of the public tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nestpipe.base.errors import TopologyError
from nestpipe.cli import app
from tests.topologies.catalogue import text_of
from topologies.fabric import Fabric
from topologies.imports.load import import_topology, load_topology


def test_an_unknown_like_is_an_error_with_a_way_out() -> None:
    run = CliRunner().invoke(app, ["topology", "show", "torus2d", "--like", "dgx_h10"])
    assert isinstance(run.exception, TopologyError)
    assert "did you mean 'dgx_h100'" in str(run.exception)


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


def test_a_run_takes_another_tools_file_and_a_description_of_our_own_without_its_first_line_is_told_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.yml"
    path.write_text("topology: [Switch]\nnpus_count: [8]\nbandwidth: [100.0]\nlatency: [500]\n", encoding="utf-8")
    assert load_topology(str(path)) == import_topology(path)
    run = CliRunner().invoke(app, ["simulate", "--schedule", "sync", "--model", "dlrm", "--topology", str(path)])
    assert run.exit_code == 0, run.output
    assert "dim0 up 0" in run.output
    path.write_text(text_of("dgx_h100").partition("\n")[2], encoding="utf-8")
    with pytest.raises(TopologyError, match="format is missing"):
        load_topology(str(path))
