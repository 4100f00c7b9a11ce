"""Key files in, key streams out: CSV and TSV logs, Criteo, MovieLens, KuaiRand, index lists and slot:key samples.

Every reader gives a `KeyStream`. A cell becomes a 64-bit key by one rule, whatever the file: an integer written
canonically is itself (negative ones as two's complement), any other text (hex ids, names) is hashed (`text_key`), and
an empty cell is no lookup. Files may be gzip-compressed; the content decides, not the name.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TraceError, unknown_name
from traces.formats.reading import open_buffered
from traces.keys.layout import KeyFileLayout, KeyFormat, check_indices, detect_layout, is_index, readable
from traces.keys.stream import KeyStream, join_streams, offsets_of, text_key

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KeyFileLayout", "KeyFormat", "detect_layout", "read_columns", "read_keys"]

_BLOCK_BYTES = 1 << 22


def read_keys(
    paths: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    order_by: str | None = None,
) -> KeyStream:
    """The key stream of one file, or of several parts one after the other.

    Args:
        paths: file or files, plain or gzip.
        columns: columns (slots) that are keys; by default the layout's `default_columns`.
        order_by: numeric column to sort the samples by (stable), e.g. `timestamp`; file order where None.

    Raises:
        TraceError: a file that is missing, damaged or not a key file, or a column that it does not have.
    """
    files = [paths] if isinstance(paths, str | Path) else list(paths)
    if not files:
        raise TraceError("no key file given; expected at least one path")
    wanted = None if columns is None else tuple(dict.fromkeys(columns))
    whole, times = _read_parts(files, wanted, () if order_by is None else (order_by,), empty_is_0=False)
    if wanted is not None:
        whole = whole.select(wanted)
    elif all(name.isdigit() for name in whole.features):
        whole = whole.select(sorted(whole.features, key=int))
    if order_by is not None:
        whole = replace(whole.take(np.argsort(times[:, 0], kind="stable")), source=f"{whole.source} by {order_by}")
    _require_keys(whole)
    return whole


def read_columns(
    path: str | Path, *, keys: Sequence[str] | None = None, numbers: Sequence[str] = ()
) -> tuple[KeyStream, NDArray[np.float64]]:
    """The key stream of a file, and some columns of numbers beside it.

    Args:
        path: file, plain or gzip.
        keys: columns that are keys; by default the layout's.
        numbers: columns of numbers, of which an empty cell is 0; of a slot file only its `label`.

    Returns:
        The keys, and float64 (samples, numbers).

    Raises:
        TraceError: as `read_keys`, and for a cell that is not a number.
    """
    stream, found = _read_parts([path], None if keys is None else tuple(keys), tuple(numbers), empty_is_0=True)
    stream = stream if keys is None else stream.select(keys)
    _require_keys(stream)
    return stream, found


def _require_keys(whole: KeyStream) -> None:
    if whole.num_lookups == 0:
        raise TraceError(
            f"{whole.source}: no keys in {whole.num_samples} samples; expected at least one non-empty cell"
        )


def _read_parts(
    files: Sequence[str | Path], wanted: tuple[str, ...] | None, numbers: tuple[str, ...], *, empty_is_0: bool
) -> tuple[KeyStream, NDArray[np.float64]]:
    """Keys and numbers of the files, one after the other."""
    parts = [part for path in files for part in _iter_parts(Path(path), wanted, numbers, empty_is_0)]
    if not parts:
        names = ", ".join(map(str, files))
        raise TraceError(f"{names}: no samples; expected at least one line of keys, found none after the header")
    return join_streams([stream for stream, _ in parts]), np.concatenate([found for _, found in parts])


def _iter_parts(
    path: Path, wanted: tuple[str, ...] | None, numbers: tuple[str, ...], empty_is_0: bool
) -> Iterator[tuple[KeyStream, NDArray[np.float64]]]:
    layout = detect_layout(path)
    if layout.format in (KeyFormat.SLOTS, KeyFormat.INDEX_LIST):
        has_label = layout.format is KeyFormat.SLOTS and empty_is_0
        for name in numbers:
            if not (has_label and name == layout.label_column):
                purpose = "of numbers" if empty_is_0 else "to order by"
                raise TraceError(f"{path}: a {layout.format} file has no column {name!r} {purpose}; leave it out")
        reader = _slot_parts if layout.format is KeyFormat.SLOTS else _index_parts
        for stream, labels in reader(path, layout):
            yield stream, np.repeat(labels[:, None], len(numbers), axis=1)
        return
    names = layout.default_columns if wanted is None else wanted
    if not names:
        shown = ", ".join(layout.columns[:8]) + (", ..." if len(layout.columns) > 8 else "")
        raise TraceError(
            f"{path}: has no header, so which of its columns {shown} hold keys is unknown; name them "
            f"(--column {layout.columns[0]}, in Python: columns=)"
        )
    for name in (*names, *numbers):
        if name not in layout.columns:
            raise TraceError(f"{path}: {unknown_name('column', name, layout.columns)}")
    yield from _table_parts(path, layout, names, numbers, empty_is_0)


def _table_parts(
    path: Path, layout: KeyFileLayout, names: tuple[str, ...], numbers: tuple[str, ...], empty_is_0: bool
) -> Iterator[tuple[KeyStream, NDArray[np.float64]]]:
    import pyarrow as pa
    import pyarrow.csv as pcsv

    text = pa.string()
    read = list(dict.fromkeys((*names, *numbers)))
    with readable(path), open_buffered(path) as raw:
        file = _SingleTabs(raw) if layout.delimiter == "::" else raw
        reader = pcsv.open_csv(
            file,
            read_options=pcsv.ReadOptions(
                column_names=list(layout.columns),
                skip_rows=int(layout.has_header),
                block_size=_BLOCK_BYTES,
                use_threads=False,
            ),
            parse_options=pcsv.ParseOptions(
                delimiter="\t" if layout.delimiter == "::" else layout.delimiter,
                ignore_empty_lines=len(layout.columns) > 1,
            ),
            convert_options=pcsv.ConvertOptions(column_types=dict.fromkeys(read, text), include_columns=read),
        )
        for batch in reader:
            found = np.empty((batch.num_rows, len(numbers)))
            for index, name in enumerate(numbers):
                found[:, index] = _numbers(path, batch.column(read.index(name)), name, empty_is_0)
            yield _from_columns(path, names, [batch.column(read.index(name)) for name in names]), found


def _numbers(path: Path, cells: pa.StringArray, column: str, empty_is_0: bool) -> NDArray[np.float64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    trimmed = pc.utf8_trim_whitespace(cells)
    if empty_is_0:
        trimmed = pc.if_else(pc.equal(trimmed, ""), "0", trimmed)
    try:
        numbers: NDArray[np.float64] = pc.cast(trimmed, pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        purpose = "" if empty_is_0 else " to order by"
        raise TraceError(f"{path}: column {column}: expected numbers{purpose}, {error}") from None
    return numbers


def _from_columns(path: Path, names: tuple[str, ...], cells: list[pa.StringArray]) -> KeyStream:
    columns = [_cell_keys(column) for column in cells]
    present = np.stack([mask for _, mask in columns], axis=1)
    values = np.stack([keys for keys, _ in columns], axis=1)[present]
    offsets = offsets_of(present.ravel())
    return KeyStream(features=names, values=values, offsets=offsets, source=path.name)


def _cell_keys(cells: pa.StringArray) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Key and presence of each cell, by the rule in the module's docstring; distinct cells are converted once."""
    import pyarrow as pa
    import pyarrow.compute as pc

    encoded = pc.dictionary_encode(pc.utf8_trim_whitespace(cells))
    texts = encoded.dictionary
    plain = pc.match_substring_regex(texts, r"^(0|[1-9][0-9]{0,18})$")
    keys = pc.cast(pc.if_else(plain, texts, "0"), pa.uint64()).to_numpy(zero_copy_only=False).copy()
    for index in np.flatnonzero(~plain.to_numpy(zero_copy_only=False)):
        keys[index] = _key_of_text(texts[int(index)].as_py())
    filled = pc.not_equal(texts, "").to_numpy(zero_copy_only=False)
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    return keys[codes], filled[codes].astype(bool)


