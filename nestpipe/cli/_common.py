"""What several commands share: provenance, digests, decimal places, progress."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

__all__ = ["decimals", "digest", "progress", "provenance"]


def provenance(**facts: object) -> dict[str, object]:
    """What a result starts with: version, command, and whatever it was computed from."""
    try:
        release = version("nestpipe")
    except PackageNotFoundError:
        release = "unknown"
    command = " ".join(["nestpipe", *sys.argv[1:]])
    return {"nestpipe": release, "command": command, **{k: v for k, v in facts.items() if v is not None}}


def digest(text: str) -> str:
    """The first 12 hex digits of a text's SHA-256, to tell inputs apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def decimals(values: Iterable[float], least: int, significant: int) -> int:
    """Decimal places that show the smallest of the positive numbers with so many significant digits, at least `least`.

    >>> decimals([1.953, 2.077], 3, 4), decimals([0.0003761, 1.2], 3, 4), decimals([], 1, 3)
    (3, 7, 2)
    """
    smallest = min((value for value in values if value > 0 and math.isfinite(value)), default=1.0)
    return max(least, significant - 1 - math.floor(math.log10(smallest)))


@contextmanager
def progress(total: int | None = None) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, on stderr, when that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda message: bar.update(task, advance=1, description=message)
