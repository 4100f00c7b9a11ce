"""Why no configuration meets the constraints: which of them bind, and what comes nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nestpipe.base import CaseError
from sim.scenario.constraints import Violation, shown, violations
from sim.scenario.file import Scenario

__all__ = ["InfeasibleError", "infeasible"]


class InfeasibleError(CaseError):
    """No configuration meets the constraints; says which bind and what comes nearest."""


def infeasible(
    rows: Sequence[Mapping[str, Any]], ok: Sequence[Mapping[str, Any]], scenario: Scenario
) -> InfeasibleError:
    """The error that names the binding constraints and the nearest point.

    A constraint binds if dropping it alone would let something through. If there is none, those binding are the ones
    that the row with the fewest and least violations breaks together.

    Args:
        rows: every row.
        ok: those that are valid.
        scenario: the constraints.
    """
    if not ok:
        reasons = sorted({str(row["reason"]) for row in rows})
        return InfeasibleError(
            f"every configuration is invalid: {reasons[0]}" + (" (and others)" if len(reasons) > 1 else "")
        )
    broken = [(row, violations(row, scenario)) for row in ok]
    alone = [(row, each[0]) for row, each in broken if len(each) == 1]
    lines = [f"none of {len(ok)} configurations meets the constraints"]
    if alone:
        for name in sorted({violation.name for _, violation in alone}):
            row, violation = min(
                ((r, v) for r, v in alone if v.name == name), key=lambda each: (each[1].excess, each[0]["index"])
            )
            lines.append(f"  {name} binds: {_nearest(violation)}; nearest: {_where(row)}")
    else:
        row, each = min(broken, key=lambda pair: (len(pair[1]), max(v.excess for v in pair[1]), pair[0]["index"]))
        names = " and ".join(violation.name for violation in each)
        lines.append(f"  {names} bind together: " + "; ".join(_nearest(violation) for violation in each))
        lines.append(f"  nearest: {_where(row)}")
    lines.append("relax a constraint, or add world sizes, schedules or clusters to try")
    return InfeasibleError("\n".join(lines))


def _nearest(violation: Violation) -> str:
    most = violation.value > violation.limit
    bound, words = ("at most", "the least") if most else ("at least", "the most")
    limit, value = (shown(violation.column, each) for each in (violation.limit, violation.value))
    return f"{violation.column} must be {bound} {limit} and {words} that meets the rest is {value}"


def _where(row: Mapping[str, Any]) -> str:
    domain = f", domains of {row['domain_size']}" if row.get("domain_size") else ""
    return (
        f"{row['schedule']} with {row['micro_batches']} micro-batches{domain} on {row['world_size']:,} workers of "
        f"cluster {row['cluster']}"
    )
