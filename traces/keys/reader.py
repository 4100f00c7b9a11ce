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
from traces.keys.layout import KeyFileLayout, KeyFormat, check_indices, detect_layout, is_index, open_key_file, readable
from traces.keys.stream import KeyStream, join_streams, offsets_of, text_key

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KeyFileLayout", "KeyFormat", "detect_layout", "read_keys"]

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
    parts: list[KeyStream] = []
    times: list[NDArray[np.float64]] = []
    for path in files:
        for stream, time in _iter_parts(Path(path), wanted, order_by):
            parts.append(stream)
            times.append(time)
    if not parts:
        names = ", ".join(map(str, files))
        raise TraceError(f"{names}: no samples; expected at least one line of keys, found none after the header")
    whole = join_streams(parts)
    if wanted is not None:
        whole = whole.select(wanted)
    elif all(name.isdigit() for name in whole.features):
        whole = whole.select(sorted(whole.features, key=int))
    if order_by is not None:
        whole = replace(
            whole.take(np.argsort(np.concatenate(times), kind="stable")), source=f"{whole.source} by {order_by}"
        )
    if whole.num_lookups == 0:
        raise TraceError(
            f"{whole.source}: no keys in {whole.num_samples} samples; expected at least one non-empty cell"
        )
    return whole


def _iter_parts(
    path: Path, wanted: tuple[str, ...] | None, order_by: str | None
) -> Iterator[tuple[KeyStream, NDArray[np.float64]]]:
    layout = detect_layout(path)
    if layout.format in (KeyFormat.SLOTS, KeyFormat.INDEX_LIST):
        if order_by is not None:
            raise TraceError(
                f"{path}: a {layout.format} file has no column {order_by!r} to order by; leave the order out"
            )
        reader = _slot_parts if layout.format is KeyFormat.SLOTS else _index_parts
        for stream in reader(path, layout):
            yield stream, np.zeros(0)
        return
    names = layout.default_columns if wanted is None else wanted
    for name in (*names, *([order_by] if order_by is not None else [])):
        if name not in layout.columns:
            raise TraceError(f"{path}: {unknown_name('column', name, layout.columns)}")
    yield from _table_parts(path, layout, names, order_by)


def _table_parts(
    path: Path, layout: KeyFileLayout, names: tuple[str, ...], order_by: str | None
) -> Iterator[tuple[KeyStream, NDArray[np.float64]]]:
    import pyarrow as pa
    import pyarrow.csv as pcsv

    text = pa.string()
    read = [*names, *([order_by] if order_by is not None and order_by not in names else [])]
    with readable(path), open_key_file(path) as raw:
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
            times = np.zeros(0) if order_by is None else _numbers(path, batch.column(read.index(order_by)), order_by)
            yield _from_columns(path, names, [batch.column(i) for i in range(len(names))]), times


def _numbers(path: Path, cells: pa.StringArray, column: str) -> NDArray[np.float64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        numbers: NDArray[np.float64] = pc.cast(pc.utf8_trim_whitespace(cells), pa.float64()).to_numpy(
            zero_copy_only=False
        )
    except pa.ArrowInvalid as error:
        raise TraceError(f"{path}: column {column}: expected numbers to order by, {error}") from None
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
    with readable(path), open_key_file(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig")
        number = 1
        while lines := text.readlines(_BLOCK_BYTES):
            yield number, lines
            number += len(lines)


def _index_parts(path: Path, layout: KeyFileLayout) -> Iterator[KeyStream]:
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
        yield KeyStream(features=("index",), values=values, offsets=offsets, source=path.name)


def _integers(tokens: list[str]) -> NDArray[np.uint64]:
    """Whole numbers as 64-bit words; negative and longer ones by their lowest 64 bits."""
    try:
        return np.array(tokens, dtype=np.int64).view(np.uint64)
    except (OverflowError, ValueError):
        return np.array([int(token) % (1 << 64) for token in tokens], dtype=np.uint64)


def _slot_parts(path: Path, _layout: KeyFileLayout) -> Iterator[KeyStream]:
    """One sample a line: `key:slot key:slot ...`, led by a label pair (`0:1`, `1:1` or `label:...`) that is no key."""
    for number, lines in _line_blocks(path):
        keys: list[int] = []
        slots: list[int] = []
        samples: list[int] = []
        count = 0
        for at, line in enumerate(lines):
            tokens = line.split()
            if not tokens:
                continue
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
        yield _from_triples(path, np.array(samples, dtype=np.int64), slots, np.array(keys, dtype=np.uint64), count)


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
