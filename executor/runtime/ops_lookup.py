"""The table of ops: what each kind does on a worker. This module holds the lookup path; `ops_train` the rest.

Each function takes the worker and the op, does its work on the calling lane and says what it moved. Which states and
buffers a lookup, sync, update or write_back touches is read from the op's accesses, as the IR defines it; so a schedule
that leaves something out really leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from executor.data import Batch, Owned, Routed, cut, dedup, own, shared_positions, to_device, with_union
from executor.runtime import ops_train
from executor.runtime.lanes import Cost, OpTable
from executor.runtime.worker import Worker
from nestpipe.base import ScheduleError
from nestpipe.ir import CACHES, Data, Loop, Op, OpKind, Program, refuse_parts

__all__ = ["IMPLEMENTATIONS", "op_table", "require_implemented"]

_ID_BYTES = 8


@dataclass(slots=True)
class Routing:
    """The `keys` buffer: the routed ids of each micro-batch so far, and this rank's loss terms."""

    parts: dict[int, Routed] = field(default_factory=dict)
    num_terms: int = 0

    def ids(self) -> Tensor:
        """All distinct ids of the batch that this rank looks up, sorted."""
        ids: Tensor = torch.unique(torch.cat([part.ids for part in self.parts.values()]))
        return ids


def read(worker: Worker, op: Op) -> Cost:
    """Read a batch from the source, hash its keys and cut it into micro-batches, in host memory."""
    raw = worker.source.read(worker.first_batch + op.batch, worker.rank, worker.world_size)
    batch = cut(raw, worker.model.features, worker.layout, worker.micro_batches, worker.cluster)
    slot = worker.buffers.claim(Data.SAMPLES, op)
    slot.value = to_device(batch, slot.tensor)
    return Cost(bytes=_size_bytes(batch), keys=len(batch.tensors["ids"]))


def copy_h2d(worker: Worker, op: Op) -> Cost:
    """Copy a batch from host memory to the device."""
    batch = worker.buffers.get(Data.SAMPLES, op)
    slot = worker.buffers.claim(Data.BATCH, op)
    slot.value = to_device(batch, slot.tensor)
    return Cost(bytes=_size_bytes(batch))


def _size_bytes(batch: Batch) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in batch.tensors.values())


def dedup_keys(worker: Worker, op: Op) -> Cost:
    """The distinct ids of a micro-batch, bucketed by owner."""
    assert op.micro_batch is not None, "dedup runs per micro-batch"
    micro = worker.buffers.get(Data.BATCH, op).micro_batch(op.micro_batch)
    routed = dedup(micro.ids, worker.layout)
    slot = worker.buffers.claim(Data.KEYS, op)
    if slot.value is None:
        slot.value = Routing()
    routing: Routing = slot.value
    routing.parts[op.micro_batch] = routed
    routing.num_terms += micro.num_terms
    slot.keep(routing, *(tensor for part in routing.parts.values() for tensor in (part.ids, part.inverse)))
    return Cost(keys=len(micro.ids), unique_keys=len(routed.ids))


def exchange_keys(worker: Worker, op: Op) -> Cost:
    """Send the ids of every micro-batch to their owners: first the counts, then the ids; then the second dedup."""
    group = worker.communicator(op.kind)
    routing: Routing = worker.buffers.get(Data.KEYS, op)
    parts = [routing.parts[m] for m in range(worker.micro_batches)]
    num_groups = len(worker.layout.groups)
    mine = torch.tensor([part.counts for part in parts], dtype=torch.int64).view(len(parts), group.size, num_groups)
    width = len(parts) * num_groups + 1
    head = torch.full((group.size, width), routing.num_terms, dtype=torch.int64)
    head[:, :-1] = mine.transpose(0, 1).reshape(group.size, -1)
    head = head.to(worker.device)
    theirs_flat = torch.empty_like(head)
    group.all_to_all(op, theirs_flat, head, [1] * group.size, [1] * group.size)
    theirs = theirs_flat.cpu()
    counts = theirs[:, :-1].view(group.size, len(parts), num_groups)

    by_owner = [torch.split(part.ids, [sum(row) for row in part.counts]) for part in parts]
    send = torch.cat([pieces[owner] for owner in range(group.size) for pieces in by_owner])
    sent = mine.sum(dim=(0, 2)).tolist()
    received = counts.sum(dim=(1, 2)).tolist()
    ids = torch.empty(sum(received), dtype=torch.int64, device=worker.device)
    group.all_to_all(op, ids, send, received, sent)

    pieces = torch.split(ids, counts.sum(dim=2).view(-1).tolist())
    requested = [torch.cat(pieces[m :: len(parts)]) for m in range(len(parts))]
    num_terms = worker.terms[worker.first_batch + op.batch] = int(theirs[:, -1].sum())
    owned = own(requested, counts.transpose(0, 1).tolist(), mine.tolist(), num_terms, worker.layout)
    _keep_owned(worker, op, owned)
    return Cost(bytes=(send.numel() + head.numel()) * _ID_BYTES, keys=len(send), unique_keys=len(torch.unique(send)))


