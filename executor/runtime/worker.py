"""Everything the ops of one rank share: its shard, model, optimisers, buffers and communicators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.data import Clustering, HostStore, Layout, MicroBatch, Source
from executor.models import DenseOptimizer, Model, SparseOptimizer
from executor.runtime.buffers import Buffers
from executor.runtime.groups import Communicator
from executor.runtime.numerics import Numerics
from nestpipe.base import ScheduleError
from nestpipe.ir import OpKind, Program

__all__ = ["Worker", "communicator_streams"]


@dataclass(slots=True, kw_only=True)
class Worker:
    """One rank at work on one program.

    `first_batch` is added to the program's batches (which start at 0) to get the data position and the optimiser step.
    `losses[batch]` and `terms[batch]` are this rank's sum of the loss and the global number of its terms, by data
    position. `on_predictions` gets the batch, the micro-batch and what the model predicts before it learns from it.
    """

    rank: int
    world_size: int
    num_domains: int
    device: torch.device
    layout: Layout
    store: HostStore
    model: Model
    sparse: SparseOptimizer
    dense: DenseOptimizer
    source: Source
    numerics: Numerics
    micro_batches: int
    cluster: Clustering | None = None
    comm_dtype: torch.dtype = torch.float32
    loss_scale: float = 1.0
    first_batch: int = 0
    buffers: Buffers = field(init=False)
    communicators: Mapping[OpKind, Communicator] = field(default_factory=dict)
    losses: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    terms: dict[int, int] = field(default_factory=dict)
    on_predictions: Callable[[int, MicroBatch, Tensor], None] | None = None
    feature_groups: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        tables = [self.layout.table_index(feature.table) for feature in self.model.features]
        self.feature_groups = tuple(self.layout.group_of[table] for table in tables)

    def communicator(self, kind: OpKind) -> Communicator:
        """The communicator of the stream that runs this kind."""
        return self.communicators[kind]

    @property
    def dims(self) -> list[int]:
        """Row width of each table group."""
        return [group.dim for group in self.layout.groups]


def communicator_streams(program: Program, kinds: frozenset[OpKind]) -> dict[OpKind, int]:
    """The stream that runs each collective kind.

    Raises:
        ScheduleError: if a kind runs on two streams; its buffers could not tell them apart.
    """
    found: dict[OpKind, int] = {}
    for index, stream in enumerate(program.streams):
        for kind in {op.kind for op in stream.ops} & kinds:
            if found.setdefault(kind, index) != index:
                raise ScheduleError(
                    f"{program.name}: {kind} runs on two streams; the executor needs one stream per kind"
                )
    return found
