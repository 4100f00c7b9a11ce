"""Benchmarks of collectives: every tool's table gives the same columns, and damaged ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from tests.paths import INPUTS
from tests.traces.formats.samples import HCCL_OTHER_UNITS, HCCL_TEXT, NCCL_TEXT, nccl_json
from traces.formats.bus_ratios import read_bus_ratios
from traces.formats.collective_logs import read_collective_log
from traces.formats.dtypes import element_bytes
from traces.formats.importing import detect, import_traces
from traces.formats.measurement import COLLECTIVE_COLUMNS
from traces.formats.nccl_text import bus_factor

WORDS = {"alltoall": "all_to_all", "allreduce": "all_reduce", "reducescatter": "reduce_scatter"}
# file: ranks, rows out of place, least and largest size (B), least time (us); of the largest: us, algbw, busbw (GB/s)
GROUND_TRUTH = {
    "nccl_a100x8_alltoall": (8, 29, 32, 8589934592, 86.02, 33508, 256.36, 224.31),
    "nccl_a100x8_allreduce": (8, 32, 4, 8589934592, 34.53, 63896, 134.44, 235.26),
    "nccl_a100x8_reducescatter": (8, 29, 32, 8589934592, 34.38, 32464, 264.60, 231.52),
    "oci_gb200_alltoall_4gpu_1node": (4, 2, 4294967296, 8589934592, 5267.6, 10470, 820.40, 615.30),
    "oci_gb200_alltoall_8gpu_1rack": (8, 2, 8589934592, 17179869184, 11426, 22698, 756.88, 662.27),
    "oci_gb200_alltoall_64gpu_1rack": (64, 2, 4294967296, 8589934592, 7465.7, 13574, 632.81, 622.92),
    "oci_gb200_alltoall_128gpu_2racks": (128, 2, 4294967296, 8589934592, 48079, 95018, 90.40, 89.70),
    "oci_gb200_alltoall_192gpu_3racks": (192, 2, 4294967296, 8589934592, 70159, 136749, 62.82, 62.49),
    "oci_gb200_allreduce_4gpu_1node": (4, 2, 4294967296, 8589934592, 9801.3, 19424, 442.22, 663.34),
    "oci_gb200_allreduce_1rack_mislabelled_gpu_count": (64, 2, 4294967296, 8589934592, 9878.8, 18967, 452.90, 891.64),
    "oci_gb200_allreduce_128gpu_2racks": (128, 2, 4294967296, 8589934592, 11311, 21313, 403.04, 799.79),
    "oci_gb200_allreduce_192gpu_3racks": (192, 2, 4294967296, 8589934592, 12154, 22820, 376.43, 748.93),
    "rccl_mi355x_8gpu_1node_alltoall": (8, 21, 128, 134217728, 29.78, 364.47, 368.25, 322.22),
    "rccl_mi355x_16gpu_2nodes_allreduce": (16, 31, 16, 17179869184, 36.56, 83456.7, 205.85, 385.98),
}


def write(folder: Path, text: str, name: str = "some.log") -> Path:
    """A file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(GROUND_TRUTH))
def test_real_log_gives_the_published_figures(shared_data: Path, name: str) -> None:
    ranks, rows, smallest, largest, least_us, time_us, algbw, busbw = GROUND_TRUTH[name]
    frame = read_collective_log(shared_data / "real" / "collectives" / f"{name}.log")
    own = frame[~frame["in_place"]]
    last = own.iloc[-1]
    assert list(frame.columns) == list(COLLECTIVE_COLUMNS)
    assert set(frame["world_size"]) == {ranks}
    assert (len(own), own["size_bytes"].min(), own["size_bytes"].max()) == (rows, smallest, largest)
    assert own["time_ns"].min() == round(least_us * 1000)
    assert last["time_ns"] == round(time_us * 1000)
    assert (last["algbw_bytes_per_s"], last["busbw_bytes_per_s"]) == (round(algbw * 1e9), round(busbw * 1e9))
    assert set(frame["collective"]) == {next(known for word, known in WORDS.items() if word in name)}
    assert frame["source"].str.startswith("measured: ").all()


