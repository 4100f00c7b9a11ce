"""The rules of the IR, one example each."""

from __future__ import annotations

import pytest

from nestpipe.base.errors import ScheduleError
from nestpipe.checks.check import check, check_programs, require_safe
from nestpipe.checks.report import Verdict
from nestpipe.checks.rules import RULES
from nestpipe.ir import map_ops, parse, parse_programs, unroll, with_micro_batches
from nestpipe.schedules import load, names
from tests.nestpipe.checks.edits import BROKEN_RULES, Golden, rules_of


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_rule_is_reported_by_name(rule: str) -> None:
    loop = parse(BROKEN_RULES[rule])
    assert check(loop).verdict is Verdict.MALFORMED
    assert rule in rules_of(loop)
    with pytest.raises(ScheduleError, match="must not run"):
        require_safe(loop)


def test_every_rule_has_an_example_and_a_message_with_a_way_out(golden: Golden) -> None:
    incomplete = "program v1 x steps=2 micro_batches=1\n  stream a on h2d\n    step 0\n      wait 0\n"
    findings = {f.rule: f.message for text in BROKEN_RULES.values() for f in check(parse(text)).findings}
    findings |= {f.rule: f.message for f in check_programs(parse_programs(incomplete)).findings}
    assert set(findings) == {rule.name for rule in RULES}
    golden("".join(f"{rule}: {findings[rule]}\n" for rule in sorted(findings)))


@pytest.mark.parametrize("name", names())
def test_rules_hold_after_every_pass(name: str) -> None:
    loop = load(name)
    for made in (loop, with_micro_batches(loop, 3), map_ops(loop, lambda op: op), unroll(loop, 1), unroll(loop, 3)):
        for rule in RULES:
            assert not list(rule.complaints(made)), rule.name
