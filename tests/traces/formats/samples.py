"""Small traces and logs in the formats that are imported, written out by hand for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nestpipe.timeline.timeline import COLUMNS as TIMELINE_COLUMNS
from traces.formats.importing import Imported, import_traces

MAIN, AUTOGRAD = 100, 101


def event(category: str, name: str, ts: Any, dur: Any, tid: Any = MAIN, pid: Any = 1, **args: Any) -> dict[str, Any]:
    """A complete event; keyword arguments become `args`, `_` in their names a blank."""
    given = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": given}


def launched(
    category: str,
    name: str,
    launch: Any,
    start: Any,
    dur: Any,
    correlation: int,
    stream: int = 7,
    tid: int = MAIN,
    **args: Any,
) -> list[dict[str, Any]]:
    """A device event and the runtime call, 2 us long, that launched it."""
    call = event("cuda_runtime", "cudaLaunchKernel", launch, 2, tid, correlation=correlation)
    return [call, event(category, name, start, dur, stream, 0, correlation=correlation, stream=stream, **args)]


def collective(
    op: str, launch: int, start: int, dur: int, correlation: int, elements: int, dtype: str = "float", tid: int = MAIN
) -> list[dict[str, Any]]:
    """A `SendRecv` kernel, its launch, and the host range that says which collective it is."""
    host = event("user_annotation", f"nccl:{op}", launch - 1, 4, tid, Input_Dims=[[elements]], Input_type=[dtype])
    return [host, *launched("kernel", "ncclDevKernel_SendRecv(x)", launch, start, dur, correlation, 20, tid)]


def trace(events: list[dict[str, Any]], rank: int | None = 0, world_size: int = 2, **top: Any) -> dict[str, Any]:
    """A Kineto document."""
    info = {"backend": "nccl"} if rank is None else {"backend": "nccl", "rank": rank, "world_size": world_size}
    return {"schemaVersion": 1, "distributedInfo": info, **top, "traceEvents": events}


def kernel(name: str, ts: Any, dur: Any, correlation: int | None = None, stream: Any = 20) -> dict[str, Any]:
    """A kernel on its own; without a correlation nothing says what launched it."""
    found = event("kernel", name, ts, dur, stream, 0)
    return found if correlation is None else {**found, "args": {**found["args"], "correlation": correlation}}


def later_pytorch() -> dict[str, Any]:
    """PyTorch 2.6 without shapes: an all_to_all whose sizes only op and kernel state, times relative and as text."""
    sizes = {"Collective name": "all_to_allv", "dtype": "BFloat16", "In msg nelems": 100, "Out msg nelems": 120}
    group = {"Group size": 16, "Process Group Name": "0", "Process Group Description": "default_pg"}
    host = event("cpu_op", "record_param_comms", 99.5, 20)
    exchange = kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "4200.250", "50.750", 5)
    host["args"] = {**sizes, **group, "In split size": "[]"}
    exchange["args"] |= {**sizes, **group, "In split size": "[50, 50]"}
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": "100.502", "args": {"name": "python"}},
        event("user_annotation", "ProfilerStep#7", "4000.000", "900.500"),
        event("gpu_user_annotation", "ProfilerStep#7", 1, 2),
        event("user_annotation", "nccl:all_to_all", "4100.100", "10.1"),
        event("cuda_runtime", "cudaLaunchKernelExC", "4105.000", "2.5", correlation=5),
        exchange,
        event("cuda_runtime", "cudaLaunchKernel", "4110.000", "2.5", correlation=6),
        kernel("gemm", "4220.250", "100.000", 6, "stream 7"),
        host,
    ]
    document = trace(events, 3, 16, record_shapes=0, baseTimeNanoseconds=1_700_000_000_000_000_000)
    return {**document, "distributedInfo": {"backend": "nccl", "rank": "3", "world_size": "16", "pg_config": []}}


def torchrec_step(rank: int = 0, late_us: int = 0, step: int = 5, base: int = 1_000_000) -> dict[str, Any]:
    """One step of a TorchRec-like run: copy, lookup, three all_to_all, forward, backward on its own thread, update.

    A rank that is `late_us` late launches everything that much later, but leaves its collectives with the others.
    """
    t = base + late_us
    events = [
        event("user_annotation", f"ProfilerStep#{step}", t, 1000 - late_us),
        event("user_annotation", "## copy_batch_to_gpu ##", t + 1, 20),
        *launched("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", t + 2, t + 10, 8, 1, 22, bytes=4096),
        event("user_annotation", "## forward ##", t + 30, 200),
        event("cpu_op", "fbgemm::split_embedding_codegen_lookup_adagrad_function", t + 31, 10),
        *launched("kernel", "lookup_kernel", t + 32, t + 40, 30, 2),
        *collective("all_to_all", t + 50, t + 60, base + 160 - t - 60, 3, 1000),
        *launched("kernel", "gemm", t + 120, base + 150, 100, 4),
        event("user_annotation", "## sparse_data_dist ##", t + 240, 40),
        *collective("all_to_all", t + 250, t + 255, base + 330 - t - 255, 5, 64, "long int"),
        event("user_annotation", "## backward ##", t + 300, 300),
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", t + 310, 100, AUTOGRAD),
        *launched("kernel", "gemm_backward", t + 320, base + 400, 100, 6, tid=AUTOGRAD),
        *collective("all_to_all", t + 400, t + 410, base + 560 - t - 410, 7, 1000, tid=AUTOGRAD),
        event("user_annotation", "## optimizer ##", t + 610, 50),
        *launched("kernel", "adagrad", t + 620, base + 700, 40, 8),
    ]
    return trace(events, rank, 2)


NCCL_TEXT = """\
# Collective test starting: alltoall_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 1 iters: 20
#
#  Rank  0 Group  0 Pid      1 on    node0 device  0 [0000:05:00] Some GPU
#  Rank  1 Group  0 Pid      1 on    node0 device  1 [0000:15:00] Some GPU
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     0.94    0.00    0.00       0     0.76    0.00    0.00    N/A
host:3442:3442 [0] NCCL INFO Launch mode Parallel
        1024           128     float    none      -1    20.50    0.05    0.02       0    21.00    0.05    0.02    N/A
   134217728      16777216     float    none      -1   1000.0  134.22   67.11       0  1.1e+03  122.02   61.01    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 33.56
