"""Options: one statement for the dataclass, the flag, the help and the key of a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from executor.app.cli import ProcessOptions
from executor.app.options import RunOptions
from executor.app.session import Outputs
from executor.options import option, read_options
from nestpipe.base.errors import ExecutorError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    size: int = option(3, "How many.", group="Work", flag="--num")
    colour: Colour = option(Colour.RED, "Which.", group="Looks")
    folder: Path | None = option(None, "Where.", group="Work")
    loud: bool = option(False, "Say more.", group="Looks")
    widths: tuple[int, ...] = option(
        (4,), "Of layers.", group="Work", parse=lambda text: tuple(map(int, text.split(",")))
    )
    notes: tuple[str, ...] = option((), "Kept.", group="Work", flag="--note", collect=tuple)


def read(*arguments: str) -> Any:
    return read_options(argparse.ArgumentParser(prog="job"), [Job], arguments)[0]


def test_what_is_not_given_has_its_default() -> None:
    assert read() == Job()


def test_values_are_parsed_by_the_type_of_their_field() -> None:
    given = read(
        "--num", "5", "--colour", "blue", "--folder", "x", "--loud", "--widths", "8,2", "--note", "a", "--note", "b"
    )
    assert given == Job(size=5, colour=Colour.BLUE, folder=Path("x"), loud=True, widths=(8, 2), notes=("a", "b"))


def test_a_file_gives_options_by_name_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("num: 5\ncolour: blue\nloud: true\nwidths: [8, 2]\nnote: [a]\nfolder: null\n")
    assert read("--config", str(path), "--num", "7", "--no-loud") == Job(
        size=7, colour=Colour.BLUE, loud=False, widths=(8, 2), notes=("a",)
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nums: 5", "unknown option 'nums'; expected one of .* \\(did you mean 'num'\\?\\)"),
        ("loud: maybe", "loud: expected true or false, got 'maybe'"),
        ("num: true", "num: expected a value, got True"),
        ("[1]", "expected options by name"),
        ("num: 1\nnum: 2", "key 'num' is given twice"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ExecutorError, match=f"job.yaml: .*{message}"):
        read("--config", str(path))


@pytest.mark.parametrize("arguments", [["--num", "x"], ["--colour", "green"], ["--nums", "1"]])
def test_a_value_of_the_wrong_type_is_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read(*arguments)
    assert end.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_the_help_of_the_executor_lists_every_option_under_a_heading(golden: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(prog="python -m executor")
    read_options(parser, [RunOptions, Outputs, ProcessOptions], [])
    lines = []
    for group in parser._action_groups:
        lines += [f"{group.title}", *(f"  {' '.join(action.option_strings)}" for action in group._group_actions)]
    golden("\n".join(lines) + "\n")
