"""The command line as users and scripts see it: one JSON line on rank 0, a Timeline, exit codes."""

from __future__ import annotations

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from executor.app.cli import ProcessOptions
from executor.app.options import IdKind, ModelKind, RunOptions
from executor.app.session import Outputs, last_batch, train
from executor.app.workload import make_trainer, user_sequences
from executor.compute import EmulatedDevice
from executor.runtime import recorder
from executor.runtime.groups import ProcessGroups, join_world
from executor.runtime.trainer import CommDtype
from executor.runtime.wraps import Delay
from nestpipe.base.errors import ExecutorError, NestPipeError
from nestpipe.ir import show
from nestpipe.schedules import load
from nestpipe.timeline.files import read_timeline
from nestpipe.timeline.metrics import partition
from tests.executor.jobs import RankEnd, pool, reserved_port, run_ranks
from tests.paths import ROOT

SMALL = ["--steps", "5", "--batch", "8", "--num-rows", "60", "--dim", "8", "--num-tables", "2", "--hidden", "8"]


def result(ends: list[RankEnd]) -> dict[str, Any]:
    assert [end.code for end in ends] == [0] * len(ends), "\n".join(end.stderr for end in ends)
    assert all(end.stdout == "" for end in ends[1:])
    found: dict[str, Any] = json.loads(ends[0].stdout.splitlines()[-1])
    return found


def test_the_result_is_one_json_line_and_schedules_agree_on_its_digests() -> None:
    found = {
        schedule: result(run_ranks([*SMALL, "--schedule", schedule, "--micro-batches", "2"]))
        for schedule in ("sync", "nestpipe")
    }
    mine = found["nestpipe"]
    assert mine["digests"] == found["sync"]["digests"]
    assert mine["losses"] == found["sync"]["losses"]
    assert len(mine["losses"]) == len(mine["step_times_ms"]) == mine["steps"] == 5
    assert mine["precision"] == {"rows": "float32", "grads": "float32", "dense": "float32"}
    assert all(len(digest) == 64 for digest in mine["digests"].values())
    assert len(mine["counters"]) == 2
    assert 0 < mine["counters"][0]["unique_ratio"] <= 1
    assert 0 < mine["counters"][0]["shared_ratio"] <= 1
    assert mine["counters"][0]["bytes"]["comm"] > 0
    assert min(mine["counters"][0]["buffer_bytes_max"].values()) >= 0


def test_the_timeline_reads_back_with_the_columns_and_parts_of_a_simulated_one(tmp_path: Path) -> None:
    path = tmp_path / "timeline.parquet"
    arguments = [*SMALL, "--steps", "14", "--micro-batches", "2", "--timeline", str(path)]
    result(run_ranks([*arguments, "--chrome", str(tmp_path / "traces")]))
    timeline = read_timeline(path)
    frame = timeline.frame()
    assert timeline.meta["source"] == "measured"
    assert timeline.meta["schedule"] == "nestpipe"
    assert set(frame["rank"]) == {0, 1}
    assert (frame["end_ns"] >= frame["start_ns"]).all()
    assert (frame.groupby(["rank", "stream"], observed=True)["start_ns"].is_monotonic_increasing).all()
    by_kind = frame[frame["rank"] == 0]["kind"].value_counts()
    assert by_kind["update"] == 14
    assert by_kind["forward"] == 28
    assert partition(timeline).shape[0] > 0
    traces = sorted((tmp_path / "traces").iterdir())
    assert len(traces) == 2
    content = traces[0].read_bytes()
    assert json.loads(gzip.decompress(content) if traces[0].suffix == ".gz" else content)["traceEvents"]


def train_on_pool(**changes: Any) -> dict[str, Any]:
    """The result of a run on a pool that is up already, which is much faster than starting ranks."""
    small = {"steps": 5, "batch_size": 8, "num_rows": 60, "dim": 8, "num_tables": 2, "hidden": (8,)}
    options = RunOptions(**{**small, **changes})
    return pool(2).run(_train, options)[0]


def _train(world: ProcessGroups, options: RunOptions) -> dict[str, Any]:
    trainer = make_trainer(world, options)
    return train(trainer, options, Outputs(), last_batch(trainer, options.steps))


@pytest.mark.parametrize("model", [ModelKind.HSTU, ModelKind.FUXI])
def test_sequence_models_train_and_learn(model: ModelKind) -> None:
    found = train_on_pool(model=model, micro_batches=2, lr=0.3, max_length=8, num_negatives=8, steps=25)
    assert sum(found["losses"][-5:]) < 0.95 * sum(found["losses"][:5])


