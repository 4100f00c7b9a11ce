"""The flow-level network solvers: closed forms, max-min optimality, agreement, case files, the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from nestpipe.base.errors import CaseError, NestPipeError, TopologyError
from nestpipe.cli.network import network
from sim.engine.maxmin import MaxMin
from sim.network.events import simulate_events
from sim.network.fold import fold
from sim.network.levels import fill
from sim.network.links import Links
from sim.network.oracle.cases import CaseFile, Network, evaluate_cases, read_cases
from sim.network.oracle.programs import build_program, traffic_matrix
from sim.network.problem import FlowProblem
from sim.network.solve import _is_dense, flow_problem, measure, simulate
from sim.network.vector import simulate_vector
from tests.sim.network.files import case_file, leaf_spine, rail_spine, star, torus

MB = 1_000_000


def write(tmp_path: Path, content: dict[str, Any]) -> Path:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def completion(tmp_path: Path, content: dict[str, Any]) -> list[float]:
    found = evaluate_cases(read_cases(write(tmp_path, content)))
    return [case["completion_time_s"] for case in found["cases"]]


# closed forms ----------------------------------------------------------------------------------------------------


def test_worked_examples_come_out_to_the_last_digit(tmp_path: Path) -> None:
    content = case_file(
        (star(16), "direct", "uniform", 64 * MB),
        (leaf_spine(64, 16, 2), "direct", "uniform", 64 * MB),
        (rail_spine(64), "hier2_barrier", "uniform", 64 * MB),
        (star(64), "ring_allreduce", None, 100 * MB),
    )
    expected = [
        2e-6 + 15 * 4e6 / 25e9,
        4e-6 + 2 * 48 * 1e6 / 25e9,
        1e-6 + 7 * 8e6 / 200e9 + 2e-6 + 8 * 7e6 / 25e9,
        126 * (2e-6 + 1_562_500 / 25e9),
    ]
    assert completion(tmp_path, content) == pytest.approx(expected, rel=1e-12)


def test_a_large_symmetric_case_is_folded_to_a_handful_of_rows(tmp_path: Path) -> None:
    content = case_file((star(256), "direct", "uniform", 64 * MB), (torus(8, 16), "direct", "uniform", 64 * MB))
    found = evaluate_cases(read_cases(write(tmp_path, content)))["cases"]
    assert [(case["flows"], case["rows"]) for case in found] == [(256 * 255, 1), (128 * 127, 127)]
    assert found[0]["completion_time_s"] == pytest.approx(2e-6 + 255 * 250_000 / 25e9, rel=1e-12)


# max-min optimality ----------------------------------------------------------------------------------------------


@st.composite
def shared_links(draw: st.DrawFn) -> tuple[list[float], list[list[int]]]:
    """Capacities, and for each user the links it takes, each once."""
    num_links = draw(st.integers(1, 6))
    capacities = draw(st.lists(st.sampled_from([1.0, 2.0, 3.0, 10.0]), min_size=num_links, max_size=num_links))
    route = st.lists(st.integers(0, num_links - 1), min_size=1, max_size=num_links, unique=True)
    return capacities, draw(st.lists(route, min_size=1, max_size=12))


def assert_max_min_fair(capacities: list[float], routes: list[list[int]], rates: list[float]) -> None:
    """Feasible, and every user has a full link on which nobody is faster: necessary and sufficient."""
    load = [sum(r for r, route in zip(rates, routes, strict=True) if link in route) for link in range(len(capacities))]
    assert all(x <= c * (1 + 1e-9) for x, c in zip(load, capacities, strict=True))
    for rate, route in zip(rates, routes, strict=True):
        assert any(
            load[link] >= capacities[link] * (1 - 1e-9)
            and all(other <= rate * (1 + 1e-9) for other, path in zip(rates, routes, strict=True) if link in path)
            for link in route
        )


@settings(max_examples=50)
@given(shared_links())
def test_filling_is_max_min_fair(system: tuple[list[float], list[list[int]]]) -> None:
    capacities, routes = system
    table = np.full((max(map(len, routes)), len(routes)), len(capacities))
    for column, route in enumerate(routes):
        table[: len(route), column] = route
    rates, _ = fill(table, None, np.array(capacities))
    assert_max_min_fair(capacities, routes, rates.tolist())


@settings(max_examples=60)
@given(shared_links(), st.data())
def test_incremental_shares_stay_max_min_fair_as_users_come_and_go(
    system: tuple[list[float], list[list[int]]], data: st.DataObject
) -> None:
    capacities, routes = system
    shares = MaxMin(capacities)
    present: list[int] = []
    for user, route in enumerate(routes):
        shares.add(user, tuple((link, 1.0) for link in route))
        present.append(user)
        if len(present) > 1 and data.draw(st.booleans()):
            shares.remove(present.pop(data.draw(st.integers(0, len(present) - 1))))
        if data.draw(st.booleans()):
            shares.resolve()
    shares.resolve()
    assert_max_min_fair(capacities, [routes[u] for u in present], [shares.rate[u] for u in present])


# solvers agree ---------------------------------------------------------------------------------------------------


def problem(topology: dict[str, Any], algorithm: str, traffic: str | None, size: int) -> tuple[FlowProblem, Any]:
    import msgspec

    file = msgspec.convert(case_file((topology, algorithm, traffic, size)), CaseFile)
    built = Network(topology["id"], file.topologies[topology["id"]])
    plan = build_program(algorithm, traffic, size, topology["P"], topology["ranks_per_node"])
    return built.problem(plan), plan


SCHEDULES = [
    ("direct", "zipf1"),
    ("direct", "random"),
    ("pairwise_shift", "uniform"),
    ("pairwise_shift_barrier", "hot0"),
    ("pairwise_xor", "zipf1"),
    ("hier2_local", "random"),
    ("hier2_barrier", "hot0"),
    ("ring_allreduce", None),
    ("hier_ring_allreduce", None),
]


@pytest.mark.parametrize(("algorithm", "traffic"), SCHEDULES)
@pytest.mark.parametrize(
    "topology", [star(16), leaf_spine(16, 8, 4), rail_spine(16), torus(4, 4)], ids=lambda t: t["id"]
)
def test_both_solvers_folded_or_not_give_the_same_end_of_every_flow(
    topology: dict[str, Any], algorithm: str, traffic: str | None
) -> None:
    whole, plan = problem(topology, algorithm, traffic, 5 * MB)
    events, vector = simulate_events(whole), simulate_vector(whole)
    assert events == pytest.approx(vector, rel=1e-9)
    folded = fold(whole, plan.flow_tag, plan.node_tag)
    if folded is not None:
        assert folded.problem.num_flows < whole.num_flows
        assert simulate_events(folded.problem)[folded.row_of] == pytest.approx(events, rel=1e-9)
        assert simulate_vector(folded.problem)[folded.row_of] == pytest.approx(events, rel=1e-9)


@st.composite
def flows(draw: st.DrawFn) -> FlowProblem:
    capacities, routes = draw(shared_links())
    table = np.full((len(routes), max(map(len, routes))), len(capacities), dtype=np.int32)
    for row, route in enumerate(routes):
        table[row, : len(route)] = route
    count = len(routes)
    size = draw(st.lists(st.sampled_from([1.0, 2.0, 7.0]), min_size=count, max_size=count))
    delay = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 3.0]), min_size=count, max_size=count))
    return flow_problem(routes=table, capacity=np.array(capacities), size=np.array(size), delay=np.array(delay))


@settings(max_examples=30)
@given(flows())
def test_random_flows_end_alike_in_both_solvers_and_folded(random: FlowProblem) -> None:
    events = simulate_events(random)
    assert simulate_vector(random) == pytest.approx(events, rel=1e-9)
    tags = np.zeros(random.num_flows, dtype=np.int64)
    assert simulate(random, tags, np.zeros(1, dtype=np.int64))[0] == pytest.approx(events, rel=1e-9)


@settings(max_examples=30)
@given(flows())
def test_no_link_idles_while_its_only_bottleneck_has_work(random: FlowProblem) -> None:
    """Work conservation: the last flow ends no later than doing all flows one after the other at their slowest link."""
    slowest = np.append(random.capacity, np.inf)[random.routes].min(axis=1)
    assert simulate_events(random).max() <= (random.size / slowest).sum() + random.delay.max() + 1e-9


@given(st.integers(1, 9), st.floats(1.0, 4.0))
def test_a_faster_single_bottleneck_never_hurts(count: int, factor: float) -> None:
    def ends(capacity: float) -> Any:
        routes = np.zeros((count, 1), dtype=np.int32)
        size = np.arange(1, count + 1, dtype=float)
        return simulate_events(
            flow_problem(routes=routes, capacity=np.array([capacity]), size=size, delay=np.zeros(count))
        )

    assert (ends(factor) <= ends(1.0) * (1 + 1e-12)).all()


def test_renaming_ranks_of_a_symmetric_network_changes_nothing() -> None:
    whole, _ = problem(star(8), "direct", "random", MB)
    order = np.random.default_rng(1).permutation(whole.num_flows)
    shuffled = flow_problem(
        routes=whole.routes[order], capacity=whole.capacity, size=whole.size[order], delay=whole.delay[order]
    )
    assert simulate_vector(shuffled) == pytest.approx(simulate_vector(whole)[order], rel=1e-12)


def test_the_answer_is_the_unperturbed_one_and_draws_are_a_range_beside_it() -> None:
    whole, plan = problem(star(32), "pairwise_shift", "random", 64 * MB)
    exact = float(simulate(whole, plan.flow_tag, plan.node_tag)[0].max())
    assert measure(whole, plan.flow_tag, plan.node_tag, num_draws=0, local=True).completion_s == exact
    found = measure(whole, plan.flow_tag, plan.node_tag, num_draws=3, local=True)
    assert found.completion_s == exact
    assert len(found.draws) >= 1
    calm, plan = problem(star(8), "pairwise_shift", "uniform", MB)
    found = measure(calm, plan.flow_tag, plan.node_tag, num_draws=3, local=True)
    assert found.sensitivity is not None
    assert found.sensitivity < 1e-6
    assert len(found.draws) == 1


# traffic and schedules -------------------------------------------------------------------------------------------


def test_traffic_follows_the_rules_by_hand() -> None:
    assert traffic_matrix("uniform", 10, 3).tolist() == [[0, 3, 3], [3, 0, 3], [3, 3, 0]]
    assert traffic_matrix("hot0", 101, 3).tolist() == [[0, 25, 25], [50, 0, 25], [50, 25, 0]]
    x = (1 * 2654435761) % 2**32  # rank 0 to rank 1
    y = ((x ^ (x >> 15)) * 2246822519) % 2**32
    assert traffic_matrix("random", 4000, 4)[0, 1] == 1000 * (1 + (y >> 8) % 1000) // 500


def test_empty_flows_are_left_out_and_their_rounds_still_pass() -> None:
    plan = build_program("pairwise_shift", "hot0", 2, 8, 8)  # all but the hot flows round down to nothing
    assert plan.num_flows == 7
    assert set(plan.dst.tolist()) == {0}


# case files ------------------------------------------------------------------------------------------------------


def test_basic_cases_pay_latency_once_and_share_fairly(tmp_path: Path) -> None:
    links = [{"id": n, "src": "a", "dst": "b", "bandwidth": 100.0, "latency": 1.0} for n in range(2)]
    rows = [{"bytes": 100, "start": 0.0, "path": [0, 1]}, {"bytes": 50, "start": 1.0, "path": [0]},
            {"bytes": 0, "start": 3.0, "path": [1]}]  # fmt: skip
    content = {"format": "network-oracle-1", "basic_cases": [{"id": "x", "links": links, "flows": rows}]}
    found = evaluate_cases(read_cases(write(tmp_path, content)))
    assert found == {"cases": [], "basic_cases": [{"id": "x", "finish_s": [3.5, 3.0, 4.0]}]}


def test_a_flow_to_itself_takes_no_time_and_one_without_a_path_is_refused(tmp_path: Path) -> None:
    link = {"id": 0, "src": "a", "dst": "b", "bandwidth": 100.0, "latency": 1.0}
    flow = {"src": "a", "dst": "a", "bytes": 100, "start": 2.0, "path": []}
    content = {"format": "network-oracle-1", "basic_cases": [{"id": "x", "links": [link], "flows": [flow]}]}
    assert evaluate_cases(read_cases(write(tmp_path, content)))["basic_cases"] == [{"id": "x", "finish_s": [2.0]}]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dst": "b"}, r"x: flows\[0\].path is empty"),
        ({"bytes": -1}, r"flows\[0\].bytes"),
        ({"path": [1]}, r"must name links by position, of which there are 1, got \[1\]"),
        ({"start": -1}, r"flows\[0\].start"),
    ]
    for change, message in wrong:
        content["basic_cases"][0]["flows"] = [flow | change]
        with pytest.raises(CaseError, match=message):
            evaluate_cases(read_cases(write(tmp_path, content)))


def test_a_route_may_cross_a_link_twice() -> None:
    twice = np.array([[0, 0, 1], [0, 1, 2]], dtype=np.int32)
    ends = [
        solver(flow_problem(routes=twice, capacity=np.array([3.0, 9.0]), size=np.array([1.0, 1.0]), delay=np.zeros(2)))
        for solver in (simulate_events, simulate_vector)
    ]
    assert ends[0] == pytest.approx(ends[1], rel=1e-12)
    assert ends[0] == pytest.approx([1.0, 1.0])


def test_a_change_costs_what_it_reaches_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight nodes that share nothing in the first phase, and eight rails in the second: a few links per event."""
    made: list[Links] = []
    monkeypatch.setattr("sim.network.events.Links", lambda whole: made.append(Links(whole)) or made[-1])
    whole, _ = problem(rail_spine(64), "hier2_local", "random", 64 * MB)
    simulate_events(whole)
    assert made[0].looks < 10 * whole.num_flows
    assert made[0].pairs < 40 * whole.num_flows
    assert made[0].moves < 5 * whole.num_flows


