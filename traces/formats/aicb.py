"""AICB micro-tests: a CSV list of collectives, whose `None` times are to be measured."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError
from traces.formats.format import Head, Options, count
from traces.formats.phases import collective_of, kind_name, kind_of_collective
from traces.formats.reading import read_text
from traces.formats.workload import Parsed, summarise, whole_cell
from traces.table import Origin, provenance

__all__ = ["read", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether the first line names AICB's columns."""
    columns = {name.strip() for name in head.text.partition("\n")[0].split(",")}
    return {"comm_type", "comm_group", "msg_size", "stage"} <= columns


def read(path: Path, _options: Options) -> Parsed:
    """Table rows and JSON summary of a micro-test.

    Raises:
        TraceError: an invalid row.
    """
    name = str(path)
    table = csv.DictReader(io.StringIO(read_text(path)))
    source = provenance(Origin.ASSUMED, Path(name).name)
    rows: list[dict[str, Any]] = []
    counts: dict[str, dict[str, int]] = {}
    stages: dict[str, int] = {}
    num_rows = 0
    for record in table:
        num_rows += 1
        if None in record.values() or None in record:
            raise TraceError(f"{name}: line {table.line_num}: expected {len(table.fieldnames or [])} cells; cut short?")
        stage = record["stage"]
        stages[stage] = stages.get(stage, 0) + 1
        word = record["comm_type"].removeprefix("CommType.")
        if word in ("epoch_end", "computation"):
            continue  # a computation's msg_size lists the shapes of its matrices
        size = whole_cell(name, table.line_num, "msg_size", record["msg_size"])
        if size == 0:
            continue
        collective = collective_of(word)
        kind, _ = kind_of_collective(collective, None, None)
        count(counts, collective, bytes=size)
        rows.append(
            {
                "kind": kind_name(kind),
                "op": f"{word} {stage}",
                "bytes": size,
                "collective": collective,
                "group": record["comm_group"].removeprefix("CommGroup."),
                "source": source,
            }
        )
    summary = {"file": name, "num_rows": num_rows, "stages": stages, "collectives": counts}
    return rows, summary
