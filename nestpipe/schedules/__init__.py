"""The catalogue: one text file per schedule, loaded by name; wherever a name is taken, a file of that text is too."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from nestpipe.base import ScheduleError, unknown_name
from nestpipe.ir import Loop, parse

__all__ = ["load", "names"]

_SUFFIX = ".txt"


@cache
def names() -> tuple[str, ...]:
    """The names of the catalogue, sorted."""
    found = (entry.name for entry in files(__name__).iterdir() if entry.name.endswith(_SUFFIX))
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found))


def load(name_or_file: str) -> Loop:
    """The loop of a catalogue name or of a file that holds one.

    Raises:
        ScheduleError: if there is no such schedule or file, or its text is not a loop.

    >>> load("nestpipe").micro_batches
    8
    """
    if name_or_file in names():
        text = (files(__name__) / f"{name_or_file}{_SUFFIX}").read_text(encoding="utf-8")
        return parse(text, source=f"{name_or_file}{_SUFFIX}")
    path = Path(name_or_file)
    if not path.is_file():
        raise ScheduleError(unknown_name("schedule", name_or_file, names()) + "; a file of schedule text works too")
    try:
        return parse(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: cannot be read as UTF-8 text: {error}") from None
