"""Parts: how a schedule splits the keys of a batch, and the dense work into layers.

An op is a kind and, where a schedule splits work, a part: `lookup.old`, `backward.top`. The parts of keys are declared
at the head, and each belongs to a *split* that puts every key of a batch into exactly one of its parts:

- `part old in t-1` and `part new not t-1`: whether the batch before touches the key too, on any rank
- `part hbm static`, one per group of tables: where the key belongs, in every batch
- `part hit cached` and `part miss uncached`: whether a cache holds the row when the batch comes

Several splits cross each other. Their finest pieces are called atoms, and a part consists of whole atoms: what an op of
a part does to data of keys, it does to those atoms, an op without a part to all of them. Layers split data of the dense
part in the same way; they are their own atoms. Sizes of parts come from the workload, never from the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Final, TypeAlias

from nestpipe.base import ScheduleError
from nestpipe.ir.kinds import Data

if TYPE_CHECKING:
    from nestpipe.ir.model import Access, Op

__all__ = ["KEY_DATA", "LAYER_DATA", "Atom", "Part", "Split", "Splits", "split_of"]

Atom: TypeAlias = tuple[str, ...]
#: Data that hold something per key, and data that hold something per layer.
KEY_DATA: Final = frozenset(
    {
        Data.TABLE,
        Data.OPTIMIZER,
        Data.KEYS,
        Data.OWNED,
        Data.ROWS,
        Data.MOMENTS,
        Data.EMBEDDINGS,
        Data.ROW_GRADS,
        Data.OWNED_GRADS,
    }
)
LAYER_DATA: Final = frozenset({Data.DENSE, Data.DENSE_GRADS, Data.ACTIVATIONS, Data.ACTIVATION_GRADS})
_LISTS: Final = frozenset({Data.KEYS, Data.OWNED})


class Split(StrEnum):
    """How a part is told from the others; the value is what the text prints."""

    IN = "in"
    NOT = "not"
    STATIC = "static"
    CACHED = "cached"
    UNCACHED = "uncached"

    @property
    def with_batch(self) -> bool:
        """Whether it is about another batch."""
        return self in (Split.IN, Split.NOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the keys: those that batch t + `offset` touches too, or not, those of a table group, or in a cache."""

    name: str
    split: Split
    offset: int | None = None

    def __post_init__(self) -> None:
        if (self.offset is not None) is not self.split.with_batch or self.offset == 0:
            raise ScheduleError(
                f"part {self.name}: in and not, and no others, name another batch such as t-1, got {self.offset}"
            )


def split_of(part: Part) -> tuple[str, int | None]:
    """Names the split that a part belongs to."""
    if part.split.with_batch:
        return "batch", part.offset
    return ("static", None) if part.split is Split.STATIC else ("cache", None)


class Splits:
    """The atoms of a schedule, and those that an op touches.

    Attributes:
        atoms: of keys; one if the schedule does not split them.
        parts: the parts of keys by name.
    """

    def __init__(self, parts: Sequence[Part], layers: Sequence[str]) -> None:
        self.parts = {part.name: part for part in parts}
        self.layers = tuple(layers)
        splits: dict[tuple[str, int | None], list[str]] = {}
        for part in parts:
            splits.setdefault(split_of(part), []).append(part.name)
        for (kind, _), names in splits.items():
            if kind != "static" and len(names) == 1:
                names.append(f"not {names[0]}")
        self.atoms: tuple[Atom, ...] = tuple(product(*splits.values()))
        self._of_layers: tuple[Atom, ...] = tuple((layer,) for layer in layers) or ((),)

    def atoms_of(self, data: Data) -> tuple[Atom, ...]:
        """The atoms in which data are held."""
        if data in KEY_DATA:
            return self.atoms
        return self._of_layers if data in LAYER_DATA else ((),)

    def touched(self, op: Op, access: Access) -> tuple[Atom, ...]:
        """The atoms of the data that an access of an op is about.

        Lists of keys are read whole by ops of a part: from them they know which keys are theirs. In another batch a key
        may be in another part, unless the split is static.
        """
        everything = self.atoms_of(access.data)
        named = access.part
        if named is None and op.part is not None:
            part = self.parts.get(op.part)
            elsewhere = access.data in _LISTS or (access.batch is not None and access.batch != op.batch)
            if part is None or part.split is Split.STATIC or not elsewhere:
                named = op.part
        mine = tuple(atom for atom in everything if named in atom)
        return mine or everything
