"""Traces of several ranks: waiting told from transfer, clocks aligned."""

from __future__ import annotations

from pathlib import Path

from tests.traces.formats.samples import collective, torchrec_step, trace, write
from traces.formats.importing import import_traces


def test_waiting_for_a_late_rank_is_told_from_transfer(tmp_path: Path) -> None:
    for rank, late in ((0, 0), (1, 50)):
        write(tmp_path / f"r{rank}.json", torchrec_step(rank, late))
    imported = import_traces([tmp_path])
    first = imported.summary["matched_collectives"][0]
    assert (first["duration_us"], first["transfer_us"], first["wait_us"]) == ([100, 50], 50, [50, 0])
    assert (first["start_us"], first["end_spread_us"], first["bytes"]) == ([0, 50], 0, 4000)
    early, late_rank = imported.summary["ranks"]
    assert (early["comm_wait_us"], early["comm_transfer_us"]) == (150, 175)
    assert (late_rank["comm_wait_us"], late_rank["comm_transfer_us"]) == (0, 175)
    frame = imported.table.frame
    assert frame[frame["rank"] == 0]["wait_ns"].sum() == 150_000


def test_clocks_that_differ_are_aligned_by_common_ends(tmp_path: Path) -> None:
    write(tmp_path / "r0.json", torchrec_step(0, 0))
    other = torchrec_step(1, 50)
    other["baseTimeNanoseconds"] = 7_000_000_000
    write(tmp_path / "r1.json", other)
    imported = import_traces([tmp_path])
    assert [rank["clock_offset_us"] for rank in imported.summary["ranks"]] == [0, 7_000_000]
    assert imported.summary["matched_collectives"][0]["start_us"] == [0, 50]
    starts = imported.table.frame.groupby("rank")["start_ns"].min()
    assert starts[1] - starts[0] == 50_000


def test_ranks_that_ran_different_collectives_are_not_compared(tmp_path: Path) -> None:
    write(tmp_path / "r0.json", trace(collective("all_to_all", 1, 10, 20, 1, 8), 0))
    write(tmp_path / "r1.json", trace(collective("all_reduce", 1, 10, 20, 1, 8), 1))
    imported = import_traces([tmp_path])
    assert "matched_collectives" not in imported.summary
    assert any("different collectives" in note for note in imported.summary["coverage"]["notes"])
