"""Validation: the grid of configurations, what is predicted for each, and how far a run on real devices was off.

What the commands `profile` and `validate` do::

    with open_bench(BenchOptions(world_size=2)) as bench:
        plan = quick_plan((None,))
        table = measure_costs(plan, bench.run, world_size=2, burst_bytes=bench.burst_bytes, conditions=bench.conditions)
        found = run_validation(load_grid("quick", None), table, bench, Path("out"), grid="quick", provenance={})
"""

from nestpipe.validate.bench import Bench, BenchOptions, bits_per_s, check_writable, links_given, open_bench
from nestpipe.validate.grid import Point, at_rate, grid_names, load_grid
from nestpipe.validate.history import append_history, read_history
from nestpipe.validate.predict import Prediction, differences, machine_of, predict
from nestpipe.validate.text import cost_fits, costs_text, validation_text
from nestpipe.validate.topology import topology_text
from nestpipe.validate.validation import Validation, run_validation

__all__ = [
    "Bench",
    "BenchOptions",
    "Point",
    "Prediction",
    "Validation",
    "append_history",
    "at_rate",
    "bits_per_s",
    "check_writable",
    "cost_fits",
    "costs_text",
    "differences",
    "grid_names",
    "links_given",
    "load_grid",
    "machine_of",
    "open_bench",
    "predict",
    "read_history",
    "run_validation",
    "topology_text",
    "validation_text",
]