def _keep_owned(worker: Worker, op: Op, owned: Owned) -> None:
    tensors = (owned.ids, *(part for request in owned.requests for part in request))
    worker.buffers.claim(Data.OWNED, op).keep(owned, *tensors)


def extend_owned(worker: Worker, op: Op) -> Cost:
    """Extend the owned ids to those that any replica of the shard owns in this batch."""
    group = worker.communicator(op.kind)
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    head = torch.tensor([len(owned.ids), owned.num_terms], dtype=torch.int64, device=worker.device)
    heads = [part.tolist() for part in group.all_gather(op, head)]
    padded = owned.ids.new_zeros(max(count for count, _ in heads))
    padded[: len(owned.ids)] = owned.ids
    parts = group.all_gather(op, padded)
    union = torch.unique(torch.cat([part[:count] for part, (count, _) in zip(parts, heads, strict=True)]))
    num_terms = worker.terms[worker.first_batch + op.batch] = sum(terms for _, terms in heads)
    _keep_owned(worker, op, with_union(owned, union, num_terms, worker.layout))
    return Cost(bytes=padded.numel() * _ID_BYTES, keys=len(owned.ids), unique_keys=len(union))


def lookup(worker: Worker, op: Op) -> Cost:
    """Copy the rows of the owned ids from each state that the op reads into the buffer that caches it."""
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    moved = 0
    for access in op.reads:
        if access.data in CACHES:
            slot = worker.buffers.claim(CACHES[access.data], op)
            slot.value = []
            for group, state in enumerate(worker.store.state(access.data)):
                ids = owned.of_group(group).cpu()
                rows = slot.tensor(str(group), (len(ids), state.shape[1]))
                if rows.device.type == "cpu":
                    worker.store.gather(access.data, group, ids, rows)
                else:
                    staged = torch.empty(rows.shape, pin_memory=True)
                    worker.store.gather(access.data, group, ids, staged)
                    rows.copy_(staged, non_blocking=True)
                slot.value.append(rows)
                moved += rows.numel() * rows.element_size()
    requests = sum(len(part) for request in owned.requests for part in request)
    return Cost(bytes=moved, keys=requests, unique_keys=len(owned.ids))


def sync(worker: Worker, op: Op) -> Cost:
    """Copy rows of ids shared with an earlier batch from that batch's buffers into this one's, oldest batch first.

    With `owned` among the reads the shared ids are found at the owner, over all ranks; with `keys` only those count
    that this rank itself looks up in both batches, which misses ids that another rank looks up.
    """
    earlier = sorted({access.batch for access in op.reads if access.batch is not None} - {op.batch})
    per_rank = not any(access.data == Data.OWNED for access in op.reads)
    moved = shared = 0
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    for batch in earlier:
        other: Owned = worker.buffers.get(Data.OWNED, op, batch)
        local = _local_ids(worker, op, batch) if per_rank else None
        for group in range(len(worker.layout.groups)):
            ids = owned.of_group(group)
            mine, theirs = shared_positions(ids, other.of_group(group))
            if local is not None:
                known = torch.isin(ids[mine], local)
                mine, theirs = mine[known], theirs[known]
            shared += len(mine)
            for access in op.writes:
                target: Tensor = worker.buffers.get(access.data, op)[group]
                rows = worker.buffers.get(access.data, op, batch)[group]
                target.index_copy_(0, mine, rows.index_select(0, theirs))
                moved += len(mine) * target.shape[1] * target.element_size()
    return Cost(bytes=moved, keys=len(owned.ids), unique_keys=shared)