@pytest.mark.parametrize(
    ("topology", "algorithm", "dense"),
    [
        (star(64), "direct", True),
        (rail_spine(64), "direct", True),
        (leaf_spine(64, 16, 2), "direct", False),
        (torus(8, 8), "direct", False),
        (rail_spine(64), "hier2_local", False),
        (star(64), "pairwise_shift_barrier", False),
    ],
)
def test_all_flows_at_a_time_only_where_every_link_hangs_on_many(
    topology: dict[str, Any], algorithm: str, dense: bool
) -> None:
    whole, plan = problem(topology, algorithm, "random", 64 * MB)
    stage = np.flatnonzero(plan.flow_tag == np.bincount(plan.flow_tag).argmax())
    assert _is_dense(whole, stage) is dense


def test_many_flows_that_start_together_in_rounds_agree_in_both_solvers() -> None:
    """Enough flows for the path that solves from nothing, ties included."""
    for traffic in ("uniform", "hot0", "random"):
        whole, _ = problem(torus(8, 8), "hier2_local", traffic, 5 * MB)
        assert simulate_events(whole) == pytest.approx(simulate_vector(whole), rel=1e-9)


def test_answers_in_a_file_are_not_read(tmp_path: Path) -> None:
    content = case_file((star(8), "direct", "uniform", MB))
    right = completion(tmp_path, content)
    content["cases"][0].update(completion_time_s=1.0, busiest_link_bound_s=1.0, closed_form_s=1.0, chaotic=True)
    assert completion(tmp_path, content) == right


