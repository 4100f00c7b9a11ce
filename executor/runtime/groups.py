"""The ranks of a run: one process group per communicator stream, and the collectives that the ops call.

In debug mode every collective is preceded by an exchange of fingerprints on the same group: kind, stream, batch,
micro-batch, dtype, and the bytes to and from every peer. gloo swaps equal-sized messages without a word and aborts the
process on a size mismatch; a fingerprint that differs becomes an error that names both sides first.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from executor.process import keep_freed_memory
from executor.runtime.duplex import all_to_all_duplex
from executor.runtime.meeting import meet, number_from
from nestpipe.base import ExecutorError, unknown_name
from nestpipe.ir import Op, OpKind, Resource, group_of, group_ranks, op_name

__all__ = ["Communicator", "ProcessGroups", "join_world", "partition_of"]

_KINDS = tuple(OpKind)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)


@dataclass(slots=True)
class Communicator:
    """A stream's process group as one rank sees it: the global `ranks` of the group and this rank's `index` in it."""

    stream: str
    resource: Resource
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup
    backend: str
    device: torch.device
    debug: bool = False

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    def all_to_all(self, op: Op, out: Tensor, send: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
        """Send `sent[i]` leading elements of `send` to rank `i` of the group and receive `received[i]` from it."""
        if self.debug:
            self._compare(op, send.dtype, send.element_size(), sent, received)
        if self.backend == "gloo" and self.device.type == "cpu":
            all_to_all_duplex(self.handle, self.index, out, send, received, sent)
        else:
            dist.all_to_all_single(out, send, list(received), list(sent), group=self.handle)

    def all_reduce(self, op: Op, values: Tensor) -> None:
        """Replace `values` by their sum over the group."""
        if self.debug:
            self._compare(op, values.dtype, values.element_size(), [len(values)] * self.size, [len(values)] * self.size)
        dist.all_reduce(values, group=self.handle)

    def all_gather(self, op: Op, values: Tensor) -> list[Tensor]:
        """The tensors of all ranks of the group, of one shape, in group order."""
        if self.debug:
            self._compare(
                op, values.dtype, values.element_size(), [values.numel()] * self.size, [values.numel()] * self.size
            )
        parts = [torch.empty_like(values) for _ in self.ranks]
        dist.all_gather(parts, values, group=self.handle)
        return parts

    def _compare(self, op: Op, dtype: torch.dtype, width: int, sent: Sequence[int], received: Sequence[int]) -> None:
        micro_batch = -1 if op.micro_batch is None else op.micro_batch
        head = [_KINDS.index(op.kind), op.batch, micro_batch, _DTYPES.index(dtype)]
        values = [*head, *(n * width for n in sent), *(n * width for n in received)]
        mine = torch.tensor(values, device=self.device)
        parts = [torch.empty_like(mine) for _ in self.ranks]
        dist.all_gather(parts, mine, group=self.handle)
        theirs: list[list[int]] = [part.tolist() for part in parts]
        for rank, other in zip(self.ranks, theirs, strict=True):
            if other[:4] != head:
                raise ExecutorError(
                    f"ranks disagree about the next collective of stream {self.stream}: rank {self.ranks[self.index]} "
                    f"has {_spell(head)}, rank {rank} has {_spell(other)}; every rank of a group must issue the same "
                    "collectives in the same order"
                )
        # every rank looks at every pair, so that all of them fail together
        for source, target in itertools.product(range(self.size), repeat=2):
            outgoing, expected = theirs[source][4 + target], theirs[target][4 + self.size + source]
            if outgoing != expected:
                raise ExecutorError(
                    f"ranks disagree about the splits of {op_name(op)} on stream {self.stream}: rank "
                    f"{self.ranks[source]} sends {outgoing} bytes to rank {self.ranks[target]}, "
                    f"which expects {expected}"
                )


def _high_priority(backend: str) -> object | None:
    """NCCL kernels get a stream of high priority, so that compute does not hold them up."""
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def _connect(handle: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Let NCCL make its connections now, one group after the other on every rank.

    It would make them at the first collectives, which lanes start in any order; what it allocates meanwhile waits for
    all kernels on the device, also for those of another group that wait for a peer.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=handle)
    dist.all_to_all_single(torch.zeros(size, device=device), torch.zeros(size, device=device), group=handle)
    torch.cuda.synchronize(device)


def _spell(head: Sequence[int]) -> str:
    micro_batch = "" if head[2] < 0 else f".{head[2]}"
    return f"{_KINDS[head[0]]} {head[1]}{micro_batch} ({str(_DTYPES[head[3]]).removeprefix('torch.')})"


def partition_of(resource: Resource, world_size: int, domain_size: int) -> tuple[tuple[int, ...], ...]:
    """The groups that a resource cuts the ranks into.

    >>> partition_of(Resource.DOMAIN, 4, 2), partition_of(Resource.REPLICA, 4, 2)
    (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    """
    if resource is not Resource.WORLD and (domain_size < 1 or world_size % domain_size):
        raise ExecutorError(f"domain_size must divide the world size {world_size}, got {domain_size}")
    groups = dict.fromkeys(group_of(resource, rank, domain_size) for rank in range(world_size))
    return tuple(tuple(group_ranks(resource, group, world_size, domain_size)) for group in groups)


@dataclass(slots=True)
class ProcessGroups:
    """This process among its peers. Groups are made once per name and partition, by all ranks in the same order."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    timeout: timedelta
    address: tuple[str, int]
    prefix: str = "nestpipe"
    _groups: dict[tuple[str, tuple[tuple[int, ...], ...]], dist.ProcessGroup] = field(default_factory=dict)

    def communicator(self, stream: str, resource: Resource, domain_size: int, *, debug: bool = False) -> Communicator:
        """The group of a stream; a collective call, all ranks make it for the same streams in the same order."""
        partition = partition_of(resource, self.world_size, domain_size)
        key = (stream, partition)
        if key not in self._groups:
            for ranks in partition:
                handle = dist.new_group(
                    list(ranks),
                    timeout=self.timeout,
                    backend=self.backend,
                    pg_options=_high_priority(self.backend),
                    group_desc=stream,
                )
                if self.rank in ranks:
                    self._groups[key] = handle
                    if self.backend == "nccl":
                        _connect(handle, len(ranks), self.device)
        mine = next(ranks for ranks in partition if self.rank in ranks)
        return Communicator(
            stream=stream,
            resource=resource,
            ranks=mine,
            index=mine.index(self.rank),
            handle=self._groups[key],
            backend=self.backend,
            device=self.device,
            debug=debug,
        )

    def gather(self, value: object) -> list[Any]:
        """The values of all ranks on every rank, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks, on the host."""
        dist.all_reduce(torch.zeros(1))

    def leave(self) -> None:
        """Take the groups down, in step with all ranks."""
        self.barrier()
        self._groups.clear()
        dist.destroy_process_group()


def join_world(
    *,
    backend: str | None = None,
    device: str = "cpu",
    timeout_s: float = 1800.0,
    rendezvous_s: float = 60.0,
    threads: int | None = None,
    terms: Mapping[str, str] | None = None,
) -> ProcessGroups:
    """Meet the other ranks and make the group of all of them; see `meet`.

    The backend is gloo on CPU and NCCL on CUDA unless named. `threads` is for torch's CPU kernels, torch's own choice
    unless given. `terms` are what all ranks must have alike. Reads LOCAL_RANK on CUDA. Sets what malloc does with freed
    memory, for this process (`executor.process`).

    Raises:
        ExecutorError: if the backend is wrong, or the ranks do not meet.
    """
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    backend = backend or ("gloo" if device == "cpu" else "nccl")
    if backend not in dist.Backend.backend_list:
        raise ExecutorError(unknown_name("backend", backend, dist.Backend.backend_list))
    if backend == "nccl" and not dist.is_nccl_available():
        raise ExecutorError("backend nccl: this torch was built without it; use gloo, or install torch for CUDA")
    meeting = meet(wait_s=rendezvous_s, terms=terms or {})
    try:
        dist.init_process_group(
            backend if device == "cpu" else f"cpu:gloo,{device}:{backend}",
            store=PrefixStore(meeting.prefix, meeting.store),
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise ExecutorError(f"rank {meeting.rank}: the process group cannot be made: {error}") from None
    return ProcessGroups(
        rank=meeting.rank,
        world_size=meeting.world_size,
        device=torch.device(device, number_from("LOCAL_RANK", 0)) if device == "cuda" else torch.device(device),
        backend=backend,
        timeout=timedelta(seconds=timeout_s),
        address=meeting.address,
        prefix=meeting.prefix,
    )
