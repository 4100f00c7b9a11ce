"""SimAI's tables of bus bandwidth ratios: no times, so no rows, but a summary; `read_bus_ratios` gives the numbers."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.base import TraceError
from traces.formats.format import Found, Head, Options
from traces.formats.reading import quantity, read_text

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["read", "read_bus_ratios", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether this is a table whose first column is `Size`."""
    return head.stripped.startswith(b"Size,")


def read(path: Path, _options: Options) -> tuple[str, pd.DataFrame]:
    """The ratios and where they come from."""
    return str(path), read_bus_ratios(path)


def read_bus_ratios(path: str | os.PathLike[str]) -> pd.DataFrame:
    """SimAI's ratio table in long form: size_bytes, num_nodes, world_size, label, busbw_ratio.

    The ratio is bus bandwidth over an unnamed peak. `num_nodes` and `world_size` are missing for the `Multi` columns,
    which do not give them; empty cells are left out.

    Raises:
        TraceError: not such a table.
    """
    import pandas as pd

    rows = list(csv.reader(io.StringIO(read_text(path))))
    if not rows or not rows[0] or rows[0][0].strip() != "Size":
        raise TraceError(f"{path}: expected a ratio table whose first column is 'Size'")
    records = []
    for line, row in enumerate(rows[1:], start=2):
        for label, cell in zip(rows[0][1:], row[1:], strict=False):
            if not cell.strip():
                continue
            nodes, ranks = re.match(r"(\d+)\s*Node", label), re.search(r"(\d+)GPU", label)
            num_nodes = int(nodes[1]) if nodes else None
            # 8 GPUs a node, as the labelled columns have it
            world = int(ranks[1]) if ranks else (8 * num_nodes if num_nodes else None)
            where = f"{path}: line {line}"
            size, ratio = quantity(f"{where}: Size", row[0]), quantity(f"{where}: {label}", cell)
            records.append((int(size), num_nodes, world, label.strip(), ratio))
    if not records:
        raise TraceError(f"{path}: the ratio table is empty")
    frame = pd.DataFrame(records, columns=["size_bytes", "num_nodes", "world_size", "label", "busbw_ratio"])
    return frame.astype({"size_bytes": "int64", "num_nodes": "Int64", "world_size": "Int64", "busbw_ratio": "float64"})


def summarise(trace: tuple[str, pd.DataFrame]) -> Found:
    """No rows; the range of sizes and the ratios at the smallest."""
    name, ratios = trace
    smallest = ratios[ratios["size_bytes"] == ratios["size_bytes"].min()]
    summary = {
        "file": name,
        "num_cells": len(ratios),
        "size_bytes_min": int(ratios["size_bytes"].min()),
        "size_bytes_max": int(ratios["size_bytes"].max()),
        "at_smallest_size": {
            str(label): float(ratio) for label, ratio in zip(smallest["label"], smallest["busbw_ratio"], strict=True)
        },
        "note": "ratios to an unnamed peak: no row of the trace table; read them with read_bus_ratios",
    }
    return Found(section="bus_ratios", summaries=[summary])
