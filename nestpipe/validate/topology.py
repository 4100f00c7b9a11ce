"""The profiled machine as a topology file: cores shared by its ranks, links as they were shaped or given."""

from __future__ import annotations

import os
import time
from typing import Final

import numpy as np
import yaml

from executor.compute import Compute
from nestpipe.base import BITS_PER_BYTE, NS_PER_S
from nestpipe.ir import OpKind
from traces.workloads import CostTable, fit_kind

__all__ = ["topology_text"]

_SIZE: Final = 384
_COPY_BYTES: Final = 1 << 26
_REPEATS: Final = 5
_MEASURED: Final = "measured by nestpipe profile"


def topology_text(table: CostTable, *, name: str = "this_machine") -> str:
    """YAML in the format of the topology catalogue; each number says whether it is measured, fitted or assumed.

    Rates of computing and copying are measured now, the rest is read off the cost table.

    Args:
        table: a profile of this machine with real compute.
        name: of the topology.
    """
    ranks = int(table.meta["world_size"])
    variant = next(name for name in sorted(set(table.rows["variant"])) if name.startswith(Compute.REAL))
    lookup = fit_kind(table.rows, OpKind.LOOKUP, variant, ("unique_keys",))
    row_ns = max(lookup.coefficients.get("unique_keys", 0.0), 1.0)
    copy = _copy_bytes_per_s()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    document = {
        "format": "nestpipe-topology-1",
        "name": name,
        "description": f"{ranks} ranks on one host, {table.meta.get('bench', 'as profiled')}",
        "ranks_max": max(ranks, 250),
        "ranks_default": ranks,
        "accelerator": {
            "name": "a core of the host",
            "compute_flops_per_s": _quantity(_flops_per_s(), f"{_MEASURED}: float32 matmul of {_SIZE}, one thread"),
            "memory_bandwidth_bytes_per_s": _quantity(copy, f"{_MEASURED}: copy of 64 MiB, read and written"),
            "memory_capacity_bytes": _quantity(memory / ranks, "operating system, shared evenly by the ranks"),
            "copy_engines": _quantity(1, "assumed: a core copies"),
        },
        "host": {
            "accelerators_per_host": ranks,
            "cores": _quantity(table.number("cores"), "operating system"),
            "dram_bandwidth_bytes_per_s": _quantity(copy, f"{_MEASURED}: copy of 64 MiB, read and written"),
            "dram_capacity_bytes": _quantity(memory, "operating system"),
            "lookup_rate_rows_per_s": _quantity(ranks * NS_PER_S / row_ns, f"fitted: {row_ns:.4g} ns a row and rank"),
            "pcie_bandwidth_bytes_per_s": _quantity(copy, "assumed: host and device memory are one"),
            "accelerators_per_pcie_switch": 1,
            "pcie_switch_bandwidth_bytes_per_s": _quantity(copy, "assumed: host and device memory are one"),
        },
        "tiers": [
            {
                "name": "link",
                "kind": "switch",
                "ranks_per_group": max(ranks, 250),
                "bandwidth_bytes_per_s": _quantity(
                    max(table.meta["rates_bits_per_s"]) / BITS_PER_BYTE, "as shaped or given"
                ),
                "latency_ns": _quantity(table.number("handoff", "p50_ns"), f"{_MEASURED}: hand-over of lanes"),
            }
        ],
    }
    return yaml.safe_dump(document, sort_keys=False, width=120)


def _quantity(value: float, source: str) -> dict[str, object]:
    return {"value": float(f"{value:.4g}"), "source": source}


def _flops_per_s() -> float:
    left = np.ones((_SIZE, _SIZE), dtype=np.float32)
    return 2 * _SIZE**3 / _best_s(lambda: left @ left)


def _copy_bytes_per_s() -> float:
    source = np.zeros(_COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return 2 * _COPY_BYTES / _best_s(lambda: np.copyto(target, source))


def _best_s(work: object) -> float:
    """The shortest of a few runs, in seconds."""
    assert callable(work)
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
