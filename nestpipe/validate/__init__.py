"""Validation: the grid of configurations, what is predicted for each, and how far a run on real devices was off."""

from nestpipe.validate.bench import Bench, bench, bits_per_s, check_writable, links_given
from nestpipe.validate.compare import Outcome, compare, kind_errors, outcome_of, prediction_rows, status_of, summarise
from nestpipe.validate.grid import Point, grid_names, load_grid
from nestpipe.validate.predict import Prediction, differences, machine_of, model_error, predict, rehearse
from nestpipe.validate.topology import topology_text

__all__ = [
    "Bench",
    "Outcome",
    "Point",
    "Prediction",
    "bench",
    "bits_per_s",
    "check_writable",
    "compare",
    "differences",
    "grid_names",
    "kind_errors",
    "links_given",
    "load_grid",
    "machine_of",
    "model_error",
    "outcome_of",
    "predict",
    "prediction_rows",
    "rehearse",
    "status_of",
    "summarise",
    "topology_text",
]
