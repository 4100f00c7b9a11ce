"""Measured curves as costs, and predicted against measured collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nestpipe.base.errors import TopologyError, TraceError
from sim.network.accuracy import Given, predict_log
from sim.network.collectives import Split
from sim.network.cost import Collectives
from sim.network.curves import read_measured
from topologies.cluster import MeasuredCollective, load_cluster
from topologies.fabric import Fabric

MB = 1_000_000
H100 = load_cluster("dgx_h100")


def collectives(ranks: int, *, sizes: tuple[int, ...] = (MB, 10 * MB), slower: float = 2.0) -> Collectives:
    """Of a cluster whose All2Alls of 8 ranks were measured to take `slower` times what the model says."""
    modelled = [Collectives.predicting(Fabric(H100, 8)).cost("all_to_all", size).time_s for size in sizes]
    curve = MeasuredCollective(
        collective="all_to_all",
        world_size=8,
        size_bytes=sizes,
        time_ns=tuple(1e9 * slower * each for each in modelled),
        source="test",
    )
    return Collectives.predicting(Fabric(replace(H100, measured=(curve,)), ranks))


def factor(ranks: int, collective: str, size: int, found: Collectives) -> float:
    return (
        found.cost(collective, size).time_s / Collectives.predicting(Fabric(H100, ranks)).cost(collective, size).time_s
    )


def test_a_measured_size_takes_what_it_took_and_one_between_lies_on_the_line() -> None:
    found = collectives(8)
    first, middle, last = (found.cost("all_to_all", size) for size in (MB, 5.5 * MB, 10 * MB))
    assert [each.basis for each in (first, middle, last)] == ["measured", "interpolated", "measured"]
    assert factor(8, "all_to_all", MB, found) == pytest.approx(2)
    assert middle.time_s == pytest.approx((first.time_s + last.time_s) / 2)
    assert found.size_bytes("all_to_all", middle.time_s) == pytest.approx(5.5 * MB, rel=1e-6)


def test_beyond_sizes_and_ranks_a_curve_scales_the_model() -> None:
    assert collectives(8).cost("all_to_all", 100 * MB).basis == "extrapolated"
    assert factor(8, "all_to_all", 100 * MB, collectives(8)) == pytest.approx(2)
    assert factor(64, "all_to_all", 10 * MB, collectives(64)) == pytest.approx(2)
    assert factor(8, "all_to_all", 3 * MB, collectives(8, sizes=(MB,), slower=3)) == pytest.approx(3)
    assert factor(8, "all_reduce", 10 * MB, collectives(8)) == 1  # of which nothing was measured


def test_a_curve_of_one_node_says_nothing_of_ranks_spread_over_nodes() -> None:
    spread = range(0, 64, 8)
    modelled = Collectives.predicting(Fabric(H100, 64)).cost("all_to_all", MB, ranks=spread)
    assert collectives(64).cost("all_to_all", MB, ranks=spread) == modelled


def test_an_uneven_split_is_scaled_by_its_busiest_sender() -> None:
    send = np.full(8, 1.0 * MB)
    send[3] = 10 * MB
    split = Split(send_bytes=send, owner_share=np.full(8, 1 / 8))
    modelled = Collectives.predicting(Fabric(H100, 8)).cost("all_to_all", split).time_s
    assert modelled > 4 * Collectives.predicting(Fabric(H100, 8)).cost("all_to_all", float(send.mean())).time_s / 2
    assert collectives(8, sizes=(10 * MB,)).cost("all_to_all", split).time_s > 1.5 * modelled


def test_logs_are_joined_out_of_place_first(tmp_path: Path) -> None:
    log = tmp_path / "nccl_h100x8_alltoall.log"
    log.write_text(
        "#       size         count    type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw\n"
        "     1048576         32768   float    none      -1    50.00   20.97   18.35       0    70.00   14.98   13.11\n"
        "     2097152         65536   float    none      -1    80.00   26.21   22.94       0    90.00   23.3   20.39\n",
        encoding="utf-8",
    )
    (curve,) = read_measured([log])
    assert (curve.collective, curve.world_size) == ("all_to_all", 8)
    assert curve.time_ns == (50_000, 80_000)
    rows = predict_log(log)
    assert {row.topology for row in rows} == {"dgx_h100"}
    assert [row.measured_s for row in rows] == pytest.approx([50e-6, 80e-6, 70e-6, 90e-6])
    assert [row.basis for row in rows] == ["fitted"] * 4
    assert [(row.bytes, row.basis) for row in predict_log(log, given=Given.HALF)] == [(2097152, "extrapolated")] * 2
    unnamed = log.rename(tmp_path / "alltoall.log")
    with pytest.raises(TopologyError, match="neither the log nor its name tells the accelerator; give --topology"):
        predict_log(unnamed)


def test_tokens_without_bytes_are_no_curve(shared_data: Path) -> None:
    with pytest.raises(TraceError, match="no row with bytes"):
        read_measured([shared_data / "real" / "collectives" / "aic_h100_deepep_normal_1to8nodes.csv"])


def test_unseen_machines_are_predicted_within_the_stated_error(shared_data: Path) -> None:
    """Each machine by a fit without its logs, from 16 MiB on; with half of the sizes as a curve."""
    folder = shared_data / "real" / "collectives"
    machines = {"a100_table": "aic_a100_*", "h100_table": "aic_h100_nccl_*", "gb200": "oci_*", "mi355x": "rccl_*"}
    blind, half = [], []
    for machine, pattern in machines.items():
        for path in sorted(folder.glob(pattern)):
            blind += [r for r in predict_log(path, fit=f"without_{machine}") if r.bytes >= 16 << 20]
            half += [r for r in predict_log(path, given=Given.HALF) if r.bytes >= 16 << 20]
    assert np.median([abs(row.relative_error) for row in blind]) < 0.10
    assert np.median([abs(row.relative_error) for row in half]) < 0.03
