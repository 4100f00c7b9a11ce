"""docs/schedules.md builds NestPipe step by step; each step is applied here and must get the verdict that it names."""

from __future__ import annotations

import re
from dataclasses import replace

from nestpipe.checks import check
from nestpipe.ir import parse, show
from nestpipe.schedules import load
from tests.paths import ROOT


def _applied(text: str, diff: str) -> str:
    """The text with each block of removed lines replaced by the added ones after it; lone additions precede `comm`."""
    for old, new in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)*)", diff, flags=re.MULTILINE):
        removed, added = (re.sub(r"^[-+]", "", lines, flags=re.MULTILINE) for lines in (old, new))
        if removed:
            assert text.count(removed) == 1, removed
            text = text.replace(removed, added)
        elif added:
            text = text.replace("  stream comm on", f"{added}  stream comm on")
    return text


def test_every_step_gets_the_verdict_that_the_page_says() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
    text, seen = show(load("sync")), []
    steps = re.findall(r"```diff\n(.*?)```|^verdict: (\w+)(?: \(([\w-]+)\))?$", page, flags=re.MULTILINE | re.DOTALL)
    for diff, verdict, rule in steps:
        if diff:
            text = _applied(text, diff)
            continue
        report = check(parse(text))
        found = report.findings[0].rule if report.findings else ""
        assert (report.verdict.value, found) == (verdict, rule), text
        seen.append(verdict)
    assert {"synchronous", "race"} == set(seen)
    assert len(seen) >= 8
    nestpipe = load("nestpipe")
    assert parse(text) == replace(nestpipe, name="sync", doc=load("sync").doc)
