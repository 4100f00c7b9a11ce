"""Where the tests find the repository and the shared data beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
GOLDEN: Final = ROOT / "tests" / "golden"
SHARED_DATA: Final = ROOT.parent / "shared" / "data"
INPUTS: Final = ROOT / "tests" / "data" / "imports"
