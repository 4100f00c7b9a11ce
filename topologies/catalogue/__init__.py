"""The catalogue of topologies: one YAML file each, every number with its source."""
