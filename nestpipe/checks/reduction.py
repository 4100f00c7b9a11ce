"""Whether what an update applies to the dense parameters is the sum over all ranks, each gradient counted once.

Dense parameters are replicated over the world. A collective on `world` reaches every replica; one on `domain` and one
on `replica` reach every replica together, since each pair of ranks is joined by one step of each; so do `node` and
`rail`. The gradients of the
micro-batches of a batch accumulate in one buffer, so that a collective sums all that have been added so far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from nestpipe.ir import ACROSS, MicroIndex, OpKind, Resource

__all__ = ["Reductions"]

#: Groups which together connect every rank with every other exactly once.
_WHOLE: Final = ({Resource.WORLD}, *({group, across} for group, across in ACROSS.items()))


@dataclass(slots=True)
class Reductions:
    """Over which groups the gradients of one batch have been summed, by micro-batch that added them."""

    summed: dict[MicroIndex, list[Resource]] = field(default_factory=dict)
    shards: list[Resource] = field(default_factory=list)

    def add(self, micro_batch: MicroIndex) -> None:
        """A backward adds its gradients."""
        self.summed[micro_batch] = []

    def collective(self, kind: OpKind, group: Resource) -> None:
        """A collective over what has been added so far."""
        if kind is OpKind.ALL_GATHER:
            if group in self.shards:
                self.shards.remove(group)
            return
        for groups in self.summed.values():
            groups.append(group)
        if kind is OpKind.REDUCE_SCATTER:
            self.shards.append(group)

    def fault(self) -> str | None:
        """The name of the rule that an update of all of it breaks now, if any."""
        if self.shards:
            return "sharded"
        for groups in self.summed.values():
            whole = set(groups) in _WHOLE
            if whole and len(groups) == len(set(groups)):
                continue
            return "reduced-twice" if len(groups) > 1 else "unreduced"
        return None
