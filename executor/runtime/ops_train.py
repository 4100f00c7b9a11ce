"""The ops of training: row and gradient exchange, forward, backward, dense all_reduce, update, and replica averaging.

Gradients are kept apart by micro-batch and source until the update adds them in one canonical order, so any schedule
with the same micro-batches gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from executor.data import MicroBatch, Owned, join_by_group, split_by_group
from executor.models import Lookups
from executor.runtime.lanes import Cost
from executor.runtime.worker import Worker
from nestpipe.ir import Data, Op, OpKind

__all__ = ["IMPLEMENTATIONS", "summed_grads"]


@dataclass(slots=True)
class Activations:
    """What backward needs of a forward: the summed loss with its graph, and the leaves. `loss` is None if empty."""

    loss: Tensor | None
    leaves: list[Tensor]


@dataclass(slots=True)
class DenseGrads:
    """The dense gradients summed over micro-batches 0 to `added` - 1, in that order; later ones wait in `early`.

    flat: float32 (parameters + 1,), the last element is the NaN flag.
    """

    flat: Tensor
    added: int = 0
    early: dict[int, Tensor] = field(default_factory=dict)

    def add(self, micro_batch: int, grads: Tensor) -> None:
        """Add the gradients of a micro-batch when its turn has come."""
        self.early[micro_batch] = grads
        while self.added in self.early:
            self.flat.add_(self.early.pop(self.added))
            self.added += 1


def _sizes(counts: list[list[int]], dims: list[int]) -> list[int]:
    """Values sent to or received from each rank."""
    return [sum(count * dim for count, dim in zip(row, dims, strict=True)) for row in counts]


def exchange_rows(worker: Worker, op: Op) -> Cost:
    """Send the rows of a micro-batch from their owners to the ranks that asked for them."""
    assert op.micro_batch is not None, "rows travel per micro-batch"
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    buffered: list[Tensor] = worker.buffers.get(Data.ROWS, op)
    requests, counts = owned.requests[op.micro_batch], owned.received[op.micro_batch]
    sent, received = _sizes(counts, worker.dims), _sizes(owned.sent[op.micro_batch], worker.dims)
    dtype = worker.comm_dtype
    picked = [rows.index_select(0, request) for rows, request in zip(buffered, requests, strict=True)]
    send = join_by_group(picked, counts, torch.empty(sum(sent), dtype=dtype, device=worker.device))
    slot = worker.buffers.claim(Data.EMBEDDINGS, op)
    flat = slot.tensor("rows", (sum(received),), dtype)
    worker.communicator(op.kind).all_to_all(op, flat, send, received, sent)
    parts = split_by_group(flat, owned.sent[op.micro_batch], worker.dims)
    slot.keep(parts, *(parts if len(parts) > 1 else ()))
    return Cost(bytes=send.numel() * send.element_size(), keys=sum(len(request) for request in requests))


def forward(worker: Worker, op: Op) -> Cost:
    """The summed loss of a micro-batch, with its graph."""
    micro: MicroBatch = worker.buffers.get(Data.BATCH, op).micro_batch(op.micro_batch)
    # autograd keeps inputs for backward, which may run when the schedule has given the batch's memory away
    kept = {name: getattr(micro, name) for name in ("lengths", "dense", "labels", "weights")}
    micro = replace(micro, **{name: tensor.clone() for name, tensor in kept.items() if tensor is not None})
    inverse: Tensor = worker.buffers.get(Data.KEYS, op).parts[op.micro_batch].inverse
    leaves = [rows.detach().float().requires_grad_() for rows in worker.buffers.get(Data.EMBEDDINGS, op)]
    slot = worker.buffers.claim(Data.ACTIVATIONS, op)
    batch = worker.first_batch + op.batch
    loss = None
    if micro.num_samples:
        with torch.enable_grad():
            lookups = Lookups(leaves=leaves, groups=worker.feature_groups, inverse=inverse, totals=micro.totals)
            loss, predictions = worker.model.loss(lookups, micro)
        worker.losses[batch].append(loss.detach())
        if worker.on_predictions is not None:
            worker.on_predictions(batch, micro, predictions.detach())
    slot.value = Activations(loss=loss, leaves=leaves)
    return Cost(keys=len(micro.ids))


def backward(worker: Worker, op: Op) -> Cost:
    """The gradients of a micro-batch: rows into a send buffer, dense ones added to the batch's."""
    assert op.micro_batch is not None, "backward runs per micro-batch"
    routed = worker.buffers.get(Data.KEYS, op).parts[op.micro_batch]
    activations: Activations = worker.buffers.get(Data.ACTIVATIONS, op)
    parameters = list(worker.model.parameters())
    wanted = [*activations.leaves, *parameters]
    if activations.loss is None:
        grads: tuple[Tensor, ...] = tuple(torch.zeros_like(tensor) for tensor in wanted)
        flag = 0.0
    else:
        seed = torch.full_like(activations.loss, worker.loss_scale)
        grads = torch.autograd.grad(activations.loss, wanted, seed, allow_unused=True, materialize_grads=True)
        activations.loss = activations.loss.detach()
        num_leaves = len(activations.leaves)
        rows = {f"row gradients {index}": grad for index, grad in enumerate(grads[:num_leaves])}
        names = [f"gradient of {name}" for name, _ in worker.model.named_parameters()]
        dense = dict(zip(names, grads[num_leaves:], strict=True))
        flag = worker.numerics.check(op, loss=activations.loss, **rows, **dense)
    slot = worker.buffers.claim(Data.ROW_GRADS, op)
    sizes = _sizes(routed.counts, worker.dims)
    send = slot.tensor("grads", (sum(sizes),), worker.comm_dtype)
    slot.value = join_by_group(list(grads[: len(activations.leaves)]), routed.counts, send)
    parts = [grad.reshape(-1) for grad in grads[len(activations.leaves) :]]
    _dense_grads(worker, op).add(op.micro_batch, torch.cat([*parts, send.new_tensor([flag], dtype=torch.float32)]))
    return Cost(keys=len(routed.ids))


