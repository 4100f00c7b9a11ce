"""Damaged inputs: whatever is cut, flipped or replaced, an import ends with a table or with a `TraceError`."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nestpipe.base.errors import TraceError
from tests.traces.formats.samples import samples
from traces.formats.importing import import_traces

NUMBER = re.compile(rb"-?\d+(\.\d+)?")
WORDS = (b"null", b"-1", b"1e999", b'"x"', b"[]", b"{}", b"9" * 25, b"NaN", b"true", b"\x00", b"inf")


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """One of: cut, flipped bytes, a hole, a repeated piece, numbers replaced by something else."""
    out = bytearray(data)
    choice, size = int(rng.integers(5)), len(data)
    if choice == 0:
        del out[int(rng.integers(size)) :]
    elif choice == 1:
        for _ in range(int(rng.integers(1, 20))):
            out[int(rng.integers(size))] = int(rng.integers(256))
    elif choice == 2:
        at = int(rng.integers(size))
        del out[at : at + int(rng.integers(1, 200))]
    elif choice == 3:
        at, piece = int(rng.integers(size)), int(rng.integers(size))
        out[at:at] = out[piece : piece + int(rng.integers(1, 100))]
    else:
        for _ in range(int(rng.integers(1, 6))):
            found = NUMBER.search(out, int(rng.integers(len(out))))
            if found:
                out[found.start() : found.end()] = WORDS[int(rng.integers(len(WORDS)))]
    return bytes(out)


def outcomes(folder: Path, files: dict[str, bytes], count: int, seed: int) -> Counter[str]:
    """How many damaged files were imported and how many refused; anything else is raised."""
    rng = np.random.default_rng(seed)
    names = sorted(files)
    seen: Counter[str] = Counter()
    for _ in range(count):
        name = names[int(rng.integers(len(names)))]
        data = damage(files[name], rng)
        path = folder / name
        path.write_bytes(gzip.compress(data, 1)[: int(rng.integers(10, 10**6))] if rng.random() < 0.1 else data)
        try:
            import_traces([path], partial=bool(rng.random() < 0.3))
            seen["imported"] += 1
        except TraceError:
            seen["refused"] += 1
    return seen


def test_damaged_samples_give_a_table_or_a_trace_error(tmp_path: Path) -> None:
    seen = outcomes(tmp_path, samples(), 600, seed=1)
    assert sum(seen.values()) == 600
    assert min(seen.values()) > 50


@pytest.mark.slow
def test_ten_thousand_damaged_real_files_give_a_table_or_a_trace_error(tmp_path: Path, shared_data: Path) -> None:
    files = dict(samples())
    for folder in ("kineto", "et", "collectives", "workload"):
        for path in sorted((shared_data / "real" / folder).rglob("*")):
            if path.is_file() and path.stat().st_size < 100_000:
                data = path.read_bytes()
                files[path.name] = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    seen = outcomes(tmp_path, files, 10_000, seed=2)
    assert sum(seen.values()) == 10_000
