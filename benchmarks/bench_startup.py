"""What commands cost to start: CPU time of each in a process of its own, and as a multiple of an empty Python.

Run: python benchmarks/bench_startup.py [--repeats N]. Seconds are for orientation; compare the ratios, which are taken
within one run.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

COMMANDS = (
    "--version",
    "schedule list",
    "schedule check nestpipe",
    "simulate --schedule nestpipe --world-size 1536",
)
HEAVY = ("numpy", "pandas", "pyarrow", "scipy", "networkx", "matplotlib", "torch")


def cpu_s(code: str, repeats: int) -> float:
    """The least CPU time of several runs of `python -c code`, in seconds."""
    found = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def imported(code: str) -> str:
    """The heavy packages that a run imports."""
    tell = f"\nfinally: print(*sorted(set(sys.modules) & set({HEAVY!r})), file=sys.stderr)"
    code = code.replace("; nestpipe.cli.main()", "\ntry: nestpipe.cli.main()") + tell
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stderr.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    empty = cpu_s("pass", repeats)
    print(f"{'':<48}{'CPU (s)':>8}{'x empty':>9}  imports\n{'an empty Python':<48}{empty:>8.3f}{1:>9.1f}")
    for command in COMMANDS:
        code = f"import sys, nestpipe.cli; sys.argv = {['nestpipe', *command.split()]!r}; nestpipe.cli.main()"
        each = cpu_s(code, repeats)
        print(f"{command:<48}{each:>8.3f}{each / empty:>9.1f}  {imported(code)}", flush=True)


if __name__ == "__main__":
    main()
