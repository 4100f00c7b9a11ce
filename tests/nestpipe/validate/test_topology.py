"""The profiled machine as a topology."""

from __future__ import annotations

from dataclasses import replace

from nestpipe.validate.topology import topology_text
from tests.nestpipe.validate.by_hand import CONFIG, costs_by_hand
from topologies.cluster import parse_cluster
from traces.workloads.cost_table import CostTable


def test_the_profiled_machine_is_a_topology_that_can_be_read() -> None:
    table = costs_by_hand(replace(CONFIG, device=None))
    meta = {**table.meta, "world_size": 2, "rates_bits_per_s": [800_000_000]}
    cluster = parse_cluster(topology_text(CostTable(rows=table.rows, meta=meta)), "this_machine.yaml")
    assert cluster.host.cores.value == table.meta["cores"]
    assert cluster.tiers[0].bandwidth_bytes_per_s is not None
    assert cluster.tiers[0].bandwidth_bytes_per_s.value == 1e8
    assert cluster.accelerator.compute_flops_per_s.source.startswith("measured")
