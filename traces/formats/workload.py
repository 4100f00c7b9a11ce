"""Workload descriptions of ASTRA-sim 1 and SimAI: sizes and planned costs, no runs.

Source: ASTRA-sim 1.0 workload text (12 columns a layer), SimAI workload text (the same rows, first line of labelled
integers, times in ns).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from nestpipe.base import TraceError
from nestpipe.ir import OpKind
from traces.formats.format import Found, Head, Options, count
from traces.formats.phases import collective_of, kind_name, kind_of_collective
from traces.formats.reading import read_text
from traces.table import Origin, provenance

__all__ = ["read", "sniff", "summarise", "whole_cell"]

Parsed = tuple[list[dict[str, Any]], dict[str, Any]]
POLICIES = ("MICRO", "DATA", "MODEL", "HYBRID", "TRANSFORMER", "DLRM", "CUSTOMIZED")
_PARTS = (("forward", OpKind.FORWARD), ("input_gradient", OpKind.BACKWARD), ("weight_gradient", OpKind.BACKWARD))
_COLLECTIVE = re.compile(r"^(NONE|ALLREDUCE|ALLGATHER|REDUCESCATTER|ALLTOALL|ALLREDUCEALLTOALL)(_[A-Z_]+)?$")


def sniff(head: Head) -> bool:
    """Whether this begins with a policy, then a line with the number of layers."""
    lines = [line.strip() for line in head.text.splitlines()[:2]]
    return len(lines) == 2 and lines[0].upper().startswith(POLICIES) and lines[1].partition(" ")[0].isdigit()


def whole_cell(path: str, line: int, what: str, cell: str) -> int:
    """The whole number in a cell.

    Raises:
        TraceError: none, negative, or beyond 62 bits.
    """
    try:
        value = int(cell)
    except ValueError as error:
        raise TraceError(f"{path}: line {line}: {what} must be a whole number, got {cell!r}") from error
    if not 0 <= value < 2**62:
        raise TraceError(f"{path}: line {line}: {what} must lie between 0 and 2^62, got {cell}")
    return value


def _header(path: str, line: str) -> tuple[str, dict[str, int], list[int]]:
    """Policy, labelled integers (SimAI) and bare ones (ASTRA-sim) of the first line."""
    words = line.split()
    labelled: dict[str, int] = {}
    bare: list[int] = []
    position = 1
    while position < len(words):
        word = words[position]
        if word.endswith(":") and position + 1 < len(words):
            labelled[word[:-1]] = whole_cell(path, 1, word[:-1], words[position + 1])
            position += 2
        else:
            if word.isdigit():
                bare.append(int(word))
            position += 1
    return words[0], labelled, bare


def _layer(path: str, number: int, line: str, labelled: dict[str, int], unit: str) -> list[dict[str, Any]]:
    cells = line.split()
    if len(cells) < 12:
        raise TraceError(f"{path}: line {number}: a layer has 12 columns, got {len(cells)}: {line.strip()[:60]!r}")
    where = provenance(Origin.ASSUMED, f"{Path(path).name}, layer {cells[0]}")
    rows: list[dict[str, Any]] = []
    for index, (part, kind) in enumerate(_PARTS):
        time, word, size = cells[2 + 3 * index : 5 + 3 * index]
        cost = whole_cell(path, number, f"{part} compute", time)
        num_bytes = whole_cell(path, number, f"{part} bytes", size)
        if not _COLLECTIVE.match(word.upper()):
            raise TraceError(
                f"{path}: line {number}: {part} collective {word!r} is not known; expected NONE, ALLREDUCE, "
                "ALLGATHER, REDUCESCATTER or ALLTOALL"
            )
        rows.append({"kind": kind.value, "op": f"{cells[0]} {part}", "source": where, **_cost(cost, unit)})
        if word.upper() != "NONE":
            collective = collective_of(word.split("_")[0])
            name, _ = kind_of_collective(collective, None, None)
            if collective == "all_to_all":
                name = OpKind.ALL_TO_ALL_ROWS if part == "forward" else OpKind.ALL_TO_ALL_GRADS
            rows.append(
                {
                    "kind": kind_name(name),
                    "op": f"{cells[0]} {part} {word}",
                    "bytes": num_bytes,
                    "collective": collective,
                    "group_size": _group_size(labelled, word, part),
                    "source": where,
                    "_part": part,
                }
            )
    update = whole_cell(path, number, "update", cells[11])
    rows.append({"kind": OpKind.UPDATE.value, "op": f"{cells[0]} update", "source": where, **_cost(update, unit)})
    return rows


def _cost(value: int, unit: str) -> dict[str, Any]:
    """Nanoseconds are a duration; cycles of an unnamed clock are not, and stay out of the table."""
    return {"duration_ns": value} if unit == "ns" else {}


def _group_size(labelled: dict[str, int], word: str, part: str) -> int | None:
    """SimAI: a suffix names the group; else weight gradients go data-parallel and the rest tensor-parallel."""
    tensor, total = labelled.get("model_parallel_NPU_group"), labelled.get("all_gpus")
    if not labelled or not tensor or not total:
        return None
    if word.upper().endswith("_DP_EP"):
        expert = labelled.get("ep", 1) or 1
        return max(1, total // (tensor * (labelled.get("pp", 1) or 1) * expert))
    if word.upper().endswith("_EP"):
        return labelled.get("ep")
    return max(1, total // (tensor * (labelled.get("pp", 1) or 1))) if part == "weight_gradient" else tensor


def read(path: Path, _options: Options) -> Parsed:
    """Table rows and JSON summary of a workload.

    ASTRA-sim gives compute in cycles, SimAI in ns: only SimAI's become durations.

    Raises:
        TraceError: an invalid line, or fewer layers than announced.
    """
    name = str(path)
    lines = [(number, line) for number, line in enumerate(read_text(path).splitlines(), start=1) if line.strip()]
    if len(lines) < 2:
        raise TraceError(f"{name}: expected a policy line and a line with the number of layers")
    policy, labelled, bare = _header(name, lines[0][1])
    num_layers = whole_cell(name, lines[1][0], "number of layers", lines[1][1].split()[0])
    layers = lines[2:]
    if len(layers) < num_layers:
        raise TraceError(f"{name}: {num_layers} layers announced, {len(layers)} found; the file is cut short")
    unit = "ns" if labelled else "cycles"
    rows = [row for number, line in layers[:num_layers] for row in _layer(name, number, line, labelled, unit)]
    counts: dict[str, dict[str, int]] = {}
    parts: dict[str, dict[str, dict[str, int]]] = {part: {} for part, _ in _PARTS}
    for row in rows:
        part = row.pop("_part", None)
        if part is not None:
            for table in (counts, parts[part]):
                count(table, row["collective"], bytes=row["bytes"])
    compute = {
        part: sum(int(line.split()[2 + 3 * index]) for _, line in layers[:num_layers])
        for index, (part, _) in enumerate(_PARTS)
    }
    summary = {
        "file": name,
        "policy": policy,
        "parameters": labelled or bare,
        "num_layers": num_layers,
        "compute_unit": unit,
        "compute": compute,
        "collectives": counts,
        "collectives_by_part": parts,
    }
    return rows, summary


def summarise(trace: Parsed) -> Found:
    """Rows and summary as read."""
    rows, summary = trace
    return Found(rows=rows, section="workloads", summaries=[summary])
