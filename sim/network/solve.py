"""How long communication takes on a network of shared links, flow by flow, as a max-min fair fluid.

`simulate` is exact: it merges flows that symmetry makes equal (`sim.network.fold`) and then runs one of two solvers,
for many flows at a time (`sim.network.vector`) or for few (`sim.network.events`). `measure` adds, where asked, whether
the answer is *chaotic*: where ranks go from round to round on their own, rounding noise can grow until the completion
time moves by per cent. A few runs with bandwidths changed by 1e-9 then give the range in which it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import CaseError
from sim.network.events import simulate_events
from sim.network.fold import fold
from sim.network.levels import fill
from sim.network.problem import Floats, FlowProblem, Ints
from sim.network.vector import simulate_vector

__all__ = ["Chaos", "FlowProblem", "Measured", "flow_problem", "measure", "run_rows", "simulate"]

CHAOTIC_ABOVE = 1e-6  # relative change of the completion time under a relative change of 1e-9 of the bandwidths
PERTURBATION = 1e-9
MAX_FLOWS_DRAWN = 300_000
MAX_FLOWS_UNFOLDED = 70_000  # of a case that symmetry makes small, as a perturbed run has no symmetry
FLOWS_DRAWN_IN_ALL = 200_000
_MANY = 200  # flows of a stage
_MANY_LINKS, _TIED = 28, 1 / 16  # links that a link depends on: at least, and as a share of those that hold flows back


class Chaos(StrEnum):
    """Whether rounding noise can move an answer: `IMPOSSIBLE` where ranks never go on by themselves."""

    IMPOSSIBLE = "impossible"
    CALM = "calm"
    CHAOTIC = "chaotic"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What simulating a case found.

    Attributes:
        completion_s: end of the last flow
        finish_s: end of each flow
        num_rows: rows left after merging equal flows
        sensitivity: relative change of the completion time under a change of 1e-9 of the bandwidths, None if not tried
        chaos: what that says; not tried unless asked, nor for very many flows, as a run for each draw would take long
        draws: completion times of perturbed runs, s
    """

    completion_s: float
    finish_s: Floats
    num_rows: int
    sensitivity: float | None
    chaos: Chaos
    draws: tuple[float, ...]


def flow_problem(
    *, routes: NDArray[np.int32], capacity: Floats, size: Floats, delay: Floats, weight: Floats | None = None
) -> FlowProblem:
    """Independent flows, each starting `delay` seconds after time 0, as a problem for `simulate` or `run_rows`."""
    flows = len(size)
    return FlowProblem(
        routes=routes,
        weight=weight,
        capacity=capacity,
        size=size,
        delay=delay,
        release=np.zeros(flows, dtype=np.int64),
        done=np.full((flows, 2), -1, dtype=np.int64),
        done_weight=np.ones((flows, 2), dtype=np.int64),
        node_pending=np.zeros(1, dtype=np.int64),
        node_next=np.full(1, -1, dtype=np.int64),
    )


def simulate(problem: FlowProblem, flow_tag: Ints, node_tag: Ints) -> tuple[Floats, int]:
    """End of every flow in s under max-min fair sharing, and the rows that were left after merging equal flows.

    Args:
        problem: flows, links and nodes; checked first
        flow_tag, node_tag: rounds or phases, used to tell flows and nodes apart early

    Raises:
        CaseError: some flow is never released.
        TopologyError: a link without capacity, a flow without a route.
    """
    problem.check()
    if not problem.num_flows:
        return np.zeros(0), 0
    folded = fold(problem, flow_tag, node_tag)
    if folded is None:
        finish, rows = _run(problem, flow_tag), problem.num_flows
    else:
        first = np.full(folded.problem.num_flows, problem.num_flows)
        np.minimum.at(first, folded.row_of, np.arange(problem.num_flows))
        finish, rows = _run(folded.problem, flow_tag[first])[folded.row_of], folded.problem.num_flows
    if np.isnan(finish).any():
        raise CaseError(f"{int(np.isnan(finish).sum())} flows are never released; the schedule waits for itself")
    return finish, rows


def run_rows(problem: FlowProblem) -> Floats:
    """End of every flow in s of independent flows as they are, without looking for symmetry."""
    problem.check()
    return _run(problem, np.zeros(problem.num_flows, dtype=np.int64))


def _run(problem: FlowProblem, flow_tag: Ints) -> Floats:
    """The solver that suits: link by link, or all flows at a time where a change reaches most of them."""
    stage = np.flatnonzero(flow_tag == np.bincount(flow_tag).argmax())
    return simulate_vector(problem) if _is_dense(problem, stage) else simulate_events(problem)


def _is_dense(problem: FlowProblem, stage: Ints) -> bool:
    """Whether a change among the flows of a stage reaches so much that taking all of them at a time costs less.

    Link by link, an event costs as many steps as links that hold flows back depend on; all flows at a time, the square
    of the number of such links. A wrong choice costs a factor of two or three (`benchmarks/bench_network.py`).
    """
    if len(stage) <= _MANY:
        return False
    count = len(problem.capacity)
    routes = np.ascontiguousarray(problem.routes[stage].T, dtype=np.int64)
    weight = None if problem.weight is None else np.ascontiguousarray(problem.weight[stage].T)
    holder = fill(routes, weight, problem.capacity)[1]
    holders = len(np.unique(holder))
    elsewhere = (routes < count) & (routes != holder)
    depends = len(np.unique((routes * count + holder)[elsewhere])) / holders
    return depends > _MANY_LINKS and depends > _TIED * holders


def measure(problem: FlowProblem, flow_tag: Ints, node_tag: Ints, *, num_draws: int, local: bool) -> Measured:
    """Simulates, and where ranks go on by themselves (`local`) finds out how far rounding noise moves the answer.

    Args:
        num_draws: perturbed runs of a chaotic case; 0: never perturb
        local: ranks enter rounds on their own; other schedules are not chaotic
    """
    finish, rows = simulate(problem, flow_tag, node_tag)
    completion = float(finish.max(initial=0.0))
    most = MAX_FLOWS_DRAWN if rows == problem.num_flows else MAX_FLOWS_UNFOLDED
    if not local or not num_draws or not completion or problem.num_flows > most:
        tried = Chaos.IMPOSSIBLE if not local or not completion else Chaos.NOT_TRIED
        return Measured(
            completion_s=completion, finish_s=finish, num_rows=rows, sensitivity=None, chaos=tried, draws=()
        )
    draws: list[float] = []
    num_draws = min(num_draws, max(3, FLOWS_DRAWN_IN_ALL // problem.num_flows))
    for seed in range(num_draws):
        draws.append(_perturbed(problem, flow_tag, seed))
        if seed == 0 and abs(draws[0] / completion - 1) <= CHAOTIC_ABOVE:
            break
    sensitivity = max(abs(draw / completion - 1) for draw in draws)
    return Measured(
        completion_s=completion,
        finish_s=finish,
        num_rows=rows,
        sensitivity=sensitivity,
        chaos=Chaos.CHAOTIC if sensitivity > CHAOTIC_ABOVE else Chaos.CALM,
        draws=tuple(draws),
    )


def _perturbed(problem: FlowProblem, flow_tag: Ints, seed: int) -> float:
    noise = np.random.default_rng(seed).uniform(-PERTURBATION, PERTURBATION, len(problem.capacity))
    changed = replace(problem, capacity=problem.capacity * (1 + noise))
    return float(_run(changed, flow_tag).max())
