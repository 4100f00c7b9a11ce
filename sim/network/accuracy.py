"""Predicted against measured collectives: every size of a log, by the costs that a simulation charges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.base import NS_PER_S, TopologyError, TraceError
from sim.network.collectives import ALGORITHMS
from sim.network.cost import Collectives
from topologies.cluster import Cluster, MeasuredCollective, load_cluster
from topologies.fabric import Fabric

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Given", "Predicted", "likely_cluster", "predict_log"]

#: Words of a log or its name, and the clusters of the catalogue that have such accelerators, the slowest first.
_LIKELY = (
    ("gb300", ("gb300_nvl72",)),
    ("gb200", ("gb200_nvl72",)),
    ("b300", ("dgx_b300",)),
    ("b200", ("dgx_b200",)),
    ("h200", ("dgx_h200",)),
    ("h100", ("dgx_h100",)),
    ("a100", ("dgx_a100",)),
    ("v100", ("azure_ndv2", "zionex_v100", "dgx2_v100")),
    ("mi355", ("mi355x",)),
    ("mi350", ("mi355x",)),
    ("mi300", ("mi300x",)),
    ("mi325", ("mi300x",)),
    ("l40s", ("l40s",)),
    ("910c", ("cloudmatrix384",)),
    ("ascend", ("ascend_910b", "cloudmatrix384")),
    ("910b", ("ascend_910b", "cloudmatrix384")),
)
_WIRE = 0.95  # of the measured time: a wire that takes longer is not the one that was measured


class Given(StrEnum):
    """What of a log the prediction may see."""

    NONE = "none"  # nothing
    HALF = "half"  # every second size, as a curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """One size of one curve of a log."""

    file: str
    topology: str
    collective: str
    ranks: int
    dtype: str
    in_place: bool
    bytes: int
    measured_s: float
    predicted_s: float
    basis: str

    @property
    def relative_error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def predict_log(
    path: Path, cluster: Cluster | None = None, *, given: Given = Given.NONE, fit: str = "all"
) -> list[Predicted]:
    """Predicts every row of a log; with half of the sizes as a curve, the other half.

    Args:
        cluster: what was measured; None: `likely_cluster` by the accelerator that the log or its name tells
        fit: which fit of the protocols (`sim.network.protocols`)

    Raises:
        TraceError: no such log, or no row with bytes.
        TopologyError: no cluster given, and none found.
    """
    from traces.formats import read_collective_log

    table = read_collective_log(path)
    table = table[table["size_bytes"].notna() & (table["time_ns"] > 0) & table["collective"].isin(ALGORITHMS)]
    if table.empty:
        raise TraceError(f"{path}: no row of a known collective with bytes and a time")
    found: list[Predicted] = []
    for (collective, ranks, dtype, in_place), rows in table.groupby(["collective", "world_size", "dtype", "in_place"]):
        times: pd.Series[float] = rows.groupby("size_bytes")["time_ns"].median().sort_index()
        count = int(str(ranks))
        at = cluster if cluster is not None else likely_cluster(path, str(collective), count, times)
        curve = MeasuredCollective(
            collective=str(collective),
            world_size=count,
            size_bytes=tuple(int(size) for size in times.index.to_numpy()),
            time_ns=tuple(float(time) for time in times),
            source=path.name,
        )
        found += [
            replace(row, file=path.name, dtype=str(dtype), in_place=bool(in_place))
            for row in _predict(curve, at, given, fit)
        ]
    return found


def _predict(curve: MeasuredCollective, cluster: Cluster, given: Given, fit: str) -> Iterator[Predicted]:
    seen: frozenset[int] = frozenset()
    if given is Given.HALF:
        half = replace(curve, size_bytes=curve.size_bytes[::2], time_ns=curve.time_ns[::2])
        seen, cluster = frozenset(half.size_bytes), replace(cluster, measured=(half,))
    on = Collectives.predicting(Fabric(cluster, curve.world_size), fit)
    for size, time_ns in zip(curve.size_bytes, curve.time_ns, strict=True):
        if size not in seen:
            cost = on.cost(curve.collective, float(size))
            yield Predicted(
                file="",
                topology=cluster.name,
                collective=curve.collective,
                ranks=curve.world_size,
                dtype="",
                in_place=False,
                bytes=size,
                measured_s=time_ns / NS_PER_S,
                predicted_s=cost.time_s,
                basis=cost.basis,
            )


def likely_cluster(path: Path, collective: str, ranks: int, times: pd.Series[float]) -> Cluster:
    """The cluster of the catalogue with the accelerators that a log names, racks equally full.

    Where there are several, the slowest whose wire alone does not take longer than was measured.

    Raises:
        TopologyError: the log and its name tell no accelerator of the catalogue.
    """
    text = f"{path.name}\n{path.read_bytes()[:20_000].decode('utf-8', 'replace')}".lower()
    names = next((names for word, names in _LIKELY if word in text), None)
    if names is None:
        raise TopologyError(f"{path}: neither the log nor its name tells the accelerator; give --topology")
    clusters = [_filled(load_cluster(name), ranks) for name in names]
    able = [each for each in clusters if each.ranks_max >= ranks] or clusters
    return next((each for each in able if _carries(each, collective, ranks, times)), able[-1])


def _filled(cluster: Cluster, ranks: int) -> Cluster:
    """With the ranks spread evenly over domains that are larger than a host."""
    inner = cluster.tiers[0]
    if inner.ranks_per_group is None or not cluster.ranks_per_node < inner.ranks_per_group < ranks:
        return cluster
    each = ranks / math.ceil(ranks / inner.ranks_per_group)
    return cluster.with_group(inner.name, int(each)) if each % cluster.ranks_per_node == 0 else cluster


def _carries(cluster: Cluster, collective: str, ranks: int, times: pd.Series[float]) -> bool:
    wire_s = Collectives(Fabric(cluster, ranks)).cost(collective, float(times.index[-1])).time_s
    return wire_s * _WIRE * NS_PER_S <= float(times.iloc[-1])
