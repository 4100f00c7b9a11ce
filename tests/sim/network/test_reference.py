"""Case files of networks nobody drew on purpose, against a reference that shares nothing with the solvers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.network.oracle.cases import evaluate_cases, read_cases
from sim.network.oracle.programs import PROGRAMS, TRAFFIC
from tests.sim.network.reference import completion_s, finish_s, rates

#: All2Alls of the file format; the reference knows no others.
ALGORITHMS = [name for name, (collective, _, _) in PROGRAMS.items() if collective == "all_to_all" and "/" not in name]
_SIZES = [0, 1, 3, 7, 100, 999, 64_000, 64_000_000, 123_456_789]
_BANDWIDTHS = [[25e9], [25e9, 200e9], [1e9, 3e9, 7e9, 25e9], [1e6, 3.3e8, 1e12]]
_LATENCIES = [[0.0], [1e-6], [0.0, 5e-7, 1e-6, 2.3e-5]]


def network(rng: random.Random, ranks: int) -> dict[str, Any]:
    """Switches in a tree, hosts on one or two of them, a few links more, and some route for every pair."""
    switches, hosts = [f"s{n}" for n in range(rng.randint(1, 4))], [f"x{n}" for n in range(ranks)]
    pairs = {(name, switches[rng.randrange(n)]) for n, name in enumerate(switches) if n}
    for host in hosts:
        pairs |= {(host, switch) for switch in rng.sample(switches, rng.randint(1, min(2, len(switches))))}
    for _ in range(rng.randint(0, 5)):
        first, second = rng.sample([*hosts, *switches], 2)
        pairs |= set() if (second, first) in pairs else {(first, second)}
    bandwidths, latencies = rng.choice(_BANDWIDTHS), rng.choice(_LATENCIES)
    graph = nx.DiGraph()
    for first, second in sorted(pairs):
        for src, dst in ((first, second), (second, first)):
            graph.add_edge(src, dst, id=graph.number_of_edges())
    routes: list[list[list[int] | None]] = []
    for src in hosts:
        routes.append([])
        for dst in hosts:
            detour = rng.choice([0.01, 3.0])
            weights = {edge: 1 + detour * rng.random() for edge in graph.edges}
            nx.set_edge_attributes(graph, weights, "weight")
            path = nx.dijkstra_path(graph, src, dst)
            routes[-1].append([graph.edges[edge]["id"] for edge in nx.utils.pairwise(path)] if src != dst else None)
    links = [
        {"id": n, "src": src, "dst": dst, "bandwidth": rng.choice(bandwidths), "latency": rng.choice(latencies)}
        for n, (src, dst) in enumerate(graph.edges)
    ]
    links.sort(key=lambda link: graph.edges[link["src"], link["dst"]]["id"])
    links = [link | {"id": n} for n, link in enumerate(links)]
    group = rng.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    return {"P": ranks, "ranks_per_node": group, "hosts": hosts, "links": links, "routes": routes}


def content(rng: random.Random, ranks: int) -> dict[str, Any]:
    """A file of three cases and a set of flows on one network."""
    drawn = network(rng, ranks)
    fits = sorted(name for name in ALGORITHMS if name != "pairwise_xor" or not ranks & (ranks - 1))
    cases = []
    for number in range(3):
        algorithm = rng.choice([*fits, "ring_allreduce", "hier_ring_allreduce"])
        traffic = rng.choice(sorted(TRAFFIC)) if algorithm in ALGORITHMS else None
        case = {"id": str(number), "topology": "net", "P": ranks, "algorithm": algorithm, "traffic": traffic}
        cases.append(case | {"S_bytes_per_rank": rng.choice(_SIZES)})
    flows = []
    for _ in range(rng.randint(0, 25) if ranks > 1 else 0):
        src, dst = rng.sample(range(ranks), 2)
        size, start = rng.choice([0, 1, 1000, 10**6, 10**6, 64 * 10**6]), rng.choice([0, 0, 0, 1e-6, 1e-3, 0.5])
        flow = {"src": drawn["hosts"][src], "dst": drawn["hosts"][dst], "bytes": size, "start": start}
        flows.append(flow | {"path": drawn["routes"][src][dst]})
    basic = [{"id": "flows", "links": drawn["links"], "flows": flows}]
    return {"format": "network-oracle-1", "topologies": {"net": drawn}, "cases": cases, "basic_cases": basic}


def check(drawn: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(drawn), encoding="utf-8")
    found = evaluate_cases(read_cases(path))
    for case, answer in zip(drawn["cases"], found["cases"], strict=True):
        if answer["chaos"] != "chaotic":
            assert answer["completion_time_s"] == pytest.approx(
                completion_s(drawn["topologies"]["net"], case), rel=1e-9
            )
    assert found["basic_cases"][0]["finish_s"] == pytest.approx(finish_s(drawn["basic_cases"][0]), rel=1e-9)


def test_the_reference_itself_by_hand() -> None:
    assert rates([1.0, 2.0], [[0], [0, 1], [1]]) == [0.5, 0.5, 1.5]
    links = [{"bandwidth": 100.0, "latency": 1.0}] * 2
    flows = [{"bytes": 100, "start": 0.0, "path": [0, 1]}, {"bytes": 50, "start": 1.0, "path": [0]},
             {"bytes": 0, "start": 3.0, "path": [1]}]  # fmt: skip
    assert finish_s({"links": links, "flows": flows}) == [3.5, 3.0, 4.0]


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 3, 4, 5, 6, 8, 9, 12]))
def test_odd_networks_agree_with_the_reference(tmp_path_factory: pytest.TempPathFactory, seed: int, ranks: int) -> None:
    check(content(random.Random(seed), ranks), tmp_path_factory.getbasetemp() / "odd.json")


@pytest.mark.parametrize("algorithm", ["direct", "pairwise_shift_barrier", "hier2_local"])
def test_odd_networks_of_hundreds_of_flows_agree_with_the_reference(tmp_path: Path, algorithm: str) -> None:
    drawn = content(random.Random(algorithm), 18)
    for case, traffic in zip(drawn["cases"], ("random", "hot0", "zipf1"), strict=True):
        case |= {"algorithm": algorithm, "traffic": traffic, "S_bytes_per_rank": 64_000_000}
    check(drawn, tmp_path / "odd.json")
