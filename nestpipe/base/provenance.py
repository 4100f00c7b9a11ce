"""Where a number comes from: one vocabulary."""

from __future__ import annotations

from typing import Final

__all__ = ["ORIGINS"]

#: Where a number can come from, the surest first.
ORIGINS: Final = ("measured", "fitted", "predicted", "interpolated", "assumed", "extrapolated")
