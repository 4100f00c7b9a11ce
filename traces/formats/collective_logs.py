"""Benchmarks of collectives as one table: nccl-tests, RCCL tests, HCCL, or a table of a tool.

`read_collective_log(path)` detects the format from the content. A row is one size of one collective at one world size,
out of place or in place; `time_ns` is what was measured, the bandwidths follow nccl-tests' definitions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.base import TraceError, ns_to_us, us_to_ns
from traces.formats.collective_json import read_json
from traces.formats.collective_tables import read_csv
from traces.formats.format import Found, Head, Options
from traces.formats.log_inference import infer_collective, infer_world_size
from traces.formats.measurement import FAILED_CHECK, Given, Measurement, frame_of, measurement, printed
from traces.formats.nccl_text import parse_text, sections
from traces.formats.phases import KIND_OF_COLLECTIVE, kind_name
from traces.formats.reading import read_head, read_text, text_lines

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["read", "read_collective_log", "sniff", "summarise"]


def sniff(head: Head) -> bool:
    """Whether this is a benchmark of collectives; any text that is no other format may be one."""
    if head.is_parquet or _is_tagged(head.stripped):
        return True
    if head.is_json:
        return head.has("busBw", "nccl_version", "out_of_place") or "results" in head.lists
    return b"\0" not in head.raw[:4096]


def _is_tagged(head: bytes) -> bool:
    """Whether a text that may begin like JSON is a log: its lines tagged by mpirun, or HCCL's table."""
    return re.match(rb"\[\d+,\d+\]<std(out|err)>:", head) is not None or b"data_size(" in head[:4096]


def read(path: Path, _options: Options) -> tuple[str, pd.DataFrame]:
    """The measurements and where they come from."""
    return str(path), read_collective_log(path)


def read_collective_log(
    path: str | os.PathLike[str], *, collective: str | None = None, world_size: int | None = None
) -> pd.DataFrame:
    """A benchmark of collectives as a table, one row per size and placement.

    Args:
        path: nccl-tests or RCCL tests text or JSON (plain or gzip), the HCCL tester's text, an aiconfigurator, DeepEP
            or transcribed CSV table.
        collective: which collective it is, for a log that does not say.
        world_size: ranks that took part, for a log that does not say.

    Returns:
        Columns `COLLECTIVE_COLUMNS`: collective (all_to_all, all_reduce, ...), world_size (ranks), size_bytes (larger
        of a rank's send and receive buffer; for all_to_all what a rank sends in total, its own share included),
        time_ns, algbw_bytes_per_s = size over time, busbw_bytes_per_s, in_place, dtype, source (provenance). Rows of
        size 0 are left out. Bandwidths are those printed where they have three digits, else computed. Where a log ends
        with an average, `attrs["average_busbw_bytes_per_s"]` holds it. DeepEP rows have no size_bytes (`<NA>`), since
        the table counts tokens.

    Raises:
        TraceError: not such a file; a invalid value; a collective or world size that nothing gives.
    """
    name = os.fspath(path)
    given = Given(name, collective, world_size)
    text = _parquet_as_csv(name) if read_head(path, 4) == b"PAR1" else read_text(path)
    start = text.lstrip()[:4096]
    average: float | None = None
    rows: list[Measurement] | None
    if start[:1] in ("{", "[") and not _is_tagged(start.encode()):
        rows, average = read_json(given, text)
    elif start.startswith("Size,"):
        raise TraceError(f"{name}: a table of ratios to an unnamed peak, not of times; use read_bus_ratios")
    else:
        rows = read_csv(given, text)
        if rows is None:
            rows, average = _read_text_log(given, text)
    if not rows:
        raise TraceError(f"{name}: no row with a size above 0")
    frame = frame_of(rows)
    if average is not None:
        frame.attrs["average_busbw_bytes_per_s"] = average
    return frame


def _read_text_log(given: Given, text: str) -> tuple[list[Measurement], float | None]:
    path = given.path
    parts = sections(text_lines(text))
    if len(parts) > 1:
        # several tests in one file; the average over them would mean nothing
        texts = ["\n".join(line for _, line in part) for part in parts]
        return [row for part in texts for row in _read_text_log(given, part)[0]], None
    header, rows = parse_text(path, parts[0])
    if not rows and re.search(r"^\w+,:\s", text, re.MULTILINE):
        raise TraceError(
            f"{path}: SimAI's bus bandwidths by group: no sizes and no times, so nothing to import; "
            "write them into a topology file"
        )
    if not rows:
        raise TraceError(
            f"{path}: no row of a collective log found; expected nccl-tests text or JSON, the HCCL tester's table, "
            "or a CSV with num_gpus, message_size and latency"
        )
    hint = Path(path).name.lower()
    name = given.collective or infer_collective(path, header, rows, hint)
    how, world_size = "given", given.world_size
    if world_size is None:
        world_size, how = infer_world_size(path, name, header, rows, hint)
    note = "" if how == "printed" else f"world size: {how}"
    if header.num_failed and not any(row.failed for row in rows):
        note = "; ".join(part for part in (note, f"{FAILED_CHECK}: {header.num_failed} out of bounds") if part)
    return [
        measurement(
            name,
            world_size,
            row.size_bytes,
            us_to_ns(row.time_us),
            given.source(note, row.failed),
            dtype=row.dtype,
            in_place=row.in_place,
            algbw=printed(row.algbw),
            busbw=printed(row.busbw),
        )
        for row in rows
    ], header.average_busbw


def _parquet_as_csv(path: str) -> str:
    """aiconfigurator ships its tables as Parquet; the same columns as in its CSV."""
    import pandas as pd

    try:
        return str(pd.read_parquet(path).to_csv(index=False))
    except Exception as error:  # pyarrow has no common base for what damaged files raise
        raise TraceError(f"{path}: not a readable Parquet file: {error}") from error


def summarise(trace: tuple[str, pd.DataFrame]) -> Found:
    """One measured exchange a row, and a summary for each collective, world size and element type."""
    name, frame = trace
    return Found(
        rows=_rows(frame), section="collective_logs", summaries=_summaries(name, frame), notes=_notes(name, frame)
    )


def _notes(path: str, frame: pd.DataFrame) -> list[str]:
    failed = frame.loc[frame["source"].str.contains(FAILED_CHECK, regex=False), "source"]
    if failed.empty:
        return []
    shown = str(failed.iloc[0]).rpartition(f"{FAILED_CHECK}: ")[2].rstrip(")")
    return [
        f"{path}: the results of {len(failed)} of {len(frame)} rows failed the benchmark's own check ({shown}); their "
        "times are those of a wrong exchange"
    ]


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Benchmark rows as ops: one measured exchange each, `op` naming the placement."""
    import pandas as pd

    measured: Any = frame.itertuples(index=False)
    return [
        {
            "kind": kind_name(KIND_OF_COLLECTIVE.get(row.collective)),
            "op": f"{row.collective} {'in place' if row.in_place else 'out of place'}",
            "duration_ns": row.time_ns,
            "bytes": None if pd.isna(row.size_bytes) else int(row.size_bytes),
            "collective": row.collective,
            "group_size": row.world_size,
            "source": row.source,
        }
        for row in measured
    ]


def _summaries(path: str, frame: pd.DataFrame) -> list[dict[str, Any]]:
    import pandas as pd

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
