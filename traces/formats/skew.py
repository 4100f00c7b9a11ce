"""Collectives across ranks: how long the exchange itself took, and how long each rank waited for the last to arrive.

All ranks leave a collective at nearly the same moment, so a rank's duration is the transfer plus its wait. The shortest
duration over the ranks bounds the transfer; the common end lets clocks that differ be aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from traces.formats.kineto_events import DeviceClass, HostRange
from traces.formats.kineto_join import Joined, group_of

__all__ = ["Exchange", "Matched", "clock_offsets_ns", "match"]

# ends of one collective differ by a few us between ranks of a node; clocks further apart than this are aligned
OFFSET_NS_MIN = 100_000


@dataclass(slots=True)
class Exchange:
    """One collective on one rank: its device events and the host range, where there is one.

    `in_step` is False where the trace has steps, but the launch lies in none: before or after what was recorded.
    """

    position: int
    collective: str
    group: str
    duration_ns_of: dict[int, int]
    host: HostRange | None
    start_ns: int
    end_ns: int
    in_step: bool = True

    @property
    def events(self) -> list[int]:
        """Indices of its device events, in launch order."""
        return list(self.duration_ns_of)

    @property
    def duration_ns(self) -> int:
        """Time on the device, the wait for others included."""
        return sum(self.duration_ns_of.values())


@dataclass(slots=True)
class Matched:
    """One collective on all given ranks, in the order of the ranks given."""

    collective: str
    group: str
    exchanges: list[Exchange]

    @property
    def transfer_ns(self) -> int:
        """The shortest duration: the exchange itself, once every rank has arrived."""
        return min(exchange.duration_ns for exchange in self.exchanges)

    @property
    def waits_ns(self) -> list[int]:
        """The time each rank waited for the last to arrive."""
        return [exchange.duration_ns - self.transfer_ns for exchange in self.exchanges]


def exchanges(joined: Joined, position: int = 0) -> list[Exchange]:
    """The collectives of a rank that have device events, in the order they were launched."""
    events = joined.events
    found: dict[int, Exchange] = {}
    order = sorted(
        (int(joined.launch_start_ns[i]), i)
        for i in range(len(joined.ops))
        if events.device_class[i] == DeviceClass.COMM
    )
    for _, index in order:
        op = joined.ops[index]
        start = events.base_ns + events.device_start_ns[index]
        duration = events.device_duration_ns[index]
        key = id(op.host) if op.host is not None else -1 - index
        if key in found:
            same = found[key]
            same.duration_ns_of[index] = duration
            same.start_ns, same.end_ns = min(same.start_ns, start), max(same.end_ns, start + duration)
            continue
        args = op.host.args if op.host is not None else events.comm_args.get(index, {})
        group = group_of(op.host)[0] if op.host is not None else str(args.get("Process Group Name", ""))
        members = args.get("Process Group Ranks", "")
        label = f"{group} {members}".strip()
        found[key] = Exchange(
            position,
            op.collective or "unknown",
            label,
            {index: duration},
            op.host,
            start,
            start + duration,
            not events.steps or int(joined.step[index]) >= 0,
        )
    return list(found.values())


def match(ranks: Sequence[Joined]) -> tuple[list[Matched], list[str]]:
    """The collectives that all given ranks took part in, matched by group and order; and what could not be matched."""
    if len(ranks) < 2:
        return [], []
    own = [exchanges(joined, position) for position, joined in enumerate(ranks)]
    matched: list[Matched] = []
    notes: list[str] = []
    groups = {exchange.group for sequence in own for exchange in sequence}
    for group in sorted(groups):
        sequences = [[exchange for exchange in sequence if exchange.group == group] for sequence in own]
        taking_part = [sequence for sequence in sequences if sequence]
        if len(taking_part) < 2:
            continue
        if not _alike(taking_part):
            # kernels that were under way as recording began belong to launches that only some ranks' traces hold
            taking_part = [[exchange for exchange in sequence if exchange.in_step] for sequence in taking_part]
        if not _alike(taking_part):
            notes.append(
                f"group {group or 'unnamed'}: the ranks ran different collectives; waiting cannot be told from transfer"
            )
            continue
        for together in zip(*taking_part, strict=True):
            matched.append(Matched(together[0].collective, group, list(together)))
    matched.sort(key=lambda one: min(exchange.start_ns for exchange in one.exchanges))
    return matched, notes


def _alike(sequences: Sequence[Sequence[Exchange]]) -> bool:
    names = [[exchange.collective for exchange in sequence] for sequence in sequences]
    return all(name == names[0] for name in names)


def clock_offsets_ns(matched: Iterable[Matched], num_ranks: int) -> list[int]:
    """How far each rank's clock is ahead, from the common end of collectives that all ranks took part in.

    0 for every rank where the clocks already agree to within the spread of such ends.
    """
    rows = [[exchange.end_ns for exchange in one.exchanges] for one in matched if len(one.exchanges) == num_ranks]
    if not rows:
        return [0] * num_ranks
    ends = np.array(rows, dtype=np.int64)
    ahead = ends - ends[:, :1]
    offsets = [int(value) for value in np.median(ahead, axis=0)]
    spread = max(offsets) - min(offsets)
    return [0] * num_ranks if spread < OFFSET_NS_MIN else offsets
