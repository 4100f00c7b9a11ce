"""The rows of a sweep in one SQLite file, each chunk in a transaction, and written as Parquet at the end.

    DIR/sweep.sqlite      what is swept, and every row that has been evaluated
    DIR/results.parquet   all rows in order of their index, once everything has run

A killed sweep keeps every chunk that was added; running it again does the rest.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.base import NestPipeError, atomic_file
from sim.scenario import COLUMNS, Grid, Row

__all__ = ["Kept", "Store", "as_frame", "columns_of", "kept", "opened"]

#: Index, rung, and the values in order of the columns as JSON, which keeps every digit.
Kept: TypeAlias = tuple[int, int, str]
_ARROW: Final = {int: pa.int64(), float: pa.float64(), str: pa.string()}
_BATCH: Final = 4096
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS sweep (facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows ("index" INTEGER, rung INTEGER, row TEXT NOT NULL, PRIMARY KEY ("index", rung))
    WITHOUT ROWID;
"""
_HIGHEST: Final = """
SELECT row FROM rows AS r WHERE rung = (SELECT max(rung) FROM rows WHERE "index" = r."index" AND rung < ?)
    ORDER BY "index"
"""


def columns_of(grid: Grid) -> dict[str, type]:
    """The columns of a sweep's results: those of every evaluation with the swept keys after the batch, and the rung."""
    columns: dict[str, type] = {}
    for name, kind in COLUMNS.items():
        columns[name] = kind
        if name == "batch_per_worker":
            for key, values in grid.axes.items():
                columns[key] = str if any(isinstance(value, str) for value in values) else float
    return columns | {"rung": int}


def kept(row: Row, columns: Mapping[str, type]) -> Kept:
    """A row as the store keeps it."""
    values = [None if row.get(name) is None else kind(row[name]) for name, kind in columns.items()]
    return row["index"], row["rung"], json.dumps(values)


def as_frame(table: pa.Table) -> pd.DataFrame:
    """A table of results as a data frame; whole numbers that may be missing are `Int64`."""
    mapping = {pa.int64(): pd.Int64Dtype()}
    frame: pd.DataFrame = table.to_pandas(types_mapper=mapping.get)
    return frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The rows of one sweep, in a folder or in memory; see `opened`."""

    connection: sqlite3.Connection
    columns: Mapping[str, type]
    facts: Mapping[str, Any]

    def has(self, rung: int, index: int) -> bool:
        """Whether a configuration has been evaluated at a rung."""
        where = 'SELECT 1 FROM rows WHERE "index" = ? AND rung = ?'
        return self.connection.execute(where, (index, rung)).fetchone() is not None

    def count(self, rung: int) -> int:
        """How many configurations have been evaluated at a rung."""
        found: int = self.connection.execute("SELECT count(*) FROM rows WHERE rung = ?", (rung,)).fetchone()[0]
        return found

    def add(self, rows: Sequence[Kept]) -> None:
        """Keeps the rows, all or none of them."""
        with self.connection:
            self.connection.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", rows)

    def rows(self, below: int) -> Iterator[Row]:
        """The row of the highest rung less than `below` of every configuration, in order of their index."""
        for (row,) in self.connection.execute(_HIGHEST, (below,)):
            yield dict(zip(self.columns, json.loads(row), strict=True))

    def table(self, below: int) -> pa.Table:
        """The same as one table."""
        return pa.Table.from_batches(self._batches(below), self._schema())

    def write(self, path: Path, below: int) -> None:
        """Writes the same as Parquet in bounded memory, and drops the rows here."""
        with atomic_file(path) as file, pq.ParquetWriter(file, self._schema()) as writer:
            for batch in self._batches(below):
                writer.write_batch(batch)
        with self.connection:
            self.connection.execute("DELETE FROM rows")
        self.connection.execute("VACUUM")

    def _schema(self) -> pa.Schema:
        fields = [(name, _ARROW[kind]) for name, kind in self.columns.items()]
        return pa.schema(fields, metadata={"nestpipe": json.dumps(dict(self.facts))})

    def _batches(self, below: int) -> Iterator[pa.RecordBatch]:
        cursor = self.connection.execute(_HIGHEST, (below,))
        while found := cursor.fetchmany(_BATCH):
            columns = zip(*(json.loads(row) for (row,) in found), strict=True)
            arrays = [pa.array(c, _ARROW[kind]) for c, kind in zip(columns, self.columns.values(), strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema())


@contextmanager
def opened(folder: Path | None, columns: Mapping[str, type], facts: Mapping[str, Any]) -> Iterator[Store]:
    """The store of a sweep in a folder, new or to be continued; in memory if there is no folder.

    Args:
        folder: made if need be.
        columns: of the results, with their types.
        facts: what is swept, with the `digest` of everything that the results depend on.

    Raises:
        NestPipeError: if the folder cannot be written, holds something else, or is in use.
    """
    path = "" if folder is None else folder / "sweep.sqlite"
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if not Path(path).is_file() and (folder / "results.parquet").exists():
                raise NestPipeError(f"{folder}: holds results.parquet of something else; choose another --out")
        with closing(sqlite3.connect(path or ":memory:", timeout=0.2)) as connection:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # held until closed, or until the process is gone
            connection.executescript("BEGIN EXCLUSIVE;" + _TABLES)
            known = connection.execute("SELECT facts FROM sweep").fetchone()
            if known is None:
                connection.execute("INSERT INTO sweep VALUES (?)", (json.dumps(dict(facts)),))
            elif (other := json.loads(known[0]))["digest"] != facts["digest"]:
                raise NestPipeError(
                    f"{folder}: holds a sweep of another scenario ({other['scenario']}, digest {other['digest']}, this "
                    f"is {facts['digest']}); choose another --out"
                )
            connection.commit()
            yield Store(connection=connection, columns=columns, facts=facts)
    except sqlite3.OperationalError as error:
        used = (
            "; another sweep is using it: wait for that one, or" if "locked" in str(error) else "; free some space or"
        )
        raise NestPipeError(f"{path}: cannot be written: {error}{used} choose another --out") from None
    except sqlite3.DatabaseError as error:
        raise NestPipeError(f"{path}: not readable as a sweep: {error}; choose another --out") from None
    except OSError as error:
        raise NestPipeError(f"{folder}: cannot be written: {error.strerror or error}; choose another --out") from None
