"""Parts of the keys and layers: atoms, what an op touches, the text."""

from __future__ import annotations

import pytest

from nestpipe.base.errors import ScheduleError
from nestpipe.ir import Data, Part, Split, Splits, parse, parse_programs, refuse_parts, show, unroll
from nestpipe.schedules import load

EXAMPLES = ("examples/pec.txt", "examples/mixed.txt", "examples/rails.txt", "examples/persia.txt", "examples/hits.txt")
HEAD = "loop v1 x micro_batches=1\n"


def test_splits_cross_each_other_and_layers_are_their_own_atoms() -> None:
    again = Part(name="again", split=Split.IN, offset=1)
    groups = [Part(name=name, split=Split.STATIC) for name in ("hbm", "host")]
    splits = Splits((again, *groups), ("bottom", "top"))
    assert set(splits.atoms) == {(a, g) for a in ("again", "not again") for g in ("hbm", "host")}
    assert splits.atoms_of(Data.ROWS) == splits.atoms
    assert splits.atoms_of(Data.DENSE) == (("bottom",), ("top",))
    assert splits.atoms_of(Data.BATCH) == ((),)


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_with_parts_is_canonical(name: str) -> None:
    loop = load(name)
    assert parse(show(loop)) == loop
    program = unroll(loop, 3)
    assert parse_programs(show(program)) == (program,)


def test_one_changed_part_changes_one_line() -> None:
    text = show(load("examples/pec.txt"))
    lines = text.splitlines()
    other = show(parse(text.replace("after lookup.old t+1 ", "after lookup.new t+1 "))).splitlines()
    assert sum(a != b for a, b in zip(lines, other, strict=True)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("  part old in t\n", "x:2:15: expected another batch"),
        ("  part old in t-1\n  part older in t-1\n", "holds the same keys as old"),
        ("  part old static\n  part old static\n", "declared twice"),
        ("  part Old static\n", "small letters"),
        ("  part old\n", "expected 'part NAME in t-1'"),
        ("  layer a, a\n", "layer is declared twice"),
        ("  part a static\n  layer a\n", "both a part and a layer"),
        ("  layer a\n  part b static\n", "parts come before layers"),
        ("  state rows host\n", "expected a state with rows"),
        ("  state table host atomic fast\n", "expected 'state DATA"),
        ("  state table host\n  state table ssd\n", "state table is declared twice"),
        ("  buffer rows ssd slots=1\n", "buffers live in host or device memory"),
        ("  part old in t-1\n  stream a on h2d\n    wait.odd t\n", "x:4:10: unknown part 'odd'"),
    ],
)
def test_a_faulty_declaration_is_refused_where_it_stands(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse(HEAD + text, source="x")


def test_who_does_not_run_parts_says_so() -> None:
    with pytest.raises(ScheduleError, match=r"the abacus does not run parts of ops, such as write_back\.last"):
        refuse_parts(load("examples/pec.txt"), "the abacus")
    refuse_parts(load("sync"), "the abacus")
