"""Who waits for whom, and which ranks form a group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.base.errors import ScheduleError
from nestpipe.ir import Loop, Op, OpKind, OpRef, Program, Resource, Stream, unroll
from nestpipe.ir.graph import group_of, group_ranks, loop_graph, program_graph
from nestpipe.schedules import load, names
from tests.strategies import loops


def one_stream(*ops: Op) -> Program:
    stream = Stream(name="a", resource=Resource.COMPUTE, body=ops)
    return Program(name="p", steps=1, micro_batches=1, buffers=(), streams=(stream,))


@given(loops(), st.integers(1, 4))
def test_a_run_takes_every_op_after_what_precedes_it(loop: Loop, steps: int) -> None:
    graph = program_graph(unroll(loop, steps))
    place = {op: at for at, op in enumerate(graph.run())}
    assert len(place) == len(graph.ops)
    assert all(place[earlier] < place[i] for i, before in enumerate(graph.preceding) for earlier in before)


@given(loops(), st.integers(1, 4))
def test_the_waits_that_are_left_out_follow_from_those_kept_and_the_order_of_streams(loop: Loop, steps: int) -> None:
    graph = program_graph(unroll(loop, steps))

    def closure(before: list[tuple[int, ...]]) -> list[set[int]]:
        known: list[set[int]] = [set() for _ in graph.ops]
        for i in graph.run():
            known[i] = {*before[i]}.union(*(known[earlier] for earlier in before[i]))
        return known

    kept = []
    for i, waited in enumerate(graph.waits()):
        first = i == 0 or graph.streams[i - 1] != graph.streams[i]
        kept.append((*waited, *(() if first else (i - 1,))))
    assert closure(kept) == closure(list(graph.preceding))
    assert all(len({graph.streams[other] for other in waited}) == len(waited) for waited in graph.waits())


@pytest.mark.parametrize("name", names())
def test_the_edges_of_a_loop_are_those_of_its_steady_state(name: str) -> None:
    """What precedes an op in the middle of a long program, as edges with the iterations between the two."""
    loop = load(name)
    steps = 24
    program = program_graph(unroll(loop, steps))
    graph = loop_graph(loop)
    number = {(op.kind, op.micro_batch): i for i, op in enumerate(graph.ops)}
    seen = set()
    for i, before in enumerate(program.preceding):
        op = program.ops[i]
        if op.step == steps // 2:
            for earlier in before:
                other = program.ops[earlier]
                seen.add(
                    (
                        number[other.kind, other.micro_batch],
                        number[op.kind, op.micro_batch],
                        op.step - other.step,
                    )
                )
    assert seen == set(graph.edges)


def test_a_stream_that_waits_for_a_later_op_of_its_own_gets_stuck() -> None:
    first = Op(kind=OpKind.READ, batch=0, after=(OpRef(kind=OpKind.UPDATE, batch=0),))
    graph = program_graph(one_stream(first, Op(kind=OpKind.UPDATE, batch=0)))
    assert graph.run() == ()
    assert graph.waits() == ((1,), ())


def test_doubled_ops_and_waits_for_nothing_are_refused_by_name() -> None:
    read = Op(kind=OpKind.READ, batch=0)
    with pytest.raises(ScheduleError, match="p: read 0 appears twice; an op runs once per batch; keep one"):
        program_graph(one_stream(read, read))
    late = replace(read, after=(OpRef(kind=OpKind.UPDATE, batch=3),))
    with pytest.raises(ScheduleError, match="read 0 waits for update 3, which the program does not have; add it"):
        program_graph(one_stream(late))


@given(st.sampled_from([Resource.WORLD, Resource.DOMAIN, Resource.REPLICA]), st.integers(1, 5), st.integers(1, 5))
def test_groups_of_a_kind_cut_the_ranks_into_parts(resource: Resource, domain_size: int, domains: int) -> None:
    world_size = domain_size * domains
    numbers = group_of(resource, np.arange(world_size), domain_size)
    for rank in range(world_size):
        group = group_of(resource, rank, domain_size)
        assert group == numbers[rank]
        assert list(group_ranks(resource, group, world_size, domain_size)) == np.flatnonzero(numbers == group).tolist()


def test_a_domain_and_a_replica_group_meet_in_one_rank() -> None:
    for rank in range(12):
        domain = group_ranks(Resource.DOMAIN, group_of(Resource.DOMAIN, rank, 4), 12, 4)
        replica = group_ranks(Resource.REPLICA, group_of(Resource.REPLICA, rank, 4), 12, 4)
        assert set(domain) & set(replica) == {rank}


def test_a_device_engine_is_no_group() -> None:
    with pytest.raises(ValueError, match="compute is not a group of ranks; expected one of domain, node, rail"):
        group_of(Resource.COMPUTE, 0, 1)
