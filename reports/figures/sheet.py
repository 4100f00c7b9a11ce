"""What every figure shares: the sheet, its style, and saving it whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nestpipe.base import TraceError, atomic_file, unknown_name
from reports.figures.style import GRID, INK, MUTED, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FORMATS", "note", "save", "sheet", "styled"]

#: Metadata that would differ from run to run, left out of each format.
FORMATS: Final[dict[str, dict[str, Any]]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "ModDate": None, "Creator": None, "Producer": None},
}
_STYLE: Final[dict[str, Any]] = {
    "font.size": 9.0,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.labelsize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3.0,
    "ytick.major.size": 3.0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.0,
    "svg.hashsalt": "nestpipe",
    "savefig.dpi": 200,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's settings for the time of a drawing, independent of the user's own style files."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        settings: Any = _STYLE
        mpl.rcParams.update(settings)
        yield


def sheet(width_in: float, height_in: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A new figure of this size in inches, tied to no window, and its axes from top to bottom."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, **options)
    return figure, list(axes[:, 0])


def note(figure: Figure, words: str) -> None:
    """A line of small print under the figure: what the marks mean, which ranks are shown."""
    figure.supxlabel(words, x=0.01, ha="left", fontsize=7.5, color=MUTED)


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes the figure as PNG, SVG or PDF by the suffix of `path`; the same figure gives the same bytes.

    Raises:
        TraceError: if the suffix is unknown or the folder cannot be written.
    """
    path = Path(path)
    metadata = FORMATS.get(path.suffix.lower())
    if metadata is None:
        raise TraceError(f"{path}: {unknown_name('figure format', path.suffix, FORMATS)}")
    with styled(), atomic_file(path, TraceError) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), metadata=metadata)
    return path
