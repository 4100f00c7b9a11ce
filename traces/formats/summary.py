"""The JSON summaries of what was imported besides profiler traces, and the table rows of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from nestpipe.base import ns_to_us
from traces.formats.kineto_join import Joined
from traces.formats.skew import Matched
from traces.table import TraceTable

__all__ = ["collective_rows", "log_summary", "matched_summary", "ratio_summary", "table_summary"]

MATCHED_SHOWN_MAX = 1000


def collective_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Benchmark rows as ops: one measured exchange each, `op` naming the placement."""
    kinds = {"all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter"}
    return [
        {
            "kind": kinds.get(row.collective, "unclassified"),
            "op": f"{row.collective} {'in place' if row.in_place else 'out of place'}",
            "duration_ns": row.time_ns,
            "bytes": None if pd.isna(row.size_bytes) else int(row.size_bytes),
            "collective": row.collective,
            "group_size": row.world_size,
            "source": row.source,
        }
        for row in _records(frame)
    ]


def _records(frame: pd.DataFrame) -> list[Any]:
    """Rows as named tuples of plain values."""
    return list(frame.itertuples(index=False))


def log_summary(path: str, frame: pd.DataFrame) -> list[dict[str, Any]]:
    summaries: list[dict[str, Any]] = []
    average = frame.attrs.get("average_busbw_bytes_per_s")
    groups: Any = frame.groupby(["collective", "world_size", "dtype"], sort=True)
    for (collective, world, dtype), part in groups:
        own = part[~part["in_place"]]
        sizes = own["size_bytes"].dropna()
        known = len(sizes) > 0
        last = own.iloc[int(sizes.to_numpy().argmax())] if known else part.iloc[-1]
        summaries.append(
            {
                "file": path,
                "collective": collective,
                "world_size": int(world),
                "dtype": dtype,
                "num_rows": len(own),
                "num_rows_in_place": len(part) - len(own),
                "size_bytes_min": int(sizes.min()) if known else None,
                "size_bytes_max": int(sizes.max()) if known else None,
                "time_us_min": ns_to_us(int(own["time_ns"].min())) if len(own) else None,
                "largest": {
                    "time_us": ns_to_us(int(last["time_ns"])),
                    "algbw_gb_per_s": None if pd.isna(last["algbw_bytes_per_s"]) else last["algbw_bytes_per_s"] / 1e9,
                    "busbw_gb_per_s": None if pd.isna(last["busbw_bytes_per_s"]) else last["busbw_bytes_per_s"] / 1e9,
                },
                "average_busbw_gb_per_s": None if average is None else average / 1e9,
                "source": str(last["source"]),
            }
        )
    return summaries


def table_summary(name: str, table: TraceTable) -> dict[str, Any]:
    frame = table.frame
    kinds = frame.groupby("kind")["duration_ns"].agg(["size", "sum"])
    return {
        "file": name,
        "num_rows": len(frame),
        "ranks": [int(rank) for rank in sorted(frame["rank"].dropna().unique())],
        "kinds": {
            str(kind): {"count": int(row["size"]), "us": ns_to_us(int(row["sum"]))} for kind, row in kinds.iterrows()
        },
    }


def ratio_summary(name: str, ratios: pd.DataFrame) -> dict[str, Any]:
    smallest = ratios[ratios["size_bytes"] == ratios["size_bytes"].min()]
    return {
        "file": name,
        "num_cells": len(ratios),
        "size_bytes_min": int(ratios["size_bytes"].min()),
        "size_bytes_max": int(ratios["size_bytes"].max()),
        "at_smallest_size": {str(row.label): float(row.busbw_ratio) for row in _records(smallest)},
        "note": "ratios to an unnamed peak: no row of the trace table; read them with read_bus_ratios",
    }


def matched_summary(
    matched: Sequence[Matched], offsets: Sequence[int], joined: Sequence[Joined]
) -> list[dict[str, Any]]:
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
