"""Sweeps: many configurations, in parallel, kept as they are finished."""

from sim.sweep.sweep import Estimate, digest, estimate, read_results, sweep, sweep_to

__all__ = [
    "Estimate",
    "digest",
    "estimate",
    "read_results",
    "sweep",
    "sweep_to",
]
