"""The op kinds, one record each: what an op of the kind may touch, what it means for rows, and where its time goes.

Whatever depends on the kind of an op asks its record, `KINDS[kind]`. To add a kind, add it to `OpKind`, write its
record here, and give the executor a function for it; rules, checks, costs, metrics, figures and exports follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

__all__ = [
    "ALL_TO_ALLS",
    "CACHES",
    "COLLECTIVES",
    "COMPUTE",
    "KINDS",
    "LOOKUP_PATH",
    "MICRO_DATA",
    "STATES",
    "Cost",
    "Data",
    "Kind",
    "Meaning",
    "OpKind",
    "StepPart",
    "kinds_of",
]


class OpKind(StrEnum):
    """What an op does; the value is exactly what the text prints."""

    READ = "read"
    COPY_H2D = "copy_h2d"
    DEDUP = "dedup"
    ALL_TO_ALL_KEYS = "all_to_all[keys]"
    LOOKUP = "lookup"
    SYNC = "sync"
    ALL_TO_ALL_ROWS = "all_to_all[rows]"
    FORWARD = "forward"
    BACKWARD = "backward"
    ALL_TO_ALL_GRADS = "all_to_all[grads]"
    ALL_REDUCE = "all_reduce"
    ALL_REDUCE_TABLES = "all_reduce[tables]"
    UPDATE = "update"
    WRITE_BACK = "write_back"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    SEND = "send"
    RECV = "recv"
    WAIT = "wait"


class Data(StrEnum):
    """What ops read and write: three states and the buffers of a batch or micro-batch."""

    TABLE = "table"
    OPTIMIZER = "optimizer"
    DENSE = "dense"
    SAMPLES = "samples"
    BATCH = "batch"
    KEYS = "keys"
    OWNED = "owned"
    ROWS = "rows"
    MOMENTS = "moments"
    EMBEDDINGS = "embeddings"
    ACTIVATIONS = "activations"
    ACTIVATION_GRADS = "activation_grads"
    ROW_GRADS = "row_grads"
    OWNED_GRADS = "owned_grads"
    DENSE_GRADS = "dense_grads"


STATES: Final = frozenset({Data.TABLE, Data.OPTIMIZER, Data.DENSE})
#: Data that are held per micro-batch.
MICRO_DATA: Final = frozenset({Data.EMBEDDINGS, Data.ACTIVATIONS, Data.ACTIVATION_GRADS, Data.ROW_GRADS})
#: The buffer that holds rows of a state for the keys of a batch.
CACHES: Final = {Data.TABLE: Data.ROWS, Data.OPTIMIZER: Data.MOMENTS}


class Meaning(StrEnum):
    """What an op does to the versions of rows and parameters; what the proofs of staleness rest on."""

    NOTHING = "leaves versions alone"
    COPY = "copies rows from a state into the buffer that caches it"
    SYNC = "copies rows that two batches share from the earlier batch's buffer"
    SERVE = "sends rows to those who asked for them"
    USE = "computes with the rows and parameters it reads"
    REDUCE = "sums dense gradients over ranks"
    APPLY = "applies the gradients of a batch"
    STORE = "copies buffered rows into the states"
    EXTEND = "extends the owned keys to those of all replicas, or a shard of gradients to the whole"
    AVERAGE = "averages rows over the replicas"


class Cost(StrEnum):
    """What an op asks of the hardware; of a collective the value is its name."""

    NOTHING = "nothing"
    HOST_MEMORY = "host memory traffic"
    HOST_TO_DEVICE = "a copy from host to device"
    DEVICE_TO_HOST = "a copy from device to host"
    ROWS_TO_DEVICE = "random rows of host memory, copied to the device"
    ROWS_TO_HOST = "rows copied from the device to random places in host memory"
    DEVICE_COPY = "a copy in device memory"
    DEVICE_MEMORY = "device memory traffic"
    ARITHMETIC = "arithmetic and device memory traffic"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    MESSAGE = "a message between two ranks"


class StepPart(StrEnum):
    """Where the time of a step goes while an op of the kind runs and nothing that comes first does."""

    COMPUTE = "compute"
    ROUTING = "routing on the compute stream"
    EMBEDDINGS = "embedding communication, for which compute waits"
    DENSE = "dense communication, for which compute waits"
    LOOKUP = "the lookup path, which should hide behind compute"
    OTHER = "counted as bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What there is to know of an op kind.

    Attributes:
        per_micro_batch: whether it runs for each micro-batch or once per batch; None where it may do either.
        reads, writes: the data that it may touch.
        needs: for each data that it writes, what it must read to do so. Not optimiser state: whether that travels is
            for the versions to say.
        uses: what it works with wherever the schedule has it, so that it must say that it reads it.
        in_place: it changes an instance that another op has written, instead of writing a new one over the slot.
        any_stream: it may run on a stream of its own rank as well as on that of a group.
        meaning: what it does to versions.
        cost: what it asks of the hardware.
        sized_like: the kind that moves as many bytes, for workloads that do not give a size of its own.
        part: where its time goes.
        precedence: of parts that run at once the one with the lowest number counts, within its `StepPart`.
        counted_as: the kind under whose name its exposed time is reported, if not its own.
    """

    per_micro_batch: bool | None = None
    reads: frozenset[Data] = frozenset()
    writes: frozenset[Data] = frozenset()
    needs: Mapping[Data, tuple[Data, ...]] = field(default_factory=dict)
    uses: frozenset[Data] = frozenset()
    in_place: bool = False
    any_stream: bool = False
    meaning: Meaning = Meaning.NOTHING
    cost: Cost
    sized_like: OpKind | None = None
    part: StepPart = StepPart.OTHER
    precedence: int = 0
    counted_as: OpKind | None = None

    @property
    def collective(self) -> bool:
        """Whether the ranks of a group meet in it."""
        return self.cost in (Cost.ALL_TO_ALL, Cost.ALL_REDUCE, Cost.REDUCE_SCATTER, Cost.ALL_GATHER)