"""

HCCL_TEXT = """\
the minbytes is 8192, maxbytes is 67108864, iters is 20, warmup_iters is 5
data_size(Bytes):  | aveg_time(us):  | alg_bandwidth(GB/s):  | check_result:
8192               | 41.20           | 0.19883               | success
67108864           | 700.50          | 95.80138              | success
"""

HCCL_OTHER_UNITS = """\
the minbytes is 1048576, maxbytes is 1073741824, iters is 20, warmup_iters is 5
check_result: | data_size(KB): | avg_time(ms): | alg_bandwidth(GB/s):
success       | 1024           | 0.00488       | 214.8
success       | 1048576        | 5.0           | 214.74836
"""

WORKLOAD_TEXT = """\
HYBRID_DLRM 4
2
Embedding -1 300 ALLTOALL 98304 310 ALLTOALL 98304 320 NONE 0 98
MLP -1 1280 NONE 0 794 NONE 0 896 ALLREDUCE 13312 13
"""

AICB_TEXT = """\
comm_type,comm_group,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count
CommType.all_to_all,CommGroup.dp_group,4096,warmup,None,None,,None,None,None,1
CommType.all_reduce,CommGroup.tp_group,8192,test_step,None,None,,None,None,None,1
CommType.epoch_end,CommGroup.all,0,,None,None,,None,None,None,1
"""


def nccl_json() -> dict[str, Any]:
    """What nccl-tests write with -J."""
    body = {"time": 20.5, "alg_bw": 49.951, "bus_bw": 99.902, "nwrong": None}
    return {
        "version": 3,
        "args": ["./build/all_reduce_perf", "-J", "x.json"],
        "nccl_version": 22703,
        "config": {"devices": [{"rank": rank, "group": 0} for rank in range(8)]},
        "results": [
            {"size": 0, "count": 0, "type": "float", "redop": "sum", "root": "-1", "out_of_place": body},
            {
                "size": 1024000,
                "count": 256000,
                "type": "float",
                "out_of_place": body,
                "in_place": {**body, "bus_bw": "nan"},
            },
        ],
        "average_bus_bandwidth": {"bandwidth": 99.9},
    }


def execution_trace_old() -> dict[str, Any]:
    """Schema 1.0.1: an uneven all_to_all of 12 and an all_reduce of 5 floats under `## forward ##`."""
    sent = {
        "inputs": [[7, 8, 0, 12, 4, "cuda:0"], 1, 99, 1, "all_to_allv", [4, 8], [4, 4]],
        "outputs": [[9, 8, 0, 8, 4, "cuda:0"]],
    }
    types = {"input_types": ["Tensor(float)", "Int", "Int", "Int", "String", "GenericList[Int]", "GenericList[Int]"]}
    reduced = [[[7, 8, 0, 5, 4, "cuda:0"]], 2, 99, 1, "allreduce", [], []]
    nodes = [
        {"name": "[pytorch|profiler|execution_graph|process]", "id": 1, "parent": 1, "inputs": [], "outputs": []},
        {"name": "## forward ##", "id": 2, "parent": 1, "inputs": [], "outputs": []},
        {"name": "record_param_comms", "id": 3, "parent": 2, **sent, **types},
        {"name": "record_param_comms", "id": 4, "parent": 2, "inputs": [1, 99, 1, "wait", [], []], "outputs": []},
        {"name": "record_param_comms", "id": 5, "parent": 1, "inputs": reduced, "outputs": [reduced[0]]},
    ]
    return {"schema": "1.0.1", "pid": 1, "time": "now", "start_ts": 1, "nodes": nodes, "finish_ts": 2}


def execution_trace_new() -> dict[str, Any]:
    """Schema 1.1.1: an all_gather whose sizes are only in the attributes."""
    attrs = [
        {"name": "collective_name", "type": "string", "value": "_allgather_base"},
        {"name": "dtype", "type": "string", "value": "BFloat16"},
        {"name": "in_msg_nelems", "type": "uint64", "value": 100},
        {"name": "out_msg_nelems", "type": "uint64", "value": 400},
        {"name": "pg_name", "type": "string", "value": "3"},
        {"name": "pg_size", "type": "uint64", "value": 4},
    ]
    empty = {"values": [], "shapes": [], "types": []}
    node = {"id": 2, "name": "record_param_comms", "ctrl_deps": 1, "inputs": empty, "outputs": empty, "attrs": attrs}
    return {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [node]}


def param_trace() -> list[dict[str, Any]]:
    """A PARAM communication trace."""
    exchange = {
        "comms": "all_to_allv",
        "req": 1,
        "in_msg_size": 6,
        "out_msg_size": 4,
        "dtype": "Int",
        "world_size": 2,
        "in_split": [2, 4],
        "out_split": [2, 2],
        "startTime_ns": 123,
        "pg_id": 0,
    }
    init = {"comms": "init", "pg_id": 0, "global_ranks": [0, 1]}
    return [init, exchange, {"comms": "wait", "req": 1}, {"compute": "gemm", "mm_dim": 8}]


def chakra_json() -> dict[str, Any]:
    """Chakra's JSON variant: one host op and one broadcast kernel of 28 us."""
    nodes = [
        {"Id": 1, "Name": "op", "NodeType": 4, "ctrlDeps": [], "data_deps": [], "runtime": 3, "is_cpu_op": True},
        {"Id": 2, "Name": "ncclKernel_Broadcast", "NodeType": 7, "ctrlDeps": [1], "runtime": 28, "is_cpu_op": False},
    ]
    return {"workload_graph": nodes, "ngpus": 8}


