"""How things look: one mark per op kind, part of a step and method, the same in every figure and on the report page.

Colours are those of Okabe and Ito, which stay apart for all common kinds of colour blindness, with lighter and darker
relatives. Kinds that share a stream differ in lightness too, so that a timeline reads in grey; what is stacked or
drawn as lines also carries a hatch or a marker.

Source: Okabe, Ito, Color Universal Design (2008), the set of eight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from nestpipe.ir import KINDS as OP_KINDS
from nestpipe.ir import OpKind, StepPart
from nestpipe.timeline import PARTS

__all__ = [
    "GRID",
    "INK",
    "KINDS",
    "MUTED",
    "PAPER",
    "PARTS_MARKS",
    "STATUSES",
    "Mark",
    "kind_mark",
    "method_marks",
    "text_colour",
]

#: Colours of what is not data. The report page swaps them for those of its light or dark theme, so they are used for
#: nothing else; text on a coloured fill, which does not change with the theme, has colours of its own.
INK: Final = "#1a1a1a"
MUTED: Final = "#6e6e6e"
GRID: Final = "#d8d8d8"
PAPER: Final = "#fefefe"
_ON_LIGHT: Final = "#111111"
_ON_DARK: Final = "#ffffff"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How one thing is drawn: fill colour, a short name for tight places, hatch for bars, marker for lines."""

    colour: str
    short: str = ""
    hatch: str = ""
    marker: str = "o"


_MARKS: Final[dict[OpKind, Mark]] = {
    OpKind.READ: Mark(colour="#8c8c8c", short="read"),
    OpKind.COPY_H2D: Mark(colour="#b3b3b3", short="h2d", hatch="--"),
    OpKind.DEDUP: Mark(colour="#cc79a7", short="dedup", hatch="++"),
    OpKind.ALL_TO_ALL_KEYS: Mark(colour="#b39ddb", short="keys", hatch="\\\\"),
    OpKind.LOOKUP: Mark(colour="#009e73", short="lookup", hatch="xx"),
    OpKind.SYNC: Mark(colour="#44aa99", short="sync", hatch="oo"),
    OpKind.ALL_TO_ALL_ROWS: Mark(colour="#f2b134", short="rows", hatch="//"),
    OpKind.FORWARD: Mark(colour="#0072b2", short="fwd"),
    OpKind.BACKWARD: Mark(colour="#7cc4ee", short="bwd"),
    OpKind.ALL_TO_ALL_GRADS: Mark(colour="#d55e00", short="grads", hatch="\\\\"),
    OpKind.ALL_REDUCE: Mark(colour="#f0e442", short="reduce", hatch=".."),
    OpKind.ALL_REDUCE_TABLES: Mark(colour="#a6761d", short="tables", hatch="||"),
    OpKind.UPDATE: Mark(colour="#003b5c", short="upd"),
    OpKind.WRITE_BACK: Mark(colour="#8fd6b8", short="write", hatch="//"),
    OpKind.ALL_GATHER: Mark(colour="#e0c36a", short="gather", hatch="--"),
    OpKind.REDUCE_SCATTER: Mark(colour="#f7d4a0", short="scatter", hatch="||"),
    OpKind.SEND: Mark(colour="#5e81ac", short="send"),
    OpKind.RECV: Mark(colour="#a3be8c", short="recv"),
    OpKind.WAIT: Mark(colour="#d9d9d9", short="wait"),
}
#: A kind without a mark of its own takes its part's colour, and a hatch that no other kind has.
_PART_COLOURS: Final = {
    StepPart.COMPUTE: "#56b4e9",
    StepPart.ROUTING: "#e3b7d0",
    StepPart.EMBEDDINGS: "#e69f00",
    StepPart.DENSE: "#c9bd36",
    StepPart.LOOKUP: "#66c2a4",
    StepPart.OTHER: "#bdbdbd",
}
KINDS: Final[dict[OpKind, Mark]] = {
    kind: _MARKS.get(kind) or Mark(colour=_PART_COLOURS[of.part], short=kind.value[:8], hatch="**")
    for kind, of in OP_KINDS.items()
}
PARTS_MARKS: Final[dict[str, Mark]] = {
    "compute": Mark(colour="#0072b2", short="compute"),
    "waiting for a peer": Mark(colour="#4d4d4d", short="peer", hatch=".."),
    "bubble": Mark(colour="#f2f2f2", short="bubble"),
    **{part: KINDS[OpKind(part.removeprefix("exposed "))] for part in PARTS if part.startswith("exposed ")},
}
#: Where a number can come from, the surest first, with the line style that says so in a curve.
STATUSES: Final[dict[str, str]] = {
    "measured": "-",
    "fitted": "-",
    "predicted": "-",
    "interpolated": "-",
    "assumed": ":",
    "extrapolated": "--",
}
_METHODS: Final = {
    "torchrec": Mark(colour="#4d4d4d", marker="s"),
    "2d-sp": Mark(colour="#cc79a7", marker="D"),
    "uniemb": Mark(colour="#e69f00", marker="^"),
    "dbp": Mark(colour="#009e73", marker="v"),
    "fwp": Mark(colour="#56b4e9", marker="P"),
    "nestpipe": Mark(colour="#0072b2", marker="o"),
    "nestpipe+2d-sp": Mark(colour="#d55e00", marker="*"),
    "sparse-dist": Mark(colour="#8c6d31", marker="X"),
}
_SYNONYMS: Final = {
    "sync": "torchrec",
    "async-prefetch": "uniemb",
    "dbp-only": "dbp",
    "fwp-only": "fwp",
    "nestpipe-2d-sp": "nestpipe+2d-sp",
    "sparsedist": "sparse-dist",
    "trainpipelinesparsedist": "sparse-dist",
}
_SPARE: Final = (
    Mark(colour="#332288", marker="<"),
    Mark(colour="#999933", marker=">"),
    Mark(colour="#882255", marker="h"),
    Mark(colour="#117733", marker="p"),
    Mark(colour="#aa4499", marker="d"),
)


def kind_mark(kind: str) -> Mark:
    """The mark of an op kind."""
    return KINDS[OpKind(kind)]


def method_marks(methods: Iterable[str]) -> dict[str, Mark]:
    """A mark for each method: known methods keep theirs in every figure, others take the spare ones in turn.

    >>> method_marks(["NestPipe", "mine"])["NestPipe"].marker
    'o'
    """
    marks: dict[str, Mark] = {}
    spare = 0
    for method in methods:
        name = re.sub(r"[\s_-]*([+-]|[\s_])[\s_-]*", lambda found: "+" if found[1] == "+" else "-", method.lower())
        known = _METHODS.get(_SYNONYMS.get(name, name))
        if known is None or known in marks.values():
            known = _SPARE[spare % len(_SPARE)]
            spare += 1
        marks[method] = known
    return marks


def text_colour(fill: str) -> str:
    """Black or white, whichever reads better on `fill` (a #rrggbb colour).

    Source: WCAG 2.1, relative luminance; the two contrasts are equal at a luminance of 0.179.

    >>> text_colour("#0072b2"), text_colour("#f0e442")
    ('#ffffff', '#111111')
    """
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return _ON_LIGHT if luminance > 0.179 else _ON_DARK
