"""The shared words: schedule IR, its text, the catalogue, checks, Timeline, metrics, units, errors, command line."""
