"""The history of validations: a file with one line of JSON for each, and its figure."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nestpipe.base import write_text
from nestpipe.validate.validation import to_json

__all__ = ["append_history", "read_history"]


def read_history(path: Path) -> list[dict[str, Any]]:
    """The entries of a history file, none if there is no file.

    Raises:
        TraceError: if it is not one JSON object a line with what the figure needs.
    """
    from reports.figures import check_history
    from traces.formats import parse_json, read_text

    if not path.exists():
        return []
    lines = enumerate(read_text(path).splitlines(), start=1)
    entries = [parse_json(f"{path}: line {number}", line) for number, line in lines if line.strip()]
    check_history(entries, str(path))
    return entries


def append_history(path: Path, summary: Mapping[str, Any], figure: Path) -> None:
    """Add a line with the summary and the commit of this source tree, and draw the history anew."""
    from reports.figures import history, save

    entries = [*read_history(path), {"commit": _commit(), **summary}]
    write_text(path, "".join(to_json(entry) + "\n" for entry in entries))
    save(history(entries), figure)


def _commit() -> str:
    """The commit of the source tree, if this is one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
