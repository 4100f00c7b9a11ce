"""Replay of recorded traces: as they were, changed, and under another schedule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.ir import OpKind, unroll
from nestpipe.schedules import load
from nestpipe.timeline.metrics import measure
from sim.costs.trace import Mode, costs_from_trace
from sim.engine.engine import simulate
from sim.engine.folding import World
from sim.engine.replay import Cause, Scales, replay, replay_recording
from sim.network.cost import network_costs
from topologies.cluster import load_cluster
from traces.formats.importing import import_traces
from traces.recording import Recording, recording

US = 1_000


def _row(**facts: object) -> dict[str, object]:
    names = "step collective group group_size launch_ns launch_end_ns wait_ns bytes duration_ns"
    blank = dict.fromkeys(names.split())
    return {**blank, "rank": 0, "kind": "forward", "op": "k", "stream": "7", **facts}


def _kernel(start: int, end: int, launch: int, **facts: object) -> dict[str, object]:
    times = {"start_ns": start * US, "end_ns": end * US, "duration_ns": (end - start) * US}
    return _row(step=0, launch_ns=launch * US, launch_end_ns=(launch + 1) * US, **times, **facts)


def _host(kind: str, start: int, end: int, **facts: object) -> dict[str, object]:
    return _row(step=0, kind=kind, stream="host", start_ns=start * US, end_ns=end * US, **facts)


def _frame(*rows: dict[str, object]) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows))
    whole = (
        "rank",
        "step",
        "start_ns",
        "end_ns",
        "duration_ns",
        "launch_ns",
        "launch_end_ns",
        "wait_ns",
        "bytes",
        "group_size",
    )
    return frame.astype(dict.fromkeys(whole, "Int64"))


def _ms(result) -> list[float]:
    return (result.steps["replayed_ns"] / US).tolist()


def test_the_host_waits_for_the_device_so_faster_kernels_shorten_the_step() -> None:
    # launch at 10, kernel 15..115, blocking call 20..118, then 32 us of host work
    frame = _frame(_host("step", 0, 150), _kernel(15, 115, 10), _host("host_wait", 20, 118))
    assert _ms(replay(frame)) == [150]
    assert _ms(replay(frame, Scales(compute=0.5))) == [100]
    assert _ms(replay(frame, Scales(compute=2))) == [250]


def test_a_step_that_the_host_bounds_does_not_profit_from_faster_kernels() -> None:
    frame = _frame(_host("step", 0, 150), _kernel(15, 45, 10), _kernel(105, 135, 100))
    assert _ms(replay(frame, Scales(compute=0.1))) == [150]
    assert _ms(replay(frame, Scales(host=0.5))) == [75]


def test_an_op_follows_the_stream_and_the_event_it_waited_for() -> None:
    # the copy on stream 9 ends at 60; the kernel on stream 7 was launched at 12 but started only then
    frame = _frame(
        _host("step", 0, 200), _kernel(11, 60, 10, stream="9"), _kernel(62, 92, 12), _host("host_wait", 20, 93)
    )
    again = replay(frame, Scales(compute=2)).spans.set_index("stream")
    assert again.loc["9", "end_ns"] == (11 + 98) * US
    assert again.loc["7", "start_ns"] == again.loc["9", "end_ns"] + 2 * US


def test_waiting_for_a_late_rank_is_worked_out_anew() -> None:
    def rank(number: int, host_before: int) -> list[dict[str, object]]:
        arrive = host_before + 5
        collective = {"collective": "all_to_all", "group": "0", "group_size": 2, "kind": "all_to_all[rows]"}
        return [
            _host("step", 0, 200, rank=number),
            _kernel(arrive, 125, host_before, rank=number, wait_ns=(105 - arrive) * US, **collective),
            _host("host_wait", host_before + 2, 126, rank=number),
        ]

    frame = _frame(*rank(0, 10), *rank(1, 100))
    same = replay(frame)
    assert _ms(same) == [200, 200]
    assert same.spans.sort_values("rank")["wait_ns"].tolist() == [90 * US, 0]
    sooner = replay(frame, Scales(host=0.5)).spans.sort_values("rank")
    assert (sooner["end_ns"] - sooner["start_ns"] - sooner["wait_ns"]).tolist() == [20 * US, 20 * US]
    assert sooner["wait_ns"].tolist() == [45 * US, 0]
    slower = replay(frame, Scales(transfer=10)).spans
    assert slower["end_ns"].unique().tolist() == [(105 + 200) * US]


def test_a_collective_whose_peers_are_not_there_scales_as_transfer() -> None:
    collective = {"collective": "all_to_all", "group": "0", "group_size": 8, "kind": "all_to_all[rows]"}
    frame = _frame(_host("step", 0, 150), _kernel(15, 115, 10, **collective), _host("host_wait", 20, 118))
    assert _ms(replay(frame, Scales(transfer=0.5))) == [100]
    assert _ms(replay(frame, Scales(compute=0.5))) == [150]


def test_a_table_without_launches_or_steps_is_refused_with_the_way_out() -> None:
    frame = _frame(_host("step", 0, 150), _kernel(15, 115, 10))
    with pytest.raises(TraceError, match=r"no step ranges.*--schedule"):
        replay(frame[frame["kind"] != "step"])
    with pytest.raises(TraceError, match=r"no host launches.*--schedule"):
        replay(frame[frame["kind"] == "step"])
    with pytest.raises(TraceError, match="compute scale"):
        Scales(compute=-1)


def test_a_step_of_no_time_is_replayed_or_left_out_with_a_note() -> None:
    frame = _frame(_host("step", 0, 150), _kernel(15, 115, 10), _host("step", 150, 150) | {"step": 1})
    result = replay(frame)
    assert result.steps["relative_error"].iloc[0] == 0
    assert np.isnan(result.steps["relative_error"].iloc[1])
    unnumbered = replay(_frame(_host("step", 0, 150), _kernel(15, 115, 10), _host("step", 150, 150) | {"step": None}))
    assert unnumbered.steps["step"].tolist() == [0]
    assert unnumbered.notes == ("1 step range(s) without a step number left out: they take no time",)


@pytest.fixture(scope="module")
def dlrm(shared_data: Path) -> pd.DataFrame:
    return import_traces(sorted((shared_data / "real/kineto/dlrm_v100x8").glob("*.json.gz"))).table.frame


def test_dlrm_on_eight_v100_replays_to_its_own_step_time(dlrm: pd.DataFrame) -> None:
    result = replay(dlrm)
    assert len(result.steps) == 8
    assert result.steps["relative_error"].abs().max() <= 0.02


def test_dlrm_under_a_schedule_separates_transfer_from_waiting(dlrm: pd.DataFrame) -> None:
    loop = load("sparse_dist")
    costs = costs_from_trace(dlrm, loop)
    shortest = {"all_to_all[rows]": 10 * US, "all_to_all[grads]": 10 * US, "all_to_all[keys]": (8 + 7 + 7) * US}
    for kind, expected in shortest.items():
        assert costs.batch_ns[OpKind(kind)].tolist() == pytest.approx([expected], abs=6 * US)
    assert any("not in the trace" in each and "write_back" in each for each in costs.assumptions)
    timeline = simulate(unroll(loop, 16), costs, World(world_size=8))
    assert measure(timeline).step_latency_ms > 0


def _steps(durations: list[int], kind: OpKind = OpKind.FORWARD, sizes: list[int] | None = None) -> pd.DataFrame:
    rows = [
        _row(
            step=step,
            kind=kind.value,
            start_ns=0,
            end_ns=ns,
            duration_ns=ns,
            bytes=None if sizes is None else sizes[step],
        )
        for step, ns in enumerate(durations)
    ]
    return _frame(*rows)


def test_modes_use_the_mean_each_step_in_turn_or_draws() -> None:
    frame = _steps([100, 200, 600])
    loop = load("sync")
    by_step = costs_from_trace(frame, loop, mode=Mode.STEP)
    ops = [op for op in unroll(loop, 6).ops if op.kind is OpKind.FORWARD]
    assert [by_step.op_ns(op) for op in ops] == [100, 200, 600, 100, 200, 600]
    assert costs_from_trace(frame, loop).op_ns(ops[0]) == 300
    drawn = [costs_from_trace(frame, loop, mode=Mode.DISTRIBUTION, seed=seed) for seed in (1, 1, 2)]
    many = [op for op in unroll(loop, 300).ops if op.kind is OpKind.FORWARD]
    first, again, other = (list(costs.local(many, 0)) for costs in drawn)
    assert first == again != other
    assert set(first) == {100, 200, 600}
    assert np.mean(first) == pytest.approx(300, rel=0.15)


def test_a_cost_law_is_fitted_and_going_beyond_it_is_flagged() -> None:
    frame = _steps([1_100, 2_100, 3_100], OpKind.ALL_TO_ALL_ROWS, sizes=[1_000, 2_000, 3_000])
    loop = load("sync")
    inside = costs_from_trace(frame, loop, mode=Mode.FITTED)
    assert inside.origin[OpKind.ALL_TO_ALL_ROWS] == "fitted"
    assert inside.batch_ns[OpKind.ALL_TO_ALL_ROWS][0] == pytest.approx(2_100)
    beyond = costs_from_trace(frame, loop, batch_scale=4)
    assert beyond.origin[OpKind.ALL_TO_ALL_ROWS] == "extrapolated"
    assert beyond.batch_ns[OpKind.ALL_TO_ALL_ROWS][0] == pytest.approx(8_100)


def test_a_larger_world_needs_a_network() -> None:
    frame = _steps([1_000, 1_000], OpKind.ALL_TO_ALL_ROWS, sizes=[64, 64]).assign(group_size=8)
    loop = load("sync")
    with pytest.raises(TraceError, match=r"on 8 ranks and says nothing of a network that joins 64.*--topology"):
        costs_from_trace(frame, loop, world_size=64)
    plain = costs_from_trace(frame, loop, world_size=4)
    assert plain.batch_ns[OpKind.ALL_TO_ALL_ROWS][0] == 1_000
    assert any("no topology given" in each for each in plain.assumptions)
    scaled = costs_from_trace(frame, loop, world_size=64, collective_ns=lambda _, size, ranks: size * ranks)
    assert scaled.batch_ns[OpKind.ALL_TO_ALL_ROWS][0] == 8_000
    assert scaled.origin[OpKind.ALL_TO_ALL_ROWS] == "extrapolated"


def test_a_described_network_scales_recorded_transfers() -> None:
    frame = _steps([1_000, 1_000], OpKind.ALL_TO_ALL_ROWS, sizes=[10**9, 10**9]).assign(group_size=8)
    loop = load("sync")
    network = network_costs(load_cluster("dgx_h100"), loop, None)
    scaled = costs_from_trace(frame, loop, world_size=512, collective_ns=network)
    # eight ranks share NVLink, 512 go over a rail of 400 Gbit/s a rank: 450 against 50 GB/s, of which software reaches
    # more on the rail
    whole_wire = 1_000 * (511 / 512) / (7 / 8) * 450 / 50
    assert 0.7 * whole_wire < scaled.batch_ns[OpKind.ALL_TO_ALL_ROWS][0] < whole_wire
    assert any("network model's ratio of 512 to 8 ranks" in each for each in scaled.assumptions)


def test_a_trace_without_any_of_the_ops_is_refused() -> None:
    with pytest.raises(TraceError, match="no durations of any op of sync"):
        costs_from_trace(_frame(_host("step", 0, 10)), load("sync"))
    with pytest.raises(TraceError, match="batch_scale must be positive, got 0"):
        costs_from_trace(_steps([1]), load("sync"), batch_scale=0)


# -- whole recordings


def _recorded(shared_data: Path, name: str) -> Recording:
    folder = shared_data / "real/kineto"
    return recording(import_traces(sorted(folder.glob(name))).table.frame)


RECORDINGS = {
    "dlrm_v100x8/*": 0.005,
    "resnet_ddp_a100x2*": 0.001,
    "recsys_a100x8*": 0.005,
    "torchrec_sparsedist_v100x4_sst5/*": 0.005,
    "torchrec_sparsedist_v100x4_sst2_slow/*": 0.001,
}


@pytest.mark.parametrize("name", RECORDINGS)
def test_a_recording_comes_out_again_and_its_parts_sum_to_the_step(shared_data: Path, name: str) -> None:
    source = _recorded(shared_data, name)
    found = replay_recording(source, Scales())
    steps = found.steps
    assert abs(steps["replayed_ns"].mean() / steps["recorded_ns"].mean() - 1) < RECORDINGS[name]
    parts = steps[[f"{cause}_ns" for cause in Cause]].sum(axis=1)
    assert parts.tolist() == steps["replayed_ns"].tolist()
    if len(found.pace):
        assert abs(found.pace["replayed_ns"].mean() / found.pace["recorded_ns"].mean() - 1) < 0.01
    # what no rule explains of the starts of ops, critical or not
    late = sum(op.unexplained_ns for each in source.ranks for op in each.ops)
    assert late < 0.02 * steps["recorded_ns"].sum()


@pytest.mark.parametrize("name", ["dlrm_v100x8/*", "resnet_ddp_a100x2*", "recsys_a100x8*"])
def test_without_the_host_nothing_makes_the_step_come_out(shared_data: Path, name: str) -> None:
    steps = replay_recording(_recorded(shared_data, name), Scales(host=0)).steps
    assert steps["replayed_ns"].mean() < 0.8 * steps["recorded_ns"].mean()


def test_without_its_dependencies_between_streams_the_step_does_not_come_out(shared_data: Path) -> None:
    source = _recorded(shared_data, "recsys_a100x8*")
    for op in source.ranks[0].ops:
        op.other = op.room = None
    steps = replay_recording(source, Scales()).steps
    assert steps["replayed_ns"].mean() < 0.95 * steps["recorded_ns"].mean()


def test_the_rank_that_stalls_is_named_and_stays_late(shared_data: Path) -> None:
    found = replay_recording(_recorded(shared_data, "torchrec_sparsedist_v100x4_sst2_slow/*"), Scales())
    late = found.late.set_index("rank")["waited_ns"]
    assert late.idxmax() == 2
    assert late[2] > 0.95 * late.sum()
    gaps = found.steps.groupby("rank")["gaps_ns"].mean()
    assert gaps[2] > 10 * gaps.drop(2).max()