def _of(*data: Data) -> frozenset[Data]:
    return frozenset(data)


_ROWS: Final = _of(Data.ROWS, Data.MOMENTS)
_SPARSE: Final = _of(Data.TABLE, Data.OPTIMIZER)
_LISTS: Final = _of(Data.KEYS, Data.OWNED)

KINDS: Final[Mapping[OpKind, Kind]] = {
    OpKind.READ: Kind(
        per_micro_batch=False,
        writes=_of(Data.SAMPLES),
        cost=Cost.HOST_MEMORY,
        part=StepPart.LOOKUP,
        precedence=6,
    ),
    OpKind.COPY_H2D: Kind(
        per_micro_batch=False,
        reads=_of(Data.SAMPLES),
        writes=_of(Data.BATCH),
        needs={Data.BATCH: (Data.SAMPLES,)},
        cost=Cost.HOST_TO_DEVICE,
        part=StepPart.LOOKUP,
        precedence=5,
    ),
    OpKind.DEDUP: Kind(
        per_micro_batch=True,
        reads=_of(Data.BATCH),
        writes=_of(Data.KEYS),
        needs={Data.KEYS: (Data.BATCH,)},
        cost=Cost.DEVICE_MEMORY,
        part=StepPart.ROUTING,
    ),
    OpKind.ALL_TO_ALL_KEYS: Kind(
        per_micro_batch=False,
        reads=_of(Data.KEYS),
        writes=_of(Data.OWNED),
        needs={Data.OWNED: (Data.KEYS,)},
        cost=Cost.ALL_TO_ALL,
        part=StepPart.LOOKUP,
        precedence=3,
    ),
    OpKind.LOOKUP: Kind(
        per_micro_batch=False,
        reads=_LISTS | _SPARSE,
        writes=_ROWS,
        needs={Data.ROWS: (Data.OWNED, Data.TABLE)},
        meaning=Meaning.COPY,
        cost=Cost.ROWS_TO_DEVICE,
        part=StepPart.LOOKUP,
        precedence=2,
    ),
    OpKind.SYNC: Kind(
        per_micro_batch=False,
        reads=_LISTS | _ROWS,
        writes=_ROWS,
        in_place=True,
        meaning=Meaning.SYNC,
        cost=Cost.DEVICE_COPY,
        part=StepPart.LOOKUP,
        precedence=1,
    ),
    OpKind.ALL_TO_ALL_ROWS: Kind(
        per_micro_batch=True,
        reads=_LISTS | {Data.ROWS},
        writes=_of(Data.EMBEDDINGS),
        needs={Data.EMBEDDINGS: (Data.OWNED, Data.ROWS)},
        meaning=Meaning.SERVE,
        cost=Cost.ALL_TO_ALL,
        part=StepPart.EMBEDDINGS,
    ),
    OpKind.FORWARD: Kind(
        per_micro_batch=True,
        reads=_of(Data.BATCH, Data.KEYS, Data.EMBEDDINGS, Data.ACTIVATIONS, Data.DENSE),
        writes=_of(Data.ACTIVATIONS),
        needs={Data.ACTIVATIONS: (Data.EMBEDDINGS,)},
        uses=_of(Data.BATCH, Data.KEYS, Data.DENSE),
        meaning=Meaning.USE,
        cost=Cost.ARITHMETIC,
        part=StepPart.COMPUTE,
    ),
    OpKind.BACKWARD: Kind(
        per_micro_batch=True,
        reads=_of(Data.BATCH, Data.KEYS, Data.EMBEDDINGS, Data.ACTIVATIONS, Data.ACTIVATION_GRADS, Data.DENSE),
        writes=_of(Data.ROW_GRADS, Data.ACTIVATION_GRADS, Data.DENSE_GRADS),
        needs={Data.ROW_GRADS: (Data.ACTIVATIONS,), Data.DENSE_GRADS: (Data.ACTIVATIONS,)},
        uses=_of(Data.KEYS, Data.DENSE),
        meaning=Meaning.USE,
        cost=Cost.ARITHMETIC,
        part=StepPart.COMPUTE,
    ),
    OpKind.ALL_TO_ALL_GRADS: Kind(
        per_micro_batch=True,
        reads=_LISTS | {Data.ROW_GRADS},
        writes=_of(Data.OWNED_GRADS),
        needs={Data.OWNED_GRADS: (Data.ROW_GRADS,)},
        cost=Cost.ALL_TO_ALL,
        part=StepPart.EMBEDDINGS,
        precedence=1,
    ),
    OpKind.ALL_REDUCE: Kind(
        reads=_of(Data.DENSE_GRADS),
        writes=_of(Data.DENSE_GRADS),
        needs={Data.DENSE_GRADS: (Data.DENSE_GRADS,)},
        in_place=True,
        meaning=Meaning.REDUCE,
        cost=Cost.ALL_REDUCE,
        part=StepPart.DENSE,
        precedence=2,
    ),
    OpKind.ALL_REDUCE_TABLES: Kind(
        per_micro_batch=False,
        reads=_LISTS | _ROWS,
        writes=_ROWS,
        needs={Data.ROWS: (Data.OWNED, Data.ROWS)},
        in_place=True,
        meaning=Meaning.AVERAGE,
        cost=Cost.ALL_REDUCE,
        sized_like=OpKind.WRITE_BACK,
        part=StepPart.EMBEDDINGS,
        precedence=3,
    ),
    OpKind.UPDATE: Kind(
        reads=_LISTS | _ROWS | _SPARSE | {Data.OWNED_GRADS, Data.DENSE_GRADS, Data.DENSE},
        writes=_ROWS | _SPARSE | {Data.DENSE},
        needs={
            Data.ROWS: (Data.OWNED, Data.OWNED_GRADS, Data.ROWS),
            Data.TABLE: (Data.OWNED, Data.OWNED_GRADS, Data.TABLE),
            Data.DENSE: (Data.DENSE_GRADS, Data.DENSE),
        },
        in_place=True,
        meaning=Meaning.APPLY,
        cost=Cost.DEVICE_MEMORY,
        part=StepPart.COMPUTE,
    ),
    OpKind.WRITE_BACK: Kind(
        reads=_LISTS | _ROWS | _SPARSE | {Data.OWNED_GRADS},
        writes=_SPARSE,
        needs={Data.TABLE: (Data.OWNED,)},
        meaning=Meaning.STORE,
        cost=Cost.ROWS_TO_HOST,
        part=StepPart.LOOKUP,
        precedence=7,
    ),
    OpKind.ALL_GATHER: Kind(
        per_micro_batch=False,
        reads=_of(Data.OWNED, Data.DENSE_GRADS),
        writes=_of(Data.OWNED, Data.DENSE_GRADS),
        needs={Data.OWNED: (Data.OWNED,), Data.DENSE_GRADS: (Data.DENSE_GRADS,)},
        in_place=True,
        meaning=Meaning.EXTEND,
        cost=Cost.ALL_GATHER,
        sized_like=OpKind.ALL_TO_ALL_KEYS,
        part=StepPart.LOOKUP,
        precedence=4,
    ),
    OpKind.REDUCE_SCATTER: Kind(
        reads=_of(Data.DENSE_GRADS),
        writes=_of(Data.DENSE_GRADS),
        needs={Data.DENSE_GRADS: (Data.DENSE_GRADS,)},
        in_place=True,
        meaning=Meaning.REDUCE,
        cost=Cost.REDUCE_SCATTER,
        part=StepPart.DENSE,
        counted_as=OpKind.ALL_REDUCE,
    ),
    OpKind.SEND: Kind(reads=MICRO_DATA, any_stream=True, cost=Cost.MESSAGE),
    OpKind.RECV: Kind(writes=MICRO_DATA, any_stream=True, cost=Cost.MESSAGE),
    OpKind.WAIT: Kind(any_stream=True, cost=Cost.NOTHING),
}


def kinds_of(*properties: Cost | StepPart | Meaning) -> frozenset[OpKind]:
    """The kinds with any of these costs, parts of the step, or meanings.

    >>> sorted(kinds_of(Meaning.COPY, StepPart.ROUTING))
    [<OpKind.DEDUP: 'dedup'>, <OpKind.LOOKUP: 'lookup'>]
    """
    return frozenset(kind for kind, of in KINDS.items() if {of.cost, of.part, of.meaning} & {*properties})


COLLECTIVES: Final = frozenset(kind for kind, of in KINDS.items() if of.collective)
ALL_TO_ALLS: Final = kinds_of(Cost.ALL_TO_ALL)
COMPUTE: Final = kinds_of(StepPart.COMPUTE)
LOOKUP_PATH: Final = kinds_of(StepPart.ROUTING, StepPart.LOOKUP)
