"""A prediction that several tests of validation look at."""

from __future__ import annotations

import pytest

from nestpipe.validate.predict import Prediction
from tests.nestpipe.validate.by_hand import prediction_by_hand


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return prediction_by_hand()
