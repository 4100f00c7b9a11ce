"""How far predicted collectives are off, as docs/hardware.md has it: tables of errors over every measured curve.

    python benchmarks/collective_accuracy.py LOGS

Each machine of `fit_collectives.MACHINES` is predicted from its topology and from protocols fitted without its logs, by
`sim.network.predict_log`, as `nestpipe topology accuracy LOG --fit without_MACHINE` does; then with every second size
of each log as a curve.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fit_collectives import MACHINES
from nestpipe.base import MIB
from sim.network import Given, Predicted, predict_log

BANDS = {
    "1 to 16 MiB": (MIB, 16 * MIB),
    "16 to 256 MiB": (16 * MIB, 256 * MIB),
    "256 MiB and more": (256 * MIB, 2**60),
    "16 MiB and more": (16 * MIB, 2**60),
}


def errors(rows: Iterable[Predicted], least: int, most: int) -> np.ndarray:
    """Relative errors of the sizes of a band."""
    return np.array([row.relative_error for row in rows if least <= row.bytes < most])


def cell(found: np.ndarray) -> str:
    """Median and 90 % of the absolute errors, and the worst error with its sign."""
    if not len(found):
        return ""
    size = np.abs(found)
    return f"{np.median(size):.1%}, {np.quantile(size, 0.9):.0%}, {found[size.argmax()]:+.0%} ({len(found)})"


def table(title: str, parts: dict[str, list[Predicted]]) -> None:
    """A table of Markdown: a row for each part, a column for each band."""
    print(f"\n| {title} | {' | '.join(BANDS)} |\n|---|{'---|' * len(BANDS)}")
    for name, rows in parts.items():
        print(f"| {name} | {' | '.join(cell(errors(rows, *band)) for band in BANDS.values())} |")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, help="folder with the measured logs")
    folder = parser.parse_args().logs
    for given in Given:
        machines: dict[str, list[Predicted]] = {}
        for machine in MACHINES:
            machines[machine.name] = [
                row
                for pattern in machine.logs
                for path in sorted(folder.glob(pattern))
                for row in predict_log(path, given=given, fit=f"without_{machine.name}")
                if machine.name != "v100_dgx2" or row.ranks == 256
            ]
        every = [row for rows in machines.values() for row in rows]
        names = sorted({row.collective for row in every})
        how = "topology and the other machines' protocols" if given is Given.NONE else "half of the sizes as a curve"
        table(how, machines)
        table(how, {name: [row for row in every if row.collective == name] for name in names} | {"all": every})
        print("\nworst from 16 MiB on:")
        for row in sorted((r for r in every if r.bytes >= 16 * MIB), key=lambda r: -abs(r.relative_error))[:6]:
            print(
                f"  {row.relative_error:+.0%} {row.collective} {row.ranks} ranks {row.bytes / MIB:.0f} MiB {row.file}"
            )


if __name__ == "__main__":
    main()
