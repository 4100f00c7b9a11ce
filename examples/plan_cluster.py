"""Plans a cluster from Python: the recommendation, the front, and what would change it."""

from pathlib import Path

from nestpipe import api

planned = api.plan(Path(__file__).with_name("plan.yaml"))
best = planned.best
print(f"{best['world_size']:,} accelerators of {best['cluster']}, {best['schedule']} with N = {best['micro_batches']}")
print(f"{best['expected_qps']:,.0f} samples/s in the long run, {best['cost_per_million_samples']:.3f} USD per million")
print()
columns = ["cluster", "schedule", "micro_batches", "world_size", "qps", "cost_per_million_samples"]
print(planned.ranked[columns].round(3).to_string(index=False))
print()
print(planned.moves.loc[:2, ["input", "low", "high", "span", "changes_choice"]].round(3).to_string(index=False))
