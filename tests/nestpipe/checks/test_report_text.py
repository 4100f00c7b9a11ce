"""Reports for people and for tools."""

from __future__ import annotations

from nestpipe.checks.check import check
from nestpipe.checks.report_text import report_document
from nestpipe.schedules import load


def test_document_for_tools_has_the_promised_fields() -> None:
    document = report_document(check(load("async_prefetch")))
    assert document["schedule"] == "async_prefetch"
    assert document["verdict"] == "stale"
    assert document["staleness"] == {"1": 1, "2": 0, "3": 0}
    assert document["peak_buffers"]["rows"] == 2  # type: ignore[index]
    assert [step["op"] for step in document["witness"]][-1] == "forward 1.0"  # type: ignore[index]
