"""Network case files: topologies, schedules and self-contained flow sets, read, rebuilt and evaluated.

Answers that a file may carry (completion times, tolerances, ensembles) are never read; the number of flows and their
sum are, to make sure that a rebuilt schedule is the one meant.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nestpipe.base import CaseError, TopologyError, unknown_name
from sim.network import Floats, FlowProblem, Measured, flow_problem, measure
from sim.network.oracle.programs import MessageProgram, build_program, check_names
from sim.network.oracle.routes import Graph, IntArray, build_routes, check_walks, pad_routes

__all__ = ["CaseFile", "Network", "evaluate_cases", "read_cases"]

FORMAT = "network-oracle-1"
MAX_RANKS = 8192
MAX_BYTES = 10**15  # a thousand times as much must fit into 64 bits
_ROUTED_FIRST = 256  # ranks up to which routes are rebuilt, and so checked, before any case runs


class _Link(msgspec.Struct):
    id: int
    src: str
    dst: str
    bandwidth: float
    latency: float


class _Topology(msgspec.Struct):
    hosts: list[str]
    links: list[_Link]
    ranks: int = msgspec.field(name="P")
    ranks_per_node: int = 1
    parameters: dict[str, Any] = {}
    family: str = ""
    routes: list[list[list[int] | None]] | None = None
    routes_sha256: str | None = None


class _Case(msgspec.Struct):
    id: str
    topology: str
    algorithm: str
    ranks: int = msgspec.field(name="P")
    size_bytes: int = msgspec.field(name="S_bytes_per_rank")
    traffic: str | None = None
    flows: int | None = None
    bytes_total: int | None = None


class _BasicFlow(msgspec.Struct):
    bytes: float
    start: float
    path: list[int]
    src: Any = None
    dst: Any = None


class _Basic(msgspec.Struct):
    id: str
    links: list[_Link]
    flows: list[_BasicFlow]


class CaseFile(msgspec.Struct):
    """A case file as read: `topologies` by id, `cases` and `basic_cases` in file order."""

    format: str
    topologies: dict[str, _Topology] = {}
    basic_cases: list[_Basic] = []
    cases: list[_Case] = []


def read_cases(path: Path) -> CaseFile:
    """Reads and checks a case file.

    Raises:
        CaseError: not JSON, another format, a field missing or of the wrong type (with the path to it).
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=CaseFile)
    except OSError as error:
        raise CaseError(f"{path}: not readable: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise CaseError(f"{path}: {error}") from None
    if file.format != FORMAT:
        raise CaseError(f"{path}: {unknown_name('format', file.format, [FORMAT])}")
    for case in file.cases:
        if case.topology not in file.topologies:
            raise CaseError(f"{path}: case {case.id}: {unknown_name('topology', case.topology, file.topologies)}")
    return file


def _link_arrays(links: list[_Link], where: str) -> tuple[Floats, Floats]:
    """Bandwidth in bytes/s and latency in s of each link; the latency has one more entry, 0, for the padding."""
    for number, link in enumerate(links):
        if link.id != number:
            raise TopologyError(f"{where}.links[{number}].id must be its position, {number}, got {link.id}")
        if not link.bandwidth > 0 or not np.isfinite(link.bandwidth):
            raise TopologyError(f"{where}.links[{number}].bandwidth must be positive bytes/s, got {link.bandwidth:g}")
        if not link.latency >= 0 or not np.isfinite(link.latency):
            raise TopologyError(f"{where}.links[{number}].latency must be 0 s or more, got {link.latency:g}")
    return np.array([ln.bandwidth for ln in links]), np.array([ln.latency for ln in links] + [0.0])


class Network:
    """A topology of a case file with its route table, built once for all its cases."""

    def __init__(self, name: str, topology: _Topology) -> None:
        self.topology = topology
        self.world_size = topology.ranks
        where = f"topologies.{name}"
        self.capacity, self.latency = _link_arrays(topology.links, where)
        graph = Graph(
            name=where,
            hosts=tuple(topology.hosts),
            src=tuple(link.src for link in topology.links),
            dst=tuple(link.dst for link in topology.links),
            parameters=topology.parameters,
        )
        self.routes: IntArray
        if topology.routes is None:
            self.routes = build_routes(graph, topology.family or name, topology.routes_sha256)
        else:
            if len(topology.routes) != self.world_size:
                raise TopologyError(f"{where}.routes must have {self.world_size} rows, got {len(topology.routes)}")
            self.routes = pad_routes(topology.routes, graph.num_links, where)
            check_walks(self.routes, graph)

    def problem(self, program: MessageProgram) -> FlowProblem:
        """The flows of a program on this topology."""
        routes = self.routes[program.src * self.world_size + program.dst]
        return program.problem(routes, self.capacity, self.latency)


def _check_case(case: _Case, topology: _Topology) -> None:
    """Refuses an invalid case before any case runs."""
    where = f"topologies.{case.topology}"
    if not 1 <= topology.ranks <= MAX_RANKS:
        more = "; use the class model (nestpipe simulate --topology) for more" if topology.ranks > MAX_RANKS else ""
        raise TopologyError(
            f"{where}.P must be 1 to {MAX_RANKS:,} ranks for the flow-level solver, got {topology.ranks:,}{more}"
        )
    if len(topology.hosts) != topology.ranks:
        raise TopologyError(f"{where}.hosts must name {topology.ranks} hosts, got {len(topology.hosts)}")
    if twice := [host for host, count in Counter(topology.hosts).items() if count > 1]:
        raise TopologyError(f"{where}.hosts must name every host once, got {twice[0]!r} again")
    where = f"case {case.id}"
    if case.ranks != topology.ranks:
        raise CaseError(f"{where}: P is {case.ranks}, but {case.topology} has {topology.ranks} ranks")
    if not 0 <= case.size_bytes <= MAX_BYTES:
        raise CaseError(f"{where}: S_bytes_per_rank must be 0 to {MAX_BYTES:,}, got {case.size_bytes:,}")
    try:
        check_names(case.algorithm, case.traffic, case.ranks, topology.ranks_per_node)
    except CaseError as error:
        raise CaseError(f"{where}: {error}") from None


def _run_case(case: _Case, network: Network, num_draws: int) -> Measured:
    program = build_program(case.algorithm, case.traffic, case.size_bytes, case.ranks, network.topology.ranks_per_node)
    rebuilt = {"flows": program.num_flows, "bytes_total": int(program.size_bytes.sum())}
    for name, value in rebuilt.items():
        if (said := getattr(case, name)) not in (None, value):
            raise CaseError(
                f"case {case.id}: {name} is {said}, but algorithm {case.algorithm!r} with traffic {case.traffic!r} "
                f"gives {value}; the file's rules differ from the ones implemented here"
            )
    problem = network.problem(program)
    return measure(problem, program.flow_tag, program.node_tag, num_draws=num_draws, local=program.local)


def _basic_routes(basic: _Basic, where: str) -> IntArray:
    """Links of each flow, padded; a flow to itself has none."""
    count = len(basic.links)
    width = max((len(flow.path) for flow in basic.flows), default=1)
    routes = np.full((len(basic.flows), max(width, 1)), count, dtype=np.int32)
    for number, flow in enumerate(basic.flows):
        at = f"{where}: flows[{number}]"
        if not all(0 <= link < count for link in flow.path):
            raise CaseError(f"{at}.path must name links by position, of which there are {count}, got {flow.path}")
        for name, value in (("bytes", flow.bytes), ("start", flow.start)):
            if not (np.isfinite(value) and value >= 0):
                raise CaseError(f"{at}.{name} must be 0 or more, got {value:g}")
        if not flow.path and flow.bytes and flow.src != flow.dst:
            raise CaseError(f"{at}.path is empty; a flow from {flow.src!r} to {flow.dst!r} needs a link or more")
        routes[number, : len(flow.path)] = flow.path
    return routes


def _basic_problem(basic: _Basic) -> FlowProblem:
    """The flows of a basic case as they are, those that take no time among them, checked."""
    where = f"basic case {basic.id}"
    capacity, latency = _link_arrays(basic.links, where)
    routes = _basic_routes(basic, where)
    size = np.array([flow.bytes for flow in basic.flows], dtype=np.float64)
    delay = np.array([flow.start for flow in basic.flows]) + latency[routes].sum(axis=1)
    return flow_problem(routes=routes, capacity=capacity, size=size, delay=delay)


def _run_basic(whole: FlowProblem) -> list[float]:
    """End of each flow; one of no bytes, or to itself, ends when it starts."""
    finish = whole.delay.copy()
    moving = np.flatnonzero((whole.size > 0) & (whole.routes[:, 0] < len(whole.capacity)))
    problem = flow_problem(
        routes=whole.routes[moving], capacity=whole.capacity, size=whole.size[moving], delay=whole.delay[moving]
    )
    tags = np.zeros(len(moving), dtype=np.int64)
    finish[moving] = measure(problem, tags, np.zeros(1, dtype=np.int64), num_draws=0, local=False).finish_s
    return [float(value) for value in finish]


def evaluate_cases(
    file: CaseFile,
    *,
    only: str | None = None,
    num_draws: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Completion times of the cases of a file.

    Args:
        only: shell pattern, or part of the id, of the cases to run; None: all
        num_draws: see `sim.network.solve.measure`
        progress: told the id of each case before it runs

    Returns:
        `cases`: id, completion_time_s, wall_s (time to rebuild the schedule and simulate), and for what it is worth
        flows, rows (after merging equal flows), chaos (see `sim.network.solve.Chaos`), sensitivity_rel, draws_s;
        `basic_cases`: id, finish_s in file order.

    Raises:
        CaseError: no case matches, or one is invalid; what shows before running is raised before any case runs.
    """

    def wanted(name: str) -> bool:
        return only is None or only in name or fnmatchcase(name, only)

    cases = [case for case in file.cases if wanted(case.id)]
    basic = [case for case in file.basic_cases if wanted(case.id)]
    if only is not None and not cases and not basic:
        raise CaseError(f"no case matches {only!r}; the file has {len(file.cases) + len(file.basic_cases)} cases")
    for case in cases:
        _check_case(case, file.topologies[case.topology])
    networks: dict[str, Network] = {}
    for name in dict.fromkeys(case.topology for case in cases):
        topology = file.topologies[name]
        _link_arrays(topology.links, f"topologies.{name}")
        if topology.routes is not None or topology.ranks <= _ROUTED_FIRST:
            networks[name] = Network(name, topology)
    problems = [(case.id, _basic_problem(case)) for case in basic]
    return {
        "cases": list(_evaluated(file, cases, networks, num_draws, progress)),
        "basic_cases": [{"id": name, "finish_s": _run_basic(problem)} for name, problem in problems],
    }


def _evaluated(
    file: CaseFile,
    cases: list[_Case],
    networks: dict[str, Network],
    num_draws: int,
    progress: Callable[[str], None] | None,
) -> Iterator[dict[str, Any]]:
    last_use = {case.topology: number for number, case in enumerate(cases)}
    for number, case in enumerate(cases):
        if progress is not None:
            progress(case.id)
        if case.topology not in networks:
            networks[case.topology] = Network(case.topology, file.topologies[case.topology])
        start = time.perf_counter()
        found = _run_case(case, networks[case.topology], num_draws)
        yield {
            "id": case.id,
            "completion_time_s": found.completion_s,
            "wall_s": time.perf_counter() - start,
            "flows": len(found.finish_s),
            "rows": found.num_rows,
            "chaos": found.chaos.value,
            "sensitivity_rel": found.sensitivity,
            "draws_s": list(found.draws),
        }
        if last_use[case.topology] == number:
            del networks[case.topology]
