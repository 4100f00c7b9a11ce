"""Running configurations: sizes known to the byte, on this process and on a testbed."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from executor.compute import EmulatedDevice
from executor.profile.driver import run_on_testbed
from executor.profile.run import sizes_of_run
from nestpipe.base.errors import CaseError
from nestpipe.ir import OpKind
from tests.executor.profile.common import CONFIG


def test_sizes_are_known_before_the_run_to_the_byte(measured: pd.DataFrame) -> None:
    sizes = sizes_of_run(CONFIG, 1)
    _assert_sizes_match(measured, sizes.table)


def _assert_sizes_match(spans: pd.DataFrame, table: pd.DataFrame) -> None:
    key = ["rank", "kind", "batch", "micro_batch"]
    both = spans.astype({"kind": str}).merge(table, on=key, suffixes=("", "_known"))
    assert len(both) == len(spans)
    for kinds, name in (
        (("read", "copy_h2d", "all_to_all[keys]", "lookup", "sync", "write_back", "all_reduce"), "bytes"),
        (("all_to_all[rows]", "all_to_all[grads]"), "bytes"),
        (("read", "dedup", "all_to_all[keys]", "lookup", "sync", "forward", "write_back"), "keys"),
        (("dedup", "lookup", "sync", "write_back"), "unique_keys"),
    ):
        some = both[both["kind"].isin(kinds)]
        assert some[name].astype(float).tolist() == some[f"{name}_known"].astype(float).tolist(), name


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(CaseError, match="dim must be at least 1, got 0"):
        replace(CONFIG, dim=0)
    with pytest.raises(CaseError, match="micro_batches 32 is more than the batch of 24 samples"):
        replace(CONFIG, micro_batches=32)


@pytest.mark.usefixtures("testbed_allowed")
def test_two_ranks_on_a_testbed_move_what_was_worked_out_for_them() -> None:
    config = replace(CONFIG, schedule="nestpipe", device=EmulatedDevice(forward_us_per_sample=1.0))
    spans = run_on_testbed([config], [200_000_000] * 2, burst_bytes=262_144, realtime=False, timeout_s=120)
    sizes = sizes_of_run(config, 2)
    _assert_sizes_match(spans, sizes.table)
    # who sends what: rows and columns of the traffic, and each rank's own share, make up the bytes
    rows = sizes.table[(sizes.table["kind"] == "all_to_all[rows]") & (sizes.table["batch"] == 3)]
    for rank, micro_batch, sent in rows[["rank", "micro_batch", "bytes"]].itertuples(index=False):
        assert 0 < sizes.traffic[OpKind.ALL_TO_ALL_ROWS, 3, int(micro_batch)][rank].sum() < sent
