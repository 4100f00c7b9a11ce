"""Fits the protocols of communication libraries on measured collectives; writes `sim/network/protocols.yaml`.

    python benchmarks/fit_collectives.py LOGS [--out sim/network/protocols.yaml]

LOGS is a folder with the logs named in `MACHINES`. What is fitted: for each pattern (everybody to everybody, chains, in
the switch) a few protocols with latencies and shares of the wire, and for each generation of accelerators a factor on
latencies and one on shares. The residual is the logarithm of predicted over measured time, by the code that predicts
(`sim.network.protocols`), with a robust loss; every machine counts alike, sizes from 1 MiB on most. Weak priors keep
what no log says at the starting point. One fit takes all machines, one more leaves out each.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import yaml
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nestpipe.base import MIB, NS_PER_S
from sim.network import Collectives
from sim.network.collectives import ALGORITHMS
from sim.network.cost import work_of
from sim.network.protocols import Pattern, Protocol, Software, StepOnWire
from topologies.cluster import Cluster, load_cluster
from topologies.fabric import Fabric
from traces.formats import read_collective_log

PRIOR_WEIGHT = 0.05
FACTOR_WEIGHT = 0.3
UNIT_BYTES = 1e9
BASES_US = {Pattern.EXCHANGE: (8.0, 15.0, 45.0), Pattern.CHAIN: (7.0, 16.0, 60.0), Pattern.IN_SWITCH: (15.0, 45.0)}
SHARES = {Pattern.EXCHANGE: (0.3, 0.5, 0.76), Pattern.CHAIN: (0.2, 0.5, 0.8), Pattern.IN_SWITCH: (0.3, 0.6)}


@dataclass(frozen=True)
class Machine:
    """Logs of one machine, the description they are held against, and how many ranks share a scale-up domain there.

    `one_process` drove all GPUs of the node, so that kernels started one after the other: its latencies are its own and
    say nothing about the generation.
    """

    name: str
    topology: str
    logs: tuple[str, ...]
    group: tuple[str, int] | None = None
    one_process: bool = False

    @property
    def cluster(self) -> Cluster:
        found = load_cluster(self.topology)
        return found if self.group is None else found.with_group(*self.group)


#: Generations of which nobody measured latencies, and the measured one that is nearest.
NEAREST = {"blackwell": "hopper", "cdna3": "cdna4"}
_LATENCIES_BELOW = 64 * MIB  # larger messages say little about latencies

#: Not among them: 64 V100 (one port a node, 4 GB/s; posted because it was slow), DeepEP (tokens, no bytes).
MACHINES = (
    Machine("a100_nccl_tests", "dgx_a100", ("nccl_a100x8_*.log",), one_process=True),
    Machine("a100_table", "dgx_a100", ("aic_a100_nccl_*.csv",)),
    Machine("h100_table", "dgx_h100", ("aic_h100_nccl_*.csv",)),
    Machine("gb200", "gb200_nvl72", ("oci_gb200_*.log",), ("nvlink", 64)),
    Machine("mi355x", "mi355x", ("rccl_mi355x_*.log",)),
    Machine("ascend", "cloudmatrix384", ("hccl_ascend910b_*.csv",)),
    Machine("v100_dgx2", "dgx2_v100", ("nccl_v100x256_*.csv",)),
)


@dataclass(frozen=True)
class Curve:
    """Measured times of one collective on one machine, and what its algorithms take on the wire for `UNIT_BYTES`."""

    machine: Machine
    algorithms: tuple[tuple[Pattern, tuple[StepOnWire, ...]], ...]
    num_inside: int
    size_bytes: np.ndarray
    time_s: np.ndarray


def curves_of(machine: Machine, folder: Path) -> list[Curve]:
    """All curves of a machine's logs."""
    found = []
    for path in sorted(each for pattern in machine.logs for each in folder.glob(pattern)):
        table = read_collective_log(path)
        for (collective, ranks, _, _), rows in table.groupby(["collective", "world_size", "dtype", "in_place"]):
            if machine.name == "v100_dgx2" and ranks != 256:
                continue
            found.append(_curve(machine, str(collective), int(ranks), rows))
    return found


def _curve(machine: Machine, collective: str, ranks: int, rows) -> Curve:  # type: ignore[no-untyped-def]
    on = Collectives(Fabric(machine.cluster, ranks))
    group = np.arange(ranks)
    place = on.place(group)
    algorithms = tuple(
        (row.pattern, tuple(on.on_wire(row, work_of(collective, UNIT_BYTES, place), place, group)[0]))
        for row in ALGORITHMS[collective].values()
        if row.taken(place)
    )
    size, time = rows["size_bytes"].to_numpy(dtype=float), rows["time_ns"].to_numpy(dtype=float) / NS_PER_S
    return Curve(machine, algorithms, place.num_inside, size[size > 0], time[size > 0])


