"""Scaling curves with intervals over seeds, what stragglers cost, and the goodput of a month with failures."""

from pathlib import Path

import msgspec

from nestpipe import api
from sim.scenario import JitterModel, Stragglers, load_scenario

scenario = load_scenario(Path(__file__).with_name("scale.yaml"))
scenario = msgspec.structs.replace(scenario, world_sizes=(128, 512), seeds=5)

curves = api.scale(scenario)
print((100 * curves.table()).round(1).to_string())
print(curves.limits[["method", "world_size", "busiest"]].to_string(index=False))
print()
for share in (0.0, 0.002, 0.02):
    slow = Stragglers(share=share, slowdown=1.15, cv=0.05)
    tails = msgspec.structs.replace(
        scenario, world_sizes=(512,), schedules=("nestpipe",), vary_assumptions=False,
        stragglers=slow, jitter=JitterModel(cv=0.03),
    )  # fmt: skip
    row = api.sweep(tails).iloc[0]
    print(
        f"{share:6.1%} of ranks slow: {row['step_ms']:7.1f} ms [{row['step_ms_low']:.1f} .. {row['step_ms_high']:.1f}]"
    )
print()
month = api.goodput(1536, accelerator_mtbf_hours=50_000, restart_s=900, checkpoint_s=60)
print(f"goodput {month.expected:.2%} [{month.low:.2%} .. {month.high:.2%}]", end="")
print(f", checkpoint every {month.interval_s / 60:.0f} min")