def chakra_bytes() -> bytes:
    """A Chakra file: metadata 0.0.4 and one all_to_all of 1 MiB, as another producer encodes it."""
    node = b"\x08\x01\x12\x02a2\x18\x07\x38\x07"
    node += b"R\x0e\n\tis_cpu_op\xd8\x01\x00" + b"R\r\n\tcomm_typeH\x06" + b"R\x0f\n\tcomm_sizeH\x80\x80@"
    return b"\x07\n\x050.0.4" + bytes([len(node)]) + node


def samples() -> dict[str, bytes]:
    """One small file of every format, by an extension-free name."""
    rccl = {"name": "AllReduce", "ranks": 4, "size": 4096, "type": "float", "inPlace": 0, "time": 9.5}
    documents = {
        "kineto": torchrec_step(),
        "nccl_json": nccl_json(),
        "rccl_json": [{**rccl, "algBw": 0.43, "busBw": 0.65}],
        "execution_trace_old": execution_trace_old(),
        "execution_trace_new": execution_trace_new(),
        "param": param_trace(),
        "chakra_json": chakra_json(),
    }
    texts = {"nccl": NCCL_TEXT, "workload": WORKLOAD_TEXT, "aicb": AICB_TEXT}
    return {
        **{name: json.dumps(document).encode() for name, document in documents.items()},
        **{name: text.encode() for name, text in texts.items()},
        "table_csv": b"nccl_dtype,num_gpus,message_size,op_name,latency\nhalf,4,128,all_to_all,0.005\n",
        "chakra": chakra_bytes(),
    }


