"""The README shows real commands with their real output: each is run again and compared.

In a fenced block a line that starts with `$ ` is a command and what follows is its output, of which `...` on a line of
its own may stand for any lines, and at the end of a line for its rest.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT


def _examples(path: Path) -> list[tuple[str, str]]:
    found = []
    for block in re.findall(r"^```text\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
            if part.startswith("$ nestpipe "):
                command, _, output = part.removeprefix("$ ").partition("\n")
                found.append((command, output.strip("\n")))
    return found


def _matches(expected: str, got: str) -> bool:
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
        elif line.endswith("..."):
            pattern += re.escape(line.removesuffix("...")) + r".*\n"
        else:
            pattern += re.escape(line.rstrip()) + r"\n"
    text = "".join(f"{line.rstrip()}\n" for line in got.splitlines())
    return re.fullmatch(pattern, text) is not None


EXAMPLES = _examples(ROOT / "README.md")


def test_the_readme_has_examples_and_elisions_are_not_everything() -> None:
    assert len(EXAMPLES) >= 5
    assert _matches("a\n...\nc", "a\nb\nb\nc")
    assert not _matches("a\n...\nc", "a\nb\nd")
    assert not _matches("a", "a\nb")


@pytest.mark.parametrize(("command", "expected"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_what_the_readme_shows_is_what_the_command_prints(command: str, expected: str, tmp_path: Path) -> None:
    words = shlex.split(command)[1:]
    words = [str(ROOT / word) if (ROOT / word).exists() and "/" in word else word for word in words]
    for text in (ROOT / "examples").glob("*.txt"):
        (tmp_path / text.name).write_text(text.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "nestpipe", *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert "Traceback" not in done.stderr
    got = done.stdout + done.stderr
    assert _matches(expected, got), f"{command} now prints\n{got}"
