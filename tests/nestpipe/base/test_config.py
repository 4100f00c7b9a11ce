"""YAML files as people write them: numbers with exponents, empty files."""

from __future__ import annotations

import pytest

from nestpipe.base.config import Config, decode
from nestpipe.base.errors import CaseError


class Numbers(Config, frozen=True, kw_only=True):
    rate: float
    rows: int = 0
    name: str = ""


@pytest.mark.parametrize(
    ("written", "meant"),
    [("2e10", 2e10), ("1.0e9", 1e9), ("1.0e+9", 1e9), ("-3E-2", -0.03), (".5e1", 5.0), ("1_0.5e0", 10.5), ("7", 7.0)],
)
def test_a_number_with_an_exponent_is_a_number(written: str, meant: float) -> None:
    assert decode(f"rate: {written}", Numbers, CaseError, source="a.yaml").rate == meant


def test_whole_numbers_and_text_stay_what_they_are() -> None:
    found = decode("{rate: 1, rows: 8_000_000_000, name: e10}", Numbers, CaseError, source="a.yaml")
    assert (found.rows, found.name) == (8_000_000_000, "e10")
    assert decode("{rate: 1, rows: 2e10}", Numbers, CaseError, source="a.yaml").rows == 20_000_000_000


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_an_empty_file_is_called_empty(text: str) -> None:
    with pytest.raises(CaseError) as caught:
        decode(text, Numbers, CaseError, source="a.yaml")
    assert str(caught.value) == "a.yaml: the file is empty; it needs at least rate"


def test_a_date_that_is_none_is_not_valid() -> None:
    with pytest.raises(CaseError, match=r"a\.yaml: not valid YAML: month must be"):
        decode("name: 2024-13-45", Numbers, CaseError, source="a.yaml")


@pytest.mark.parametrize("text", ["rate: 1\nname: a\nrate: 2\n", "{rate: 1, rate: 1}"])
def test_a_key_that_is_given_twice_is_refused(text: str) -> None:
    with pytest.raises(CaseError, match=r"a\.yaml: not valid YAML: key 'rate' is given twice"):
        decode(text, Numbers, CaseError, source="a.yaml")
