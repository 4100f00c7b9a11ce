"""The numbers of a rank's trace, by the definitions of the field, and how much of the device time was understood.

compute: kernels that do not communicate; communication: kernels of NCCL, RCCL or HCCL; copies and fills are neither.
`_us` of a class is the length of the union over streams, `_sum_us` the plain sum. Exposed is communication during which
nothing computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe.base import ns_to_us
from traces.formats.intervals import intersection_ns, merge, union_ns
from traces.formats.kineto_events import DeviceClass, argument_bytes
from traces.formats.kineto_join import Joined
from traces.formats.phases import kernel_collective

__all__ = ["coverage", "rank_summary"]


def _columns(joined: Joined) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    events = joined.events
    start = np.asarray(events.device_start_ns, dtype=np.int64)
    duration = np.asarray(events.device_duration_ns, dtype=np.int64)
    return np.asarray(events.device_class, dtype=np.int8), start, duration


def rank_summary(joined: Joined) -> dict[str, Any]:
    """The rank's numbers: identity, steps, times in us, counts, collectives with bytes."""
    events = joined.events
    classes, start, duration = _columns(joined)
    end = start + duration
    merged = {one: merge(start[classes == one], end[classes == one]) for one in DeviceClass}
    busy = merge(
        *(np.concatenate([merged[one][side] for one in (DeviceClass.COMPUTE, DeviceClass.MEM)]) for side in (0, 1))
    )
    comm_ns = union_ns(*merged[DeviceClass.COMM])
    exposed_ns = comm_ns - intersection_ns(merged[DeviceClass.COMM], merged[DeviceClass.COMPUTE])
    exposed_mem_ns = comm_ns - intersection_ns(merged[DeviceClass.COMM], busy)
    kernels = classes != DeviceClass.MEM
    names = list(dict.fromkeys(found.name for found in events.steps))
    summary: dict[str, Any] = {
        "rank": events.rank,
        "rank_source": events.rank_source,
        "world_size": events.world_size,
        "file": events.path,
        "num_events": events.num_events,
        "num_steps": len(names),
        "steps": [
            {"step": int(found.name.split("#")[1]), "duration_us": ns_to_us(found.end_ns - found.start_ns)}
            for found in events.steps
        ],
        "span_us": ns_to_us(int(end[kernels].max() - start[kernels].min())) if kernels.any() else None,
        "compute_us": ns_to_us(union_ns(*merged[DeviceClass.COMPUTE])),
        "comm_us": ns_to_us(comm_ns),
        "exposed_us": ns_to_us(exposed_ns),
        "exposed_with_mem_us": ns_to_us(exposed_mem_ns),
        "overlap_percent": round(100 * (1 - exposed_ns / comm_ns), 4) if comm_ns else None,
    }
    for one, label in ((DeviceClass.COMPUTE, "compute"), (DeviceClass.COMM, "comm"), (DeviceClass.MEM, "mem")):
        summary[f"num_{label}_{'events' if one is DeviceClass.MEM else 'kernels'}"] = int((classes == one).sum())
        summary[f"{label}_sum_us"] = ns_to_us(int(duration[classes == one].sum()))
    summary["collectives"] = collectives(joined)
    summary["kernels_by_name_alone"] = _by_name_alone(joined)
    return summary


def collectives(joined: Joined) -> dict[str, dict[str, Any]]:
    """Per collective: how many the host issued, bytes in and out of the rank, and the device time they took."""
    events = joined.events
    counts: dict[str, dict[str, Any]] = {}

    def entry(name: str) -> dict[str, Any]:
        fields = ("count", "bytes", "bytes_out", "without_size", "without_kernel", "num_kernels", "kernel_us")
        return counts.setdefault(name, dict.fromkeys(fields, 0))

    launched = {id(op.host) for op in joined.ops if op.host is not None}
    for found in joined.collectives:
        one = entry(found.collective or "unknown")
        one["count"] += 1
        one["bytes"] += found.bytes_in or 0
        one["bytes_out"] += found.bytes_out or 0
        one["without_size"] += found.bytes_in is None
        one["without_kernel"] += id(found) not in launched
    kernel_ns: dict[str, int] = {}
    for index, op in enumerate(joined.ops):
        if op.collective is None:
            continue
        one = entry(op.collective)
        one["num_kernels"] += 1
        kernel_ns[op.collective] = kernel_ns.get(op.collective, 0) + events.device_duration_ns[index]
        if op.host is None:
            _count_kernel(joined, index, one, counted=bool(joined.collectives))
    for name, total in kernel_ns.items():
        counts[name]["kernel_us"] = ns_to_us(total)
    return dict(sorted(counts.items()))


def _count_kernel(joined: Joined, index: int, one: dict[str, Any], *, counted: bool) -> None:
    """A trace without host ranges has its kernels stand for the collectives; else they were counted already."""
    if counted:
        return
    args = joined.events.comm_args.get(index, {})
    size, out = argument_bytes(args, "In"), argument_bytes(args, "Out")
    one["count"] += 1
    one["bytes"] += size or 0
    one["bytes_out"] += out or 0
    one["without_size"] += size is None


def _by_name_alone(joined: Joined) -> dict[str, dict[str, Any]]:
    events = joined.events
    found: dict[str, dict[str, Any]] = {}
    for index in range(len(joined.ops)):
        if events.device_class[index] == DeviceClass.COMM:
            name = kernel_collective(events.names[events.device_name[index]]) or "unknown"
            one = found.setdefault(name, {"num_kernels": 0, "kernel_us": 0.0})
            one["num_kernels"] += 1
            one["kernel_us"] = round(one["kernel_us"] + ns_to_us(events.device_duration_ns[index]), 3)
    return found


def coverage(ranks: Sequence[Joined], notes: Sequence[str] = ()) -> dict[str, Any]:
    """What share of the device time got an op kind, by kind, and for the rest the reason."""
    by_kind: dict[str, int] = {}
    reasons: dict[str, list[Any]] = {}
    for joined in ranks:
        events = joined.events
        for index, op in enumerate(joined.ops):
            duration = events.device_duration_ns[index]
            if op.kind is not None:
                by_kind[op.kind.value] = by_kind.get(op.kind.value, 0) + duration
            else:
                one = reasons.setdefault(op.reason, [0, 0, events.names[events.device_name[index]]])
                one[0] += 1
                one[1] += duration
    classified = sum(by_kind.values())
    total = classified + sum(one[1] for one in reasons.values())
    return {
        "device_us": ns_to_us(total),
        "classified_us": ns_to_us(classified),
        "classified_share": round(classified / total, 6) if total else None,
        "by_kind_us": {kind: ns_to_us(value) for kind, value in sorted(by_kind.items(), key=lambda item: -item[1])},
        "unclassified": [
            {"reason": reason, "count": one[0], "us": ns_to_us(one[1]), "example": one[2][:120]}
            for reason, one in sorted(reasons.items(), key=lambda item: -item[1][1])
        ],
        "notes": [f"rank {joined.events.rank}: {note}" for joined in ranks for note in joined.notes] + list(notes),
    }