@pytest.mark.parametrize(
    ("name", "collective", "ranks"),
    [("nccl_a100x8_reducescatter", "reduce_scatter", 8), ("oci_gb200_alltoall_192gpu_3racks", "all_to_all", 192)],
)
def test_collective_is_found_without_the_file_name(
    shared_data: Path, tmp_path: Path, name: str, collective: str, ranks: int
) -> None:
    text = (shared_data / "real" / "collectives" / f"{name}.log").read_text(encoding="utf-8")
    frame = read_collective_log(write(tmp_path, text, f"{ranks}gpu.log"))
    assert set(frame["collective"]) == {collective}
    assert set(frame["world_size"]) == {ranks}


def test_rows_of_a_text_log_keep_time_and_printed_bandwidth(tmp_path: Path) -> None:
    frame = read_collective_log(write(tmp_path, NCCL_TEXT))
    assert frame[["size_bytes", "time_ns", "in_place"]].values.tolist() == [
        [1024, 20_500, False],
        [1024, 21_000, True],
        [134217728, 1_000_000, False],
        [134217728, 1_100_000, True],
    ]
    assert set(frame["collective"]) == {"all_to_all"}
    assert set(frame["world_size"]) == {2}
    assert frame.attrs["average_busbw_bytes_per_s"] == 33_560_000_000
    # two digits say less than size over time
    assert frame["algbw_bytes_per_s"].iloc[0] == pytest.approx(1024 / 20.5e-6)
    assert frame["algbw_bytes_per_s"].iloc[2] == 134_220_000_000


def _of_64_ranks() -> str:
    """An all_reduce whose program computed busbw with 64 ranks: 1.96875 = 2 * 63 / 64."""
    text = NCCL_TEXT.replace("alltoall_perf", "all_reduce_perf").replace("134.22   67.11", "134.22  264.25")
    return text.replace("122.02   61.01", "122.02  240.23")


def test_a_device_list_that_the_bandwidths_contradict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"list of devices has 2 ranks, but busbw/algbw of all_reduce is that of 64;"):
        read_collective_log(write(tmp_path, _of_64_ranks()))


def test_ranks_are_inferred_only_where_one_number_fits(tmp_path: Path) -> None:
    lines = [line for line in _of_64_ranks().splitlines() if "device" not in line]
    frame = read_collective_log(write(tmp_path, "\n".join(lines)))
    assert set(frame["world_size"]) == {64}
    assert frame["source"].str.contains("inferred").all()
    # of 100 ranks and more the printed digits tell several powers of two
    text = "\n".join(lines).replace("264.25", "268.44").replace("240.23", "244.04")
    with pytest.raises(TraceError, match=r"allows \d+ or more ranks; write the number into the file's name"):
        read_collective_log(write(tmp_path, text))
    assert set(read_collective_log(write(tmp_path, text, "x_32768gpu.log"))["world_size"]) == {32768}


def test_a_log_that_could_be_several_collectives_is_refused(tmp_path: Path) -> None:
    text = "\n".join(line.replace("N/A", "0") for line in NCCL_TEXT.splitlines() if "starting" not in line)
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=r"allows all_to_all, all_gather; name it in the file's name"):
        read_collective_log(path)
    assert set(read_collective_log(path, collective="all_gather")["collective"]) == {"all_gather"}
    # the root column tells the collectives that have a root
    with pytest.raises(TraceError, match=r"allows gather, scatter; name it in the file's name"):
        read_collective_log(write(tmp_path, text.replace("none      -1", "none       0")))
    # without checks and without a root nothing tells
    with pytest.raises(TraceError, match=r"allows all_to_all, all_gather, gather, scatter; name it"):
        read_collective_log(INPUTS / "import-nccl-unnamed.log")


