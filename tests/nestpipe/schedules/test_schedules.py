"""Schedules by name."""

from __future__ import annotations

import pytest

from nestpipe.base.errors import ScheduleError
from nestpipe.schedules import load


def test_unknown_schedules_are_refused_with_a_suggestion() -> None:
    with pytest.raises(ScheduleError, match="did you mean 'nestpipe'"):
        load("nestpip")
