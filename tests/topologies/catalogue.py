"""The catalogue's files as text, to be changed and read again."""

from __future__ import annotations

from tests.paths import ROOT


def text_of(name: str) -> str:
    return (ROOT / "topologies" / "catalogue" / f"{name}.yaml").read_text(encoding="utf-8")
