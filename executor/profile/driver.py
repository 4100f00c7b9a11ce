"""Runs configurations on a testbed made for them and brings the spans back."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from executor.profile.run import RunConfig, write_job
from executor.testbed import launch, temporary
from nestpipe.base import CaseError

__all__ = ["run_on_testbed"]


def run_on_testbed(
    configs: Sequence[RunConfig],
    rates_bits_per_s: Sequence[int],
    *,
    burst_bytes: int,
    realtime: bool,
    timeout_s: float,
    probe_ns: int | None = None,
    patience_s: float = 0.0,
) -> pd.DataFrame:
    """The spans of every configuration, run in the given order on one testbed.

    Args:
        configs: what to run.
        rates_bits_per_s: for each rank the rate of its NIC.
        burst_bytes: what an idle NIC lets through at once.
        realtime: run the ranks before everything else on the machine.
        timeout_s: of the whole job.
        probe_ns, patience_s: see `executor.profile.run.run_configs`.

    Raises:
        TestbedError: if no testbed can be made, or a rank fails.
    """
    if not configs:
        raise CaseError("no configuration to run")
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        tempfile.TemporaryDirectory(prefix="nestpipe-job-") as folder,
        temporary(rates_bits_per_s, burst_bytes=burst_bytes) as bed,
    ):
        job, out = Path(folder) / "job.json", Path(folder) / "spans.parquet"
        write_job(job, configs, out, timeout_s=timeout_s, probe_ns=probe_ns, patience_s=patience_s)
        command = [sys.executable, "-m", "executor.profile.run", str(job)]
        launch(bed, command, timeout_s=timeout_s, extra_environment={"PYTHONPATH": path}, realtime=realtime)
        return pd.read_parquet(out)
