"""Clusters as data: accelerators, hosts, links; a YAML catalogue with sources."""
