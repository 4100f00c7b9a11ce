"""What a host range says about the device work launched inside it: annotations and op names to op kinds.

The innermost range with a meaning decides. Rules follow TorchRec's pipeline annotations (`## sparse_data_dist ##`,
`## forward ##`, ...), FBGEMM's embedding ops and PyTorch's autograd and optimizer ranges.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nestpipe.ir import COLLECTIVES, OpKind

__all__ = [
    "KIND_OF_COLLECTIVE",
    "UNCLASSIFIED",
    "Phase",
    "collective_of",
    "is_backend_range",
    "kernel_collective",
    "kind_name",
    "kind_of_collective",
    "known_collective",
    "phase_of",
    "step_of",
]

UNCLASSIFIED = "unclassified"


class Phase(NamedTuple):
    """What work inside a range is: an op kind, or none with the reason; whether the range is a pipeline stage.

    `stage` is set for annotations that span a stage on the main thread; they also cover what other threads (autograd's)
    launch meanwhile.
    """

    kind: OpKind | None
    reason: str
    stage: str | None


def _phase(kind: OpKind | None, reason: str = "", stage: str | None = None) -> Phase:
    return Phase(kind, reason, stage)


_RULES: tuple[tuple[re.Pattern[str], Phase], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (r"^## (copy_batch_to_gpu|load_batch|copy_batch_to_device)\b", _phase(OpKind.COPY_H2D, "", "copy_h2d")),
        (r"^## (start_|wait_)?sparse_data_dist\b", _phase(OpKind.DEDUP, "", "dedup")),
        (
            r"^## (all2all_data|all2all_tw_data|all2all_id|KJT|SplitsAllToAll|permute_id_|permute_sparse)",
            _phase(OpKind.DEDUP),
        ),
        (r"^## (input_dist|bucketize)", _phase(OpKind.DEDUP)),
        (
            r"^fbgemm::(permute_(1D|2D)?_?sparse|block_bucketize|asynchronous_complete_cumsum|jagged_unique)",
            _phase(OpKind.DEDUP),
        ),
        (r"CppNode<(fbgemm_gpu::)?Split(NoBag)?LookupFunction_Dense", _phase(OpKind.BACKWARD)),
        # FBGEMM's table-batched embeddings apply the optimiser inside their backward
        (r"CppNode<.*(Split|SSD)\w*LookupFunction_\w+", _phase(OpKind.UPDATE)),
        (r"^(fbgemm::)?split_embedding_backward", _phase(OpKind.UPDATE)),
        (r"^(fbgemm::)?(split|dense|ssd)_embedding\w*_lookup|^fbgemm::.*embedding.*lookup", _phase(OpKind.LOOKUP)),
        (r"^aten::(_?embedding_bag(_forward_only)?|embedding)$", _phase(OpKind.LOOKUP)),
        (r"^## .*(sparse_arch|embedding_lookup|tbe_lookup|EmbeddingBagCollection\.forward)", _phase(OpKind.LOOKUP)),
        (r"^(## zero_grad|## optimizer)", _phase(OpKind.UPDATE, "", "update")),
        (r"^Optimizer\.(step|zero_grad)#", _phase(OpKind.UPDATE)),
        (r"^autograd::engine::evaluate_function", _phase(OpKind.BACKWARD)),
        (r"^## backward\b", _phase(OpKind.BACKWARD, "", "backward")),
        (r"^## forward\b", _phase(OpKind.FORWARD, "", "forward")),
        (
            r"^(DistributedDataParallel|FullyShardedDataParallel|DistributedModelParallel)\.forward$",
            _phase(OpKind.FORWARD),
        ),
        (r"^## (metrics|publish)", _phase(None, "launched by metrics, which no op kind stands for", "metrics")),
    )
)

# what `traces.formats.export_kineto` writes around the launch of an op
_OWN = re.compile(r"^## nestpipe:(.+) ##$")
_KINDS = frozenset(kind.value for kind in OpKind)
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_BACKEND = re.compile(r"^(nccl|rccl|hccl|xccl|oneccl|ucc):", re.IGNORECASE)
# by library: NCCL and those named after it, oneCCL, HCCL's tasks, DeepEP, MSCCL++, NVSHMEM; vLLM's and PyTorch's own
_COMM_KERNEL = re.compile(
    r"nccl|rccl|hccl|\bhcom_|oneccl|(?:deep_ep|\bep)::|mscclpp|nvshmem|cross_device_reduce"
    r"|(?:one|two)_shot_all_?reduce|multimem_(?:one_shot_)?(?:all_?reduce|all_?gather|reduce_scatter)",
    re.IGNORECASE,
)
# of expert parallelism (DeepEP): tokens to their experts and back
_EXPERT = re.compile(r"\b(dispatch|combine|notify_dispatch|cached_notify\w*)\b")

# the first that matches names the collective
_COLLECTIVES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"all[_-]?to[_-]?all", "all_to_all"),
        (r"all[_-]?reduce", "all_reduce"),
        (r"all[_-]?gather", "all_gather"),
        (r"reduce[_-]?scatter", "reduce_scatter"),
        (r"broadcast|bcast", "broadcast"),
        (r"send[_-]?recv", "send_recv"),
        (r"barrier", "barrier"),
        (r"coalesced", "coalesced"),
        (r"reduce", "reduce"),
        (r"gather", "gather"),
        (r"scatter", "scatter"),
        (r"recv", "recv"),
        (r"send", "send"),
    )
)

KIND_OF_COLLECTIVE = {
    "all_reduce": OpKind.ALL_REDUCE,
    "all_gather": OpKind.ALL_GATHER,
    "reduce_scatter": OpKind.REDUCE_SCATTER,
    "send": OpKind.SEND,
    "recv": OpKind.RECV,
}


def phase_of(name: str) -> Phase | None:
    """The meaning of a host range of this name; `None` if it has none.

    >>> phase_of("## sparse_data_dist ##").kind
    <OpKind.DEDUP: 'dedup'>
    >>> phase_of("aten::add") is None
    True
    """
    if own := _OWN.match(name):
        if own[1] == UNCLASSIFIED:
            return _phase(None, "not classified by the import that this trace was exported from")
        return _phase(OpKind(own[1])) if own[1] in _KINDS else None
    return next((phase for pattern, phase in _RULES if pattern.search(name)), None)


def step_of(name: str) -> int | None:
    """The step of a profiler range; `None` for another name.

    >>> step_of("ProfilerStep#10"), step_of("ProfilerStep*")
    (10, None)
    """
    found = _STEP.match(name)
    return int(found[1]) if found and len(found[1]) < 18 else None


def is_backend_range(name: str) -> bool:
    """Whether a host range stands for one collective of a device backend (`nccl:all_reduce`)."""
    return _BACKEND.match(name) is not None


def collective_of(name: str) -> str:
    """The usual spelling of a collective; an unknown one stays as it is.

    >>> [collective_of(name) for name in ("nccl:_all_gather_base", "all_to_allv", "allreduce", "nccl:send 0->1")]
    ['all_gather', 'all_to_all', 'all_reduce', 'send']
    """
    bare = _BACKEND.sub("", name.strip()).lower()
    return known_collective(bare) or bare


def known_collective(text: str) -> str | None:
    """The first collective that a text in lower case names; `None` where it names none."""
    return next((known for pattern, known in _COLLECTIVES if pattern.search(text)), None)


def kernel_collective(name: str) -> str | None:
    """The collective that the name of a communication kernel states; `None` for any other kernel.

    `SendRecv` is all-to-all in all but point-to-point code; `Generic` (RCCL) could be anything.

    >>> kernel_collective("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"), kernel_collective("sgemm")
    ('all_to_all', None)
    """
    if not _COMM_KERNEL.search(name):
        return None
    head = name.split("(", 1)[0].lower()
    if "sendrecv" in head or _EXPERT.search(head):
        return "all_to_all"
    if "cross_device_reduce" in head:
        return "all_reduce"
    return known_collective(head) or "unknown"


def kind_of_collective(collective: str, phase: Phase | None, integers: bool | None) -> tuple[OpKind | None, str]:
    """The op kind of a collective launched in this phase, or none and the reason.

    Keys travel as integers or within the key path (their weights are floats), rows go forward and gradients backward.
    """
    if phase is not None and phase.kind in COLLECTIVES:
        return phase.kind, ""
    if collective != "all_to_all":
        kind = KIND_OF_COLLECTIVE.get(collective)
        return kind, "" if kind is not None else f"collective {collective} has no op kind"
    if integers or (phase is not None and phase.kind is OpKind.DEDUP):
        return OpKind.ALL_TO_ALL_KEYS, ""
    if phase is None:
        return None, "all_to_all outside any annotated stage: rows or gradients"
    backward = phase.kind in (OpKind.BACKWARD, OpKind.UPDATE)
    return OpKind.ALL_TO_ALL_GRADS if backward else OpKind.ALL_TO_ALL_ROWS, ""


def kind_name(kind: OpKind | None) -> str:
    """The `kind` of a row of the trace table."""
    return UNCLASSIFIED if kind is None else kind.value
