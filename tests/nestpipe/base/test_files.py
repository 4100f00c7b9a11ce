"""A file or folder is there whole or as it was before."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from nestpipe.base.errors import NestPipeError, TraceError
from nestpipe.base.files import atomic_file, atomic_folder, write_text


def test_a_file_appears_whole_and_readable_by_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.txt"
    with atomic_file(target) as file:
        file.write(b"one")
        file.flush()
        assert not target.exists()
    assert target.read_bytes() == b"one"
    assert target.stat().st_mode & 0o777 == 0o644
    write_text(target, "zwei ü")
    assert target.read_text(encoding="utf-8") == "zwei ü"
    assert [path.name for path in target.parent.iterdir()] == ["a.txt"]


def _write(path: Path, interrupt: type[BaseException]) -> None:
    with atomic_file(path) as file:
        file.write(b"new")
        raise interrupt


def _fill(path: Path, interrupt: type[BaseException]) -> None:
    with atomic_folder(path) as folder:
        (folder / "c").touch()
        raise interrupt


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, interrupt: type[BaseException]) -> None:
    write_text(tmp_path / "a", "old")
    with pytest.raises(interrupt):
        _write(tmp_path / "a", interrupt)
    with pytest.raises(interrupt):
        _fill(tmp_path / "b", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_file_that_does_not_fit_leaves_what_was_there(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(TraceError) as caught, atomic_file(tmp_path / "a", TraceError, option="--timeline") as file:
            file.write(bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value) == f"{tmp_path}/a: cannot be written: File too large; choose another --timeline"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_a_full_disk_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NestPipeError) as caught, atomic_file(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(caught.value) == (
        f"{tmp_path}/a: cannot be written: No space left on device; free some space or choose another --out"
    )


def test_a_folder_replaces_what_was_there_and_names_itself_in_errors(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with atomic_folder(tmp_path / "a") as folder:
            write_text(folder / name, name)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["two"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    with pytest.raises(NestPipeError, match=rf"^{tmp_path}/a/nnn\w+: cannot"), atomic_folder(tmp_path / "a") as folder:
        write_text(folder / ("n" * 300), "a name too long")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