def _dense_grads(worker: Worker, op: Op) -> DenseGrads:
    slot = worker.buffers.claim(Data.DENSE_GRADS, op)
    if slot.value is None:
        size = sum(parameter.numel() for parameter in worker.model.parameters()) + 1
        slot.value = DenseGrads(flat=slot.tensor("flat", (size,)).zero_())
    grads: DenseGrads = slot.value
    return grads


def exchange_grads(worker: Worker, op: Op) -> Cost:
    """Send the row gradients of a micro-batch to the owners, where they are kept apart by micro-batch and source."""
    assert op.micro_batch is not None, "gradients travel per micro-batch"
    owned: Owned = worker.buffers.get(Data.OWNED, op)
    send: Tensor = worker.buffers.get(Data.ROW_GRADS, op)
    counts = owned.received[op.micro_batch]
    sent, received = _sizes(owned.sent[op.micro_batch], worker.dims), _sizes(counts, worker.dims)
    slot = worker.buffers.claim(Data.OWNED_GRADS, op)
    if slot.value is None:
        slot.value = {}
    flat = slot.tensor(str(op.micro_batch), (sum(received),), send.dtype)
    worker.communicator(op.kind).all_to_all(op, flat, send, received, sent)
    kept: dict[int, list[Tensor]] = slot.value
    kept[op.micro_batch] = split_by_group(flat, counts, worker.dims)
    if len(worker.dims) > 1:
        slot.keep(kept, *(part for parts in kept.values() for part in parts))
    num_keys = sum(map(sum, owned.sent[op.micro_batch]))
    return Cost(bytes=send.numel() * send.element_size(), keys=num_keys)


