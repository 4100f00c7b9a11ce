"""The schedule text: exact round trip, one spelling, errors that point."""

from __future__ import annotations

import pytest
from hypothesis import given

from nestpipe.base.errors import ScheduleError
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


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, None, "expected 'loop v1 NAME"),
        ("loop v2 x micro_batches=1\n", 1, 6, "unknown version 'v2'"),
        ("loop v1 x micro_batches=0\n", 1, 25, "must be a positive integer"),
        ("loop v1 x micro_batch=1\n", 1, 11, "did you mean 'micro_batches'?"),
        (HEAD + "  stream a on computer\n", 2, 15, "did you mean 'compute'?"),
        (HEAD + "  stream a on compute\n    foward t\n", 3, 5, "did you mean 'forward'?"),
        (HEAD + "  stream a on compute\n    forward\n", 3, 12, "expected a batch"),
        (HEAD + "  stream a on compute\n    forward u\n", 3, 13, "expected a batch such as t or t+1"),
        (HEAD + "  stream a on compute\n    forward t m\n", 3, 5, "a micro-batch needs 'for m'"),
        (HEAD + "  stream a on compute\n    for m\n      forward t\n", 4, 7, "needs a micro-batch"),
        (HEAD + "  stream a on compute\n    for m\n    update t\n", 3, 5, "at least one indented op"),
        (HEAD + "  stream a on compute\n    update t after\n", 3, 14, "expected an item"),
        (
            HEAD + "  stream a on compute\n    update t after read t,, lookup t\n",
            None,
            None,
            "before and after each comma",
        ),
        (HEAD + "  stream a on compute\n    update t befor read t\n", 3, 14, "expected one of after, reads, writes"),
        (HEAD + "  stream a on compute\n    update t reads tables\n", 3, 20, "did you mean 'table'?"),
        (HEAD + "  stream a on compute\n    update t reads embeddings\n", 3, 20, "is per micro-batch"),
        (HEAD + "  stream a on compute\n    update t after read t after read t\n", 3, 27, "after is given twice"),
        (HEAD + "  buffer table host slots=1\n", 2, 10, "is a state"),
        (HEAD + "  stream a on compute\n  stream a on h2d\n", None, None, "stream a is declared twice"),
        (HEAD + "  steam a on compute\n", 2, 3, "expected 'buffer' or 'stream'"),
    ],
)
def test_a_syntax_error_names_line_column_and_what_was_expected(text, line, column, message) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text, source="my.txt")
    assert message in str(caught.value)
    if line and column:
        assert str(caught.value).startswith(f"my.txt:{line}:{column}: ")
