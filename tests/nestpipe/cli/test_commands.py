"""Every command of the table exists, loads when it is called, and starts without what it does not need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from inspect import getdoc

import pytest
from typer.testing import CliRunner

from nestpipe.cli import app
from nestpipe.cli._commands import COMMANDS, Entry


def _entries() -> Iterator[tuple[tuple[str, ...], Entry]]:
    for name, entry in COMMANDS.items():
        if isinstance(entry, dict):
            yield from (((name, each), one) for each, one in entry.items() if each)
        else:
            yield (name,), entry


@pytest.mark.parametrize(("words", "entry"), list(_entries()))
def test_every_command_has_a_function_with_a_docstring_and_prints_its_help(
    words: tuple[str, ...], entry: Entry
) -> None:
    module, function = entry.target.split(":")
    assert getdoc(getattr(import_module(f"nestpipe.cli.{module}"), function))
    done = CliRunner().invoke(app, [*words, "-h"])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"Usage: root {' '.join(words)} ")


@pytest.mark.parametrize("words", [[], ["schedule"], ["topology"], ["trace"], ["testbed"]])
def test_lists_of_commands_are_not_cut(words: list[str]) -> None:
    text = " ".join(CliRunner().invoke(app, [*words, "--help"]).stdout.split())
    lines = [entry.help for names, entry in _entries() if list(names[:-1]) == words]
    assert lines
    assert all(line in text for line in lines)


@pytest.mark.parametrize(
    "words",
    [["schedule", "check", "nestpipe"], ["simulate", "--schedule", "nestpipe", "--world-size", "1536"]],
)
def test_a_command_does_not_import_what_it_does_not_need(words: list[str]) -> None:
    unneeded = ["pandas", "pyarrow", "scipy", "networkx", "matplotlib", "torch"]
    code = (
        f"import sys, nestpipe.cli; sys.argv = {['nestpipe', *words]!r}\n"
        "try: nestpipe.cli.main()\n"
        f"finally: print(*sorted(set(sys.modules) & set({unneeded!r})), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")