@pytest.mark.parametrize(("dtype", "tolerance"), [(CommDtype.BFLOAT16, 0.02), (CommDtype.FLOAT16, 0.005)])
def test_reduced_precision_is_printed_and_close(dtype: CommDtype, tolerance: float) -> None:
    full, reduced = train_on_pool(micro_batches=2), train_on_pool(micro_batches=2, comm_dtype=dtype, loss_scale=4.0)
    assert set(reduced["precision"].values()) == {dtype}
    assert reduced["losses"] == pytest.approx(full["losses"], rel=tolerance)
    assert reduced["losses"] != full["losses"]


def test_memory_mapped_tables_give_the_same_result(tmp_path: Path) -> None:
    assert train_on_pool(storage=tmp_path)["digests"] == train_on_pool()["digests"]
    assert any((tmp_path / "rank-1").iterdir())


def test_training_stops_together_when_the_data_end(tmp_path: Path) -> None:
    keys = tmp_path / "keys.csv"
    keys.write_text("a,b\n" + "".join(f"{i % 7},{i * i % 11}\n" for i in range(45)))
    found = train_on_pool(data=keys, steps=None)
    assert found["steps"] == 3
    assert all(loss is not None for loss in found["losses"])


def test_resume_continues_to_the_same_digests(tmp_path: Path) -> None:
    whole = train_on_pool(steps=6)
    kept = ["--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "2"]
    result(run_ranks([*SMALL, *kept, "--steps", "4"]))
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["batch-00000002", "batch-00000004"]
    resumed = result(run_ranks([*SMALL, *kept, "--steps", "6", "--resume"]))
    assert resumed["digests"] == whole["digests"]


def test_resuming_with_other_options_is_refused_by_name_or_allowed_by_name(tmp_path: Path) -> None:
    keys = [tmp_path / name for name in ("keys.csv", "others.csv")]
    for number, path in enumerate(keys):
        path.write_text("a,b\n" + "".join(f"{i % 7},{(i + number) % 11}\n" for i in range(200)))
    kept = [*SMALL, "--checkpoint", str(tmp_path / "kept"), "--steps", "2"]
    result(run_ranks([*kept, "--data", str(keys[0])]))
    changed = ["--data", str(keys[1]), "--batch", "4", "--lr", "0.1", "--seed", "3", "--resume"]
    ends = run_ranks([*kept, *changed])
    assert [end.code for end in ends] == [2, 2]
    for part in ("--lr was 0.05, this run has 0.1; --seed was 0, this run has 3;", "--data was ", "--batch was 8"):
        assert part in ends[0].stderr
    allowed = [text for name in ("data", "batch", "lr", "seed") for text in ("--allow-change", name)]
    assert "or allow it: --allow-change lr --allow-change seed --allow-change data" in ends[0].stderr
    assert len(result(run_ranks([*kept, *changed, *allowed, "--steps", "4"]))["losses"]) == 4
    ends = run_ranks([*kept, *changed, *allowed, "--steps", "4"])
    assert "the checkpoint stands at batch 4 and training ends before it; give more --steps or data" in ends[1].stderr
    ends = run_ranks([*kept, "--data", str(keys[0]), "--resume", "--allow-change", "learning-rate"])
    assert [end.code for end in ends] == [2, 2]
    assert "--allow-change: unknown option '--learning-rate'" in ends[0].stderr


@pytest.mark.parametrize(("key", "shown"), [("60", "60"), ("-1", "-1")])
def test_a_key_that_is_no_row_is_named_unless_keys_are_hashed(tmp_path: Path, key: str, shown: str) -> None:
    path = tmp_path / "keys.csv"
    path.write_text("a,b\n" + "1,2\n" * 30 + f"3,{key}\n")
    ends = run_ranks([*SMALL, "--data", str(path)])
    assert [end.code for end in ends] == [2, 2]
    assert f"sample 30, feature b: key {shown} is not a row of a table of 60, nor are 0 others of 62" in ends[0].stderr
    assert train_on_pool(data=path, ids=IdKind.HASH)["steps"] == 2


def test_emulated_runs_take_the_device_s_time_say_so_and_train_the_same(tmp_path: Path) -> None:
    path = tmp_path / "timeline.parquet"
    emulated = ["--emulate", "forward_us_per_sample=500", "--emulate", "launch_us=6000", "--delay", "update:1:5"]
    found = result(run_ranks([*SMALL, "--schedule", "sync", *emulated, "--timeline", str(path)]))
    assert found["emulated"]["forward_us_per_sample"] == 500.0
    assert found["digests"] == train_on_pool(schedule="sync")["digests"]
    frame = read_timeline(path).frame()
    took = (frame["end_ns"] - frame["start_ns"]).groupby([frame["kind"], frame["rank"]], observed=True).min() / 1e6
    assert took["forward", 0] >= 6 + 8 * 0.5
    assert took["backward", 1] >= 6 + 8 * 1.0
    assert took["lookup", 0] >= 6
    assert took["write_back", 1] >= 6
    assert took["update", 1] >= 6 + 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "nestpip"], "unknown schedule 'nestpip'; expected one of"),
        (["--schedule", "async_prefetch"], "stale"),
        (["--steps", "-1"], "steps must be at least 1, got -1"),
        (["--batch", "0"], "batch_size must be at least 1, got 0"),
        (["--hidden", "8,x"], "--hidden must be positive widths"),
        (["--delay", "updat:0:1"], "unknown op kind 'updat'"),
        (["--emulate", "lunch_us=1"], "unknown attribute 'lunch_us'"),
        pytest.param(
            ["--device", "cuda"],
            "torch finds no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--resume"], "give --checkpoint"),
    ],
)
def test_bad_input_is_one_message_and_exit_2(arguments: list[str], message: str) -> None:
    (end,) = run_ranks([*SMALL, *arguments], world_size=1)
    assert end.code == 2
    assert message in end.stderr
    assert "Traceback" not in end.stderr
    assert end.stdout == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": math.nan}, "lr must be a positive number, got nan"),
        ({"dense_lr": math.inf}, "dense_lr must be a positive number, got inf"),
        ({"loss_scale": 0.0}, "loss_scale must be a positive number, got 0.0"),
        ({"mean_length": math.nan}, "mean_length must be a positive number, got nan"),
        ({"exponent": -1.0}, "exponent must be a number that is not negative, got -1.0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
    ],
)
def test_impossible_numbers_are_refused_before_ranks_meet(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecutorError, match=message):
        RunOptions(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "tpu"}, "--device tpu: torch has no such device here"),
        ({"threads": 0}, "--threads must be at least 1, got 0"),
        ({"timeout_s": math.nan}, "--timeout-s must be more than 0 and at most 1e\\+06 seconds, got nan"),
        ({"rendezvous_s": -1.0}, "--rendezvous-s must be more than 0"),
    ],
)
def test_a_process_that_could_not_start_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecutorError, match=message):
        ProcessOptions(**values)


