"""The traces of several ranks put together: clocks aligned, waiting told from transfer, sizes taken from each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError, ns_to_us
from traces.formats.execution_trace import NOT_COLLECTIVES, EtRank, et_rows
from traces.formats.kineto_join import Joined
from traces.formats.kineto_table import kineto_frames, waits_by_event
from traces.formats.measures import coverage, rank_summary
from traces.formats.skew import Matched, clock_offsets_ns, match
from traces.table import TraceTable, make_table

__all__ = ["Together", "put_together"]

MATCHED_SHOWN_MAX = 1000


@dataclass(frozen=True, slots=True)
class Together:
    """Rows made as they are asked for, the ranks' summaries, what was understood of them, and further sections."""

    tables: Iterator[TraceTable]
    ranks: list[dict[str, Any]]
    coverage: dict[str, Any]
    sections: dict[str, list[dict[str, Any]]]


def put_together(traces: Sequence[object]) -> Together:
    """Profiler and execution traces of any number of ranks.

    Raises:
        TraceError: two traces of a kind are of the same rank.
    """
    joined = sorted((one for one in traces if isinstance(one, Joined)), key=lambda one: _rank_order(one.events.rank))
    executions = sorted((one for one in traces if isinstance(one, EtRank)), key=lambda one: _rank_order(one.rank))
    _same_rank_twice([(one.events.rank, one.events.path) for one in joined])
    _same_rank_twice([(one.rank, one.path) for one in executions])
    notes = _number_unknown(joined)
    for trace in executions:
        notes += trace.notes
        for one in joined:
            if one.events.rank == trace.rank and attach_splits(one, trace):
                notes.append(f"rank {trace.rank}: sizes per peer taken from {Path(trace.path).name} ({trace.schema})")
    matched, unmatched = match(joined)
    notes += unmatched
    offsets = clock_offsets_ns(matched, len(joined)) if joined else []
    if any(offsets):
        notes.append("the ranks' clocks differ; aligned by the common end of their collectives")
    waits_of = [waits_by_event(matched, position) for position in range(len(joined))]
    ranks = [
        _rank_summary(one, position, offset, waits, matched)
        for position, (one, offset, waits) in enumerate(zip(joined, offsets, waits_of, strict=True))
    ]
    sections = {"matched_collectives": matched_summary(matched, offsets, joined)} if matched else {}
    profiled = {one.events.rank for one in joined}
    tables: list[TraceTable] = []
    for trace in executions:
        rows, summary = et_rows(trace)
        if trace.rank in profiled:
            sections.setdefault("execution_traces", []).append(summary)
        else:
            ranks.append(summary)
            tables.append(make_table(rows, where=trace.path))
    frames = _frames(joined, offsets, waits_of)
    return Together(chain(frames, tables), ranks, coverage(joined, notes), sections)


def _rank_order(rank: int | None) -> tuple[bool, int]:
    return rank is None, rank if rank is not None else 0


def _rank_summary(
    joined: Joined, position: int, offset: int, waits: Mapping[int, int], matched: Sequence[Matched]
) -> dict[str, Any]:
    summary = {**rank_summary(joined), "clock_offset_us": ns_to_us(offset)}
    if waits:
        total = sum(e.duration_ns for m in matched for e in m.exchanges if e.position == position)
        summary["comm_wait_us"] = ns_to_us(sum(waits.values()))
        summary["comm_transfer_us"] = ns_to_us(total - sum(waits.values()))
    return summary


def _frames(
    joined: Sequence[Joined], offsets: Sequence[int], waits_of: Sequence[Mapping[int, int]]
) -> Iterator[TraceTable]:
    """Tables of the profiled ranks, one piece at a time; time 0 is the first event of all."""
    origin = min((_first_ns(one) - offset for one, offset in zip(joined, offsets, strict=True)), default=0)
    for one, offset, waits in zip(joined, offsets, waits_of, strict=True):
        for frame in kineto_frames(one, waits, offset, origin):
            yield make_table(frame, where=one.events.path)


def _same_rank_twice(ranks: Sequence[tuple[int | None, str]]) -> None:
    seen: dict[int, str] = {}
    for rank, path in ranks:
        if rank is None:
            continue
        if rank in seen:
            raise TraceError(f"{path}: holds rank {rank}, and so does {seen[rank]}; import separate runs separately")
        seen[rank] = path


def _number_unknown(joined: Sequence[Joined]) -> list[str]:
    """Numbers several files that do not state their rank in order; a single one stays unknown."""
    unknown = [one for one in joined if one.events.rank is None]
    if len(joined) < 2 or not unknown:
        return []
    taken = {one.events.rank for one in joined}
    free = (number for number in range(len(joined) + len(taken)) if number not in taken)
    for one in unknown:
        one.events.rank, one.events.rank_source = next(free), "order of the files"
    return [f"{len(unknown)} files do not say their rank; numbered in the order given"]


def attach_splits(joined: Joined, trace: EtRank) -> bool:
    """Fills the per-peer sizes that a profiler trace lacks from the execution trace of the same rank and run.

    Collectives are matched by order, and only if the whole sequence agrees in name and bytes: ids drift.
    """
    own = sorted(joined.collectives, key=lambda found: found.start_ns)
    others = [one for one in trace.collectives if one.recorded not in NOT_COLLECTIVES]
    if [(f.collective, f.bytes_in) for f in own] != [(o.collective, o.bytes_in) for o in others]:
        return False
    for found, other in zip(own, others, strict=True):
        found.bytes_out = other.bytes_out if found.bytes_out is None else found.bytes_out
        if other.splits:
            found.args.setdefault("In split size", list(other.splits))
            found.args.setdefault("Out split size", list(other.splits_out))
        if other.group_size:
            found.args.setdefault("Group size", other.group_size)
    return True


def _first_ns(joined: Joined) -> int:
    events = joined.events
    moments = [min(events.device_start_ns)] if events.device_start_ns else []
    moments += [found.start_ns for found in events.steps[:1]]
    moments += [found.start_ns for found in joined.collectives[:1]]
    return events.base_ns + min(moments, default=0)


def matched_summary(
    matched: Sequence[Matched], offsets: Sequence[int], joined: Sequence[Joined]
) -> list[dict[str, Any]]:
    """Each collective on all its ranks: sizes, durations, transfer and waits."""
    rows: list[dict[str, Any]] = []
    for index, one in enumerate(matched[:MATCHED_SHOWN_MAX]):
        starts = [exchange.start_ns - offsets[exchange.position] for exchange in one.exchanges]
        ends = [exchange.end_ns - offsets[exchange.position] for exchange in one.exchanges]
        sizes = [exchange.host.bytes_in if exchange.host is not None else None for exchange in one.exchanges]
        rows.append(
            {
                "index": index,
                "collective": one.collective,
                "group": one.group or None,
                "ranks": [joined[exchange.position].events.rank for exchange in one.exchanges],
                "bytes": sizes[0] if len(set(sizes)) == 1 else sizes,
                "duration_us": [ns_to_us(exchange.duration_ns) for exchange in one.exchanges],
                "transfer_us": ns_to_us(one.transfer_ns),
                "wait_us": [ns_to_us(wait) for wait in one.waits_ns],
                "start_us": [ns_to_us(start - min(starts)) for start in starts],
                "end_spread_us": ns_to_us(max(ends) - min(ends)),
            }
        )
    return rows