def summed_grads(worker: Worker, op: Op, owned: Owned) -> list[Tensor]:
    """Per group the gradient of every owned row: the sum over micro-batches, then sources, over the global count."""
    kept: dict[int, list[Tensor]] = worker.buffers.get(Data.OWNED_GRADS, op)
    scale = worker.num_domains / (max(owned.num_terms, 1) * worker.loss_scale)
    grads = []
    for group, spec in enumerate(worker.layout.groups):
        total = torch.zeros(len(owned.of_group(group)), spec.dim, device=worker.device)
        for micro_batch in sorted(kept):
            total.index_add_(0, owned.requests[micro_batch][group], kept[micro_batch][group].float())
        grads.append(total.mul_(scale))
    return grads


def all_reduce(worker: Worker, op: Op) -> Cost:
    """Sum the dense gradients, and the NaN flag with them, over all ranks."""
    grads: DenseGrads = worker.buffers.get(Data.DENSE_GRADS, op)
    if worker.comm_dtype == torch.float32:
        worker.communicator(op.kind).all_reduce(op, grads.flat)
        sent = grads.flat
    else:
        sent = grads.flat.to(worker.comm_dtype)
        worker.communicator(op.kind).all_reduce(op, sent)
        grads.flat.copy_(sent)
    return Cost(bytes=sent.numel() * sent.element_size())


def update(worker: Worker, op: Op) -> Cost:
    """Apply the batch's gradients to what the op writes: buffered rows and their moments, dense parameters."""
    writes = {access.data for access in op.writes}
    batch = worker.first_batch + op.batch
    dense: DenseGrads = worker.buffers.get(Data.DENSE_GRADS, op)
    if not worker.numerics.apply(batch, float(dense.flat[-1])):
        return Cost()
    num_keys = 0
    if Data.ROWS in writes:
        owned: Owned = worker.buffers.get(Data.OWNED, op)
        num_keys = len(owned.ids)
        _update_rows(worker, op, owned)
    num_terms = worker.terms[batch]
    if Data.DENSE in writes and num_terms:
        worker.dense.step(dense.flat[:-1] / (num_terms * worker.loss_scale), batch + 1)
    return Cost(keys=num_keys, unique_keys=num_keys)


def _update_rows(worker: Worker, op: Op, owned: Owned) -> None:
    step = worker.first_batch + op.batch + 1
    buffered = zip(worker.buffers.get(Data.ROWS, op), worker.buffers.get(Data.MOMENTS, op), strict=True)
    for group, ((rows, moments), grads) in enumerate(zip(buffered, summed_grads(worker, op, owned), strict=True)):
        if owned.mine is None:
            worker.sparse.apply(rows, moments, grads, step)
        else:
            mine = owned.mine[group]
            touched = [part.index_select(0, mine) for part in (rows, moments, grads)]
            worker.sparse.apply(touched[0], touched[1], touched[2], step)
            rows.index_copy_(0, mine, touched[0])
            moments.index_copy_(0, mine, touched[1])


def average_replicas(worker: Worker, op: Op) -> Cost:
    """Average the buffered rows, and their moments, over the replicas of this shard, summed in replica order."""
    group = worker.communicator(op.kind)
    moved = 0
    for access in op.writes:
        for rows in worker.buffers.get(access.data, op):
            parts = group.all_gather(op, rows)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            rows.copy_(total.div_(group.size))
            moved += rows.numel() * rows.element_size()
    return Cost(bytes=moved, keys=len(worker.buffers.get(Data.OWNED, op).ids))


IMPLEMENTATIONS: Final[Mapping[OpKind, Callable[[Worker, Op], Cost]]] = {
    OpKind.ALL_TO_ALL_ROWS: exchange_rows,
    OpKind.FORWARD: forward,
    OpKind.BACKWARD: backward,
    OpKind.ALL_TO_ALL_GRADS: exchange_grads,
    OpKind.ALL_REDUCE: all_reduce,
    OpKind.UPDATE: update,
    OpKind.ALL_REDUCE_TABLES: average_replicas,
}
