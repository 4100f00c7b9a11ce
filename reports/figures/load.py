"""How full the links and hosts of a run were, as a heat map: kinds of resource by places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import pandas as pd

from nestpipe.base import TraceError
from reports.figures.sheet import note, sheet, styled
from reports.figures.style import text_colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["has_places", "load_figure", "load_table"]

_MOST_WRITTEN: Final = 16  # places up to which each field has its number written in; more are drawn as one image
_PLACE: Final = r"^(?P<kind>.*) (?P<place>\d+)$"


def has_places(load: pd.DataFrame) -> bool:
    """Whether there are resources, each a kind and the number of a place, as `load_table` needs them."""
    return len(load) > 0 and bool(load["resource"].str.fullmatch(_PLACE).all())


def load_table(load: pd.DataFrame) -> pd.DataFrame:
    """Utilisation by kind of resource and place, NaN where a kind has no such place.

    Args:
        load: `resource`, a kind and the number of a host, switch, device or domain, and `utilisation` from 0 to 1

    >>> load = pd.DataFrame({"resource": ["dram 0", "dram 1", "rail up 0"], "utilisation": [0.5, 0.25, 1.0]})
    >>> load_table(load).fillna(-1).to_numpy().tolist()
    [[0.5, 0.25], [1.0, -1.0]]
    """
    parts = load["resource"].str.extract(_PLACE)
    if parts.isna().any().any():
        odd = load["resource"][parts.isna().any(axis=1)].iloc[0]
        raise TraceError(f"resource {odd!r} must be a kind and the number of a place, for example 'dram 0'")
    frame = parts.assign(place=parts["place"].astype(int), utilisation=load["utilisation"])
    table = frame.pivot_table(index="kind", columns="place", values="utilisation", aggfunc="max", sort=False)
    return table.sort_index(axis=1)


def load_figure(load: pd.DataFrame, title: str) -> Figure:
    """A heat map of `load_table`, in per cent of a resource's capacity over the whole run; a row is as wide as others,
    however many places its kind has."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colours = colormaps["YlOrRd"]
    table = load_table(load)
    with styled():
        figure, (axes,) = sheet(7.2, 1.6 + 0.3 * len(table))
        for row, (_, values) in enumerate(table.iterrows()):
            found = values.dropna()
            edges = np.linspace(0.0, 1.0, len(found) + 1)
            mesh = axes.pcolormesh(edges, [row - 0.46, row + 0.46], [found], cmap=colours, vmin=0.0, vmax=1.0)
            mesh.set_rasterized(len(found) > _MOST_WRITTEN)
            if len(found) <= _MOST_WRITTEN:
                for at, value in zip((edges[:-1] + edges[1:]) / 2, found, strict=True):
                    tint = text_colour(to_hex(colours(float(value))))
                    axes.annotate(f"{value:.0%}", (at, row), ha="center", va="center", fontsize=7, color=tint)
        counts = table.notna().sum(axis=1)
        axes.set_yticks(range(len(table)), [f"{kind} ({count})" for kind, count in counts.items()])
        axes.set_ylim(len(table) - 0.5, -0.5)
        axes.set_xticks([])
        axes.set_xlabel("hosts, switches, devices or domains of each kind, as many as in brackets, in order")
        axes.grid(visible=False)
        axes.set_title(title)
        bar = figure.colorbar(mesh, ax=axes, ticks=[0.0, 0.5, 1.0], pad=0.02)
        bar.ax.set_yticklabels(["0 %", "50 %", "100 %"])
        note(figure, "Share of capacity used over the run. Ranks that are alike are simulated once, and shown once.")
    return figure
