"""Reports of checks: text with witness and marked schedule lines for people, documents and tables for tools."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nestpipe.base import bytes_text
from nestpipe.checks.report import Finding, Report, Verdict, WitnessStep
from nestpipe.ir import Loop, Program, op_name, show, show_op

__all__ = ["excerpt", "finding_text", "report_document", "report_table", "report_text"]

_MEANING = {
    Verdict.SYNCHRONOUS: "every read sees what a sequential run reads",
    Verdict.STALE: "every update arrives once, some reads come before it",
    Verdict.DRIFT: "replicas of parameters are updated differently and drift apart",
    Verdict.WRONG: "an update applies something else than the gradients of its batch",
    Verdict.RACE: "a value that is read is undefined, or an update is lost",
    Verdict.DEADLOCK: "it cannot finish",
    Verdict.MALFORMED: "it breaks the rules of the schedule format",
}
_MAX_STEPS = 24
_MAX_LINE = 116


def report_text(report: Report, schedule: Loop | Sequence[Program]) -> str:
    """The report for people: verdict, table of key classes, buffers, findings with witness and marked lines."""
    lines = [f"{report.schedule}: {report.verdict}: {_MEANING[report.verdict]}"]
    if report.key_classes:
        lines += ["", *_class_table(report)]
    if report.peak_buffers:
        buffers = schedule.buffers if isinstance(schedule, Loop) else schedule[0].buffers
        slots = {buffer.data: buffer.slots for buffer in buffers}
        used = ", ".join(f"{data} {peak}/{slots[data]}" for data, peak in report.peak_buffers.items())
        lines += ["", *_wrapped("buffers, most live at once of slots: " + used)]
    if report.bytes_per_rank is not None:
        memory = ", ".join(f"{place} {bytes_text(size)}" for place, size in report.bytes_per_rank.items())
        lines.append(f"buffer memory per rank: {memory}")
    for note in report.notes:
        lines += _wrapped(f"note: {note}")
    if isinstance(schedule, Loop) and report.verdict in (Verdict.SYNCHRONOUS, Verdict.STALE):
        lines.append(f"examined: all programs of 1 to {report.num_batches} batches; longer ones only repeat them")
    for finding in report.findings:
        followed = finding is report.findings[0] and finding.verdict is not Verdict.MALFORMED
        lines += ["", *_wrapped(f"{finding.rule}: {finding.message}"), *_witness(finding.witness if followed else ())]
    if report.findings:
        marked = excerpt(schedule, report.findings[0].witness)
        lines += ["", "schedule:", marked.rstrip()] if marked else []
    return "\n".join(lines) + "\n"


def report_document(report: Report) -> dict[str, object]:
    """The report for tools: what to dump as JSON."""
    memory = report.bytes_per_rank
    return {
        "schedule": report.schedule,
        "verdict": report.verdict.value,
        "staleness": {str(distance): stale for distance, stale in report.staleness.items()},
        "dense_staleness": report.dense_staleness,
        "peak_buffers": {data.value: peak for data, peak in report.peak_buffers.items()},
        "bytes_per_rank": None if memory is None else {place.value: size for place, size in memory.items()},
        "witness": _steps_document(report.witness),
        "findings": [
            {"rule": f.rule, "verdict": f.verdict.value, "message": f.message, "witness": _steps_document(f.witness)}
            for f in report.findings
        ],
        "notes": list(report.notes),
        "num_batches": report.num_batches,
    }


def report_table(report: Report) -> list[dict[str, object]]:
    """The key classes as rows of a table; distance is empty for keys that no batch has touched before."""
    return [
        {
            "schedule": report.schedule,
            "verdict": report.verdict.value,
            "distance": key_class.distance,
            "through": key_class.through,
            "rows_behind": key_class.rows,
            "optimizer_behind": key_class.optimizer,
        }
        for key_class in report.key_classes
    ]


def finding_text(finding: Finding) -> str:
    """A finding in words, with its witness."""
    steps = () if finding.verdict is Verdict.MALFORMED else finding.witness
    return "\n".join([f"{finding.rule}: {finding.message}", *_witness(steps)])


def excerpt(schedule: Loop | Sequence[Program], steps: Sequence[WitnessStep]) -> str:
    """The lines of the schedule around the ops of a witness, these marked; a loop's ops are found by their kind.

    Programs are shown without the clauses of their ops, one for each kind of program that the witness names.
    """
    if isinstance(schedule, Loop):
        kinds = {step.op.kind for step in steps}
        marked = {show_op(op, loop=True) for op in schedule.ops if op.kind in kinds}
        return _around(show(schedule).splitlines(), marked)
    parts = []
    for program in schedule:
        rank = None if program.ranks is None else min(program.ranks)
        names = {op_name(step.op) for step in steps if step.rank in (None, rank)}
        lines = []
        for stream in program.streams:
            lines.append(f"  stream {stream.name} on {stream.resource}")
            lines += [f"    {op_name(op)}" for op in stream.ops]
        found = _around(lines, names)
        if found:
            parts.append(found if rank is None else f"  rank {rank}\n{found}")
    return "".join(parts)


def _around(lines: Sequence[str], marked: set[str]) -> str:
    """Streams with a marked line: head, marked lines, and the lines next to them."""
    kept: list[str] = []
    starts = [i for i, line in enumerate(lines) if line.startswith("  stream ")] + [len(lines)]
    for start, end in pairwise(starts):
        hits = {i for i in range(start, end) if lines[i].strip() in marked}
        if not hits:
            continue
        kept.append(f"  {lines[start]}")
        last = start
        for i in range(start + 1, end):
            if hits & {i - 1, i, i + 1}:
                if i > last + 1:
                    kept.append("        ...")
                kept.append(_cut(f"{'>' if i in hits else ' '} {lines[i]}"))
                last = i
    return "\n".join(kept) + "\n" if kept else ""


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 4] + " ..."


def _class_table(report: Report) -> list[str]:
    proven = report.verdict in (Verdict.SYNCHRONOUS, Verdict.STALE)
    deepest = max((c.distance or 0 for c in report.key_classes), default=0)
    lines = [
        f"{'keys of batch t last touched by':<34}{'rows come through':<22}{'rows behind':>12}{'optimiser behind':>18}"
    ]
    for key_class in report.key_classes:
        older = " or earlier" if key_class.distance == deepest and proven else ""
        who = "no batch" if key_class.distance is None else f"batch t-{key_class.distance}{older}"
        optimizer = "-" if key_class.optimizer is None else str(key_class.optimizer)
        lines.append(f"{who:<34}{key_class.through:<22}{key_class.rows:>12}{optimizer:>18}")
    lines.append(f"{'dense parameters':<56}{report.dense_staleness:>12}{'-':>18}")
    return lines


def _witness(steps: tuple[WitnessStep, ...]) -> list[str]:
    lines = []
    for number, step in enumerate(steps[:_MAX_STEPS], start=1):
        rank = "" if step.rank is None else f"rank {step.rank} "
        lines.append(f"  {number:>2}. {rank}{op_name(step.op):<24} {step.stream:<14} {step.note}".rstrip())
    if len(steps) > _MAX_STEPS:
        lines.append(f"      and {len(steps) - _MAX_STEPS} more")
    return lines


def _wrapped(text: str) -> list[str]:
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > _MAX_LINE:
            lines.append("  ")
        lines[-1] += word if lines[-1].strip() == "" else f" {word}"
    return lines


def _steps_document(steps: tuple[WitnessStep, ...]) -> list[dict[str, object]]:
    return [{"op": op_name(step.op), "stream": step.stream, "rank": step.rank, "note": step.note} for step in steps]
