"""Schedules of the catalogue with parts of their text replaced, and what the checks say of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files

from nestpipe.checks.check import check
from nestpipe.checks.report import Report
from nestpipe.checks.report_text import report_text
from nestpipe.ir import Loop, parse
from nestpipe.schedules import load

Golden = Callable[[str], None]


BROKEN_RULES = {
    "not-empty": "loop v1 x micro_batches=1\n  stream h2d on h2d\n",
    "unique-op": "loop v1 x micro_batches=1\n  stream a on h2d\n    wait t\n  stream b on h2d\n    wait t+1\n",
    "references": "loop v1 x micro_batches=1\n  stream a on h2d\n    wait t  after update t\n",
    "streams": "loop v1 x micro_batches=1\n  stream a on h2d\n    all_reduce t\n",
    "one-device": "loop v1 x micro_batches=1\n  stream a on compute\n    wait t\n  stream b on compute\n    update t\n",
    "groups": "loop v1 x micro_batches=1\n  stream a on world\n    all_to_all[keys] t\n  stream b on domain\n"
    "    for m\n      all_to_all[rows] t m\n",
    "granularity": "loop v1 x micro_batches=1\n  stream a on compute\n    forward t\n",
    "accesses": "loop v1 x micro_batches=1\n  stream a on compute\n    for m\n      forward t m  writes table\n",
    "inputs": "loop v1 x micro_batches=1\n  buffer batch device slots=1\n  stream a on h2d\n"
    "    copy_h2d t  writes batch\n",
    "own-instance": "loop v1 x micro_batches=1\n  buffer batch device slots=2\n  buffer samples host slots=2\n"
    "  stream a on h2d\n    read t  writes samples\n    copy_h2d t  reads samples t-1  writes batch\n",
    "parts": "loop v1 x micro_batches=1\n  part old in t-1\n  part new not t-1\n  buffer owned device slots=2\n"
    "  buffer rows device slots=2\n  stream a on world\n    all_to_all[keys] t  writes owned\n"
    "  stream b on host_memory\n    lookup.old t  reads owned, table  writes rows\n",
    "layers": "loop v1 x micro_batches=1\n  layer a, b\n  buffer activations device slots=1\n"
    "  buffer activation_grads device slots=1\n  stream c on compute\n    for m\n"
    "      forward.a t m  writes activations\n"
    "      forward.b t m  reads activations.a  writes activations\n      backward.b t m  writes activation_grads\n"
    "      backward.a t m  reads activations\n",
    "coverage": "loop v1 x micro_batches=1\n  part a static\n  part b static\n  buffer owned device slots=2\n"
    "  buffer rows device slots=2\n  stream b on host_memory\n    lookup.a t  reads owned, table  writes rows\n",
    "sync-keys": "loop v1 x micro_batches=1\n  buffer rows device slots=2\n  stream a on host_memory\n"
    "    lookup t  writes rows\n  stream b on d2d\n    sync t  reads rows t-1  writes rows\n",
    "depth": "loop v1 x micro_batches=1\n  stream a on h2d\n    wait t-1\n  stream b on world\n    all_reduce t+16\n",
    "buffers": "loop v1 x micro_batches=1\n  stream a on h2d\n    copy_h2d t  writes batch\n",
}


def changed(name: str, *changes: tuple[str, str]) -> Loop:
    """A catalogue schedule with parts of its text replaced; each part must be there."""
    text = (files("nestpipe.schedules") / f"{name}.txt").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text)


@cache
def checked(name: str) -> Report:
    return check(load(name))


def report_of(loop: Loop) -> str:
    return report_text(check(loop), loop)


def rules_of(loop: Loop) -> list[str]:
    return [finding.rule for finding in check(loop).findings]
