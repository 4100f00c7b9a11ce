"""Which numbers of a model's step come from keys: the ratio, where it is from, and the keys it makes of the model's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from traces.keys import KeyStatistics
from traces.workloads.models import WorkloadModel
from traces.workloads.synthesis import KeyCounts, key_counts

__all__ = ["KeyUse", "key_uses"]


class KeyUse(NamedTuple):
    """A number of a step that follows from keys.

    Attributes:
        drives: the op kinds whose sizes follow from it.
        ratio: of the key stream; None where the model gives the number itself.
        meaning: what is divided by what.
        status: measured, extrapolated or assumed.
        basis: from what: so many batches, a draw, a power law, the model.
        keys: how many keys or rows of a rank and step follow for the model.
    """

    drives: str
    ratio: float | None
    meaning: str
    status: str
    basis: str
    keys: int


def key_uses(model: WorkloadModel, batch: int, micro_batches: int, statistics: KeyStatistics) -> list[KeyUse]:
    """Everything that `traces.workloads.synthesis.synthesise` takes from the statistics, in the order of the step.

    Args:
        model: whose lookups the ratios are applied to.
        batch: samples a rank takes per step.
        micro_batches: N.
        statistics: of the key stream; with a duplication for N > 1.

    Raises:
        TraceError: the statistics say nothing about N micro-batches.
    """
    return list(_uses(key_counts(model, batch, micro_batches, statistics), micro_batches, statistics))


def _uses(counts: KeyCounts, micro_batches: int, one: KeyStatistics) -> Iterator[KeyUse]:
    rank, owner = _bases(one)
    yield KeyUse("read, copy_h2d, dedup", None, "lookups of a rank's batch", "assumed", "the model's", counts.lookups)
    ratio, meaning = one.unique_ratio_per_rank, "unique keys / lookups of a rank's batch"
    yield KeyUse("(the rows below)", ratio, meaning, *rank, counts.sent)
    meaning = "keys the busiest owner receives / mean"
    yield KeyUse("all_to_all[keys]", one.owner_skew, meaning, *owner, counts.received)
    ratio, meaning = one.rows_per_owner_max / one.received_keys_per_owner_max, "rows / keys received, at busiest owners"
    yield KeyUse("lookup, update, write_back", ratio, meaning, *owner, counts.rows)
    if one.shared_rows_per_owner_max is not None:
        ratio, meaning = one.shared_rows_per_owner_max / one.rows_per_owner_max, "rows the step before had too / rows"
        yield KeyUse("sync", ratio, meaning, *owner, counts.shared_rows)
    sent = sum(counts.rows_by_micro_batch)
    if micro_batches == 1:
        yield KeyUse("all_to_all[rows], [grads]", None, "keys received, each sent once", *owner, sent)
        return
    split = next(each for each in one.duplication if each.num_micro_batches == micro_batches)
    ratio, how = (split.in_order, "in order") if split.clustered is None else (split.clustered, "clustered")
    meaning = f"rows sent by {micro_batches} micro-batches / unique"
    yield KeyUse("all_to_all[rows], [grads]", ratio, meaning, "measured", f"batches of one rank, {how}", sent)


def _bases(one: KeyStatistics) -> tuple[tuple[str, str], tuple[str, str]]:
    """Status and basis of what a rank sees, and of what an owner sees."""
    owners = f"{one.world_size:,} ranks"
    if one.origin == "measured":
        both = ("measured", f"{one.num_batches} global batches of {owners}")
        return both, both
    if one.origin == "resampled":
        both = ("extrapolated", f"drawn with replacement for {owners}")
        return both, both
    rank = ("measured", f"{one.num_batches} batches of one rank")
    return rank, ("extrapolated", f"to {owners}")
