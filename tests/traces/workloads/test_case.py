"""Cases: the growth laws, the assumptions, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.errors import CaseError
from nestpipe.ir import OpKind, with_micro_batches
from nestpipe.schedules import load, names
from sim.costs.reproduce import varied
from tests.paths import ROOT
from traces.workloads.case import FitRow, GrowthLaw, Laws, batch_times, fit, growth_laws, load_case

TEXT = (ROOT / "traces" / "cases" / "nestpipe_paper.yaml").read_text(encoding="utf-8")


def _rows(*sizes_and_times: tuple[int, float]) -> tuple[FitRow, ...]:
    return tuple(
        FitRow(world_size=size, step_latency_ms=10 * time, lookup_ms=time, communication_ms=2 * time, source="test")
        for size, time in sizes_and_times
    )


def _laws(mechanism: str) -> Laws:
    law = GrowthLaw(mechanism=mechanism, why="test")  # type: ignore[arg-type]
    return Laws(lookup=law, communication=law, compute=law)


@pytest.mark.parametrize("mechanism", ["per_peer", "log2", "power"])
@given(low=st.floats(1, 1e4), high=st.floats(1, 1e4))
def test_two_rows_are_met_exactly(mechanism: str, low: float, high: float) -> None:
    work = fit(_rows((128, low), (1536, high)), _laws(mechanism))
    assert work.lookup.at(128) == pytest.approx(low, rel=1e-9, abs=1e-6)
    assert work.communication.at(1536) == pytest.approx(2 * high, rel=1e-9, abs=1e-6)


def test_one_row_does_not_grow() -> None:
    work = fit(_rows((128, 5.0)), _laws("constant"))
    assert [work.lookup.at(size) for size in (1, 128, 4096)] == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("world_size", [128, 700, 1536])
def test_the_stages_of_the_lookup_path_sum_to_the_fitted_lookup_path(name: str, world_size: int) -> None:
    case = load_case("nestpipe_paper")
    work = growth_laws(case)
    loop = load(name)
    times = batch_times(work, case.values(), loop, world_size)
    path = (OpKind.DEDUP, OpKind.READ, OpKind.COPY_H2D, OpKind.ALL_TO_ALL_KEYS, OpKind.LOOKUP, OpKind.WRITE_BACK)
    assert sum(times[kind] for kind in path) / 1e6 == pytest.approx(work.lookup.at(world_size))
    dense = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE)
    assert sum(times[kind] for kind in dense) / 1e6 == pytest.approx(work.compute.at(world_size))


def test_only_the_baseline_is_read_by_the_fit() -> None:
    document = yaml.safe_load(TEXT)
    for row in document["published"]:
        row["metrics"] = dict.fromkeys(row["metrics"], 1000000000.0)
    import msgspec

    from traces.workloads.case import Case

    assert growth_laws(msgspec.convert(document, Case)) == growth_laws(load_case("nestpipe_paper"))


def test_a_domain_shortens_the_all_to_all_and_not_the_lookup() -> None:
    case = load_case("nestpipe_paper")
    work, values = growth_laws(case), case.values()
    world = batch_times(work, values, load("sync"), 1536)
    domain = batch_times(work, values, load("2d_sp"), 1536)
    assert domain[OpKind.ALL_TO_ALL_ROWS] == batch_times(work, values, load("sync"), 128)[OpKind.ALL_TO_ALL_ROWS]
    assert domain[OpKind.LOOKUP] == world[OpKind.LOOKUP]


def test_repeated_rows_only_cost_where_there_are_micro_batches() -> None:
    case = load_case("nestpipe_paper")
    work, values = growth_laws(case), {**case.values(), "row_duplication": 1.25}
    plain, split = (batch_times(work, values, with_micro_batches(load("fwp"), n), 1536) for n in (1, 8))
    assert split[OpKind.ALL_TO_ALL_ROWS] == pytest.approx(1.25 * plain[OpKind.ALL_TO_ALL_ROWS])


@given(st.sampled_from(["read_share", "keys_share", "lookup_share"]), st.floats(0, 1))
def test_varying_one_share_keeps_the_sum(name: str, to: float) -> None:
    values = varied(load_case("nestpipe_paper").values(), name, to)
    shares = [
        value
        for key, value in values.items()
        if key in ("read_share", "copy_h2d_share", "keys_share", "lookup_share", "write_back_share")
    ]
    assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lookup_ms: 626.8", "lookup_ms: -1", "fit[0].lookup_ms must be positive and at most 1e+09, got -1"),
        ("lookup_ms: 626.8", "lookup_ms: 3000", "leave no compute"),
        ("lookup_ms: 626.8", "lookup_ms: many", "fit[0].lookup_ms: Expected 'float', got 'str'"),
        ("    lookup_ms: 626.8\n", "", "fit[0]: Object missing required field 'lookup_ms'"),
        ("lookup_ms: 626.8", "lookups_ms: 626.8", "unknown key 'lookups_ms' (did you mean 'lookup_ms'?)"),
        ("- world_size: 128\n", "- world_size: 1536\n", "a world size is given twice"),
        ("mechanism: per_peer", "mechanism: per_pear", "growth.lookup.mechanism: Invalid enum value 'per_pear'"),
        ("sync_ms:", "synch_ms:", "did you mean 'sync_ms'?"),
        ("read_share: {value: 0.15", "read_share: {value: 0.25", "must sum to 1, got 1.1"),
        ("micro_batches: {value: 8,", "micro_batches: {value: 7.5,", "must be a whole number, got 7.5"),
        ("micro_batches: {value: 8,", "micro_batches: {value: 32,", "value 32 must lie between low and high"),
        ("metrics: {step_latency_ms: 4914.01", "metrics: {step_latency: 4914.01", "did you mean 'step_latency_ms'?"),
        ("{method: UniEmb, world_size: 1536", "{method: UniEmb, world_size: 1500", "not among the sizes that are run"),
        (
            "table_sync_ms: {value: 200, low: 50, high: 400",
            "table_sync_ms: {value: 200, low: 50, high: .inf",
            "high must",
        ),
        ("baseline: true", "baseline: false", "exactly one method must have 'baseline: true'"),
        ("{method: UniEmb, world_size", "{method: UniEmbb, world_size", "did you mean 'UniEmb'?"),
        ("batch_per_worker: 512", "batch_per_worker: 0", "batch_per_worker must be at least 1, got 0"),
        ("case: nestpipe_paper", "case: [nestpipe_paper", "not valid YAML"),
    ],
)
def test_a_broken_case_names_file_key_and_value(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = tmp_path / "mine.yaml"
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(CaseError) as caught:
        load_case(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_case_is_refused_with_a_suggestion() -> None:
    with pytest.raises(CaseError, match="did you mean 'nestpipe_paper'"):
        load_case("nestpipe_papr")
