"""Every command prints, on small inputs, exactly the text, JSON or CSV kept for it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nestpipe import cli
from tests.nestpipe.cli.test_plan import MAPPED, SMALL
from tests.paths import ROOT
from tests.sim.network.files import case_file, star
from tests.sim.scenario.scenarios import RANDOM
from tests.traces.formats.samples import torchrec_step

LOG = """\
# Collective test starting: all_gather_perf
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 8388608 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576         32768     float    none      -1    20.00   52.43   45.88      0    19.00   55.19   48.29      0
     2097152         65536     float    none      -1    30.00   69.91   61.17      0    29.00   72.32   63.28      0
     4194304        131072     float    none      -1    50.00   83.89   73.40      0    49.00   85.60   74.90      0
     8388608        262144     float    none      -1    90.00   93.21   81.56      0    88.00   95.33   83.41      0
"""
KEYS = "user,item,shop\n" + "".join(f"{n % 7},{n * n % 11},{n % 3}\n" for n in range(64))
SIMULATE = "simulate --schedule nestpipe --world-size 1536 --steps 8"

COMMANDS = {
    "welcome": "",
    "help": "-h",
    "help_trace": "trace --help",
    "help_topology_show": "topology show -h",
    "schedule_list": "schedule list",
    "schedule_list_json": "schedule list --format json",
    "schedule_list_csv": "schedule list --format csv",
    "schedule_show": "schedule show dbp",
    "schedule_show_unrolled": "schedule show sync --unrolled --steps 2",
    "schedule_check": "schedule check nestpipe",
    "schedule_check_file": "schedule check forgotten.txt",
    "schedule_check_json": "schedule check sync --format json",
    "schedule_check_csv": "schedule check fwp --micro-batches 2 --format csv",
    "topology_list": "topology list",
    "topology_list_json": "topology list --format json",
    "topology_list_csv": "topology list --format csv",
    "topology_show": "topology show dgx_h100 --world-size 64",
    "topology_show_csv": "topology show dgx_a100 --format csv",
    "topology_measured": "topology measured log.txt --topology dgx_h100",
    "topology_measured_json": "topology measured log.txt --topology dgx_h100 --format json",
    "topology_measured_csv": "topology measured log.txt --topology dgx_h100 --format csv",
    "trace_import": "trace import traces",
    "trace_import_csv": "trace import traces --format csv",
    "trace_import_log": "trace import log.txt --format csv",
    "trace_export": "trace export t.csv --out kineto",
    "trace_replay": "trace replay t.csv",
    "trace_replay_json": "trace replay t.csv --transfer-scale 0.5 --format json",
    "trace_replay_csv": "trace replay t.csv --format csv",
    "trace_replay_schedule": "trace replay t.csv --schedule dbp --world-size 8 --topology laptop",
    "trace_replay_schedule_json": "trace replay t.csv --schedule dbp --format json",
    "trace_replay_schedule_csv": "trace replay t.csv --schedule dbp --format csv",
    "schedule_check_stale": "schedule check async_prefetch --allow-staleness 1",
    "trace_keys": "trace keys keys.csv --batch 8 --world-size 2 --micro-batches 2",
    "trace_cluster_csv": "trace cluster keys.csv --batch 8 --micro-batches 2 --format csv",
    "trace_cluster": "trace cluster keys.csv --batch 8 --micro-batches 2 --micro-batches 4",
    "trace_cluster_json": "trace cluster keys.csv --batch 8 --micro-batches 2 --format json",
    "simulate": SIMULATE,
    "simulate_csv": f"{SIMULATE} --format csv",
    "simulate_topology": "simulate --schedule dbp --topology laptop --world-size 1 --steps 8 --jitter 0.02 --seed 1",
    "simulate_model": "simulate --schedule sync --model hstu --topology laptop --world-size 1 --steps 8 --format csv",
    "scale": "scale random.yaml",
    "scale_csv": "scale random.yaml --format csv",
    "sweep": "sweep map.yaml --workers 1 --map factors.compute_time,factors.skew",
    "sweep_csv": "sweep map.yaml --workers 1 --map factors.compute_time,factors.skew --format csv",
    "plan": "plan plan.yaml --workers 1",
    "plan_csv": "plan plan.yaml --workers 1 --format csv",
    "plan_dry_run": "plan plan.yaml --workers 1 --dry-run",
    "diff": "diff a b",
    "diff_csv": "diff a b --format csv",
    "diff_tolerance": "diff a b --tolerance-percent 1",
    "report": "report a b --out r.html",
    "network": "network net.json",
    "network_csv": "network net.json --format csv",
    "refused_option": "simulate --schedule nestpipe --batch 8",
    "refused_name": "schedule show nestpip",
    "refused_file": "plan missing.yaml",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small input for every command."""
    made = tmp_path_factory.mktemp("golden")
    shutil.copy(ROOT / "examples/forgotten.txt", made)
    for name, text in {
        "log.txt": LOG,
        "keys.csv": KEYS,
        "map.yaml": MAPPED,
        "plan.yaml": SMALL,
    }.items():
        (made / name).write_text(text, encoding="utf-8")
    (made / "random.yaml").write_text(RANDOM, encoding="utf-8")
    (made / "net.json").write_text(json.dumps(case_file((star(4), "ring_allreduce", None, 64_000_000))))
    (made / "traces").mkdir()
    for rank in (0, 1):
        (made / f"traces/rank{rank}.json").write_text(
            json.dumps(torchrec_step(rank, late_us=rank * 7)), encoding="utf-8"
        )
    return made


@pytest.fixture(autouse=True)
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs in that folder, with a trace table and two runs in it."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    if not (folder / "b").exists():
        for words in (
            "trace import traces --out t.csv",
            "simulate --schedule dbp --world-size 256 --steps 6 --out a",
            "simulate --schedule nestpipe --world-size 256 --steps 6 --out b",
        ):
            _run(words, monkeypatch)
    capsys.readouterr()


def _run(words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["nestpipe", *shlex.split(words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_prints(
    name: str, golden: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = _run(COMMANDS[name], monkeypatch)
    got = capsys.readouterr()
    text = f"$ nestpipe {COMMANDS[name]}\n{got.out}"
    text += "".join(f"stderr: {line}\n" for line in got.err.splitlines()) + (f"exit: {code}\n" if code else "")
    golden(_steady(name, text))


def _steady(name: str, text: str) -> str:
    """The text without what a clock says."""
    if name.startswith("network"):
        text = re.sub(r"\b\d\.\d{4,6}$|\b\d\.\d{4}(?=  )", "TIME", text, flags=re.MULTILINE)
    if name.startswith("trace_cluster"):
        text = re.sub(r"[\d,]+ samples/s", "SPEED samples/s", text)
    if name == "plan_dry_run":
        text = re.sub(r"[\d.]+ (ms|s|min|h)\b", "TIME", text)
    return text