class Parameters:
    """Names and starting values of what is fitted, all as logarithms."""

    def __init__(self, machines: list[str]) -> None:
        self.names: list[tuple[object, ...]] = []
        self.start: list[float] = []
        self.machines = machines
        self.own_latency = {(machine.name, "latency") for machine in MACHINES if machine.one_process}
        for pattern in Pattern:
            for number, base_us in enumerate(BASES_US[pattern]):
                self._add((pattern, number, "base_ns"), base_us * 1e3)
                self._add((pattern, number, "share"), SHARES[pattern][number])
            self._add((pattern, "step_ns"), 300.0)
            self._add((pattern, "step_across_ns"), 3000.0)
            self._add((pattern, "share_across"), 0.9)
            self._add((pattern, "own_copy"), 0.3)
        for name in machines:
            self._add((name, "latency"), 1.0)
            self._add((name, "share"), 1.0)

    def _add(self, name: tuple[object, ...], value: float) -> None:
        self.names.append(name)
        self.start.append(float(np.log(value)))

    def prior(self, point: np.ndarray) -> np.ndarray:
        """How far the point is from the start, weighted."""
        weight = np.where([name[0] in self.machines for name in self.names], FACTOR_WEIGHT, PRIOR_WEIGHT)
        weight = np.where([name[-1] == "share" and name[0] in self.machines for name in self.names], 1.0, weight)
        weight = np.where([name in self.own_latency for name in self.names], 0.01, weight)
        return weight * (point - np.array(self.start))

    def software(self, point: np.ndarray, latency: float, share: float) -> Software:
        """What a point says for a machine with these factors."""
        value = {name: float(np.exp(at)) for name, at in zip(self.names, point, strict=True)}
        return Software(
            protocols={
                pattern: tuple(
                    Protocol(
                        base_ns=value[pattern, number, "base_ns"] * latency,
                        step_ns=value[pattern, "step_ns"] * latency,
                        step_across_ns=value[pattern, "step_across_ns"] * latency,
                        share=min(1.0, value[pattern, number, "share"] * share),
                        share_across=min(1.0, value[pattern, "share_across"]),
                    )
                    for number in range(len(BASES_US[pattern]))
                )
                for pattern in Pattern
            },
            own_copy={pattern: value[pattern, "own_copy"] for pattern in Pattern},
        )

    def factors(self, point: np.ndarray, machine: str) -> tuple[float, float]:
        """A machine's factors on latencies and shares."""
        value = dict(zip(self.names, point, strict=True))
        return float(np.exp(value.get((machine, "latency"), 0.0))), float(np.exp(value.get((machine, "share"), 0.0)))


def predicted_s(curve: Curve, software: Software) -> np.ndarray:
    """The time of every size of a curve: the least over algorithms and protocols."""
    options = [
        option for pattern, steps in curve.algorithms for option in software.options(steps, pattern, curve.num_inside)
    ]
    waiting, moving = np.array(options).T
    return (waiting[:, None] + moving[:, None] * curve.size_bytes / UNIT_BYTES).min(axis=0)


def _weights(curves: list[Curve]) -> list[np.ndarray]:
    rows: dict[str, float] = defaultdict(float)
    band = [np.where(curve.size_bytes >= MIB, 1.0, 0.3) for curve in curves]
    for curve, weight in zip(curves, band, strict=True):
        rows[curve.machine.name] += float((weight**2).sum())
    return [weight / np.sqrt(rows[curve.machine.name]) * 10 for curve, weight in zip(curves, band, strict=True)]


def fit(curves: list[Curve]) -> tuple[Parameters, np.ndarray]:
    """The parameters that predict these curves best."""
    parameters = Parameters(sorted({curve.machine.name for curve in curves}))
    weights = _weights(curves)

    def residuals(point: np.ndarray) -> np.ndarray:
        by_machine = {
            name: parameters.software(point, *parameters.factors(point, name)) for name in parameters.machines
        }
        off = [
            weight * np.log(predicted_s(curve, by_machine[curve.machine.name]) / curve.time_s)
            for curve, weight in zip(curves, weights, strict=True)
        ]
        return np.concatenate([*off, parameters.prior(point)])

    found = least_squares(residuals, parameters.start, loss="soft_l1", f_scale=0.1, max_nfev=60)
    return parameters, found.x


def as_data(curves: list[Curve], parameters: Parameters, point: np.ndarray) -> dict[str, object]:
    """The fit as the file has it; a generation's factors are the mean of its machines."""
    latencies = {curve.machine.name for curve in curves if curve.size_bytes.min() < _LATENCIES_BELOW}
    generations: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"latency": [], "share": []})
    for machine in MACHINES:
        if machine.name in parameters.machines:
            generation = machine.cluster.accelerator.generation
            assert generation is not None
            latency, share = parameters.factors(point, machine.name)
            generations[generation]["share"].append(share)
            if not machine.one_process and machine.name in latencies:
                generations[generation]["latency"].append(latency)
    for name, nearest in NEAREST.items():
        for factor in ("latency", "share"):
            generations[name][factor] = generations[name][factor] or generations[nearest][factor]
    plain = parameters.software(point, 1.0, 1.0)
    rounded = msgspec.to_builtins(plain.protocols)
    return {
        "patterns": {
            str(pattern): [{key: float(f"{value:.4g}") for key, value in each.items()} for each in rows]
            for pattern, rows in rounded.items()
        },
        "own_copy": {str(pattern): float(f"{value:.3g}") for pattern, value in plain.own_copy.items()},
        "generations": {
            name: {key: float(f"{np.exp(np.mean(np.log(values or [1.0]))):.4g}") for key, values in rows.items()}
            for name, rows in sorted(generations.items())
        },
    }


def main() -> None:
    """Fits and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, help="folder with the measured logs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "sim" / "network" / "protocols.yaml")
    options = parser.parse_args()
    curves = [curve for machine in MACHINES for curve in curves_of(machine, options.logs)]
    fits = {"all": as_data(curves, *fit(curves))}
    for machine in MACHINES:
        others = [each for each in curves if each.machine != machine]
        fits[f"without_{machine.name}"] = as_data(others, *fit(others))
        print(f"fitted without {machine.name}", file=sys.stderr)
    source = (
        f"fitted by benchmarks/fit_collectives.py on {len(curves)} measured curves of {len(MACHINES)} machines "
        "(docs/hardware.md names them)"
    )
    text = yaml.safe_dump({"source": source, "fits": fits}, sort_keys=False, width=120, default_flow_style=None)
    options.out.write_text(f"# Written by benchmarks/fit_collectives.py; do not edit.\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
