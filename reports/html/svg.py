"""A figure as an SVG element for the report page: named for readers of the page, coloured by its theme."""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING, Final

from reports.figures import FORMATS, GRID, INK, MUTED, PAPER, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["inline_svg"]

_VARIABLES: Final = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"}


def inline_svg(figure: Figure, name: str, words: str) -> str:
    """The figure as one `<svg>` element.

    Args:
        figure: any figure of this package.
        name: prefix of its ids, unique on the page.
        words: what it shows, for those who cannot see it.
    """
    out = io.StringIO()
    with styled():
        figure.savefig(out, format="svg", metadata=FORMATS[".svg"])
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    seen: set[str] = set()

    def once(found: re.Match[str]) -> str:
        """The id with the prefix; nothing where a marker that was defined before is defined again, alike."""
        if found[1] in seen:
            return ""
        seen.add(found[1])
        return f' id="{name}-{found[1]}"'

    text = re.sub(r'\sid="([^"]+)"', once, text)
    text = re.sub(r'(href="#|url\(#)', rf"\1{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    text = re.sub(r'\bd="[^"]+"', lambda path: re.sub(r"(\d\.\d{2})\d+", r"\1", path[0]), text)
    head, _, body = text.partition(">")
    width = re.search(r'\bwidth="([\d.]+)pt"', head)
    head = re.sub(r'\b(width|height)="[\d.]+pt"\s*', "", head)
    size = f' style="max-width:{float(width[1]) * 4 / 3:.0f}px"' if width else ""
    return f'{head} role="img" aria-label="{html.escape(words)}"{size}>{body}'.strip()
