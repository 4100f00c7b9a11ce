"""The schedule whose ops are timed: that of `sync`, with the buffer sync of dual-buffer pipelining added.

It has every op of the catalogue's schedules on `world`, one after the other. So each op is seen alone, done by the very
code that trains; and what it trains is what `sync` trains, since the rows that it copies are the same already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nestpipe.ir import OpKind

__all__ = ["PAIRS", "SERIAL", "TURNS"]

SERIAL: Final = """\
loop v1 serial micro_batches=1
  buffer samples host slots=1
  buffer batch device slots=1
  buffer keys device slots=1
  buffer owned device slots=2
  buffer rows device slots=2
  buffer moments device slots=2
  buffer embeddings device slots=1
  buffer activations device slots=1
  buffer row_grads device slots=1
  buffer owned_grads device slots=1
  buffer dense_grads device slots=1
  stream data on host_io
    read                t      after write_back t-1  writes samples
  stream h2d on h2d
    copy_h2d            t      after read t  reads samples  writes batch
  stream route on world
    all_to_all[keys]    t      after dedup t *  reads keys  writes owned
  stream host on host_memory
    lookup              t      after all_to_all[keys] t  reads owned, table, optimizer  writes rows, moments
    write_back          t      after update t  reads owned, rows, moments  writes table, optimizer
  stream d2d on d2d
    sync                t      after lookup t  reads owned, owned t-1, rows t-1, moments t-1  writes rows, moments
  stream comm on world
    for m
      all_to_all[rows]    t m        after sync t, backward t m-1  reads owned, rows  writes embeddings
      all_to_all[grads]   t m        after backward t m  reads row_grads  writes owned_grads
  stream dense on world
    all_reduce          t      after all_to_all[grads] t *  reads dense_grads  writes dense_grads
  stream compute on compute
    for m
      dedup               t m        after copy_h2d t  reads batch  writes keys
    for m
      forward             t m        after all_to_all[rows] t m  reads batch, keys, embeddings, dense  writes activations
      backward            t m        reads keys, activations, dense  writes row_grads, dense_grads
    update              t      after all_to_all[grads] t *, all_reduce t  reads owned, owned_grads, dense_grads, rows, moments, dense  writes rows, moments, dense
"""  # noqa: E501

#: Interference: for each pair a schedule that differs from SERIAL by letting some ops run at the same time, and which.
PAIRS: Final[Mapping[str, tuple[str, tuple[OpKind, ...]]]] = {
    "all_reduce with all_to_all[grads]": (
        SERIAL.replace(
            "all_reduce          t      after all_to_all[grads] t *", "all_reduce          t      after backward t *"
        ),
        (OpKind.ALL_REDUCE, OpKind.ALL_TO_ALL_GRADS),
    ),
    "forward and backward with all_to_all[rows]": (
        SERIAL.replace("embeddings device slots=1", "embeddings device slots=2")
        .replace("row_grads device slots=1", "row_grads device slots=2")
        .replace(
            "all_to_all[rows]    t m        after sync t, backward t m-1", "all_to_all[rows]    t m+1      after sync t"
        ),
        (OpKind.FORWARD, OpKind.BACKWARD, OpKind.ALL_TO_ALL_ROWS),
    ),
    "write_back with read and copy_h2d": (
        SERIAL.replace("t      after write_back t-1  writes samples", "t      after update t-1  writes samples"),
        (OpKind.WRITE_BACK, OpKind.READ, OpKind.COPY_H2D),
    ),
    "lookup with forward and backward": ("dbp", (OpKind.LOOKUP, OpKind.FORWARD, OpKind.BACKWARD)),
}

#: Turns on a busy link: schedules in which a small collective starts together with a large one, which outlasts it.
TURNS: Final[Mapping[OpKind, str]] = {
    OpKind.ALL_REDUCE: PAIRS["all_reduce with all_to_all[grads]"][0],
    OpKind.ALL_TO_ALL_KEYS: SERIAL.replace("samples host slots=1", "samples host slots=2")
    .replace("batch device slots=1", "batch device slots=2")
    .replace("keys device slots=1", "keys device slots=2")
    .replace("owned device slots=2", "owned device slots=3")
    .replace("read                t      after write_back t-1", "read                t+1    after write_back t-1")
    .replace("copy_h2d            t      after read t ", "copy_h2d            t+1    after read t+1 ")
    .replace("dedup               t m        after copy_h2d t ", "dedup               t+1 m      after copy_h2d t+1 ")
    .replace("all_to_all[keys]    t      after dedup t", "all_to_all[keys]    t+1    after backward t *, dedup t+1"),
}