def _broken(change: str) -> dict[str, Any]:
    content = case_file((star(8), "direct", "uniform", MB))
    topology, case = content["topologies"]["star_8"], content["cases"][0]
    if change == "hash":
        topology["routes_sha256"] = "0" * 64
    elif change == "family":
        topology["family"] = "hypercube"
    elif change == "bandwidth":
        topology["links"][3]["bandwidth"] = 0
    elif change == "routes":
        topology["routes"] = [[None] * 8] * 8
    elif change == "walk":
        topology["routes"] = [[None if i == j else [0, 1] for j in range(8)] for i in range(8)]
    elif change == "algorithm":
        case["algorithm"] = "dirct"
    elif change == "traffic":
        case["traffic"] = "unform"
    elif change == "twice":
        topology["hosts"][1] = "h0"
    elif change == "flows":
        case["flows"] = 7
    elif change == "size":
        case["S_bytes_per_rank"] = 10**19
    elif change == "group":
        case["algorithm"], topology["ranks_per_node"] = "hier2_local", 3
    elif change == "power":
        content = case_file((star(6), "pairwise_xor", "uniform", MB))
    elif change == "no rule":
        case["traffic"] = None
    elif change == "topology":
        case["topology"] = "star_9"
    elif change == "ranks":
        topology["P"] = 10**9
    return content


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("hash", "routes_sha256 says 0000"),
        ("family", "unknown family 'hypercube'"),
        ("bandwidth", r"links\[3\].bandwidth must be positive"),
        ("routes", r"routes\[0\]\[1\] is missing"),
        ("walk", "does not end at|starts at"),
        ("algorithm", "did you mean 'direct'"),
        ("traffic", "did you mean 'uniform'"),
        ("flows", "flows is 7, but algorithm 'direct' with traffic 'uniform' gives 56"),
        ("twice", "hosts must name every host once, got 'h0' again"),
        ("size", r"S_bytes_per_rank|out of range|int"),
        ("group", r"case direct__uniform__star_8: ranks_per_node must divide 8 ranks, got 3"),
        ("power", r"case pairwise_xor__uniform__star_6: P: pairwise_xor needs a power of two"),
        ("no rule", r"case direct__uniform__star_8: traffic: .* needs a rule"),
        ("topology", "unknown topology 'star_9'"),
        ("ranks", "must be 1 to"),
    ],
)
def test_a_broken_file_is_refused_with_the_reason(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises((CaseError, TopologyError), match=message):
        evaluate_cases(read_cases(write(tmp_path, _broken(change))))


@pytest.mark.parametrize("wrong", ["link", "route", "flow"])
def test_what_is_wrong_in_the_last_case_shows_before_the_first_one_runs(tmp_path: Path, wrong: str) -> None:
    content = case_file((star(8), "direct", "uniform", MB), (star(4), "direct", "uniform", MB))
    links = [{"id": 0, "src": "a", "dst": "b", "bandwidth": 1.0, "latency": 0.0}]
    flow = {"src": "a", "dst": "b", "bytes": 1, "start": 0.0, "path": [0 if wrong != "flow" else 1]}
    content["basic_cases"] = [{"id": "last", "links": links, "flows": [flow]}]
    if wrong == "link":
        content["topologies"]["star_4"]["links"][0]["bandwidth"] = 0
    elif wrong == "route":
        content["topologies"]["star_4"]["routes_sha256"] = "0"
    started: list[str] = []
    with pytest.raises(NestPipeError):
        evaluate_cases(read_cases(write(tmp_path, content)), progress=started.append)
    assert started == []


def test_the_command_prints_json_and_refuses_what_is_not_a_case_file(tmp_path: Path) -> None:
    app = Typer()
    app.command()(network)
    path = write(tmp_path, case_file((star(8), "direct", "uniform", MB), (star(8), "direct", "hot0", MB)))
    run = CliRunner().invoke(app, [str(path), "--only", "*hot0*", "--format", "json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert [case["id"] for case in found["cases"]] == ["direct__hot0__star_8"]
    assert found["cases"][0]["completion_time_s"] > 0
    assert found["cases"][0]["wall_s"] > 0
    for text in ("", "[]", '{"format": "other"}', '{"format": "network-oracle-1", "cases": [{"id": 3}]}'):
        (tmp_path / "bad.json").write_text(text, encoding="utf-8")
        with pytest.raises(NestPipeError, match=r"bad\.json"):
            CliRunner().invoke(app, [str(tmp_path / "bad.json")], catch_exceptions=False)
    with pytest.raises(CaseError, match=r"cases\.json: no case matches"):
        CliRunner().invoke(app, [str(path), "--only", "nothing"], catch_exceptions=False)


# oracle ----------------------------------------------------------------------------------------------------------


def oracle(shared_data: Path) -> tuple[CaseFile, dict[str, Any]]:
    path = shared_data / "oracle" / "network_cases.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return read_cases(path), json.loads(path.read_text(encoding="utf-8"))


def check_cases(file: CaseFile, answers: dict[str, Any], only: str | None) -> int:
    by_id = {case["id"]: case for case in answers["cases"]}
    found = evaluate_cases(file, only=only)["cases"]
    wrong = []
    for case in found:
        answer = by_id[case["id"]]
        value, expected = case["completion_time_s"], answer["completion_time_s"]
        if answer["chaotic"]:
            drawn = answer["perturbed_ensemble"]
            near = drawn["min"] <= value <= drawn["max"] or abs(value / expected - 1) <= answer["tolerance_rel"]
        else:
            near = abs(value / expected - 1) <= 1e-9
        wrong += [] if near else [(case["id"], value, expected)]
    assert wrong == []
    return len(found)


def test_a_sample_of_the_oracle_agrees(shared_data: Path) -> None:
    file, answers = oracle(shared_data)
    assert check_cases(file, answers, "*64MB*_16") > 100


def test_every_flow_of_the_basic_oracle_cases_agrees(shared_data: Path) -> None:
    file, answers = oracle(shared_data)
    found = evaluate_cases(CaseFile(format=file.format, basic_cases=file.basic_cases))["basic_cases"]
    for case, answer in zip(found, answers["basic_cases"], strict=True):
        assert case["finish_s"] == pytest.approx([flow["finish_s"] for flow in answer["flows"]], rel=1e-10)


def test_rebuilt_routes_have_the_oracles_hashes(shared_data: Path) -> None:
    file, _ = oracle(shared_data)
    for topology in file.topologies.values():
        topology.routes = None
    for case in {case.topology: case for case in file.cases if case.algorithm == "ring_allreduce"}.values():
        assert evaluate_cases(
            CaseFile(format=file.format, topologies=file.topologies, cases=[case]),
        )["cases"]


@pytest.mark.slow
def test_the_whole_oracle_agrees(shared_data: Path) -> None:
    file, answers = oracle(shared_data)
    assert check_cases(file, answers, None) == len(answers["cases"])
