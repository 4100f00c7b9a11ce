"""Ranks that were not started alike do not train: option, ranks and values are named, with exit status 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor.jobs import run_ranks

SMALL = ["--steps", "3", "--batch", "8", "--num-rows", "40", "--dim", "4", "--num-tables", "2", "--hidden", "4"]


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (["--seed", "7"], "--seed: 0 on rank 0, 7 on rank 1"),
        (["--lr", "0.5", "--dense-lr", "0.5"], "--lr: 0.05 on rank 0, 0.5 on rank 1; in --dense-lr: 0.01 on rank 0"),
        (["--loss-scale", "2", "--nan", "skip"], "--loss-scale: 1.0 on rank 0, 2.0 on rank 1; in --nan: stop on rank"),
        (["--schedule", "sync", "--micro-batches", "4"], "--schedule: nestpipe (SHA-256 "),
        (["--dim", "8", "--comm-dtype", "float16"], "--comm-dtype: float32 on rank 0, float16 on rank 1; in --dim: 4"),
        (["--debug"], "--debug: False on rank 0, True on rank 1"),
    ],
)
def test_another_option_on_one_rank_is_named_on_every_rank(mine: list[str], message: str) -> None:
    ends = run_ranks(SMALL, own={1: mine})
    assert [end.code for end in ends] == [2, 2]
    for rank, end in enumerate(ends):
        assert f"error: rank {rank}: the ranks differ in " in end.stderr
        assert message in end.stderr
        assert end.stdout == ""


def test_files_are_compared_by_content_not_by_name(tmp_path: Path) -> None:
    text = "a,b\n" + "1,2\n" * 32
    for name, content in (("first", text), ("same", text), ("other", text.replace("1,2\n3,4", "1,2\n3,5") + "9,9\n")):
        (tmp_path / name).write_text(content)
    files = {name: ["--data", str(tmp_path / name)] for name in ("first", "same", "other", "absent")}
    assert [end.code for end in run_ranks([*SMALL, *files["first"]], own={1: files["same"]})] == [0, 0]
    for name, seen in (("other", "bytes (SHA-256 "), ("absent", "absent (No such file or directory) on rank 1")):
        ends = run_ranks([*SMALL, *files["first"]], own={1: files[name]})
        assert [end.code for end in ends] == [2, 2]
        assert all("the ranks differ in --data: " in end.stderr and seen in end.stderr for end in ends)


def test_what_each_rank_may_have_for_itself_may_differ(tmp_path: Path) -> None:
    own = ["--storage", str(tmp_path), "--timeout-s", "60", "--timeline", str(tmp_path / "unused.parquet")]
    assert [end.code for end in run_ranks(SMALL, own={1: own})] == [0, 0]


def test_another_world_size_is_named_long_before_the_wait_is_over() -> None:
    ends = run_ranks([*SMALL, "--rendezvous-s", "200"], sizes={1: 3}, timeout_s=100)
    assert [end.code for end in ends] == [2, 2]
    assert all("the ranks differ in WORLD_SIZE: 2 on rank 0, 3 on rank 1" in end.stderr for end in ends)


def test_a_rank_started_twice_is_named() -> None:
    ends = run_ranks([*SMALL, "--rendezvous-s", "3"], world_size=3, only=[0, 1, 1])
    assert [end.code for end in ends] == [2, 2, 2]
    assert sum("rank 1 was started twice; give every process a RANK of its own" in end.stderr for end in ends) == 1
    assert "rank 2 of 3 did not come within 3 s" in ends[0].stderr
