"""The buffers of a schedule as real memory: `slots` physical copies each, instance `i` in slot `i` modulo `slots`.

A schedule that overwrites a live instance therefore really corrupts it. The debug mode turns such a mistake into an
error or into NaN: every read checks that the slot still holds the instance it wants, and a buffer is poisoned as soon
as the last op that uses it has finished.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from executor.runtime.cursor import touched
from nestpipe.base import ExecutorError, ScheduleError
from nestpipe.checks import instance_of
from nestpipe.ir import Access, Buffer, Data, Op, Place

__all__ = ["Buffers", "Slot"]


@dataclass(slots=True)
class Slot:
    """One physical copy: named memory that is reused, and the value that the current instance has put into it.

    `loose` are the tensors of the value that are not in the memory.
    """

    device: torch.device
    pinned: bool
    instance: int | None = None
    value: Any = None
    loose: tuple[Tensor, ...] = ()
    memory: dict[str, Tensor] = field(default_factory=dict)
    value_bytes_max: int = 0

    def begin(self, instance: int | None) -> None:
        """Forget the value: the slot belongs to this instance now."""
        self.instance, self.value, self.loose = instance, None, ()

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory of this slot as a tensor of the given shape; grows when it must, never shrinks."""
        size = math.prod(shape)
        held = self.memory.get(name)
        if held is None or held.dtype != dtype or held.numel() < size:
            held = torch.empty(max(size, 1), dtype=dtype, device=self.device, pin_memory=self.pinned)
            self.memory[name] = held
        return held[:size].view(shape)

    def keep(self, value: Any, *tensors: Tensor) -> None:
        """Put a value into the slot that is made of tensors outside its memory, and count them."""
        self.value, self.loose = value, tensors
        self.value_bytes_max = max(self.value_bytes_max, sum(part.numel() * part.element_size() for part in tensors))

    def poison(self) -> None:
        """Fill the memory with NaN, or with the lowest integer, so that a late read is noticed."""
        for held in self.memory.values():
            held.fill_(math.nan if held.dtype.is_floating_point else torch.iinfo(held.dtype).min)

    @property
    def size_bytes(self) -> int:
        """Bytes of the memory, and of the largest value so far that was not put into it."""
        return sum(held.numel() * held.element_size() for held in self.memory.values()) + self.value_bytes_max


class Buffers:
    """All buffers of one rank.

    Args:
        declared: the schedule's buffers.
        micro_batches: of the schedule; numbers the instances of per-micro-batch buffers.
        device: where `device` buffers live; `host` buffers are pinned if it is CUDA.
        uses: with it the debug mode is on: how many ops use each instance.
    """

    def __init__(
        self,
        declared: tuple[Buffer, ...],
        micro_batches: int,
        device: torch.device,
        uses: Mapping[tuple[Data, int], int] | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self.debug = uses is not None
        self._on_cuda = device.type == "cuda"
        self._left = dict(uses or {})
        self._lock = threading.Lock()
        host = torch.device("cpu")
        self._slots = {
            buffer.data: [
                Slot(
                    device=device if buffer.place == Place.DEVICE else host,
                    pinned=buffer.place == Place.HOST and device.type == "cuda",
                )
                for _ in range(buffer.slots)
            ]
            for buffer in declared
        }

    def claim(self, data: Data, op: Op) -> Slot:
        """The slot of the op's own instance, to write to; its value is None if this op is the first to write."""
        instance = self._own(data, op)
        slot = self._slot(data, instance)
        if slot.instance != instance:
            slot.begin(instance)
        return slot

    def get(self, data: Data, op: Op, batch: int | None = None) -> Any:
        """The value of the op's own instance, or of another batch's, as it is in the slot now.

        Raises:
            ExecutorError: if nothing has been written there, or, in debug mode, if the slot holds another instance.
        """
        instance = self._own(data, op) if batch is None else batch
        slot = self._slot(data, instance)
        if slot.value is None or (self.debug and slot.instance != instance):
            holds = "nothing" if slot.value is None else f"instance {slot.instance}"
            raise ExecutorError(
                f"buffer {data}: its slot holds {holds}, instance {instance} was wanted; "
                "the schedule lets an op read before the write or after the next one"
            )
        if self._on_cuda:
            # their memory goes back to the stream that made them, which need not have waited for this one
            for tensor in slot.loose:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
        return slot.value

    def release(self, op: Op) -> None:
        """Debug mode: poison every instance of which `op` was the last user."""
        if not self.debug:
            return
        with self._lock:
            for use in touched(op, self.micro_batches):
                self._left[use] -= 1
                slot = self._slot(*use)
                if not self._left[use] and slot.instance == use[1]:
                    if self._on_cuda:
                        # other streams have been told to read it, but may not have done so yet
                        torch.cuda.synchronize()
                    slot.poison()
                    slot.begin(None)

    def declares(self, data: Data) -> bool:
        """Whether the schedule has this buffer."""
        return data in self._slots

    def size_bytes(self) -> dict[str, int]:
        """Bytes held by each buffer, all slots together, at most so far."""
        return {str(data): sum(slot.size_bytes for slot in slots) for data, slots in self._slots.items()}

    def _own(self, data: Data, op: Op) -> int:
        return instance_of(Access(data=data, batch=op.batch, micro_batch=op.micro_batch), self.micro_batches)

    def _slot(self, data: Data, instance: int) -> Slot:
        slots = self._slots.get(data)
        if slots is None:
            raise ScheduleError(f"the schedule has no buffer {data}; add 'buffer {data} device slots=1'")
        return slots[instance % len(slots)]