@pytest.mark.parametrize(
    ("environment", "backend", "message"),
    [
        ({}, "glooo", "unknown backend 'glooo'"),
        ({}, "nccl", "backend nccl: this torch was built without it"),
        ({"MASTER_PORT": "99999"}, "gloo", "MASTER_PORT must be a port below 65536, got 99999"),
    ],
)
def test_a_backend_or_port_that_cannot_be_is_refused_before_ranks_meet(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], backend: str, message: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExecutorError, match=message):
        join_world(backend=backend)


@pytest.mark.parametrize("name", ["timeline", "chrome", "checkpoint"])
def test_outputs_that_could_not_be_written_are_refused_before_training(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    values: dict[str, Any] = {name: tmp_path / "file" / "folder" / "out"}
    assert "cannot create the folder" in (Outputs(**values).prepare() or "")
    assert "expects a file, this is a folder" in (Outputs(timeline=tmp_path).prepare() or "")
    assert Outputs(**{name: tmp_path / "new" / "out"}).prepare() is None
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeline", "/proc/nowhere/timeline.parquet"], "/proc/nowhere: cannot create the folder"),
        (["--schedule", "nestpipe_2d_sp", "--domain-size", "3"], "domain_size must divide the world size 2, got 3"),
        (["--data", "/nowhere/keys.csv"], "/nowhere/keys.csv: no such file"),
        (["--checkpoint", "/nowhere", "--resume"], "no checkpoint in /nowhere"),
        (["--steps", "0"], "generated data have no end"),
    ],
)
def test_bad_input_that_only_a_running_rank_finds_ends_all_ranks(arguments: list[str], message: str) -> None:
    ends = run_ranks([*SMALL, *arguments])
    assert all(end.code == 2 for end in ends)
    assert message in ends[0].stderr
    assert "Traceback" not in ends[0].stderr


def test_allowed_staleness_lets_a_stale_schedule_run() -> None:
    assert train_on_pool(schedule="async_prefetch", allow_staleness=1)["schedule"] == "async_prefetch"


def test_the_schedule_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(show(load("dbp")).replace("loop v1 dbp", "loop v1 mine"))
    assert train_on_pool(schedule=str(path))["schedule"] == "mine"


def test_a_wrong_environment_is_named() -> None:
    (end,) = run_ranks(SMALL, world_size=2, only=[5])
    assert end.code == 2
    assert "RANK must lie in 0 to WORLD_SIZE - 1 = 1, got 5" in end.stderr


@pytest.mark.slow
def test_torchrun_starts_it() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    with reserved_port() as port:
        done = subprocess.run(
            [*command, str(port), "-m", "executor", *SMALL, "--schedule", "nestpipe", "--model", "hstu"],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
            cwd=ROOT,
        )
    assert json.loads(done.stdout.splitlines()[-1])["world_size"] == 2


