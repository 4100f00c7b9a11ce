"""Published measurements as cases: one YAML file each."""
