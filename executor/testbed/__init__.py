"""A cluster on one Linux machine: a network namespace per rank, links of a chosen bandwidth."""

from executor.testbed.launch import launch
from executor.testbed.links import check_links
from executor.testbed.namespaces import (
    MAX_RANKS,
    Testbed,
    TestbedError,
    existing,
    rate_text,
    refusal,
    remove_stale,
    set_up,
    tear_down,
    temporary,
)

__all__ = [
    "MAX_RANKS",
    "Testbed",
    "TestbedError",
    "check_links",
    "existing",
    "launch",
    "rate_text",
    "refusal",
    "remove_stale",
    "set_up",
    "tear_down",
    "temporary",
]
