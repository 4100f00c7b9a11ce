"""What every command prints on the inputs of the README, the docs and the examples, and of inputs that are absent."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable

import pytest

from nestpipe import cli
from tests.paths import ROOT

COMMANDS = {
    "help": "--help",
    "version": "--version",
    "no_such_command": "no-such-command",
    "no_such_schedule": "simulate --schedule nestpip --world-size 3072",
    "schedule": "schedule",
    "schedule_show": "schedule show fwp",
    "schedule_show_unrolled": "schedule show dbp --unrolled --steps 1",
    "schedule_check_csv": "schedule check async_prefetch --format csv",
    "schedule_check_json": "schedule check async_prefetch --format json",
    "schedule_check_forgotten": "schedule check examples/forgotten.txt",
    "reproduce": "reproduce",
    "simulate": "simulate --schedule nestpipe --world-size 3072",
    "simulate_csv": "simulate --schedule nestpipe --world-size 3072 --format csv",
    "simulate_json": "simulate --schedule nestpipe --world-size 3072 --format json",
    "simulate_file": "simulate --schedule examples/deeper.txt --world-size 3072",
    "simulate_model": "simulate --schedule nestpipe --model hstu --topology dgx_h100 --world-size 512",
    "scale_dry_run": "scale examples/scale.yaml --dry-run",
    "sweep_dry_run": "sweep examples/break_even.yaml --dry-run",
    "plan": "plan examples/plan.yaml",
    "plan_dry_run": "plan examples/plan.yaml --dry-run",
    "topology": "topology",
    "topology_show": "topology show dgx_h100 --world-size 512",
    "trace": "trace",
    "trace_replay": "trace replay no_such_file.json",
    "trace_keys": "trace keys no_such_file.csv",
    "report": "report no_such_run --out report.html",
    "diff": "diff no_such_run no_such_run",
    "network": "network no_such_file.json",
    "validate": "validate --costs no_such_file.json --grid held_out_small_1",
    "testbed": "testbed",
}
LONGEST = 58
TIMINGS = re.compile(r"^(Measured on|Takes about) .*$", re.MULTILINE)


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints on stdout, then on stderr, and its exit status."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["nestpipe", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    printed = capsys.readouterr()
    errors = f"--- stderr\n{printed.err}" if printed.err else ""
    return f"{printed.out}{errors}--- exit status {end.value.code}\n"


def shortened(text: str) -> str:
    """The text without timings; of a long one the first lines, and the digest of all of them."""
    text = TIMINGS.sub(r"\1 ...", text)
    lines = text.splitlines(keepends=True)
    if len(lines) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()
    return "".join(lines[:LONGEST]) + f"--- {len(lines)} lines in all, SHA-256 {digest}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_output(
    name: str, golden: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    golden(shortened(run(COMMANDS[name].split(), monkeypatch, capsys)))
