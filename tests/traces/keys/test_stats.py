"""Key statistics equal the published numbers of the public files, and a brute-force count by sets on made-up ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from nestpipe.base.errors import TraceError
from nestpipe.cli.keys import cluster, keys
from tests.paths import SHARED_DATA
from traces.keys.generate import Bag, ZipfFeature, criteo_like, generate_stream
from traces.keys.reader import read_keys
from traces.keys.sets import micro_batch_duplication, stream_statistics
from traces.keys.stats import (
    extrapolated_statistics,
    key_statistics,
    largest_world_size,
    resample,
    split_matrix,
)
from traces.keys.stream import KeyStream, owner_of

SHARED = SHARED_DATA / "real"
KEYS = SHARED / "keys"
needs_shared = pytest.mark.skipif(not KEYS.is_dir(), reason="the public key files are not here (../shared/data/real)")
CRITEO = [KEYS / f"criteo_tb_recis_part-{part}.csv.gz" for part in range(3)]
RATINGS = KEYS / "movielens_latest_small_ratings.csv.gz"

app = typer.Typer(pretty_exceptions_enable=False)
app.command("keys")(keys)
app.command("cluster")(cluster)


@cache
def criteo(parts: tuple[int, ...] = (0, 1, 2)) -> KeyStream:
    return read_keys([CRITEO[part] for part in parts])


PUBLISHED = {
    "criteo part-0 all 26 columns": lambda: criteo((0,)),
    "criteo (0, 1, 2) concatenated": criteo,
    "criteo column c1 (3 parts concatenated)": lambda: criteo().select(["c1"]),
    "criteo column c9 (3 parts concatenated)": lambda: criteo().select(["c9"]),
    "movielens movieId file order": lambda: read_keys(RATINGS),
    "movielens movieId timestamp order (stable sort)": lambda: read_keys(RATINGS, order_by="timestamp"),
    "movielens userId timestamp order": lambda: read_keys(RATINGS, columns=["userId"], order_by="timestamp"),
    "dlrm_datasets medium": lambda: read_keys(KEYS / "dlrm_datasets_table_medium_reuse_500K.txt.gz"),
    "criteo kaggle deepctr 200": lambda: read_keys(KEYS / "criteo_kaggle_deepctr_200.csv"),
    "slot_dnn demo": lambda: read_keys(KEYS / "paddlerec_slot_dnn_demo10.txt.gz"),
}


@needs_shared
@pytest.mark.parametrize("title", PUBLISHED)
def test_statistics_equal_the_published_ones(title: str) -> None:
    expected = json.loads((SHARED / "expected.json").read_text())["keys"][title]
    stream = PUBLISHED[title]()
    for name, numbers in expected.items():
        if re.fullmatch(r"B\d+", name):
            found = stream_statistics(stream, int(name[1:]))
            assert found.batches == numbers["batches"]
            for field in ("unique_ratio", "overlap_unique", "overlap_lookups"):
                assert getattr(found, field) == pytest.approx(numbers[field], abs=5.1e-5)
    whole = stream_statistics(stream, 1)
    assert (whole.samples, whole.lookups, whole.unique) == (
        expected["samples"],
        expected["lookups"],
        expected["unique"],
    )
    assert whole.zipf_ls == pytest.approx(expected["zipf_ls"][0], abs=5.1e-4)
    assert whole.zipf_ls_ranks == expected["zipf_ls"][1]
    assert whole.zipf_mle == pytest.approx(expected["zipf_mle"], abs=5.1e-4)
    tops = [expected["top_0.1%"], expected["top_1%"], expected["top_10%"]]
    assert list(whole.top_shares) == pytest.approx(tops, abs=5.1e-5)


def pairs(stream: KeyStream) -> Iterator[list[tuple[int, int]]]:
    """The (feature, value) pairs of each sample."""
    flat = list(zip(stream.feature_of_lookup().tolist(), stream.values.tolist(), strict=True))
    for start, stop in zip(stream.sample_offsets[:-1], stream.sample_offsets[1:], strict=True):
        yield flat[start:stop]


def brute_force(stream: KeyStream, batch: int, world_size: int) -> dict[str, Any]:
    """The definitions word for word, with Python sets."""
    samples = list(pairs(stream))
    keys_of = dict(
        zip(
            (pair for sample in samples for pair in sample),
            owner_of(stream.row_keys(), world_size).tolist(),
            strict=True,
        )
    )
    num = len(samples) // (batch * world_size)
    chunk = [[p for s in samples[i * batch : (i + 1) * batch] for p in s] for i in range(num * world_size)]
    sets = [set(one) for one in chunk]
    unions = [set().union(*sets[t * world_size : (t + 1) * world_size]) for t in range(num)]
    received = np.zeros((num, world_size))
    rows = np.zeros((num, world_size))
    shared = np.zeros((num, world_size))
    for t in range(num):
        for r in range(world_size):
            for key in sets[t * world_size + r]:
                received[t, keys_of[key]] += 1
        for key in unions[t]:
            rows[t, keys_of[key]] += 1
            shared[t, keys_of[key]] += t > 0 and key in unions[t - 1]
    mine = [len(sets[i] & sets[i - world_size]) for i in range(world_size, len(sets))]
    return {
        "received_max": received.max(axis=1).mean(),
        "received": received.mean(),
        "rows": rows.mean(),
        "rows_max": rows.max(axis=1).mean(),
        "shared_rank": np.mean(mine) if mine else None,
        "shared_owner": shared[1:].mean() if num > 1 else None,
        "overlap_owner": np.mean([len(unions[t] & unions[t - 1]) / len(unions[t]) for t in range(1, num)])
        if num > 1
        else None,
    }


@st.composite
def streams(draw: st.DrawFn) -> KeyStream:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    features = [
        ZipfFeature(name=f"f{i}", num_keys=draw(st.integers(1, 40)), exponent=1.0, mean_lookups=1.5, bag=Bag.POISSON)
        for i in range(draw(st.integers(1, 3)))
    ]
    features.append(ZipfFeature(name="always", num_keys=30, exponent=0.5))
    return generate_stream(features, draw(st.integers(24, 60)), rng)


@settings(max_examples=60, deadline=None)
@given(stream=streams(), batch=st.integers(1, 6), world_size=st.integers(1, 4))
def test_cluster_statistics_equal_brute_force(stream: KeyStream, batch: int, world_size: int) -> None:
    truth = brute_force(stream, batch, world_size)
    found = key_statistics(stream, batch=batch, world_size=world_size)
    assert found.unique_keys_per_rank == pytest.approx(truth["received"])
    assert found.received_keys_per_owner_max == pytest.approx(truth["received_max"])
    assert found.rows_per_owner == pytest.approx(truth["rows"])
    assert found.rows_per_owner_max == pytest.approx(truth["rows_max"])
    assert found.shared_keys_per_rank == (None if truth["shared_rank"] is None else pytest.approx(truth["shared_rank"]))
    assert found.shared_rows_per_owner == (
        None if truth["shared_owner"] is None else pytest.approx(truth["shared_owner"])
    )
    assert found.overlap_at_owner == (None if truth["overlap_owner"] is None else pytest.approx(truth["overlap_owner"]))


@settings(max_examples=40, deadline=None)
@given(stream=streams(), batch=st.integers(1, 6), world_size=st.integers(1, 4))
def test_splits_sum_to_what_ranks_send_and_owners_receive(stream: KeyStream, batch: int, world_size: int) -> None:
    matrix = split_matrix(stream, batch, world_size)
    first = key_statistics(stream.slice(0, batch * world_size), batch=batch, world_size=world_size)
    assert matrix.shape == (world_size, world_size)
    assert matrix.sum() == pytest.approx(first.unique_keys_per_rank * world_size)
    assert matrix.sum(axis=0).max() == first.received_keys_per_owner_max
    assert first.split_skew == pytest.approx(matrix.max() / matrix.mean())


def test_overlap_at_the_owner_exceeds_that_of_ranks_that_swap_their_samples() -> None:
    # rank 0 sees keys 0..3 then 4..7, rank 1 the other way round: no rank repeats a key, the owners repeat them all
    values = np.array([*range(4), *range(4, 8), *range(4, 8), *range(4)], dtype=np.uint64)
    stream = KeyStream(features=("f",), values=values, offsets=np.arange(17), source="test")
    found = key_statistics(stream, batch=4, world_size=2)
    assert found.shared_keys_per_rank == 0
    assert found.overlap_at_owner == 1


def test_micro_batches_send_a_row_once_each() -> None:
    values = np.array([1, 2, 1, 2], dtype=np.uint64)
    stream = KeyStream(features=("f",), values=values, offsets=np.arange(5), source="test")
    rng = np.random.default_rng(0)
    found = micro_batch_duplication(
        stream, batch=4, micro_batches=2, rng=rng, clustering=lambda *_: np.array([0, 1, 0, 1])
    )
    assert (found.in_order, found.clustered) == (2.0, 1.0)
    assert micro_batch_duplication(stream, batch=4, micro_batches=1, rng=rng).in_order == 1.0
    with pytest.raises(TraceError, match="between 1 and the batch of 4"):
        micro_batch_duplication(stream, batch=4, micro_batches=5, rng=rng)


def test_a_short_stream_is_refused_with_the_way_out() -> None:
    stream = generate_stream(criteo_like(3), 100, np.random.default_rng(0))
    assert largest_world_size(stream, 10) == 5
    with pytest.raises(TraceError, match=r"100 samples do not fill one global batch of 10 x 16; use at most 10 ranks"):
        key_statistics(stream, batch=10, world_size=16)
    with pytest.raises(TraceError, match="use a smaller batch"):
        key_statistics(stream, batch=101, world_size=1)


def test_extrapolation_from_half_a_stream_meets_what_the_whole_measures() -> None:
    stream = generate_stream(criteo_like(12, 100_000), 16_384, np.random.default_rng(1))
    measured = key_statistics(stream, batch=64, world_size=64)
    guessed = extrapolated_statistics(stream.slice(0, 4096), batch=64, world_size=64)
    assert guessed.origin == "extrapolated"
    assert guessed.rows_per_owner == pytest.approx(measured.rows_per_owner, rel=0.05)
    assert guessed.received_keys_per_owner_max == pytest.approx(measured.received_keys_per_owner_max, rel=0.1)
    assert guessed.shared_rows_per_owner == pytest.approx(measured.shared_rows_per_owner, rel=0.2)


def test_resampling_is_seeded_and_has_no_new_key() -> None:
    stream = generate_stream(criteo_like(4), 300, np.random.default_rng(0))
    one, two = (resample(stream, 1000, np.random.default_rng(7)) for _ in range(2))
    assert np.array_equal(one.code, two.code)
    assert set(one.keys[one.code].tolist()) <= set(stream.row_keys().tolist())
    assert "resampled" in one.source


def run(*arguments: str) -> tuple[int, str, Exception | None]:
    result = CliRunner().invoke(app, list(arguments))
    error = result.exception if isinstance(result.exception, Exception) else None
    return result.exit_code, result.stdout, error


@pytest.fixture
def log(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    path = tmp_path / "log.csv"
    rows = [f"{rng.zipf(1.5)},{rng.integers(2**63, dtype=np.uint64) * 2 % 50},{rng.integers(9)}" for _ in range(640)]
    path.write_text("user,item,c\n" + "\n".join(rows) + "\n")
    return str(path)


def test_command_prints_the_definitions_as_json(log: str) -> None:
    code, text, _ = run("keys", log, "--batch", "32", "--world-size", "4", "--micro-batches", "4", "--format", "json")
    result = json.loads(text)
    stream = read_keys(log)
    plain = stream_statistics(stream, 32)
    world = key_statistics(stream, batch=32, world_size=4)
    assert code == 0
    assert result["unique_ratio"] == plain.unique_ratio
    assert result["overlap_lookups"] == plain.overlap_lookups
    assert result["per_column"]["item"]["unique"] == stream_statistics(stream.select(["item"]), 32).unique
    assert result["owner"]["skew"] == world.owner_skew
    assert result["global_batch"]["overlap_unique"] == world.overlap_at_owner
    assert result["owner"]["origin"] == "measured"
    assert np.array(result["splits"]["matrix"]).shape == (4, 4)
    assert 1 <= result["micro_batch"]["clustered"] <= result["micro_batch"]["random"]
    assert result["notes"] == []


def test_command_says_when_the_file_is_too_short(log: str) -> None:
    _, text, _ = run("keys", log, "--batch", "32", "--world-size", "100", "--format", "json")
    result = json.loads(text)
    assert result["owner"]["origin"] == "extrapolated"
    assert "640 samples are fewer than two global batches of 32 x 100 = 6400" in result["notes"][0]
    _, text, _ = run(
        "keys", log, "--batch", "32", "--world-size", "100", "--resample", "--seed", "3", "--format", "json"
    )
    assert json.loads(text)["owner"]["origin"] == "resampled"
    _, text, _ = run("keys", log, "--batch", "1000", "--format", "json")
    result = json.loads(text)
    assert (result["batches"], result["unique_ratio"], result["unique"] > 0) == (0, None, True)
    assert "do not fill one batch of 1000" in result["notes"][0]


def test_command_prints_text_and_csv(log: str) -> None:
    code, text, _ = run("keys", log, "--batch", "32", "--world-size", "4")
    assert code == 0
    assert "at the owner, 4 ranks (measured)" in text
    _, text, _ = run("keys", log, "--batch", "32", "--format", "csv")
    assert "\nunique_ratio,0." in text


def test_cluster_command_writes_the_assignment(log: str, tmp_path: Path) -> None:
    out = tmp_path / "assigned.csv"
    code, text, _ = run("cluster", log, "--batch", "64", "--micro-batches", "4", "--out", str(out), "--format", "json")
    result = json.loads(text)
    row = result["micro_batches"][0]
    assert code == 0
    assert row["duplicate_rows_clustered"] < row["duplicate_rows_random"]
    lines = out.read_text().splitlines()
    assert lines[0] == "sample,batch,micro_batch"
    assert len(lines) == 641


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--world-size", "-3"], "--world-size must be at least 1, got -3"),
        (["--batch", "4", "--micro-batches", "8"], r"--micro-batches must be at most --batch \(4\), got 8"),
        (["--world-size", "100000000"], "--world-size must be at most 10,000,000, got 100,000,000"),
        (["--batch", "32", "--world-size", "5000000", "--resample"], "320,000,000 samples .* draw at most 33,333,333"),
        (["--column", "itme"], "did you mean 'item'"),
        (["--order-by", "when"], "unknown column 'when'"),
        (["--sequence", "5"], "a sequence needs two columns, the user and the item: name both"),
    ],
)
def test_bad_usage_is_one_clear_error(log: str, arguments: list[str], message: str) -> None:
    _, _, error = run("keys", log, *arguments)
    assert isinstance(error, TraceError)
    assert re.search(message, str(error))


@pytest.mark.parametrize("command", ["keys", "cluster"])
@pytest.mark.parametrize("option", ["--seed", "--sequence"])
def test_a_negative_number_is_bad_usage(log: str, command: str, option: str) -> None:
    assert run(command, log, option, "-1")[0] == 2