def write(path: Path, document: Any) -> Path:
    """A file of bytes, of text, or of a document as JSON."""
    data = document if isinstance(document, str | bytes) else json.dumps(document)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def load(tmp_path: Path, document: Any, name: str = "trace.json", **options: Any) -> Imported:
    """What importing this document gives."""
    return import_traces([write(tmp_path / name, document)], **options)


def rank_of(imported: Imported) -> dict[str, Any]:
    """The summary of the only rank."""
    (rank,) = imported.summary["ranks"]
    return dict(rank)


STREAMS = ("h2d", "comm", "compute", "host")


def timeline(ranks: int = 2, steps: int = 4, seed: int = 3) -> pd.DataFrame:
    """A Timeline of a nested pipeline: two micro-batches, exchanges beside compute, lookups on the host; odd times."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for rank in range(ranks):
        free = dict.fromkeys(STREAMS, 1000 * rank)
        for step in range(steps):
            ready = max(free.values()) - 1_500_000 if step else 0
            plan = [
                ("h2d", "copy_h2d", step + 1, None),
                ("host", "lookup", step + 1, None),
                ("h2d", "sync", step + 1, None),
            ]
            for micro in (0, 1):
                plan += [("comm", "all_to_all[rows]", step, micro), ("compute", "forward", step, micro)]
                plan += [("compute", "backward", step, micro), ("comm", "all_to_all[grads]", step, micro)]
            plan += [("comm", "all_reduce", step, None), ("compute", "update", step, None)]
            for stream, kind, batch, micro in plan:
                start = max(free[stream], ready) + int(rng.integers(0, 30_000))
                end = free[stream] = start + int(rng.integers(800_000, 4_000_000))
                op = f"{kind} {batch}" + ("" if micro is None else f".{micro}")
                sizes = {"bytes": 4096 if stream == "comm" else None, "keys": None, "unique_keys": None, "wait_ns": 0}
                known = {
                    "step": step,
                    "batch": batch,
                    "micro_batch": micro,
                    "rank": rank,
                    "stream": stream,
                    "kind": kind,
                }
                rows.append({**known, "op": op, "start_ns": start, "end_ns": end, **sizes})
    frame = pd.DataFrame(rows, columns=list(TIMELINE_COLUMNS))
    return frame.astype(dict.fromkeys(("micro_batch", "bytes", "keys", "unique_keys"), "Int64"))