def test_a_test_of_no_known_collective_is_not_taken_for_another(tmp_path: Path) -> None:
    path = INPUTS / "import-hypercube.log"
    with pytest.raises(TraceError, match=r"the log says that it is of hypercube_perf, which measures none of"):
        read_collective_log(path)
    with pytest.raises(TraceError, match="hypercube_perf"):
        read_collective_log(write(tmp_path, path.read_text(encoding="utf-8"), "alltoall_8gpu.log"))
    document = {**nccl_json(), "args": ["./build/hypercube_perf"]}
    with pytest.raises(TraceError, match="must name the test program"):
        read_collective_log(write(tmp_path, json.dumps(document), "all_reduce.json"))
    record = {"name": "HyperCube", "ranks": 8, "size": 4096, "time": 9.5, "algBw": 1, "busBw": 1}
    with pytest.raises(TraceError, match="name must name the collective, got 'HyperCube'"):
        read_collective_log(write(tmp_path, json.dumps([record]), "all_reduce.json"))


def test_failed_checks_are_noted_and_stand_at_their_rows(tmp_path: Path) -> None:
    path = INPUTS / "import-nccl-wrong-count.log"
    frame = read_collective_log(path)
    assert frame["source"].str.contains("check failed: 4096 values wrong").tolist() == [True, False, False, False]
    (note,) = import_traces([path]).summary["coverage"]["notes"]
    assert "1 of 4 rows failed the benchmark's own check (4096 values wrong)" in note
    # a failure that is only in the last lines is one of all rows
    text = path.read_text(encoding="utf-8").replace("9.18   4096", "9.18    N/A")
    (note,) = import_traces([write(tmp_path, text, "a.log")]).summary["coverage"]["notes"]
    assert "4 of 4 rows failed" in note
    assert import_traces([write(tmp_path, NCCL_TEXT, "b.log")]).summary["coverage"]["notes"] == []
    wrong = HCCL_TEXT.replace("| success", "| failed", 1)
    (note,) = import_traces([write(tmp_path, wrong, "all_reduce_8npu.txt")]).summary["coverage"]["notes"]
    assert "1 of 2 rows failed" in note
    document = json.loads(json.dumps(nccl_json()).replace('"nwrong": null', '"nwrong": 7'))
    (note,) = import_traces([write(tmp_path, json.dumps(document), "c.json")]).summary["coverage"]["notes"]
    assert "2 of 2 rows failed the benchmark's own check (7 values wrong)" in note


def test_blanks_around_the_cells_of_a_csv_are_no_part_of_them(tmp_path: Path) -> None:
    path = INPUTS / "import-rccl-csv-spaces.csv"
    row = ["all_to_all", 8, 1048576, 100_000, "float"]
    names = ["collective", "world_size", "size_bytes", "time_ns", "dtype"]
    assert read_collective_log(path)[names].values.tolist() == [row]
    text = path.read_text(encoding="utf-8").replace(",", " ,\t") + "\n \n"
    assert read_collective_log(write(tmp_path, text, "x.csv"))[names].values.tolist() == [row]
    table = "num_gpus , message_size, op_name, latency, nccl_dtype\n 4, 128, all_gather, 0.005, half \n"
    assert read_collective_log(write(tmp_path, table, "y.csv"))["size_bytes"].tolist() == [256]


def test_hccl_text_needs_what_it_does_not_say(tmp_path: Path) -> None:
    path = write(tmp_path, HCCL_TEXT)
    with pytest.raises(TraceError, match="does not say which collective"):
        read_collective_log(path)
    with pytest.raises(TraceError, match="how many ranks"):
        read_collective_log(path, collective="all_reduce")
    frame = read_collective_log(write(tmp_path, HCCL_TEXT, "all_reduce_8npu.txt"))
    assert frame[["world_size", "size_bytes", "time_ns"]].values.tolist() == [[8, 8192, 41_200], [8, 67108864, 700_500]]
    assert frame["busbw_bytes_per_s"].iloc[1] == pytest.approx(67108864 / 700.5e-6 * 1.75)