def _local_ids(worker: Worker, op: Op, batch: int) -> Tensor:
    """Ids that this rank looks up in both batches."""
    mine: Tensor = worker.buffers.get(Data.KEYS, op).ids()
    return mine[torch.isin(mine, worker.buffers.get(Data.KEYS, op, batch).ids())]


def write_back(worker: Worker, op: Op) -> Cost:
    """Copy buffered rows into the states, or, if the op reads the gradients, apply them to the states themselves."""
    if any(access.data == Data.OWNED_GRADS for access in op.reads):
        return _apply_to_states(worker, op)
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    moved = 0
    for access in op.writes:
        for group, rows in enumerate(worker.buffers.get(CACHES[access.data], op)):
            host = _on_host(rows)
            worker.store.scatter(access.data, group, owned.of_group(group).cpu(), host)
            moved += host.numel() * host.element_size()
    return Cost(bytes=moved, keys=len(owned.ids), unique_keys=len(owned.ids))


def _on_host(rows: Tensor) -> Tensor:
    """The values in host memory, there when this returns; through pinned memory from CUDA."""
    if rows.device.type == "cpu":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return host


def _apply_to_states(worker: Worker, op: Op) -> Cost:
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    moved = 0
    for group, grads in enumerate(ops_train.summed_grads(worker, op, owned)):
        ids = owned.of_group(group).cpu()
        states = [worker.store.state(data)[group] for data in (Data.TABLE, Data.OPTIMIZER)]
        rows, moments = (torch.empty(len(ids), state.shape[1]) for state in states)
        worker.store.gather(Data.TABLE, group, ids, rows)
        worker.store.gather(Data.OPTIMIZER, group, ids, moments)
        worker.sparse.apply(rows, moments, _on_host(grads), worker.first_batch + op.batch + 1)
        worker.store.scatter(Data.TABLE, group, ids, rows)
        worker.store.scatter(Data.OPTIMIZER, group, ids, moments)
        moved += 2 * (rows.numel() + moments.numel()) * rows.element_size()
    return Cost(bytes=moved, keys=len(owned.ids), unique_keys=len(owned.ids))


def wait(worker: Worker, op: Op) -> Cost:  # noqa: ARG001 - the signature of the table
    """Nothing: the op exists for what it waits for."""
    return Cost()


IMPLEMENTATIONS: Final[Mapping[OpKind, Callable[[Worker, Op], Cost]]] = {
    OpKind.READ: read,
    OpKind.COPY_H2D: copy_h2d,
    OpKind.DEDUP: dedup_keys,
    OpKind.ALL_TO_ALL_KEYS: exchange_keys,
    OpKind.ALL_GATHER: extend_owned,
    OpKind.LOOKUP: lookup,
    OpKind.SYNC: sync,
    OpKind.WRITE_BACK: write_back,
    OpKind.WAIT: wait,
    **ops_train.IMPLEMENTATIONS,
}


def require_implemented(loop: Loop) -> None:
    """Refuse a schedule that the executor cannot run.

    Raises:
        ScheduleError: naming the kinds that have no implementation, or an update that writes states itself.
    """
    refuse_parts(loop, "the executor")
    unknown = sorted({op.kind for op in loop.ops} - IMPLEMENTATIONS.keys())
    if unknown:
        raise ScheduleError(
            f"{loop.name}: the executor has no implementation of {', '.join(unknown)}; "
            f"it runs {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    if any(op.kind is OpKind.UPDATE and access.data in CACHES for op in loop.ops for access in op.writes):
        raise ScheduleError(
            f"{loop.name}: update writes table or optimizer itself, which the executor does not run; "
            "let it write rows and moments, or let write_back apply owned_grads"
        )


def op_table(worker: Worker, program: Program) -> OpTable:
    """The implementations that a program needs, bound to a worker."""
    return {kind: partial(IMPLEMENTATIONS[kind], worker) for kind in {op.kind for op in program.ops}}
