"""What the tests of the testbed share."""

from __future__ import annotations

from executor.testbed import namespaces as testbed

MBIT = 1_000_000


def of_this_process() -> list[str]:
    return [name for name in testbed.existing() if name == testbed.owned_name()]
