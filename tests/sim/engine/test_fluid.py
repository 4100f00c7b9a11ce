"""Fluid resources over SimPy: ends by hand, fairness, caps and shares, determinism, and what resources report."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.fluid import Activity, FluidSystem

GB = 1e9


def run_all(starts: list[tuple[int, float, tuple[int, ...], float | None]], capacities: list[float]) -> list[int]:
    """Ends in ns of activities (start ns, work, resources, cap)."""
    env = simpy.Environment()
    fluid = FluidSystem(env)
    resources = [fluid.resource(f"r{n}", capacity) for n, capacity in enumerate(capacities)]
    ends = [0] * len(starts)

    def process(number: int) -> Generator[simpy.Event, Any, None]:
        start, work, uses, cap = starts[number]
        yield env.timeout(start)
        ends[number] = yield fluid.start(Activity(work=work, uses={resources[r]: 1.0 for r in uses}, cap_per_s=cap))

    processes = [env.process(process(number)) for number in range(len(starts))]
    env.run(until=env.all_of(processes))
    return ends


def test_two_flows_share_a_link_and_the_second_speeds_up_when_the_first_ends() -> None:
    assert run_all([(0, 100.0, (0,), None), (0, 50.0, (0,), None)], [10 * GB]) == [15, 10]


def test_the_parking_lot_gives_the_long_flow_its_smaller_share() -> None:
    starts = [(0, 50.0, (0, 1), None), (0, 100.0, (0,), None), (0, 50.0, (1,), None)]
    assert run_all(starts, [10 * GB, 10 * GB]) == [10, 15, 10]


def test_a_cap_leaves_the_rest_to_the_others() -> None:
    assert run_all([(0, 10.0, (0,), 1 * GB), (0, 90.0, (0,), None)], [10 * GB]) == [10, 10]


def test_an_activity_with_only_a_cap_takes_its_time() -> None:
    assert run_all([(3, 8.0, (), 2 * GB)], []) == [7]


def test_work_ends_at_the_first_whole_nanosecond_at_which_it_is_done() -> None:
    assert run_all([(0, 10.0, (0,), None)], [3 * GB]) == [4]
    assert run_all([(5, 0.0, (0,), None)], [3 * GB]) == [5]


def test_a_share_of_two_gets_twice_the_rate_and_weights_take_more_of_a_resource() -> None:
    env = simpy.Environment()
    fluid = FluidSystem(env)
    link = fluid.resource("link", 9 * GB)
    heavy = fluid.start(Activity(work=60.0, uses={link: 1.0}, share=2.0))
    light = fluid.start(Activity(work=30.0, uses={link: 1.0}))
    env.run()
    assert (heavy.value, light.value) == (10, 10)
    env, fluid = (e := simpy.Environment()), FluidSystem(e)
    link = fluid.resource("link", 9 * GB)
    double = fluid.start(Activity(work=30.0, uses={link: 2.0}))
    single = fluid.start(Activity(work=30.0, uses={link: 1.0}))
    env.run()
    assert (double.value, single.value) == (10, 10)


def test_usage_says_how_long_and_how_much() -> None:
    env = simpy.Environment()
    fluid = FluidSystem(env)
    link, idle = fluid.resource("link", 10 * GB), fluid.resource("idle", 1 * GB)
    fluid.start(Activity(work=50.0, uses={link: 1.0}))
    env.run(until=20)
    used, unused = fluid.usage()
    assert (used.name, used.work, used.busy_ns, used.utilisation) == ("link", 50.0, 5, pytest.approx(0.25))
    assert (unused.name, unused.work, unused.busy_ns) == (idle.name, 0.0, 0)


def test_rates_are_solved_once_for_all_that_starts_in_a_nanosecond() -> None:
    env = simpy.Environment()
    fluid = FluidSystem(env)
    link = fluid.resource("link", 100 * GB)
    for _ in range(50):
        fluid.start(Activity(work=100.0, uses={link: 1.0}))
    env.run()
    assert fluid.num_solves == 2  # the start of all, the end of all


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"work": -1.0, "cap_per_s": 1.0}, "work must be finite and 0 or more"),
        ({"work": float("nan"), "cap_per_s": 1.0}, "work must be finite"),
        ({"work": 1.0}, "must use a resource or have a cap_per_s"),
        ({"work": 1.0, "cap_per_s": 0.0}, "cap_per_s must be positive"),
        ({"work": 1.0, "cap_per_s": 1.0, "share": 0.0}, "share must be positive"),
    ],
)
def test_an_impossible_activity_is_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Activity(**arguments)  # type: ignore[arg-type]


def test_a_resource_without_capacity_is_refused() -> None:
    for capacity in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="capacity_per_s must be positive and finite"):
            FluidSystem(simpy.Environment()).resource("link", capacity)


activities = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 200).map(float),
        st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True).map(tuple),
        st.sampled_from([None, None, 2 * GB]),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=60)
@given(activities)
def test_activities_neither_beat_their_slowest_resource_nor_idle(starts: list[Any]) -> None:
    capacities = [10 * GB, 4 * GB, 7 * GB]
    ends = run_all(starts, capacities)
    for (start, work, uses, cap), end in zip(starts, ends, strict=True):
        fastest = min([capacities[r] for r in uses] + ([cap] if cap else [])) / GB
        assert end - start >= work / fastest - 1e-6
    alone = sum(w / (min([capacities[r] for r in u] + ([c] if c else [])) / GB) + 1 for _, w, u, c in starts)
    assert max(ends) <= max(start for start, *_ in starts) + alone


@settings(max_examples=40)
@given(activities)
def test_the_same_activities_end_at_the_same_times_in_any_order_of_creation(starts: list[Any]) -> None:
    capacities = [10 * GB, 4 * GB, 7 * GB]
    assert run_all(starts, capacities) == run_all(starts[::-1], capacities)[::-1]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 100).map(float), min_size=1, max_size=8))
def test_a_single_link_is_never_idle_while_there_is_work(works: list[float]) -> None:
    ends = run_all([(0, work, (0,), None) for work in works], [1 * GB])
    assert sum(works) <= max(ends) <= sum(works) + len(works)  # a nanosecond of rounding at each end


# the machine -----------------------------------------------------------------------------------------------------
