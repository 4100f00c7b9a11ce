"""At which cost of communication does each schedule stop paying? One swept key, the edges, and a figure."""

from pathlib import Path

import msgspec

from nestpipe import api
from sim.scenario import load_scenario

scenario = load_scenario(Path(__file__).with_name("break_even.yaml"))
one_axis = {"factors.communication_time": scenario.sweep.axes["factors.communication_time"]}
scenario = msgspec.structs.replace(scenario, sweep=msgspec.structs.replace(scenario.sweep, axes=one_axis))

results = api.sweep(scenario)
found = api.break_even(results, "factors.communication_time", pays_at=1.1)
print(found.edges.round(2).to_string(index=False))
figure = found.figure()  # a matplotlib Figure; figure.savefig("break_even.png") keeps it
print(len(figure.axes[0].lines), "lines drawn")