def test_nccl_json_skips_size_zero_and_computes_what_is_nan(tmp_path: Path) -> None:
    frame = read_collective_log(write(tmp_path, json.dumps(nccl_json())))
    assert frame[["collective", "world_size", "size_bytes", "time_ns"]].drop_duplicates().values.tolist() == [
        ["all_reduce", 8, 1024000, 20_500]
    ]
    assert frame["busbw_bytes_per_s"].tolist() == [99_902_000_000, pytest.approx(49_951_000_000 * 1.75)]
    assert frame.attrs["average_busbw_bytes_per_s"] == 99_900_000_000


@pytest.mark.parametrize("form", ["array", "lines", "csv"])
def test_rccl_tests_records_in_all_their_forms(tmp_path: Path, form: str) -> None:
    record = {
        "name": "AllToAll",
        "ranks": 16,
        "size": 4096,
        "type": "float",
        "inPlace": 1,
        "time": 9.5,
        "algBw": 0.43,
        "busBw": 0.4,
    }
    text = json.dumps([record]) if form == "array" else json.dumps(record)
    if form == "csv":
        text = ",".join(record) + "\n" + ",".join(str(value) for value in record.values())
    row = read_collective_log(write(tmp_path, text)).iloc[0]
    assert row[["collective", "world_size", "size_bytes", "time_ns", "in_place"]].tolist() == [
        "all_to_all",
        16,
        4096,
        9500,
        True,
    ]


def test_elements_become_bytes_and_milliseconds_nanoseconds(shared_data: Path) -> None:
    folder = shared_data / "real" / "collectives"
    hccl = read_collective_log(folder / "hccl_ascend910b_all_to_all_2_8_16npu.csv")
    largest = hccl[hccl["size_bytes"] == 1073741824].set_index("world_size")
    assert largest["time_ns"].to_dict() == {2: 3_860_040, 8: 3_264_070, 16: 3_875_260}
    assert largest["busbw_bytes_per_s"].round(-8).to_dict() == {2: 139.1e9, 8: 287.8e9, 16: 259.8e9}
    for name, n8 in (("aic_h100_nccl_2.29.2", 315.2e9), ("aic_a100_nccl_2.27.3", 203.1e9)):
        frame = read_collective_log(folder / f"{name}.csv")
        row = frame[
            (frame["collective"] == "all_to_all") & (frame["world_size"] == 8) & (frame["dtype"] == "half")
        ].iloc[-1]
        assert len(frame) == 504
        assert row["size_bytes"] == 536870912
        assert round(row["busbw_bytes_per_s"], -8) == n8


def test_deepep_counts_tokens_so_sizes_are_unknown(shared_data: Path) -> None:
    frame = read_collective_log(shared_data / "real" / "collectives" / "aic_h100_deepep_normal_1to8nodes.csv")
    assert len(frame) == 2 * 437
    assert frame["size_bytes"].isna().all()
    chosen = (
        frame[frame["source"].str.contains(r"tokens 4096, SMs 20\b")]
        .groupby(["world_size", "collective"])["time_ns"]
        .first()
    )
    assert chosen[8, "dispatch"] == 491_240
    assert chosen[64, "combine"] == 4_461_000


def test_ratio_table_is_refused_as_a_log_and_read_as_ratios(shared_data: Path) -> None:
    path = shared_data / "real" / "collectives" / "simai_ata_ratio.csv"
    with pytest.raises(TraceError, match="read_bus_ratios"):
        read_collective_log(path)
    ratios = read_bus_ratios(path)
    first = ratios[(ratios["size_bytes"] == 16777216) & ratios["num_nodes"].notna()]
    assert first["busbw_ratio"].tolist() == [0.44, 0.52, 0.67, 0.64, 0.62]
    assert first["world_size"].tolist() == [8, 16, 32, 64, 128]


def test_several_tests_in_one_file_keep_their_own_collective(tmp_path: Path) -> None:
    second = NCCL_TEXT.replace("alltoall_perf", "reduce_scatter_perf")
    frame = read_collective_log(write(tmp_path, NCCL_TEXT + second))
    assert frame["collective"].tolist() == ["all_to_all"] * 4 + ["reduce_scatter"] * 4
    assert not frame.attrs