@pytest.mark.parametrize(
    "names", [("userId", "movieId", "rating", "timestamp"), ("user_id", "video_id", "is_click", "time_ms")]
)
def test_sequences_are_in_time_order_with_items_renumbered(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = tmp_path / "log.csv"
    columns = ([1, 1, 2, 1], [50, 7, 7, 9], [1] * 4, [30, 10, 5, 20])
    pd.DataFrame(dict(zip(names, columns, strict=True))).to_csv(path, index=False)
    sequences, num_items = user_sequences(path)
    assert num_items == 3
    assert [items.tolist() for items in sequences] == [[0, 1, 2], [0]]


def test_a_file_without_users_items_and_times_holds_no_sequences(tmp_path: Path) -> None:
    path = tmp_path / "keys.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ExecutorError, match="sequences need the columns userId, movieId, timestamp or user_id"):
        user_sequences(path)


@pytest.mark.parametrize("text", ["update", "update:x:1", "update:0:-1", "update:0:nan", "update:0:1:2"])
def test_delays_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ExecutorError, match="--delay"):
        Delay.parse(text)


@pytest.mark.parametrize("text", ["launch_us", "launch_us=-1", "launch_us=x", "launch_us=inf", "copy_bytes_per_s=0"])
def test_emulated_devices_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(NestPipeError, match=r"--emulate|must be positive"):
        EmulatedDevice.parse([text])


def _offset(world: ProcessGroups, one_host: bool) -> int:
    if not one_host:
        recorder._BOOT_ID = Path("/there/is/no/such/file")
    return recorder.clock_offset_ns(world)


def test_clocks_are_aligned_to_rank_0() -> None:
    assert pool(2).run(_offset, True) == [0, 0]
    measured = pool(2).run(_offset, False)
    # both ranks share a clock here, so what is measured is the error
    assert measured[0] == 0
    assert abs(measured[1]) < 500_000_000


@pytest.mark.slow
def test_one_rank_needs_no_environment() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "executor", *SMALL, "--steps", "1"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
        cwd=ROOT,
    )
    assert json.loads(done.stdout.splitlines()[-1])["world_size"] == 1


def test_clustering_sends_fewer_rows_and_keeps_the_batch(tmp_path: Path) -> None:
    keys = tmp_path / "keys.csv"
    keys.write_text("a,b\n" + "".join(f"{i % 4},{i % 4 + 7 * (i % 8)}\n" for i in range(256)))
    runs = [train_on_pool(data=keys, batch_size=64, steps=2, micro_batches=4, cluster=on) for on in (False, True)]
    plain, clustered = (run["counters"][0]["bytes"]["comm"] for run in runs)
    assert clustered < 0.5 * plain
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)


def test_labels_and_dense_values_of_a_file_are_what_is_trained_on(tmp_path: Path) -> None:
    rows = [(i * i % 2, i % 5, i % 9, i % 7) for i in range(64)]
    files = {
        "plain": "label,I1,a,b\n" + "".join(f"{y},{d},{a},{b}\n" for y, d, a, b in rows),
        "flipped": "label,I1,a,b\n" + "".join(f"{1 - y},{d},{a},{b}\n" for y, d, a, b in rows),
        "dense": "label,I1,a,b\n" + "".join(f"{y},{d + 1},{a},{b}\n" for y, d, a, b in rows),
        "keys": "a,b\n" + "".join(f"{a},{b}\n" for _, _, a, b in rows),
    }
    found = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        found[name] = train_on_pool(data=tmp_path / name, steps=None)
    assert len({tuple(each["losses"]) for each in found.values()}) == 4
    assert found["plain"]["data"] == {"label": "label", "dense": ("I1",), "sparse": ("a", "b"), "synthetic": ()}
    assert found["keys"]["data"]["synthetic"] == ("labels", "dense")


def test_ratings_are_predicted_above_chance_and_alike_by_every_synchronous_schedule(shared_data: Path) -> None:
    ratings = shared_data / "real" / "keys" / "movielens_latest_small_ratings.csv.gz"
    columns: dict[str, Any] = {"label": "rating>=4", "sparse": ("userId", "movieId"), "ids": IdKind.HASH}
    sizes = {"batch_size": 256, "num_rows": 20_000, "dim": 8, "micro_batches": 2, "steps": 100, "hidden": (16,)}
    rates = {"lr": 0.2, "dense_lr": 0.02}
    found = [train_on_pool(data=ratings, schedule=name, **columns, **sizes, **rates) for name in ("sync", "nestpipe")]
    assert found[0]["auc"] > 0.6
    assert found[1]["auc"] == found[0]["auc"]
    assert found[0]["data"]["synthetic"] == ("dense",)
