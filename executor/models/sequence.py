"""Generative recommenders on item sequences, in plain torch: HSTU and FuXi-α blocks under one next-item loss.

A sample is a history of items and some sampled negatives; every position predicts the item after it against the
negatives. Items and negatives are looked up in one table, so the output embeddings are sparse too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.data import Feature, MicroBatch, TableSpec
from executor.models.dlrm import Model
from executor.models.lookups import Lookups

__all__ = ["FuXiBlock", "HSTUBlock", "SequenceModel", "pad_rows"]


def pad_rows(rows: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Jagged rows as (samples, longest, dim), zeros behind each sample's end.

    Args:
        rows: float (lookups, dim), ordered by sample.
        lengths: int64 (samples,), each at most `longest`.
        longest: the padded length.
    """
    num_samples, dim = len(lengths), rows.shape[1]
    starts = torch.arange(num_samples, device=rows.device) * longest - (lengths.cumsum(0) - lengths)
    positions = torch.arange(len(rows), device=rows.device) + starts.repeat_interleave(lengths, output_size=len(rows))
    return rows.new_zeros(num_samples * longest, dim).index_copy(0, positions, rows).view(num_samples, longest, dim)


class _Attention(nn.Module):
    """What both blocks share: head split, causal mask and a learned bias per head and distance."""

    def __init__(self, width: int, heads: int, max_length: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} must be a multiple of the {heads} heads")
        self.heads, self.max_length = heads, max_length
        self.bias = nn.Parameter(torch.zeros(heads, max_length))

    def split(self, values: Tensor) -> Tensor:
        """(samples, length, width) to (samples, heads, length, width / heads)."""
        samples, length, width = values.shape
        return values.view(samples, length, self.heads, width // self.heads).transpose(1, 2)

    def positional(self, length: int) -> tuple[Tensor, Tensor]:
        """The bias of each pair, (heads, length, length), and the causal mask, (length, length)."""
        index = torch.arange(length, device=self.bias.device)
        distance = index[:, None] - index[None, :]
        return self.bias[:, distance.clamp(min=0)], distance >= 0


class HSTUBlock(_Attention):
    """Pointwise aggregated attention with SiLU instead of softmax, gated by U.

    Source: Zhai et al., arXiv 2402.17152, equations 1 to 3; the relative bias is positional (no timestamps).
    """

    def __init__(self, width: int, heads: int, max_length: int) -> None:
        super().__init__(width, heads, max_length)
        self.norm_in, self.norm_out = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 4 * width), nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """(samples, length, width) to the same shape."""
        gate, values, queries, keys = functional.silu(self.inputs(self.norm_in(states))).chunk(4, dim=2)
        bias, mask = self.positional(states.shape[1])
        scores = self.split(queries) @ self.split(keys).transpose(2, 3) + bias
        weights = functional.silu(scores) * mask / self.max_length
        mixed = (weights @ self.split(values)).transpose(1, 2).reshape(states.shape)
        result: Tensor = states + self.output(self.norm_out(mixed) * gate)
        return result


class FuXiBlock(_Attention):
    """Adaptive multi-channel attention, semantic and positional, then a gated feed-forward network.

    Source: Ye et al., FuXi-α, arXiv 2502.03036, section 3. Its temporal channel needs timestamps, which our samples do
    not carry, and is left out.
    """

    def __init__(self, width: int, heads: int, max_length: int) -> None:
        super().__init__(width, heads, max_length)
        self.norm_in, self.norm_mixed, self.norm_ffn = nn.RMSNorm(width), nn.RMSNorm(2 * width), nn.RMSNorm(width)
        self.inputs, self.gate = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(2 * width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """(samples, length, width) to the same shape."""
        normed = self.norm_in(states)
        queries, keys, values = (self.split(part) for part in functional.silu(self.inputs(normed)).chunk(3, dim=2))
        bias, mask = self.positional(states.shape[1])
        semantic = functional.silu(queries @ keys.transpose(2, 3)) * mask / self.max_length
        channels = [weights @ values for weights in (semantic, (bias * mask).unsqueeze(0))]
        mixed = torch.cat([channel.transpose(1, 2).reshape(states.shape) for channel in channels], dim=2)
        states = states + self.output(self.norm_mixed(mixed) * functional.silu(self.gate(normed)))
        activated, linear = self.up(self.norm_ffn(states)).chunk(2, dim=2)
        result: Tensor = states + self.down(functional.silu(activated) * linear)
        return result


class SequenceModel(Model):
    """Blocks of one kind on embedded histories, trained by sampled softmax at every position.

    Args:
        block: `HSTUBlock` or `FuXiBlock`.
        table: the item table; its width is the model's.
        layers: number of blocks.
        heads: attention heads.
        max_length: longest history, target included.
        num_negatives: per sample.
    """

    def __init__(
        self,
        block: type[HSTUBlock] | type[FuXiBlock],
        table: TableSpec,
        *,
        layers: int = 2,
        heads: int = 2,
        max_length: int = 50,
        num_negatives: int = 32,
    ) -> None:
        super().__init__()
        self.tables = (table,)
        self.features = (Feature(name="items", table=table.name), Feature(name="negatives", table=table.name))
        self.num_negatives, self.max_length = num_negatives, max_length
        self.position = nn.Embedding(max_length, table.dim)
        self.blocks = nn.ModuleList([block(table.dim, heads, max_length) for _ in range(layers)])
        self.norm = nn.LayerNorm(table.dim)

    def encode(self, items: Tensor) -> Tensor:
        """States after each position: (samples, length, dim) from embedded items of the same shape."""
        states: Tensor = items + self.position.weight[: items.shape[1]]
        for block in self.blocks:
            states = block(states)
        normed: Tensor = self.norm(states)
        return normed

    def loss(self, lookups: Lookups, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        lengths = batch.lengths[0]
        items = pad_rows(lookups.rows(0), lengths, int(lengths.max()))
        states, targets = self.encode(items[:, :-1]), items[:, 1:]
        negatives = lookups.rows(1).view(len(lengths), self.num_negatives, -1)
        positive = (states * targets).sum(dim=2, keepdim=True)
        logits = torch.cat([positive, states @ negatives.transpose(1, 2)], dim=2)
        present = torch.arange(targets.shape[1], device=items.device) < (lengths - 1)[:, None]
        kept = logits[present]
        zeros = torch.zeros(len(kept), dtype=torch.int64, device=items.device)
        return functional.cross_entropy(kept, zeros, reduction="sum"), kept


def next_item_scores(model: SequenceModel, table: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
    """The score of every item as the next one of each history: float32 (histories, items).

    Args:
        model: trained dense parameters.
        table: float32 (items, dim).
        histories: item lists, oldest first, none empty; only the last `max_length` - 1 items are used.
    """
    recent = [list(history)[-(model.max_length - 1) :] for history in histories]
    lengths = torch.tensor([len(history) for history in recent])
    rows = table[torch.tensor([item for history in recent for item in history])]
    with torch.no_grad():
        states = model.encode(pad_rows(rows, lengths, int(lengths.max())))
        return states[torch.arange(len(recent)), lengths - 1] @ table.T