def test_a_table_of_a_tool_may_be_parquet(tmp_path: Path) -> None:
    row = {"nccl_dtype": "half", "num_gpus": 4, "message_size": 128, "op_name": "all_gather", "latency": 0.005}
    pd.DataFrame([row]).to_parquet(tmp_path / "nccl_perf.parquet")
    frame = read_collective_log(tmp_path / "nccl_perf.parquet")
    assert frame[["collective", "size_bytes", "time_ns"]].values.tolist() == [["all_gather", 256, 5000]]
    assert detect(tmp_path / "nccl_perf.parquet").name == "collective_log"


def test_one_placement_without_root_is_read_by_its_header(tmp_path: Path) -> None:
    text = "     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)\n"
    text += "    33554432        33554432    uint8         768          43.69          76.46\n"
    frame = read_collective_log(write(tmp_path, text, "allr_8ranks.txt"), collective="all_reduce")
    assert frame[["world_size", "size_bytes", "time_ns"]].values.tolist() == [[8, 33554432, 768_000]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no row of a collective log"),
        ("hello\nworld\n", "no row of a collective log"),
        ("   1024    128    float    none", "cut short"),
        ("num_gpus,message_size,op_name,latency,nccl_dtype\n4,12x,all_to_all,0.1,half", "message_size .*'12x'"),
        (
            "num_gpus,message_size,op_name,latency,nccl_dtype\n4,12,all_to_all,0.1,zzz",
            "'zzz' has no known element size",
        ),
        ("num_gpus,message_size,op_name,latency,nccl_dtype\n4,12,all_to_all,-1,half", "latency .*'-1'"),
        ('{"nccl_version": 1, "results": []}', "config.devices must list the ranks"),
    ],
)
def test_damaged_logs_name_the_value(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_collective_log(write(tmp_path, text))


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert [bus_factor(name, 4) for name in ("all_reduce", "all_gather", "all_to_all", "broadcast")] == [
        1.5,
        0.75,
        0.75,
        1,
    ]


@pytest.mark.parametrize(
    ("dtype", "width"), [("float", 4), ("BFloat16", 2), ("c10::Half", 2), ("long int", 8), ("Byte", 1)]
)
def test_element_sizes_in_the_spellings_of_traces(dtype: str, width: int) -> None:
    assert element_bytes(dtype) == width


def test_dtypes_of_the_columns_are_stable(tmp_path: Path) -> None:
    frame = read_collective_log(write(tmp_path, NCCL_TEXT))
    assert pd.api.types.is_integer_dtype(frame["time_ns"])
    assert frame["size_bytes"].dtype == "int64"
    assert frame["in_place"].dtype == bool


def test_hccl_columns_are_found_by_name_and_unit(tmp_path: Path) -> None:
    frame = read_collective_log(write(tmp_path, HCCL_OTHER_UNITS, "all_reduce_8npu.txt"))
    assert frame["size_bytes"].tolist() == [1 << 20, 1 << 30]
    assert frame["time_ns"].tolist() == [4_880, 5_000_000]
    with pytest.raises(TraceError, match=r"line 2: expected a column size in one of b, byte.*got \(words\)"):
        read_collective_log(write(tmp_path, HCCL_OTHER_UNITS.replace("(KB)", "(words)"), "all_reduce_8npu.txt"))
    with pytest.raises(TraceError, match="powers of 1000 or of 1024 and the bandwidth does not tell"):
        read_collective_log(write(tmp_path, HCCL_OTHER_UNITS.replace("214.8", "0.000"), "all_reduce_8npu.txt"))


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "[1,12]<stderr>: ", "\x1b[32m"])
def test_what_a_launcher_puts_before_a_line_is_ignored(tmp_path: Path, prefix: str) -> None:
    plain = read_collective_log(write(tmp_path, NCCL_TEXT, "alltoall.log"))
    tagged = "\n".join(prefix + line for line in NCCL_TEXT.splitlines())
    path = write(tmp_path, tagged, "alltoall.log")
    assert read_collective_log(path).equals(plain)
    assert detect(path).name == "collective_log"
