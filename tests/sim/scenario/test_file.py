"""Scenario files: what they mean, and what is said about those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from nestpipe.base.errors import CaseError, NestPipeError
from sim.scenario.assumptions import assumed_values
from sim.scenario.evaluate import Evaluator
from sim.scenario.file import load_scenario
from sim.scenario.grid import Grid, sweepable, with_value
from sim.scenario.scale import scale
from sim.scenario.sections import Factors, Range
from tests.sim.scenario.scenarios import PLAIN, PRICED, RANDOM, grid, scenario, write


def _error(tmp_path: Path, text: str) -> str:
    path = write(tmp_path, text)
    with pytest.raises(NestPipeError) as caught:
        Grid.of(load_scenario(path))
    return str(caught.value).replace(str(path), "scenario.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("world_sizes:", "world_size:"), "unknown key 'world_size' (did you mean 'world_sizes'?)"),
        (("[128, 1536]", "[128, 0]"), "world_sizes[1] must be at least 1, got 0"),
        (("[128, 1536]", "[128, 128]"), "world_sizes: a value is given twice"),
        (("[128, 1536]", "[]"), "world_sizes: give at least one"),
        (("dbp", "dpb"), "schedules: unknown schedule 'dpb'"),
        (("nestpipe_paper", "nestpipe_papr"), "unknown case 'nestpipe_papr'"),
        (("{case: nestpipe_paper}", "{case: a, model: b}"), "workload: give exactly one of case, trace and model"),
        (("{case: nestpipe_paper}", "{}"), "workload: give exactly one of case, trace and model, got none"),
        (("{case: nestpipe_paper}", "{model: hstu}"), "workload.model needs clusters, each with a topology"),
        (("scenario: plain", "scenario: plain\nfactors: {skew: 0}"), "factors.skew must be positive, got 0"),
        (("scenario: plain", "scenario: plain\nfactors: {skw: 2}"), "unknown key 'skw' (did you mean 'skew'?)"),
        (("scenario: plain", "scenario: plain\nfactors: {time: {lokup: 2}}"), "unknown op kind 'lokup'"),
        (("scenario: plain", "scenario: plain\nbatch_per_worker: 8\nglobal_batch: 64"), "contradict each other"),
        (("scenario: plain", "scenario: plain\nconstraints: {qps_min: 9, qps_max: 3}"), "qps_max 3 contradict"),
        (("scenario: plain", "scenario: plain\nconstraints: {world_size_max: 64}"), "contradicts world_sizes"),
        (("scenario: plain", "scenario: plain\nconstraints: {cost_per_hour_max: 9}"), "needs a price"),
        (("scenario: plain", "scenario: plain\nconstraints: {expected_qps_min: 9}"), "needs 'failures'"),
        (("scenario: plain", "scenario: plain\nobjective: {minimise: qps}"), "qps is to be maximised"),
        (("scenario: plain", "scenario: plain\nobjective: {minimise: cost}"), "unknown objective 'cost'"),
        (("scenario: plain", "scenario: plain\nobjective: {}"), "give exactly one of minimise and maximise"),
        (
            ("scenario: plain", "scenario: plain\nclusters: {a: {device_memory_bytes: 64 GX}}"),
            "device_memory_bytes: a size must be bytes",
        ),
        (
            (
                "scenario: plain",
                "scenario: plain\nmemory: {table_rows: 1, keys_per_sample: 1, row_bytes: 5 GB/s, "
                "activation_bytes_per_sample: 1, dense_parameter_bytes: 1}",
            ),
            "memory: row_bytes: a size must be bytes",
        ),
        (("scenario: plain", "scenario: plain\nclusters: {a: {topology: dgx_h10}}"), "unknown topology 'dgx_h10'"),
        (("scenario: plain", "scenario: plain\nsweep: {search: random}"), "needs 'points'"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {factors.skw: [1, 2]}}"), "did you mean 'factors.skew'?"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {factors.skew: [1, -2]}}"), "must be positive, got -2"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {factors.skew: [1, 1]}}"), "a value is given twice"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {factors.skew: {from: 0, to: 1, num: 3, scale: log}}}"),
         "a log range needs positive ends"),
        (("scenario: plain", "scenario: plain\ncontention: true"), "contention needs clusters, each with a topology"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {sync: 2}}"), "unknown assumption 'sync'"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {dedup_ms: .nan}}"),
         "workload.assumptions.dedup_ms must be finite, got nan"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {forward_share: 2}}"),
         "workload.assumptions.forward_share must be a number between 0 and 1, got 2"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {micro_batches: 2.5}}"),
         "must be a whole number, got 2.5"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {dedup_ms: 5000}}"),
         "dedup_ms 5000 is longer than the shortest lookup"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {forward_share: 0.9, update_share: 0.2}}"),
         "forward_share + update_share must not exceed 1, got 1.1"),
        (("{case: nestpipe_paper}", "{case: nestpipe_paper, assumptions: {read_share: 0.7, keys_share: 0.6}}"),
         "must sum to 1, got 1.3 for read_share, keys_share"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {workload.assumptions.forward_share: [0.3, 1.5]}}"),
         "forward_share must be a number between 0 and 1, got 1.5"),
        (("scenario: plain", "scenario: plain\nseed: -1"), "seed must be at least 0, got -1"),
        (("scenario: plain", "scenario: plain\nseeds: 1000000000"), "seeds must be at most 100000, got 1000000000"),
        (("scenario: plain", "scenario: plain\nsweep: {seed: -1}"), "sweep.seed must be at least 0, got -1"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {factors.skew: {from: 1, to: 2, num: 1000000000}}}"),
         "sweep.axes.factors.skew.num must be at most 100000, got 1000000000"),
        (("scenario: plain", "scenario: plain\nsweep: {axes: {factors.skew: {from: 1, to: .inf, num: 3}}}"),
         "sweep.axes.factors.skew.to must be finite, got inf"),
        (("scenario: plain", "scenario: plain\nsweep: {search: random, points: 1000000000000}"),
         "sweep.points must be at most 10000000, got 1000000000000"),
        (("scenario: plain", "scenario: plain\nclusters: {a: {accelerator_hour: 0}}\n"
          "objective: {minimise: cost_per_hour}"), "clusters.a.accelerator_hour is 0, so objective cost_per_hour is 0"),
        ((PLAIN, "# nothing"), "the file is empty; it needs at least scenario, workload, schedules, world_sizes"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_refused_with_the_reason(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in PLAIN
    assert message in _error(tmp_path, PLAIN.replace(*change))


def test_given_stages_of_the_lookup_path_are_kept_and_the_others_share_the_rest() -> None:
    text = PLAIN.replace("nestpipe_paper", "nestpipe_paper, assumptions: {read_share: 0.5, keys_share: 0.3}")
    found = grid(text)
    assert found.case is not None
    values = assumed_values(found.case, found.scenario)
    assert (values["read_share"], values["keys_share"]) == (0.5, 0.3)
    stages = ("read_share", "copy_h2d_share", "keys_share", "lookup_share", "write_back_share")
    assert sum(values[name] for name in stages) == pytest.approx(1)
    own = found.case.values()
    assert values["lookup_share"] / values["copy_h2d_share"] == pytest.approx(
        own["lookup_share"] / own["copy_h2d_share"]
    )


def test_a_combination_of_swept_shares_that_cannot_be_is_a_row_that_says_why() -> None:
    axes = "{workload.assumptions.forward_share: [0.3, 0.9], workload.assumptions.update_share: [0.0, 0.2]}"
    found = grid(f"{PLAIN}sweep: {{axes: {axes}}}")
    rows = [Evaluator(grid=found).row(found[i]) for i in range(4)]
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "invalid"]
    assert "must not exceed 1, got 1.1" in rows[3]["reason"]


def test_a_job_that_never_trains_and_a_step_of_no_time_are_rows_that_say_why() -> None:
    failing = PRICED.replace("50000", "1.0e-9")
    row = Evaluator(grid=grid(failing)).row(grid(failing)[0])
    assert (row["status"], row["cost_per_million_samples"]) == ("invalid", None)
    assert "so nothing is ever trained" in row["reason"]
    free = "factors: {compute_time: 0, communication_time: 0, lookup_cost: 0, time: {read: 0, copy_h2d: 0, sync: 0}}"
    found = grid(f"{PLAIN}{free}\n")
    row = Evaluator(grid=found).row(found[0])
    assert (row["status"], row["reason"]) == (
        "invalid",
        "a step takes no time: every op's time is 0; see factors and assumptions",
    )


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"nowhere\.yaml: cannot be read"):
        load_scenario(tmp_path / "nowhere.yaml")


def test_schedules_and_cases_beside_the_file_are_found(tmp_path: Path) -> None:
    from nestpipe.ir import show
    from nestpipe.schedules import load

    (tmp_path / "mine.txt").write_text(show(load("dbp")), encoding="utf-8")
    found = Grid.of(load_scenario(write(tmp_path, PLAIN.replace("dbp", "mine.txt"))))
    row = Evaluator(grid=found).row(next(each for each in found if each.variant.schedule.endswith("mine.txt")))
    assert row["status"] == "ok"


def test_the_grid_holds_every_combination_once_and_repeats_no_schedule_for_what_it_does_not_have() -> None:
    found = grid(PLAIN)
    assert [tuple(variant) for variant in found.variants] == [
        ("sync", 1, None), ("dbp", 1, None), ("nestpipe", 2, None), ("nestpipe", 8, None),
    ]  # fmt: skip
    configurations = [found[i] for i in range(len(found))]
    assert len({(each.variant, each.world_size) for each in configurations}) == len(found) == 8
    assert [each.index for each in configurations] == list(range(8))
    with pytest.raises(IndexError):
        found[8]


def test_automatic_micro_batches_are_powers_of_two_up_to_the_batch() -> None:
    found = grid(PLAIN, micro_batches="auto", batch_per_worker=(24,))
    assert [each.micro_batches for each in found.variants if each.schedule == "nestpipe"] == [1, 2, 4, 8, 16]


def test_a_random_search_draws_different_points_and_the_same_ones_again() -> None:
    text = PLAIN.replace("scenario: plain", "scenario: plain\nsweep: {search: random, points: 5, seed: 3}")
    first, again = grid(text).chosen(), grid(text).chosen()
    assert first == again
    assert len(set(first)) == 5
    assert first != grid(text.replace("seed: 3", "seed: 4")).chosen()


def test_a_huge_grid_is_addressed_without_being_built() -> None:
    axes = {f"factors.{name}": Range(start=1, to=9, num=1000) for name in ("skew", "peer_cost", "lookup_cost")}
    text = PLAIN.replace("scenario: plain", "scenario: plain\nsweep: {search: random, points: 4}")
    found = grid(text)
    import msgspec

    swept = msgspec.structs.replace(found.scenario.sweep, axes=axes)
    huge = Grid.of(msgspec.structs.replace(found.scenario, sweep=swept))
    assert len(huge) == 8 * 10**9
    assert huge[8 * 10**9 - 1].settings == tuple((key, 9.0) for key in axes)
    assert len(huge.chosen()) == 4


@pytest.mark.parametrize("text", [PLAIN, PRICED, RANDOM])
def test_every_sweepable_key_can_be_set(text: str) -> None:
    found = scenario(text)
    for key in sweepable(found):
        if not key.endswith(("unique_ratio", "share", "_max", "update_share")):
            with_value(found, key, 1 if "bytes" not in key else 4096)


def test_what_cannot_be_is_a_row_that_says_why() -> None:
    found = grid(PLAIN, schedules=("nestpipe_2d_sp",), world_sizes=(1536,), domain_sizes=(100,), micro_batches=8)
    row = Evaluator(grid=found).row(found[0])
    assert (row["status"], row["reason"]) == (
        "invalid",
        "world_size 1536 is not divisible by domain_size 100; choose a divisor of 1536",
    )
    found = grid(PLAIN, schedules=("nestpipe",), micro_batches=16, batch_per_worker=8)
    assert Evaluator(grid=found).row(found[0])["reason"] == "16 micro-batches of 8 samples per worker"
    found = grid(PLAIN, schedules=("sync",), world_sizes=(96,), global_batch=1000)
    assert Evaluator(grid=found).row(found[0])["reason"] == "global_batch 1000 is not a multiple of 96"


def test_factors_of_cluster_and_scenario_multiply() -> None:
    one = Factors(skew=2.0, time={"lookup": 3.0})
    other = Factors(skew=1.5, compute_time=0.5, time={"lookup": 2.0, "sync": 4.0})
    both = one.combined(other)
    assert (both.skew, both.compute_time, both.time) == (3.0, 0.5, {"lookup": 6.0, "sync": 4.0})


def test_a_curve_says_which_of_its_points_cannot_be() -> None:
    text = """
scenario: small
workload: {model: dlrm}
clusters: {one: {topology: laptop}}
schedules: [sync]
world_sizes: [2, 4, 16]
batch_per_worker: 32
"""
    found = scale(grid(text))
    assert set(found.rows["world_size"]) == {2, 4}
    assert found.missing == ("sync at 16 workers: laptop: world_size must be 1 to 8 (ranks_max), got 16",)
