"""The format of this program's own trace tables, Parquet or CSV."""

from __future__ import annotations

from pathlib import Path

from nestpipe.base import ns_to_us
from traces.formats.format import Found, Head, Options
from traces.table import CSV_PREFIX, TraceTable, is_table, read_table

__all__ = ["read", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether this is a trace table."""
    return is_table(head.path) if head.is_parquet else head.raw.startswith(CSV_PREFIX.encode())


def read(path: Path, _options: Options) -> tuple[str, TraceTable]:
    """The table and where it comes from."""
    return str(path), read_table(path)


def summarise(trace: tuple[str, TraceTable]) -> Found:
    """The table as it is; rows, ranks and time by kind."""
    name, table = trace
    frame = table.frame
    kinds = frame.groupby("kind")["duration_ns"].agg(["size", "sum"])
    summary = {
        "file": name,
        "num_rows": len(frame),
        "ranks": [int(rank) for rank in sorted(frame["rank"].dropna().unique())],
        "kinds": {
            str(kind): {"count": int(row["size"]), "us": ns_to_us(int(row["sum"]))} for kind, row in kinds.iterrows()
        },
    }
    return Found(rows=table, section="tables", summaries=[summary])
