"""How fast a large profiler trace is imported, and how much memory that takes.

    python benchmarks/bench_import.py --size-mb 1000

writes a Kineto file of about that size (events of the shape and mix of a TorchRec run, with stack strings as the
profiler writes them), imports it in a fresh process, and prints rate and peak memory; then compares the streaming
parser with `json.load` and with ijson on a file of a tenth of the size. Results with the machine are in docs/traces.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CALL_STACK = "".join(f"trainer/model.py({line}): forward_{line}\\n" for line in range(100, 130))


def _step(step: int, start: int, operations: int) -> Iterator[dict[str, Any]]:
    """One step: host ops with stacks, launches and kernels, one collective in fifty."""
    pid, now = 4000, start
    for index in range(operations):
        correlation = step * operations + index + 1
        is_comm = index % 50 == 0
        shapes = {"Input Dims": [[1024, 512], [512, 256]], "Input type": ["float", "float"], "Call stack": CALL_STACK}
        if is_comm:
            name, category = "nccl:all_to_all", "user_annotation"
            shapes = {"Input Dims": [[262144]], "Input type": ["float"]}
        else:
            name, category = f"aten::op{index % 97}", "cpu_op"
        host = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": pid, "ts": now, "dur": 18}
        yield {**host, "args": {"External id": correlation, **shapes}}
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "tid": pid}
        yield {**call, "ts": now + 3, "dur": 6, "args": {"correlation": correlation, "External id": correlation}}
        kernel = (
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)" if is_comm else f"void kernel_{index % 97}()"
        )
        device = {"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": 20 if is_comm else 7}
        stream = {"device": 0, "stream": 20 if is_comm else 7, "correlation": correlation, "grid": [8, 1, 1]}
        yield {**device, "ts": now + 9, "dur": 12, "args": stream}
        now += 20
    whole = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": pid, "tid": pid}
    yield {**whole, "ts": start, "dur": now - start, "args": {}}


def write_trace(path: Path, size_bytes: int, operations: int = 5000) -> int:
    """Writes steps until the file has the size; returns the number of events."""
    count, step, separator = 0, 0, ""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 8}, "traceEvents": [\n')
        while file.tell() < size_bytes:
            for event in _step(step, 1_700_000_000_000_000 + step * operations * 20, operations):
                file.write(separator + json.dumps(event))
                separator = ",\n"
                count += 1
            step += 1
        file.write("\n]}\n")
    return count


IMPORT = """
import resource, sys, time
sys.path.insert(0, {root!r})
from traces.formats.importing import import_to
base = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
start = time.perf_counter()
rows = import_to(sys.argv[1] + ".parquet", [sys.argv[1]])["num_rows"]
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(seconds, base // 1024, peak // 1024, rows)
"""


def measure_import(path: Path) -> tuple[float, int, int, int]:
    """Seconds, MiB before, peak MiB and rows of an import in a process of its own."""
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", IMPORT.format(root=root), str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(output[0]), int(output[1]), int(output[2]), int(output[3])


def _json_load(path: Path) -> int:
    with open(path, encoding="utf-8") as file:
        return len(json.load(file)["traceEvents"])


def _ijson(path: Path) -> int:
    import ijson

    with open(path, "rb") as file:
        return sum(1 for _ in ijson.items(file, "traceEvents.item", use_float=True))


def _stream(path: Path) -> int:
    from traces.formats import EventStream

    return sum(1 for _ in EventStream(path))


def compare_parsers(path: Path, repeats: int = 3) -> dict[str, float]:
    """The least of a few interleaved times of each parser, in seconds."""
    parsers: dict[str, Callable[[Path], int]] = {"streaming": _stream, "ijson": _ijson, "json.load": _json_load}
    best = dict.fromkeys(parsers, float("inf"))
    for _ in range(repeats):
        for name, parser in parsers.items():
            start = time.perf_counter()
            parser(path)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Writes, imports, compares, prints."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--size-mb", type=int, default=1000)
    size = options.parse_args().size_mb * 1_000_000
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with tempfile.TemporaryDirectory() as folder:
        for part in (size // 10, size):
            path = Path(folder) / "trace.json"
            events = write_trace(path, part)
            actual = path.stat().st_size
            seconds, base, peak, rows = measure_import(path)
            print(
                f"{actual / 1e6:.0f} MB, {events} events: {seconds:.1f} s ({actual / seconds / 1e6:.0f} MB/s), "
                f"{rows} rows, memory {base} MiB before, {peak} MiB at most"
            )
            if part < size:
                for name, best in compare_parsers(path).items():
                    print(f"  {name}: {best:.2f} s ({actual / best / 1e6:.0f} MB/s)")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MiB at most")


if __name__ == "__main__":
    main()
