"""Shared fixtures: golden texts, the shared data folder, derandomised Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.paths import GOLDEN, ROOT, SHARED_DATA

settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden texts instead of comparing them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compares a text with tests/golden/<path of the test file>/<test>.txt; --update-golden writes it."""
    test_file = Path(request.node.fspath).relative_to(ROOT / "tests")
    path = GOLDEN / test_file.with_suffix("") / f"{request.node.name}.txt"

    def compare(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing; run pytest --update-golden and review the diff"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def testbed_allowed() -> None:
    """Skips where no testbed can be made, and says why."""
    from executor.testbed import refusal

    reason = refusal()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real data beside the repository; skips where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED_DATA
