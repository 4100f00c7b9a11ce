"""Topologies of other tools: NCCL, ASTRA-sim, SimAI."""

from topologies.imports.load import load_topology

__all__ = [
    "load_topology",
]
