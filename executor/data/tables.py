"""Embedding tables: their one address space, its row-wise shards, and a rank's shard in host memory.

Every row of every table has one `id`. Tables of equal width form a *group* and get neighbouring ids, so one dedup, one
key exchange and one row exchange serve them all. Shard `s` of `S` owns the ids congruent to `s` modulo `S`; a shard may
be empty. Initial values depend on the id alone, so they are the same at every world size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nestpipe.base import ExecutorError, bytes_text, unknown_name
from nestpipe.ir import Data
from traces.keys import mix64, owner_of

__all__ = ["HostStore", "Layout", "TableGroup", "TableSpec", "make_layout"]

_CHUNK_ROWS = 1 << 16
_VALUE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """One table. Keys are hashed to rows, or are rows themselves, 0 to `num_rows` - 1, where `hashed` is false."""

    name: str
    num_rows: int
    dim: int
    hashed: bool = True

    def __post_init__(self) -> None:
        for field in ("num_rows", "dim"):
            if getattr(self, field) < 1:
                raise ExecutorError(f"table {self.name}: {field} must be at least 1, got {getattr(self, field)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGroup:
    """Tables of one width: ids `first` to `first + num_rows` - 1."""

    dim: int
    first: int
    num_rows: int

    @property
    def end(self) -> int:
        """The id after the last."""
        return self.first + self.num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All tables in one address space, cut into `num_shards` shards."""

    tables: tuple[TableSpec, ...]
    groups: tuple[TableGroup, ...]
    first_ids: tuple[int, ...]
    group_of: tuple[int, ...]
    num_shards: int

    def table_index(self, name: str) -> int:
        """The position of a table by name.

        Raises:
            ExecutorError: if there is no such table.
        """
        names = [table.name for table in self.tables]
        if name not in names:
            raise ExecutorError(unknown_name("table", name, names))
        return names.index(name)

    def ids(self, table: int, keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The ids of raw keys of one table.

        Args:
            table: position in `tables`.
            keys: int64 or uint64, any shape; any value if the table hashes them.

        Raises:
            ExecutorError: if a key of a table that does not hash them is not one of its rows.
        """
        spec = self.tables[table]
        if spec.hashed:
            return owner_of(keys, spec.num_rows) + self.first_ids[table]
        bad = keys[(keys < 0) | (keys >= spec.num_rows)]
        if bad.size:
            raise ExecutorError(
                f"table {spec.name}: key {bad[0]} is not a row of it; it has {spec.num_rows}, from 0. "
                "Give it more rows, or hash its keys"
            )
        return np.asarray(keys, dtype=np.int64) + self.first_ids[table]

    def shard_ids(self, group: int, shard: int) -> range:
        """The ids of a group that a shard owns, ascending; may be empty."""
        spec = self.groups[group]
        return range(spec.first + (shard - spec.first) % self.num_shards, spec.end, self.num_shards)


def make_layout(tables: tuple[TableSpec, ...], num_shards: int) -> Layout:
    """Lay the tables out by width, then in the given order.

    >>> layout = make_layout((TableSpec(name="a", num_rows=3, dim=8), TableSpec(name="b", num_rows=2, dim=4)), 2)
    >>> layout.first_ids, [(group.dim, group.first) for group in layout.groups]
    ((2, 0), [(4, 0), (8, 2)])
    >>> list(layout.shard_ids(1, 1))
    [3]
    """
    if not tables:
        raise ExecutorError("a model needs at least one table")
    first_ids, group_of = [0] * len(tables), [0] * len(tables)
    groups: list[TableGroup] = []
    at = 0
    for dim in sorted({table.dim for table in tables}):
        first = at
        for index, table in enumerate(tables):
            if table.dim == dim:
                first_ids[index], group_of[index] = at, len(groups)
                at += table.num_rows
        groups.append(TableGroup(dim=dim, first=first, num_rows=at - first))
    return Layout(
        tables=tables,
        groups=tuple(groups),
        first_ids=tuple(first_ids),
        group_of=tuple(group_of),
        num_shards=num_shards,
    )


class HostStore:
    """A shard of every table and of its optimiser rows, in host memory.

    Args:
        layout: the address space.
        shard: which shard this is.
        moment_widths: optimiser values per row, by group; 0 for none.
        seed: of the initial values.
        directory: keep rows in memory-mapped files there instead of RAM, for tables larger than RAM.
    """

    def __init__(
        self,
        layout: Layout,
        shard: int,
        moment_widths: tuple[int, ...],
        *,
        seed: int = 0,
        directory: Path | None = None,
    ) -> None:
        self.layout = layout
        self.shard = shard
        self.directory = directory
        self._first = [(layout.shard_ids(group, shard).start) for group in range(len(layout.groups))]
        self.rows: list[Tensor] = []
        self.moments: list[Tensor] = []
        for group, (spec, width) in enumerate(zip(layout.groups, moment_widths, strict=True)):
            num_rows = len(layout.shard_ids(group, shard))
            rows = self._allocate(f"rows-{group}-shard-{shard}", num_rows, spec.dim)
            for start, ids in _chunks(layout.shard_ids(group, shard)):
                rows[start : start + len(ids)] = torch.from_numpy(_initial_rows(ids, spec.dim, seed))
            self.rows.append(rows)
            self.moments.append(self._allocate(f"moments-{group}-shard-{shard}", num_rows, width))

    def _allocate(self, name: str, num_rows: int, width: int) -> Tensor:
        if self.directory is None or num_rows * width == 0:
            return torch.zeros(num_rows, width)
        path = self.directory / f"{name}.bin"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                # a sparse file would end the process with SIGBUS when the disk is full
                os.posix_fallocate(file.fileno(), 0, num_rows * width * _VALUE_BYTES)
            flat = torch.from_file(str(path), shared=True, size=num_rows * width)
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            size = bytes_text(num_rows * width * _VALUE_BYTES)
            raise ExecutorError(
                f"{self.directory}: cannot map {size} there: {error}; choose another --storage"
            ) from None
        return flat.zero_().view(num_rows, width)

    def state(self, data: Data) -> list[Tensor]:
        """The tensors of `table` or `optimizer`, one (rows of the shard, width) tensor per group."""
        assert data in (Data.TABLE, Data.OPTIMIZER), f"{data} is not in host memory"
        return self.rows if data == Data.TABLE else self.moments

    def gather(self, data: Data, group: int, ids: Tensor, out: Tensor) -> None:
        """Copy the rows of owned ids into `out`, (ids, width)."""
        torch.index_select(self.state(data)[group], 0, self._local(group, ids), out=out)

    def scatter(self, data: Data, group: int, ids: Tensor, values: Tensor) -> None:
        """Copy `values`, (ids, width), over the rows of owned ids, which are distinct."""
        self.state(data)[group].index_copy_(0, self._local(group, ids), values)

    def _local(self, group: int, ids: Tensor) -> Tensor:
        return (ids - self._first[group]).div_(self.layout.num_shards, rounding_mode="floor")


def _chunks(ids: range) -> Iterator[tuple[int, range]]:
    for start in range(0, len(ids), _CHUNK_ROWS):
        yield start, ids[start : start + _CHUNK_ROWS]


def _initial_rows(ids: range, dim: int, seed: int) -> npt.NDArray[np.float32]:
    """Uniform in ±1/sqrt(dim), a function of seed, id and column alone: float32 (ids, dim)."""
    first = np.asarray(ids, dtype=np.uint64)[:, None] * np.uint64(dim)
    numbers: npt.NDArray[np.uint64] = (first + np.arange(dim, dtype=np.uint64)).astype(np.uint64)
    bits = mix64(numbers ^ mix64(np.full(1, seed, dtype=np.uint64)))
    unit = (bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return ((unit * 2 - 1) / np.float32(np.sqrt(dim))).astype(np.float32)
