"""The schedule text: exact round trip, one spelling."""

from __future__ import annotations

import pytest
from hypothesis import given

from nestpipe.ir import Loop, parse, parse_programs, show, unroll
from nestpipe.schedules import load, names
from tests.strategies import loops

HEAD = "loop v1 x micro_batches=1\n"


@pytest.mark.parametrize("name", names())
def test_catalogue_text_is_canonical_and_round_trips(name: str) -> None:
    loop = load(name)
    assert parse(show(loop)) == loop
    assert show(parse(show(loop))) == show(loop)
    program = unroll(loop, 5)
    assert parse_programs(show(program)) == (program,)


@given(loops())
def test_any_loop_and_its_program_round_trip(loop: Loop) -> None:
    assert parse(show(loop)) == loop
    program = unroll(loop, 4)
    assert parse_programs(show(program)) == (program,)


def test_unrolled_dbp_reads_as_expected(golden) -> None:
    golden(show(unroll(load("dbp"), 2)))


def test_spacing_and_comments_do_not_matter() -> None:
    loose = HEAD + "  stream a on compute   # the device\n    forward t   after  lookup   t-1 , read t\n\n"
    assert show(parse(loose)) == show(parse(show(parse(loose))))
    assert "after lookup t-1, read t" in show(parse(loose))


def test_programs_carry_their_ranks() -> None:
    head = "program v1 x steps=1 micro_batches=1 ranks=0,2-4\n"
    text = head + "  stream a on compute\n    step 0\n      update              0\n"
    (program,) = parse_programs(text)
    assert program.ranks == (0, 2, 3, 4)
    assert show(program) == text