def _key_of_text(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        return text_key(text)
    if str(number) != text or not -(1 << 63) <= number < 1 << 64:
        return text_key(text)
    return number % (1 << 64)


def _line_blocks(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Runs of whole lines with the number of the first."""
    with readable(path), open_buffered(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig")
        number = 1
        while lines := text.readlines(_BLOCK_BYTES):
            yield number, lines
            number += len(lines)


def _index_parts(path: Path, layout: KeyFileLayout) -> Iterator[tuple[KeyStream, NDArray[np.float64]]]:
    """One sample a line: an index, or several separated by blanks or the delimiter (a bag)."""
    for number, lines in _line_blocks(path):
        rows = [(line.replace(layout.delimiter, " ") if layout.delimiter else line).split() for line in lines]
        for at, row in enumerate(rows):
            if not all(map(is_index, row)):
                check_indices(path, " ".join(row), number + at)
        values = _integers([token for row in rows for token in row])
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        lengths = lengths[lengths > 0] if layout.delimiter is None else lengths
        offsets = offsets_of(lengths)
        stream = KeyStream(features=("index",), values=values, offsets=offsets, source=path.name)
        yield stream, np.zeros(stream.num_samples)


def _integers(tokens: list[str]) -> NDArray[np.uint64]:
    """Whole numbers as 64-bit words; negative and longer ones by their lowest 64 bits."""
    try:
        return np.array(tokens, dtype=np.int64).view(np.uint64)
    except (OverflowError, ValueError):
        return np.array([int(token) % (1 << 64) for token in tokens], dtype=np.uint64)


def _slot_parts(path: Path, _layout: KeyFileLayout) -> Iterator[tuple[KeyStream, NDArray[np.float64]]]:
    """One sample a line: `key:slot key:slot ...`, led by a label pair (`0:1`, `1:1` or `label:...`) that is no key.

    The second array are the labels of `0:1` and `1:1`, NaN where a sample has none.
    """
    for number, lines in _line_blocks(path):
        keys: list[int] = []
        slots: list[int] = []
        samples: list[int] = []
        labels: list[float] = []
        count = 0
        for at, line in enumerate(lines):
            tokens = line.split()
            if not tokens:
                continue
            labels.append({"0:1": 0.0, "1:1": 1.0}.get(tokens[0], np.nan))
            if re.fullmatch(r"[01]:1|label:.*|.*:label", tokens[0]):
                tokens = tokens[1:]
            for token in tokens:
                key, _, slot = token.partition(":")
                if not (key.isdecimal() and slot.isdecimal() and int(key) < 1 << 64):
                    raise TraceError(
                        f"{path}: line {number + at}: expected key:slot with a 64-bit key, got {token[:40]!r}"
                    )
                keys.append(int(key))
                slots.append(int(slot))
            samples.extend([count] * len(tokens))
            count += 1
        stream = _from_triples(path, np.array(samples, dtype=np.int64), slots, np.array(keys, dtype=np.uint64), count)
        yield stream, np.array(labels)


def _from_triples(
    path: Path, samples: NDArray[np.int64], slots: list[int], keys: NDArray[np.uint64], num_samples: int
) -> KeyStream:
    names, column = np.unique(np.array(slots, dtype=np.int64), return_inverse=True)
    features = tuple(str(name) for name in names) or ("0",)
    bag = samples * len(features) + column
    order = np.argsort(bag, kind="stable")
    counts = np.bincount(bag, minlength=num_samples * len(features))
    offsets = offsets_of(counts)
    return KeyStream(features=features, values=keys[order], offsets=offsets, source=path.name)


class _SingleTabs(io.RawIOBase):
    """A `::`-separated file seen as tab-separated."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest + self._file.read(max(1, len(buffer) - len(self._rest)))
        cut = len(data) - 1 if data.endswith(b":") and len(data) > 1 else len(data)
        data, self._rest = data[:cut].replace(b"::", b"\t"), data[cut:]
        buffer[: len(data)] = data
        return len(data)
