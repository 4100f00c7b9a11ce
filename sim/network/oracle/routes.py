"""Static single-path routing of the named topology families, as one table of link numbers.

A route table has one row per ordered pair of ranks, `row = src * world_size + dst`, padded on the right with the number
`num_links`, which stands for "no further link". Rows of `src == dst` are all padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TopologyError, unknown_name

__all__ = ["Graph", "build_routes", "check_walks", "hash_routes", "pad_routes"]

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Hosts in rank order and directed links, by name, as a case file lists them."""

    name: str
    hosts: tuple[str, ...]
    src: tuple[str, ...]
    dst: tuple[str, ...]
    parameters: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return len(self.hosts)

    @property
    def num_links(self) -> int:
        return len(self.src)

    def ids(self) -> dict[tuple[str, str], int]:
        """Number of the link from one node to another."""
        table: dict[tuple[str, str], int] = {}
        for number, ends in enumerate(zip(self.src, self.dst, strict=True)):
            if ends in table:
                raise TopologyError(
                    f"{self.name}: links {table[ends]} and {number} both go from {ends[0]} to {ends[1]}"
                )
            table[ends] = number
        return table


class _Links:
    """Finds link numbers by the names at their ends; a missing one is the family not fitting this graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.by_ends = graph.ids()
        self.out: dict[str, list[str]] = {}
        for src, dst in self.by_ends:
            self.out.setdefault(src, []).append(dst)

    def between(self, ends: Sequence[tuple[str, str]]) -> IntArray:
        try:
            return np.array([self.by_ends[pair] for pair in ends], dtype=np.int32)
        except KeyError as missing:
            raise TopologyError(f"{self.graph.name}: no link {missing.args[0][0]} -> {missing.args[0][1]}") from None

    def attached(self, prefix: str) -> tuple[NDArray[np.int64], list[str], IntArray, IntArray]:
        """For every host the switch called `prefix…` it hangs on: index, names, link up, link down."""
        names = []
        for host in self.graph.hosts:
            found = [n for n in self.out.get(host, ()) if n.startswith(prefix) and n[len(prefix) :].isdigit()]
            if len(found) != 1:
                raise TopologyError(
                    f"{self.graph.name}: host {host} must hang on one {prefix} switch, got {found or 0}"
                )
            names.append(found[0])
        order = sorted(set(names), key=lambda n: int(n[len(prefix) :]))
        index = np.array([order.index(n) for n in names])
        hosts = self.graph.hosts
        up = self.between(list(zip(hosts, names, strict=True)))
        down = self.between(list(zip(names, hosts, strict=True)))
        return index, order, up, down


def _pairs(world_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    src, dst = np.divmod(np.arange(world_size * world_size), world_size)
    return src, dst


def _star(links: _Links) -> IntArray:
    hosts = links.graph.hosts
    src, dst = _pairs(len(hosts))
    up = links.between([(h, "sw") for h in hosts])
    down = links.between([("sw", h) for h in hosts])
    return np.stack([up[src], down[dst]], axis=1)


def _leaf_spine(links: _Links) -> IntArray:
    graph = links.graph
    src, dst = _pairs(graph.world_size)
    leaf, leaves, up, down = links.attached("leaf")
    none = np.int32(graph.num_links)
    to_spine = links.between([(name, "spine") for name in leaves])
    from_spine = links.between([("spine", name) for name in leaves])
    same_leaf = leaf[src] == leaf[dst]
    second = np.where(same_leaf, down[dst], to_spine[leaf[src]])
    third = np.where(same_leaf, none, from_spine[leaf[dst]])
    fourth = np.where(same_leaf, none, down[dst])
    routes = np.stack([up[src], second, third, fourth], axis=1).astype(np.int32)
    if any(name.startswith("nv") for name in links.out):
        _inside_nodes(links, routes, src, dst)
    return routes


def _inside_nodes(links: _Links, routes: IntArray, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
    node, _, nv_up, nv_down = links.attached("nv")
    inside = np.flatnonzero(node[src] == node[dst])
    routes[inside, 0] = nv_up[src[inside]]
    routes[inside, 1] = nv_down[dst[inside]]
    routes[inside, 2:] = links.graph.num_links


def _rail_spine(links: _Links) -> IntArray:
    graph = links.graph
    src, dst = _pairs(graph.world_size)
    rail, rails, up, down = links.attached("rail")
    none = np.int32(graph.num_links)
    to_spine = links.between([(name, "spine") for name in rails])
    from_spine = links.between([("spine", name) for name in rails])
    same = rail[src] == rail[dst]
    second = np.where(same, down[dst], to_spine[rail[src]])
    third = np.where(same, none, from_spine[rail[dst]])
    fourth = np.where(same, none, down[dst])
    routes = np.stack([up[src], second, third, fourth], axis=1).astype(np.int32)
    _inside_nodes(links, routes, src, dst)
    return routes


def _rail_pxn(links: _Links) -> IntArray:
    graph = links.graph
    src, dst = _pairs(graph.world_size)
    rail, rails, up, down = links.attached("rail")
    node, nodes, nv_up, nv_down = links.attached("nv")
    peer = np.full((len(nodes), len(rails)), -1)
    peer[node, rail] = np.arange(graph.world_size)
    proxy = peer[node[src], rail[dst]]
    if (proxy < 0).any():
        raise TopologyError(f"{graph.name}: a node has no host on some rail, so it cannot forward to that rail")
    none = np.int32(graph.num_links)
    same = rail[src] == rail[dst]
    routes = np.stack(
        [
            np.where(same, up[src], nv_up[src]),
            np.where(same, down[dst], nv_down[proxy]),
            np.where(same, none, up[proxy]),
            np.where(same, none, down[dst]),
        ],
        axis=1,
    ).astype(np.int32)
    _inside_nodes(links, routes, src, dst)
    return routes


def _torus_2d(links: _Links) -> IntArray:
    graph = links.graph
    size_x, size_y = int(graph.parameters["X"]), int(graph.parameters["Y"])
    if size_x * size_y != graph.world_size:
        raise TopologyError(f"{graph.name}: X * Y must be {graph.world_size} hosts, got {size_x} * {size_y}")
    src, dst = _pairs(graph.world_size)
    width = size_x // 2 + size_y // 2
    routes = np.full((len(src), max(width, 1)), graph.num_links, dtype=np.int32)
    x, y = src % size_x, src // size_x
    hop = np.zeros(len(src), dtype=np.int64)
    for axis, size in (("x", size_x), ("y", size_y)):
        goal = dst % size_x if axis == "x" else dst // size_x
        here = x if axis == "x" else y
        distance = (goal - here) % size
        step = np.where(2 * distance <= size, 1, -1)
        todo = np.where(step > 0, distance, (-distance) % size)
        table = {sign: links.between(_torus_ends(graph, size_x, size_y, axis, sign)) for sign in (1, -1) if size > 1}
        while (todo > 0).any():
            go = np.flatnonzero(todo > 0)
            at = x[go] + size_x * y[go]
            routes[go, hop[go]] = np.where(step[go] > 0, table[1][at], table[-1][at])
            here[go] = (here[go] + step[go]) % size
            hop[go] += 1
            todo[go] -= 1
    return routes


def _torus_ends(graph: Graph, size_x: int, size_y: int, axis: str, sign: int) -> list[tuple[str, str]]:
    ends = []
    for rank in range(graph.world_size):
        x, y = rank % size_x, rank // size_x
        to = (x + sign) % size_x + size_x * y if axis == "x" else x + size_x * ((y + sign) % size_y)
        ends.append((graph.hosts[rank], graph.hosts[to]))
    return ends


def _dragonfly(links: _Links) -> IntArray:
    graph = links.graph
    groups, routers = int(graph.parameters["groups"]), int(graph.parameters["routers_per_group"])
    per_router = int(graph.parameters["hosts_per_router"])
    src, dst = _pairs(graph.world_size)
    index = np.arange(graph.world_size)
    router_of = (index // (routers * per_router)) * routers + (index // per_router) % routers
    names = [f"r{g}_{a}" for g in range(groups) for a in range(routers)]
    up = links.between([(h, names[r]) for h, r in zip(graph.hosts, router_of, strict=True)])
    down = links.between([(names[r], h) for h, r in zip(graph.hosts, router_of, strict=True)])
    none = graph.num_links
    router_links = np.full((groups * routers, groups * routers), none, dtype=np.int32)
    for (start, end), number in links.by_ends.items():
        if start.startswith("r") and end.startswith("r"):
            router_links[names.index(start), names.index(end)] = number
    here, there = router_of[src], router_of[dst]
    own, other = here // routers, there // routers
    gate_out = own * routers + ((other - own - 1) % groups) % routers
    gate_in = other * routers + ((own - other - 1) % groups) % routers
    local = own == other
    hops = [
        np.where(local | (here == gate_out), none, router_links[here, gate_out]),
        np.where(local, np.where(here == there, none, router_links[here, there]), router_links[gate_out, gate_in]),
        np.where(local | (there == gate_in), none, router_links[gate_in, there]),
    ]
    wanted = [~local & (here != gate_out), ~local | (here != there), ~local & (there != gate_in)]
    for hop, want in zip(hops, wanted, strict=True):
        if (hop[want] == none).any():
            raise TopologyError(f"{graph.name}: a link between routers that the dragonfly rule needs is missing")
    return _left_packed(np.stack([up[src], *hops, down[dst]], axis=1).astype(np.int32), none)


def _left_packed(routes: IntArray, none: int) -> IntArray:
    """Moves the padding of every row to its right end, keeping the order of the links."""
    order = np.argsort(routes == none, axis=1, kind="stable")
    return np.take_along_axis(routes, order, axis=1)


_FAMILIES: dict[str, Callable[[_Links], IntArray]] = {
    "star": _star,
    "flat_leafspine": _leaf_spine,
    "node8_leafspine": _leaf_spine,
    "rail_spine": _rail_spine,
    "rail_pxn": _rail_pxn,
    "torus2d": _torus_2d,
    "dragonfly": _dragonfly,
}


def build_routes(graph: Graph, family: str, sha256: str | None) -> IntArray:
    """The route table of a graph by the routing rule of its family.

    Args:
        graph: hosts and links; `parameters` as the family needs them (X and Y of a torus, groups of a dragonfly)
        family: `star`, `flat_leafspine`, `node8_leafspine`, `rail_spine`, `rail_pxn`, `torus2d` or `dragonfly`, where
            a suffix such as `_2to1` or `_slow0` is allowed
        sha256: what `hash_routes` must give, or None where nothing is known to check against

    Raises:
        TopologyError: the family is unknown, the graph does not fit it, or the table has another hash.
    """
    known = [name for name in _FAMILIES if family == name or family.startswith(name + "_")]
    if not known:
        raise TopologyError(f"{graph.name}: cannot rebuild its routes: {unknown_name('family', family, _FAMILIES)}")
    try:
        routes = _FAMILIES[max(known, key=len)](_Links(graph))
    except KeyError as missing:
        raise TopologyError(f"{graph.name}: parameters.{missing.args[0]} is needed to rebuild its routes") from None
    world_size = graph.world_size
    routes[np.arange(world_size) * (world_size + 1)] = graph.num_links
    if sha256 is not None and (found := hash_routes(routes, world_size, graph.num_links)) != sha256:
        raise TopologyError(
            f"{graph.name}: routes rebuilt by the rule of family {family!r} have sha256 {found}, "
            f"routes_sha256 says {sha256}; give the routes in the file"
        )
    return routes


def hash_routes(routes: IntArray, world_size: int, num_links: int) -> str:
    """sha256 of the lines `src dst id,id,…` of all pairs with `src != dst`, in row-major order.

    >>> table = np.array([[2], [0], [1], [2]], dtype=np.int32)
    >>> hash_routes(table, 2, 2) == hashlib.sha256(b"0 1 0\\n1 0 1\\n").hexdigest()
    True
    """
    digest = hashlib.sha256()
    src, dst = _pairs(world_size)
    rows = np.flatnonzero(src != dst)
    for start in range(0, len(rows), 1 << 16):
        part = rows[start : start + (1 << 16)]
        digest.update(_lines(src[part], dst[part], routes[part], num_links))
    return digest.hexdigest()


def _digits(values: NDArray[Any], shown: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Decimal digits of `values`, one column each, and which of them are printed."""
    width = len(str(int(values.max(initial=0))))
    powers = 10 ** np.arange(width - 1, -1, -1)
    digits = (values[:, None] // powers % 10 + ord("0")).astype(np.uint8)
    printed = (values[:, None] >= powers) | (powers == 1)
    return digits, printed & shown[:, None]


def _lines(src: NDArray[Any], dst: NDArray[Any], routes: IntArray, num_links: int) -> bytes:
    always = np.ones(len(src), dtype=bool)
    columns: list[NDArray[np.uint8]] = []
    printed: list[NDArray[np.bool_]] = []

    def literal(character: str, where: NDArray[np.bool_]) -> None:
        columns.append(np.full((len(src), 1), ord(character), dtype=np.uint8))
        printed.append(where[:, None])

    def number(values: NDArray[Any], where: NDArray[np.bool_]) -> None:
        digits, shown = _digits(values, where)
        columns.append(digits)
        printed.append(shown)

    number(src, always)
    literal(" ", always)
    number(dst, always)
    literal(" ", always)
    for hop in range(routes.shape[1]):
        there = routes[:, hop] < num_links
        if hop:
            literal(",", there)
        number(routes[:, hop].astype(np.int64), there)
    literal("\n", always)
    return np.concatenate(columns, axis=1)[np.concatenate(printed, axis=1)].tobytes()


def pad_routes(routes: Sequence[Sequence[Sequence[int] | None]], num_links: int, where: str) -> IntArray:
    """Lists of link numbers, `routes[src][dst]`, as a padded table; None only where src is dst."""
    world_size = len(routes)
    width = max((len(path) for row in routes for path in row if path), default=1)
    table = np.full((world_size * world_size, width), num_links, dtype=np.int32)
    for src, row in enumerate(routes):
        if len(row) != world_size:
            raise TopologyError(f"{where}.routes[{src}] must have {world_size} entries, got {len(row)}")
        for dst, path in enumerate(row):
            if not path:
                if src != dst:
                    raise TopologyError(f"{where}.routes[{src}][{dst}] is missing; every pair of ranks needs a path")
                continue
            if not all(0 <= number < num_links for number in path):
                raise TopologyError(f"{where}.routes[{src}][{dst}] names a link outside 0..{num_links - 1}: {path}")
            table[src * world_size + dst, : len(path)] = path
    return table


def check_walks(routes: IntArray, graph: Graph) -> None:
    """Every route starts at its source, ends at its destination, and each link begins where the last one ended."""
    names = {name: number for number, name in enumerate(dict.fromkeys((*graph.hosts, *graph.src, *graph.dst)))}
    start = np.array([names[n] for n in graph.src] + [-1])
    end = np.array([names[n] for n in graph.dst] + [-1])
    src, dst = _pairs(graph.world_size)
    at = np.array([names[h] for h in graph.hosts])[src]
    for hop in range(routes.shape[1]):
        there = routes[:, hop] < graph.num_links
        wrong = np.flatnonzero(there & (start[routes[:, hop]] != at))
        if len(wrong):
            row = int(wrong[0])
            raise TopologyError(
                f"{graph.name}.routes[{src[row]}][{dst[row]}]: link {routes[row, hop]} starts at "
                f"{graph.src[routes[row, hop]]}, but the path so far ends elsewhere"
            )
        at = np.where(there, end[routes[:, hop]], at)
    wrong = np.flatnonzero((at != np.array([names[h] for h in graph.hosts])[dst]) & (src != dst))
    if len(wrong):
        row = int(wrong[0])
        raise TopologyError(f"{graph.name}.routes[{src[row]}][{dst[row]}] does not end at {graph.hosts[dst[row]]}")
