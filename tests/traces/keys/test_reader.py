"""Key files are read as what they are: counts of the public files, and every quirk that a log can have."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.base.errors import TraceError
from tests.paths import INPUTS, SHARED_DATA
from traces.keys.generate import Bag, ZipfFeature, generate_stream, zipf_ranks
from traces.keys.reader import KeyFormat, detect_layout, read_keys
from traces.keys.stream import KeyStream, group_sequences, join_streams, mix64, owner_of, row_keys, text_key

SHARED = SHARED_DATA / "real"
KEYS = SHARED / "keys"
needs_shared = pytest.mark.skipif(not KEYS.is_dir(), reason="the public key files are not here (../shared/data/real)")


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def bags(stream: KeyStream) -> list[list[list[int]]]:
    """Nested lists: samples, features, values."""
    flat = [stream.values[a:b].tolist() for a, b in pairwise(stream.offsets)]
    width = len(stream.features)
    return [flat[i : i + width] for i in range(0, len(flat), width)]


PUBLIC = {
    "criteo_tb_recis_part-0.csv.gz": (KeyFormat.CSV, "criteo part-0 all 26 columns"),
    "movielens_latest_small_ratings.csv.gz": (KeyFormat.MOVIELENS, "movielens movieId file order"),
    "dlrm_datasets_table_medium_reuse_500K.txt.gz": (KeyFormat.INDEX_LIST, "dlrm_datasets medium"),
    "criteo_kaggle_deepctr_200.csv": (KeyFormat.CSV, "criteo kaggle deepctr 200"),
    "paddlerec_slot_dnn_demo10.txt.gz": (KeyFormat.SLOTS, "slot_dnn demo"),
}


@needs_shared
@pytest.mark.parametrize("name", PUBLIC)
def test_public_file_has_its_published_counts(name: str) -> None:
    kind, title = PUBLIC[name]
    expected = json.loads((SHARED / "expected.json").read_text())["keys"][title]
    stream = read_keys(KEYS / name)
    assert detect_layout(KEYS / name).format is kind
    assert stream.num_samples == expected["samples"]
    assert stream.num_lookups == expected["lookups"]
    assert len(np.unique(stream.row_keys())) == expected["unique"]


@needs_shared
def test_a_report_that_is_no_key_file_is_refused() -> None:
    with pytest.raises(TraceError, match=r"locality_stats\.txt: line 2: expected an integer"):
        read_keys(KEYS / "dlrm_datasets_2021_locality_stats.txt")


@needs_shared
def test_a_file_read_in_pieces_is_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = KEYS / "criteo_tb_recis_part-0.csv.gz"
    whole = read_keys(path)
    monkeypatch.setattr("traces.keys.reader._BLOCK_BYTES", 1 << 15)
    joined = read_keys(path)
    assert np.array_equal(joined.values, whole.values)
    assert np.array_equal(joined.offsets, whole.offsets)


def test_empty_cells_are_no_lookup_and_the_largest_keys_survive(tmp_path: Path) -> None:
    path = write(tmp_path / "k.csv", "c1,c2\n18446744073709551615,\n,-1\n9223372036854775808,0\n")
    assert bags(read_keys(path)) == [[[2**64 - 1], []], [[], [2**64 - 1]], [[2**63], [0]]]


def test_text_that_is_not_a_canonical_integer_is_hashed(tmp_path: Path) -> None:
    path = write(tmp_path / "k.csv", "id\n007\n7\n05db9164\n")
    assert read_keys(path).values.tolist() == [text_key("007"), 7, text_key("05db9164")]


def test_names_in_any_script_are_columns_and_ids(tmp_path: Path) -> None:
    assert read_keys(write(tmp_path / "k.csv", "商品\nläufer\n")).values.tolist() == [text_key("läufer")]


def test_an_empty_line_of_a_single_column_is_a_sample_without_lookup(tmp_path: Path) -> None:
    stream = read_keys(write(tmp_path / "k.csv", "item\n5\n\n7\n"))
    assert bags(stream) == [[[5]], [[]], [[7]]]


def test_label_dense_and_time_columns_are_not_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "k.csv", "label,I1,timestamp,user,C1\n1,0.5,99,4,0a1b2c3d\n")
    assert detect_layout(path).default_columns == ("user", "C1")


def test_criteo_without_header_is_known_by_its_forty_columns(tmp_path: Path) -> None:
    row = "\t".join(["1", *["3"] * 13, *[f"{i:08x}" for i in range(26)]])
    path = write(tmp_path / "day_0", row + "\n" + row.replace("00000005", "") + "\n")
    stream = read_keys(path)
    assert detect_layout(path).format is KeyFormat.CRITEO
    assert stream.features == tuple(f"C{i}" for i in range(1, 27))
    assert stream.num_lookups == 51


def test_the_test_half_of_criteo_has_no_label(tmp_path: Path) -> None:
    path = write(tmp_path / "t", "\t".join([*["3"] * 13, *["68fd1e64"] * 26]) + "\n")
    assert read_keys(path).num_lookups == 26


@pytest.mark.parametrize(
    "text",
    [
        "userId,movieId,rating,timestamp\n1,31,2.5,1260759144\n1,29,3.0,1260759179\n",
        "1::31::5::978300760\n1::29::3::978302109\n",
        "1\t31\t3\t881250949\n1\t29\t3\t891717742\n",
    ],
)
def test_movielens_in_its_three_spellings(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "ratings", text)
    assert detect_layout(path).format is KeyFormat.MOVIELENS
    assert read_keys(path).values.tolist() == [31, 29]
    assert read_keys(path, columns=["userId", "movieId"]).values.tolist() == [1, 31, 1, 29]


def test_order_is_by_time_and_stable(tmp_path: Path) -> None:
    path = write(tmp_path / "r.csv", "userId,movieId,rating,timestamp\n1,10,1,5\n2,20,1,3\n3,30,1,5\n4,40,1,3\n")
    assert read_keys(path, order_by="timestamp").values.tolist() == [20, 40, 10, 30]


def test_kuairand_log_columns(tmp_path: Path) -> None:
    head = "user_id,video_id,date,hourmin,time_ms,is_click,is_like,long_view,play_time_ms,duration_ms,is_rand,tab"
    path = write(tmp_path / "log.csv", f"{head}\n0,7531,20220408,1400,1649400,1,0,0,1000,9000,0,1\n")
    layout = detect_layout(path)
    assert layout.format is KeyFormat.KUAIRAND
    assert layout.key_columns == ("user_id", "video_id", "tab")
    assert read_keys(path).values.tolist() == [7531]


def test_index_list_one_a_line_or_bags(tmp_path: Path) -> None:
    assert bags(read_keys(write(tmp_path / "a.txt", "5\n7\n5\n"))) == [[[5]], [[7]], [[5]]]
    assert bags(read_keys(write(tmp_path / "b.txt", "5 7\n5\n"))) == [[[5, 7]], [[5]]]
    assert bags(read_keys(write(tmp_path / "c.txt", "5,7\n5\n"))) == [[[5, 7]], [[5]]]


def test_slot_file_drops_the_label_and_sorts_its_slots(tmp_path: Path) -> None:
    path = write(tmp_path / "s.txt", "0:1 18446744073709551615:30 5:4 6:30\n1:1 7:4\n")
    stream = read_keys(path)
    assert stream.features == ("4", "30")
    assert bags(stream) == [[[5], [2**64 - 1, 6]], [[7], []]]


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "keys.csv"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbfa,b\r\n1,2\r\n3,\r\n"))
    assert read_keys(path).features == ("a", "b")
    assert read_keys(path).values.tolist() == [1, 2, 3]


def test_a_header_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"a\.csv: no samples; expected at least one line of keys"):
        read_keys(write(tmp_path / "a.csv", "key\n"))


def test_parts_are_read_one_after_the_other(tmp_path: Path) -> None:
    one, two = write(tmp_path / "1.csv", "a,b\n1,2\n"), write(tmp_path / "2.csv", "a,b\n3,4\n")
    assert read_keys([one, two]).values.tolist() == [1, 2, 3, 4]


def damaged() -> dict[str, bytes]:
    return {
        "empty": b"",
        "blank": b"\n \n",
        "binary": bytes(range(256)) * 8,
        "short row": b"a,b,c\n1,2,3\n1,2\n",
        "long row": b"a,b\n1,2\n1,2,3\n",
        "truncated gzip": gzip.compress(b"a,b\n" + b"1,2\n" * 5000)[:-20],
        "gzip of garbage": b"\x1f\x8b" + bytes(range(200)),
        "json": b'{"traceEvents": [\n{"ph": "X"}]}',
        "prose": b"This is a report,\nnot a table, of keys\n",
        "words in an index list": b"1\n2\nthree\n",
        "bad slot": b"0:1 5:x\n",
        "slot key beyond 64 bits": b"0:1 99999999999999999999999:4\n",
        "only empty cells": b"a,b\n,\n,\n",
        "a column twice": b"a,a\n1,2\n",
        "late binary": b"a,b\n1,2\n" + b"\xff\xfe,3\n",
    }


@pytest.mark.parametrize("name", damaged())
def test_damaged_input_is_refused_with_its_path(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(damaged()[name])
    with pytest.raises(TraceError, match=r"bad\.txt"):
        read_keys(path)


def test_missing_file_folder_and_unknown_column(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nosuch\.csv: no such file"):
        read_keys(tmp_path / "nosuch.csv")
    with pytest.raises(TraceError, match=r"cannot be read"):
        read_keys(tmp_path)
    path = write(tmp_path / "k.csv", "user,item\n1,2\n")
    with pytest.raises(TraceError, match=r"unknown column 'itme'.*did you mean 'item'"):
        read_keys(path, columns=["itme"])


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f"
    path.write_bytes(data)
    try:
        stream = read_keys(path)
    except TraceError:
        return
    assert stream.num_lookups > 0


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet='0123456789abc,:\t\n "-.;', max_size=120))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f"
    path.write_text(text)
    try:
        read_keys(path)
    except TraceError:
        return


def test_mix64_is_splitmix64() -> None:
    # the first outputs of SplittableRandom's generator from seed 0 are its finaliser of 0, gamma, 2 gamma
    gamma = 0x9E3779B97F4A7C15
    states = np.array([0, gamma, 2 * gamma % 2**64], dtype=np.uint64)
    assert mix64(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_owners_are_even_and_equal_for_both_integer_types() -> None:
    keys = np.arange(100_000, dtype=np.int64) - 50_000
    owners = owner_of(keys, 7)
    assert np.array_equal(owners, owner_of(keys.view(np.uint64), 7))
    assert np.bincount(owners, minlength=7).max() < 1.02 * len(keys) / 7
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        owner_of(keys, 0)


def test_equal_values_of_two_features_are_two_rows() -> None:
    stream = KeyStream(
        features=("a", "b"), values=np.array([1, 1], dtype=np.uint64), offsets=np.array([0, 1, 2]), source="test"
    )
    assert stream.row_keys()[0] != stream.row_keys()[1]
    assert stream.row_keys()[1:].tolist() == row_keys(np.array([1], dtype=np.uint64), "b").tolist()


@st.composite
def streams(draw: st.DrawFn) -> KeyStream:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    features = [
        ZipfFeature(
            name=f"f{i}", num_keys=20, exponent=1.1, mean_lookups=draw(st.sampled_from([0, 1, 2])), bag=Bag.POISSON
        )
        for i in range(draw(st.integers(1, 3)))
    ]
    return generate_stream(features, draw(st.integers(1, 30)), rng)


@settings(max_examples=50, deadline=None)
@given(stream=streams(), batch=st.integers(1, 12))
def test_batches_partition_the_stream(stream: KeyStream, batch: int) -> None:
    parts = list(stream.batches(batch, drop_last=False))
    assert [one for part in parts for one in bags(part)] == bags(stream)
    assert [part.num_samples for part in stream.batches(batch)] == [batch] * (stream.num_samples // batch)


@settings(max_examples=50, deadline=None)
@given(stream=streams(), data=st.data())
def test_take_and_select_pick_bags(stream: KeyStream, data: st.DataObject) -> None:
    order = data.draw(st.lists(st.integers(0, stream.num_samples - 1), max_size=10))
    all_bags = bags(stream)
    assert bags(stream.take(np.array(order, dtype=np.int64))) == [all_bags[i] for i in order]
    last = stream.features[-1]
    assert bags(stream.select([last])) == [[sample[-1]] for sample in all_bags]


def test_sequences_are_user_histories_in_time_order() -> None:
    rows = np.array([[1, 10], [2, 20], [1, 11], [1, 12], [2, 21]], dtype=np.uint64)
    stream = KeyStream(features=("u", "i"), values=rows.ravel(), offsets=np.arange(11), source="test")
    # user 1 ends at row 3 with two runs, user 2 at row 4
    assert bags(group_sequences(stream, "u", "i", 2)) == [[[1], [10, 11]], [[1], [12]], [[2], [20, 21]]]


def test_streams_with_other_features_are_united() -> None:
    one = KeyStream(features=("a",), values=np.array([1], dtype=np.uint64), offsets=np.array([0, 1]), source="x")
    two = KeyStream(
        features=("b", "a"), values=np.array([2, 3], dtype=np.uint64), offsets=np.array([0, 1, 2]), source="y"
    )
    both = join_streams([one, two])
    assert both.features == ("a", "b")
    assert bags(both) == [[[1], []], [[3], [2]]]


@pytest.mark.parametrize(("num_keys", "exponent"), [(5, 0.0), (30, 0.7), (1000, 1.0), (10**12, 1.3)])
def test_generated_keys_follow_zipf(num_keys: int, exponent: float) -> None:
    count = 50_000
    ranks = zipf_ranks(num_keys, exponent, count, np.random.default_rng(3))
    seen = np.bincount(ranks[ranks < 30].astype(np.int64), minlength=min(30, num_keys))
    weights = np.arange(1, min(num_keys, 10**6) + 1, dtype=np.float64) ** -exponent
    tail = 0.0 if num_keys <= 10**6 else (10.0**6) ** (1 - exponent) / (exponent - 1)
    expected = count * weights[: len(seen)] / (weights.sum() + tail)
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected) + 1)


def test_same_seed_same_stream() -> None:
    features = [ZipfFeature(name="f", num_keys=100, exponent=1.0, mean_lookups=3.0, bag=Bag.LOGNORMAL)]
    one, two = (generate_stream(features, 200, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(one.values, two.values)
    assert np.array_equal(one.offsets, two.offsets)
    assert abs(one.num_lookups / 200 - 3) < 0.7


def test_floats_row_numbers_and_points_in_time_are_no_keys(tmp_path: Path) -> None:
    assert detect_layout(INPUTS / "keys-float-and-row-id.csv").default_columns == ("item_id", "position")
    rows = [
        f"{n + 7},{[5, 3, 9][n % 3]},{1_700_000_000 + 60 * (n % 4)},{1_700_000_000_123 + n % 2},{n % 5 / 2},{n % 5}.0,"
        f"{n}e1"
        for n in range(40)
    ]
    path = write(tmp_path / "k.csv", "row,item,when,when_ms,value,shop,hash\n" + "\n".join(rows) + "\n")
    # whole numbers with a point may be ids that a table library made floats, and an id may look like a power of ten
    assert detect_layout(path).default_columns == ("item", "shop", "hash")


def test_columns_without_a_header_have_to_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "k.csv", "5,7,8\n9,7,8\n")
    with pytest.raises(TraceError, match=r"has no header, so which of its columns c1, c2, c3 hold keys is unknown"):
        read_keys(path)
    assert read_keys(path, columns=["c2"]).values.tolist() == [7, 7]
