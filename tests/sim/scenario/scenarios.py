"""Scenario files for tests, as text and as grids."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nestpipe.base.config import decode
from nestpipe.base.errors import CaseError
from sim.scenario.file import Scenario
from sim.scenario.grid import Grid

PLAIN = """
scenario: plain
workload: {case: nestpipe_paper}
schedules: [sync, dbp, nestpipe]
world_sizes: [128, 1536]
micro_batches: [2, 8]
"""

PRICED = """
scenario: priced
workload: {case: nestpipe_paper}
clusters:
  cheap: {accelerator_hour: 1.5, device_memory_bytes: 64 GiB, factors: {compute_time: 1.6, link_bandwidth: 0.5}}
  fast: {accelerator_hour: 2.6, device_memory_bytes: 24 GiB}
schedules: [sync, dbp, fwp, nestpipe, async_prefetch]
world_sizes: [256, 512, 1024, 1536]
micro_batches: [2, 4, 8, 16]
micro_batching: {overhead_us: 800, row_duplication_per_doubling: 1.03}
memory:
  table_rows: 8_000_000_000
  row_bytes: 512
  optimizer_row_bytes: 4
  keys_per_sample: 3000
  unique_ratio: 0.3
  activation_bytes_per_sample: 60 MB
  dense_parameter_bytes: 400 MB
  dense_optimizer_bytes: 800 MB
failures: {accelerator_mtbf_hours: 50000, restart_s: 900, checkpoint_s: 60}
objective: {minimise: cost_per_million_samples}
constraints: {qps_min: 150000}
"""

RANDOM = """
scenario: random
workload: {case: nestpipe_paper}
schedules: [sync, nestpipe]
world_sizes: [16, 32]
micro_batches: [4]
jitter: {cv: 0.05}
stragglers: {share: 0.05, slowdown: 1.3, cv: 0.1}
vary_assumptions: true
seeds: 6
"""


def scenario(text: str, **changes: object) -> Scenario:
    """The scenario of a text with top-level fields replaced."""
    return msgspec.structs.replace(decode(text, Scenario, CaseError, source="test.yaml"), **changes)


def grid(text: str, **changes: object) -> Grid:
    """The grid of a text with top-level fields replaced."""
    return Grid.of(scenario(text, **changes))


def write(folder: Path, text: str) -> Path:
    """A scenario file in a folder."""
    path = folder / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path
