"""Small network case files for tests: topologies of the known families with hashed routes, and cases on them."""

from __future__ import annotations

from typing import Any

from sim.network.oracle.routes import Graph, build_routes, hash_routes

__all__ = ["case", "case_file", "leaf_spine", "rail_spine", "star", "torus"]

Link = tuple[str, str, float, float]
NIC, NVLINK = 25e9, 200e9


def _both(first: str, second: str, bandwidth: float, latency: float) -> list[Link]:
    return [(first, second, bandwidth, latency), (second, first, bandwidth, latency)]


def _topology(name: str, family: str, ranks: int, links: list[Link], **parameters: Any) -> dict[str, Any]:
    hosts = tuple(f"h{i}" for i in range(ranks))
    src, dst, _, _ = (tuple(column) for column in zip(*links, strict=True))
    graph = Graph(name=name, hosts=hosts, src=src, dst=dst, parameters=parameters)
    routes = build_routes(graph, family, None)
    return {
        "id": name,
        "family": family,
        "P": ranks,
        "ranks_per_node": 8,
        "hosts": list(hosts),
        "parameters": parameters,
        "routes": None,
        "routes_sha256": hash_routes(routes, ranks, len(links)),
        "links": [{"id": n, "src": s, "dst": d, "bandwidth": b, "latency": t} for n, (s, d, b, t) in enumerate(links)],
    }


def star(ranks: int) -> dict[str, Any]:
    links = [link for i in range(ranks) for link in _both(f"h{i}", "sw", NIC, 1e-6)]
    return _topology(f"star_{ranks}", "star", ranks, links)


def leaf_spine(ranks: int, per_leaf: int, oversubscription: float) -> dict[str, Any]:
    links = [link for i in range(ranks) for link in _both(f"h{i}", f"nv{i // 8}", NVLINK, 5e-7)]
    links += [link for i in range(ranks) for link in _both(f"h{i}", f"leaf{i // per_leaf}", NIC, 1e-6)]
    trunk = NIC * per_leaf / oversubscription
    links += [link for a in range(ranks // per_leaf) for link in _both(f"leaf{a}", "spine", trunk, 1e-6)]
    return _topology(f"node8_leafspine_{oversubscription:g}to1_{ranks}", "node8_leafspine", ranks, links)


def rail_spine(ranks: int) -> dict[str, Any]:
    links = [link for i in range(ranks) for link in _both(f"h{i}", f"nv{i // 8}", NVLINK, 5e-7)]
    links += [link for i in range(ranks) for link in _both(f"h{i}", f"rail{i % 8}", NIC, 1e-6)]
    links += [link for r in range(8) for link in _both(f"rail{r}", "spine", NIC * ranks / 8, 1e-6)]
    return _topology(f"rail_spine_{ranks}", "rail_spine", ranks, links)


def torus(size_x: int, size_y: int) -> dict[str, Any]:
    links: list[Link] = []
    for rank in range(size_x * size_y):
        x, y = rank % size_x, rank // size_x
        across = [(x + 1) % size_x + size_x * y, (x - 1) % size_x + size_x * y]
        along = [x + size_x * ((y + 1) % size_y), x + size_x * ((y - 1) % size_y)]
        links += [(f"h{rank}", f"h{to}", NIC, 1e-6) for to in dict.fromkeys(across + along)]
    return _topology(f"torus2d_{size_x * size_y}", "torus2d", size_x * size_y, links, X=size_x, Y=size_y)


def case(topology: dict[str, Any], algorithm: str, traffic: str | None, size: int = 64_000_000) -> dict[str, Any]:
    return {
        "id": f"{algorithm}__{traffic}__{topology['id']}",
        "topology": topology["id"],
        "P": topology["P"],
        "algorithm": algorithm,
        "traffic": traffic,
        "S_bytes_per_rank": size,
    }


def case_file(*cases: tuple[dict[str, Any], str, str | None, int]) -> dict[str, Any]:
    return {
        "format": "network-oracle-1",
        "topologies": {topology["id"]: topology for topology, _, _, _ in cases},
        "basic_cases": [],
        "cases": [case(*one) for one in cases],
    }
