"""Where configurations run: torchrun's ranks, options, files that are not writable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from executor.profile.run import loop_of
from nestpipe.base.errors import CaseError, NestPipeError
from nestpipe.ir import unroll
from nestpipe.validate.bench import BenchOptions, check_writable, open_bench
from tests.nestpipe.validate.by_hand import CONFIG


def test_what_could_not_be_written_after_minutes_is_refused_before(tmp_path: Path) -> None:
    check_writable(None, tmp_path / "new" / "costs.json")
    assert not (tmp_path / "new" / "costs.json").exists()
    (tmp_path / "file").touch()
    with pytest.raises(NestPipeError, match="file: cannot be made a folder"):
        check_writable(tmp_path / "file" / "costs.json")
    with pytest.raises(CaseError, match="it is a folder"):
        check_writable(tmp_path)


def _torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun would set for a world of one rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_under_torchrun_the_rate_of_the_links_must_be_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nestpipe.cli.profile import profile

    _torchrun(monkeypatch)
    with pytest.raises(CaseError, match="--rate-mbit-per-s is missing: under torchrun links are not shaped"):
        profile(out=tmp_path / "costs.json")


def test_the_ranks_of_torchrun_run_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    _torchrun(monkeypatch)
    with open_bench(BenchOptions(world_size=7, timeout_s=60)) as here:
        frame = here.run([replace(CONFIG, steps=6)], 1)
        assert (here.world_size, here.first, here.conditions["bench"]) == (1, True, "torchrun")
    assert set(frame["kind"].astype(str)) == {op.kind.value for op in unroll(loop_of(CONFIG), 6).ops}
