"""Grids are files, apart from everything that is profiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.compute import EmulatedDevice
from executor.profile.measure import full_plan, quick_plan
from executor.profile.samples import check_separate
from nestpipe.base.errors import CaseError
from nestpipe.validate.grid import grid_names, load_grid
from tests.nestpipe.validate.by_hand import CONFIG, MBIT, costs_by_hand
from traces.workloads.cost_table import CostTable


def test_no_grid_touches_what_any_profile_fits_on() -> None:
    rows = costs_by_hand(CONFIG).rows
    for plan in (quick_plan, full_plan):
        profiled = [config.values() for config in plan((None, EmulatedDevice())).configs()]
        rates = set(plan((None,)).rates_bits_per_s)
        for name in grid_names():
            points = load_grid(name, EmulatedDevice())
            check_separate(CostTable(rows=rows, meta={"configurations": profiled}), [each.config for each in points])
            assert not rates & {point.rate_bits_per_s for point in points}
    assert all(
        len(load_grid(name, None)) == (35 if name.startswith(("held_out", "development")) else 5)
        for name in grid_names()
    )
    workloads = [{point.config.workload for point in load_grid(name, None)} for name in grid_names()]
    assert len(set.union(*workloads)) == sum(map(len, workloads)), "grids share no workload either"


def test_an_unknown_grid_is_refused_with_a_suggestion() -> None:
    with pytest.raises(CaseError, match=r"unknown grid 'quik'.*did you mean 'quick'.*or give a \.yaml file"):
        load_grid("quik", None)


GRID = """\
format: nestpipe-grid-1
purpose: mine
seed: 3
steps: 6
schedules: [sync, dbp]
workloads:
  - {micro_batches: 2, batch_size: 24, dim: 8, rate_mbit_per_s: 0.5}
  - {micro_batches: 1, batch_size: 16, dim: 4, rate_mbit_per_s: 100}
"""


def test_a_grid_may_be_a_file_and_runs_every_schedule_on_every_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GRID)
    found = [(p.config.schedule, p.config.batch_size, p.rate_bits_per_s) for p in load_grid(path, None)]
    assert found == [("sync", 24, 500_000), ("dbp", 24, 500_000), ("sync", 16, 100 * MBIT), ("dbp", 16, 100 * MBIT)]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dim: 8", "dim: 0", r"workloads\[0\]\.dim"),
        ("steps: 6", "steps: 3", "steps"),
        ("seed: 3", "seeds: 3", r"unknown key 'seeds' \(did you mean 'seed'\?\)"),
        ("batch_size: 24", "batch_size: 1", r"workloads\[0\]: configuration sync: micro_batches 2 is more than"),
        ("[sync, dbp]", "[sync, dpb]", r"workloads\[0\]: unknown schedule 'dpb'"),
        ("nestpipe-grid-1", "nestpipe-grid-2", "format"),
    ],
)
def test_an_invalid_grid_file_is_refused_by_file_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GRID.replace(old, new))
    with pytest.raises(CaseError, match=f"mine.yaml: .*{message}"):
        load_grid(path, None)
