"""Errors in a schedule's text: each names line, column and what to write, whatever the text."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nestpipe.base.errors import ScheduleError
from nestpipe.checks.check import check, check_programs
from nestpipe.ir import Loop, Program, show, unroll, with_micro_batches
from nestpipe.ir.text import parse, parse_programs
from nestpipe.schedules import load, names

HEAD = "loop v1 x micro_batches=1\n"
PROGRAM = "program v1 x steps=1 micro_batches=1 {}\n  stream a on compute\n    step 0\n      wait 0\n"
#: What people mistype, and what no person writes.
WORDS = """
    t t-1 t+1 t-0 t+99999999999 m m+1 m-1 m+1000000 * , # 0 1.1 0.0 3. ² ٣ -1 1e3 loop program for step stream buffer on
    after reads writes v2 rows table embeddings update send world compute host slots=0 micro_batches=2
    micro_batches=1000000 steps=2 ranks=5-2 ranks=0-999999 ranks=0,0 ranks=- x=y =
"""
ODD = (*WORDS.split(), "", "1" * 5000, "\x00", "\u2028")


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
            3,
            27,
            "before and after each comma",
        ),
        (HEAD + "  stream a on compute\n    update t befor read t\n", 3, 14, "expected one of after, reads, writes"),
        (HEAD + "  stream a on compute\n    update t reads tables\n", 3, 20, "did you mean 'table'?"),
        (HEAD + "  stream a on compute\n    update t reads embeddings\n", 3, 20, "is per micro-batch"),
        (HEAD + "  stream a on compute\n    update t after read t after read t\n", 3, 27, "after is given twice"),
        (HEAD + "  buffer table host slots=1\n", 2, 10, "is a state"),
        (HEAD + "  stream a on compute\n  stream a on h2d\n", 3, 10, "stream a is declared twice"),
        (HEAD + "  buffer rows host slots=1\n  buffer rows device slots=1\n", 3, 10, "buffer rows is declared twice"),
        (HEAD + "  buffer rows host slots=1 slots=2\n", 2, 3, "expected 'buffer DATA host|device slots=N'"),
        (HEAD + "  stream a on compute\n  buffer rows host slots=1\n", 3, 3, "buffers come before streams"),
        (HEAD + "  stream , on compute\n", 2, 10, "expected a name"),
        (HEAD + "loop v1 y micro_batches=1\n", 2, 1, "expected one loop, found another"),
        ("program v1 x steps=1 micro_batches=1\n", 1, 1, "expected one loop; write 'loop v1"),
        ("loop v1 x micro_batches=²\n", 1, 25, "must be a positive integer of at most 2,000,000, got '²'"),
        ("loop v1 x micro_batches=٣\n", 1, 25, "must be a positive integer"),
        ("loop v1 x micro_batches=1 micro_batches=2\n", 1, 27, "micro_batches is given twice; keep one"),
        (f"loop v1 x micro_batches={'9' * 5000}\n", 1, 25, "got '999"),
        (HEAD + "  buffer rows host slots=2000001\n", 2, 26, "slots must be a positive integer of at most 2,000,000"),
        (HEAD + f"  stream a on compute\n    update t+{'9' * 5000}\n", 3, 12, "an offset must be a whole number"),
        (HEAD + "  steam a on compute\n", 2, 3, "expected 'buffer' or 'stream'"),
    ],
)
def test_a_syntax_error_names_line_column_and_what_was_expected(text, line, column, message) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse(text, source="my.txt")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"my.txt:{line}:{column}: " if column else f"my.txt:{line}: ")


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("5-2", "expected ranks such as 0,2-5, the lower first, got '5-2'"),
        ("1-2-3", "expected ranks such as 0,2-5"),
        ("0-30000000", "a rank in ranks=0,2-5 must be a whole number of at most 2,000,000, got '30000000'"),
        ("0-1000000", "rank 1,000,000 is too large; ranks go up to 999,999"),
        ("0-3,2", "rank 2 is given twice"),
        ("²", "must be a whole number"),
        ("-1", "must be a whole number"),
        ("0,", "must be a whole number"),
    ],
)
def test_ranks_that_name_no_or_too_many_ranks_are_refused(ranks: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_programs(PROGRAM.format(f"ranks={ranks}"), source="my.txt")
    assert str(caught.value).startswith("my.txt:1:44: ")
    assert message in str(caught.value)


def small(name: str) -> Loop:
    loop = load(name)
    return with_micro_batches(loop, min(2, loop.micro_batches))


LOOPS = tuple(show(small(name)) for name in names())
PROGRAMS = tuple(show(unroll(small(name), 1)) for name in ("sync", "2d_sp"))


@st.composite
def damaged(draw: st.DrawFn, texts: tuple[str, ...]) -> str:
    """A text with one or two words changed, added or dropped, and perhaps a line moved."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 2))):
        words = [found.span() for found in re.finditer(r",|[^\s,]+", text)]
        start, end = draw(st.sampled_from(words))
        new = draw(st.sampled_from(ODD) | st.sampled_from(words).map(lambda span, text=text: text[slice(*span)]))  # type: ignore[misc]
        text = (
            text[:start] + draw(st.sampled_from([new, f"{text[start:end]} {new}", text[start:end] + new])) + text[end:]
        )
    lines = text.splitlines(keepends=True)
    if draw(st.booleans()):
        lines.insert(draw(st.integers(0, len(lines))), lines.pop(draw(st.integers(0, len(lines) - 1))))
    return "".join(lines)


def read_and_check(text: str) -> None:
    """Reads and checks a text; only a ScheduleError with the line may come out of reading it."""
    loop = text.lstrip().startswith(("#", "loop"))
    schedule: Loop | tuple[Program, ...] | None = None
    refused = ""
    try:
        schedule = parse(text, source="x") if loop else parse_programs(text, source="x")
    except ScheduleError as error:
        refused = str(error)
    if isinstance(schedule, Loop):
        assert parse(show(schedule)) == schedule
        check(schedule)
    elif schedule is not None:
        assert parse_programs("".join(map(show, schedule))) == schedule
        check_programs(schedule)
    else:
        assert re.match(r"x:\d+:", refused), refused


@given(damaged(LOOPS))
def test_a_damaged_loop_is_read_and_judged_or_refused_by_line(text: str) -> None:
    read_and_check(text)


@given(damaged(PROGRAMS))
def test_a_damaged_program_is_read_and_judged_or_refused_by_line(text: str) -> None:
    read_and_check(text)


@given(st.text())
@example("loop")
@example("loop v1 x micro_batches=1\n stream")
@example("program v1 x steps=1 micro_batches=1\n stream a on compute\n  step\n")
@example("program v1 x steps=1 micro_batches=1\n stream a on compute\n  step -\n")
def test_any_text_at_all_is_refused_by_line(text: str) -> None:
    read_and_check(text)
