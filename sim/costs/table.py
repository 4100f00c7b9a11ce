"""A profiled machine as a workload: the fits of its cost table for the very ops of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nestpipe.base import CaseError
from nestpipe.ir import Loop, OpKind, unroll
from sim.costs.calibrated import CalibratedCosts, Machine, OpSizes, with_starts
from sim.costs.workload import OpCosts, Options
from topologies.cluster import Cluster
from traces.workloads import CostFit

__all__ = ["TableWorkload"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWorkload:
    """Fits of a cost table for the very ops of one run, on the machine that they were measured on.

    Attributes:
        fits, sizes, machine, busy, spread, seed: see `CalibratedCosts`.
        batch_per_worker: samples per rank and step.
    """

    fits: Mapping[OpKind, CostFit]
    sizes: OpSizes
    machine: Machine
    batch_per_worker: int
    busy: Mapping[OpKind, CostFit] | None = None
    spread: Mapping[OpKind, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def domain_size(self) -> None:
        """A profile has no domains of its own."""
        return

    def costs(self, loop: Loop, cluster: Cluster | None, options: Options) -> OpCosts:
        """See `Workload.costs`.

        Raises:
            CaseError: on another cluster, or if the table lacks a cost that the loop needs.
        """
        if cluster is not None:
            raise CaseError("a cost table holds for the machine that was profiled; give no topology")
        costs = CalibratedCosts(
            program=unroll(loop, options.steps),
            fits=self.fits,
            sizes=self.sizes,
            machine=self.machine,
            busy=self.busy,
            spread=self.spread,
            seed=self.seed,
        )
        return OpCosts(costs=costs, op_ns=None, origin={}, finish=lambda run: with_starts(run, costs.gaps))
