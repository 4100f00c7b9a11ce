"""A sweep on disk: one small Parquet file per finished chunk, written whole or not at all, merged at the end.

    DIR/sweep.json           what is swept: digest, number of points, chunk size
    DIR/parts/R-CHUNK.parquet rows of one chunk of rung R
    DIR/results.parquet      all rows in order of their index, once everything has run

A killed sweep keeps every part that was written; running it again does the rest. Nothing is held in memory but one
chunk at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.base import NestPipeError, atomic_file, write_text
from sim.scenario import COLUMNS, Grid, Row

__all__ = ["Store", "as_frame", "schema_of", "table_of"]

_ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string()}


def schema_of(grid: Grid) -> pa.Schema:
    """The columns of a sweep's results: those of every evaluation with the swept keys after the batch, and the rung."""
    fields = [pa.field(name, _ARROW[kind]) for name, kind in COLUMNS.items()]
    place = list(COLUMNS).index("batch_per_worker") + 1
    swept = []
    for key, values in grid.axes.items():
        text = any(isinstance(value, str) for value in values)
        swept.append(pa.field(key, pa.string() if text else pa.float64()))
    return pa.schema([*fields[:place], *swept, *fields[place:], pa.field("rung", pa.int64())])


def table_of(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table."""
    columns = {}
    for each in schema:
        values = [row.get(each.name) for row in rows]
        if each.type == pa.float64():
            values = [None if value is None else float(value) for value in values]
        elif each.type == pa.string():
            values = [None if value is None else str(value) for value in values]
        columns[each.name] = pa.array(values, type=each.type)
    return pa.table(columns, schema=schema)


def as_frame(table: pa.Table) -> pd.DataFrame:
    """A table of results as a data frame; whole numbers that may be missing are `Int64`."""
    mapping = {pa.int64(): pd.Int64Dtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=mapping.get)
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The folder of one sweep."""

    folder: Path
    schema: pa.Schema
    chunk_size: int

    @classmethod
    def open(cls, folder: Path, schema: pa.Schema, *, digest: str, facts: Mapping[str, Any], chunk_size: int) -> Store:
        """The store in a folder, new or to be continued.

        Args:
            folder: made if need be.
            schema: of the results.
            digest: of everything that the results depend on.
            facts: what else to note.
            chunk_size: for a new store; one that is continued keeps its own.

        Raises:
            NestPipeError: if the folder cannot be written, or holds another sweep.
        """
        about = folder / "sweep.json"
        try:
            (folder / "parts").mkdir(parents=True, exist_ok=True)
            for left in (folder / "parts").glob(".*"):
                left.unlink()
            if about.is_file():
                known = json.loads(about.read_text(encoding="utf-8"))
                if known.get("digest") != digest:
                    raise NestPipeError(
                        f"{folder}: holds a sweep of another scenario ({known.get('scenario')}, digest "
                        f"{known.get('digest')}, this is {digest}); choose another --out"
                    )
                chunk_size = int(known["chunk_size"])
            else:
                note = {"digest": digest, "chunk_size": chunk_size, **facts}
                write_text(about, json.dumps(note, indent=1))
        except OSError as error:
            reason = error.strerror or error
            raise NestPipeError(f"{folder}: cannot be written: {reason}; choose another --out") from None
        except (ValueError, KeyError) as error:
            raise NestPipeError(f"{about}: not readable as a sweep: {error}; choose another --out") from None
        return cls(folder=folder, schema=schema, chunk_size=chunk_size)

    @property
    def results(self) -> Path:
        """The merged file."""
        return self.folder / "results.parquet"

    def part(self, rung: int, chunk: int) -> Path:
        """The file of a chunk."""
        return self.folder / "parts" / f"{rung}-{chunk:08d}.parquet"

    def has(self, rung: int, chunk: int) -> bool:
        """Whether a chunk is done."""
        return self.part(rung, chunk).is_file()

    def add(self, rung: int, chunk: int, table: pa.Table) -> None:
        """Keeps a finished chunk.

        Raises:
            NestPipeError: if it cannot be written.
        """
        with atomic_file(self.part(rung, chunk)) as file:
            pq.write_table(table, file)

    def tables(self, rung: int, num_chunks: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The finished chunks of a rung in order, one at a time."""
        for chunk in range(num_chunks):
            yield pq.read_table(self.part(rung, chunk), columns=columns)

    def merge(self, tables: Iterator[pa.Table], facts: Mapping[str, Any]) -> Path:
        """Writes all rows into one file, a row group per table, and drops the parts."""
        schema = self.schema.with_metadata({"nestpipe": json.dumps(dict(facts))})
        with atomic_file(self.results) as file, pq.ParquetWriter(file, schema) as writer:
            for table in tables:
                writer.write_table(table.cast(schema))
        for part in (self.folder / "parts").glob("*.parquet"):
            part.unlink(missing_ok=True)
        return self.results
