"""Which constraints a row of results breaks, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from nestpipe.base import bytes_text
from sim.scenario.file import Scenario

__all__ = ["Violation", "better", "limits", "violations"]


class Violation(NamedTuple):
    """A broken constraint. `excess` is how far beyond the limit the value is, relative to the limit."""

    name: str
    column: str
    value: float
    limit: float
    excess: float

    def text(self) -> str:
        """The constraint, its limit and the value, in words."""
        return f"{self.name} {shown(self.column, self.limit)} against {shown(self.column, self.value)}"


#: For each constraint of a scenario the result column and whether the limit is the most (or the least) allowed.
_COLUMNS: Final[Mapping[str, tuple[str, bool]]] = {
    "qps_min": ("qps", False),
    "qps_max": ("qps", True),
    "expected_qps_min": ("expected_qps", False),
    "step_ms_max": ("step_ms", True),
    "cost_per_hour_max": ("cost_per_hour", True),
    "cost_per_million_samples_max": ("cost_per_million_samples", True),
    "scaling_efficiency_min": ("scaling_efficiency", False),
    "world_size_min": ("world_size", False),
    "world_size_max": ("world_size", True),
    "staleness_max": ("staleness", True),
}
_MEMORY: Final = {
    "device_memory_bytes": ("device_bytes", "device_bytes_max"),
    "host_memory_bytes": ("host_bytes", "host_bytes_max"),
}


def limits(row: Mapping[str, Any], scenario: Scenario) -> dict[str, tuple[str, float, bool]]:
    """What must hold for a row: for each constraint the column, the limit and whether it is the most allowed."""
    found = {}
    for name, (column, most) in _COLUMNS.items():
        limit = getattr(scenario.constraints, name)
        if limit is not None:
            found[f"constraints.{name}"] = (column, float(limit), most)
    cluster = scenario.clusters.get(str(row["cluster"]))
    where = f"clusters.{row['cluster']}"
    if cluster is not None and cluster.world_size_max is not None:
        found[f"{where}.world_size_max"] = ("world_size", float(cluster.world_size_max), True)
    for name, (column, of_limit) in _MEMORY.items():
        if row.get(of_limit) is not None:
            found[f"{where}.{name}"] = (column, float(row[of_limit]), True)
    return found


def violations(row: Mapping[str, Any], scenario: Scenario) -> list[Violation]:
    """The constraints that a row breaks; a value that is not known breaks none."""
    broken = []
    for name, (column, limit, most) in limits(row, scenario).items():
        value = row.get(column)
        if value is None or value != value:
            continue
        if value > limit if most else value < limit:
            excess = abs(value - limit) / abs(limit) if limit else abs(value - limit)
            broken.append(Violation(name, column, float(value), limit, excess))
    return broken


def better(column: str, minimise: bool, row: Mapping[str, Any]) -> tuple[float, float, float, int]:
    """A sort key, best first: the objective, then fewer micro-batches, less device memory, lower index."""
    value = row.get(column)
    score = float("inf") if value is None or value != value else float(value) * (1 if minimise else -1)
    return score, float(row["micro_batches"]), float(row.get("device_bytes") or 0), int(row["index"])


def shown(column: str, value: float) -> str:
    """A value of a result column for people."""
    if column.endswith("bytes"):
        return bytes_text(value)
    if column in ("world_size", "staleness") or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
