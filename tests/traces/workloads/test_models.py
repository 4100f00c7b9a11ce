"""Model arithmetic equals torch's own FLOP counter, and synthetic traces are rooflines of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nestpipe.base.errors import TraceError
from nestpipe.base.units import NS_PER_S
from nestpipe.ir import OpKind
from traces.keys.clustering import cluster_stream
from traces.keys.generate import criteo_like, generate_stream
from traces.keys.sets import micro_batch_duplication
from traces.keys.stats import key_statistics
from traces.table import make_table
from traces.workloads.models import PRESETS, WorkloadModel, dlrm, fuxi_alpha, hstu, preset
from traces.workloads.synthesis import SYNTHETIC_COLUMNS, AcceleratorRates, key_counts, synthesise

RATES = AcceleratorRates(
    flops_per_s=100e12,
    memory_bandwidth_bytes_per_s=2e12,
    h2d_bandwidth_bytes_per_s=25e9,
    host_read_bandwidth_bytes_per_s=1e9,
    host_memory_bandwidth_bytes_per_s=10e9,
    network_bandwidth_bytes_per_s=25e9,
    network_latency_ns=20_000,
)


def counted(model: Any, inputs: Any) -> tuple[int, int]:
    """Forward and backward FLOPs as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        out = model(inputs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def sequence_blocks(kind: str, layers: int, dim: int, heads: int, width: int, hidden: int) -> Any:
    """HSTU or FuXi-alpha blocks in plain torch, from the papers' equations."""
    import torch
    from torch import nn
    from torch.nn import functional

    inner = heads * width

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            fuxi = kind == "fuxi_alpha"
            self.project = nn.Linear(dim, (3 if fuxi else 4) * inner, bias=False)
            self.out = nn.Linear((3 if fuxi else 1) * inner, dim, bias=False)
            if fuxi:
                self.gate = nn.Linear(dim, 3 * inner, bias=False)
                self.up = nn.Linear(dim, hidden, bias=False)
                self.mul = nn.Linear(dim, hidden, bias=False)
                self.down = nn.Linear(hidden, dim, bias=False)
                self.bias = nn.Parameter(torch.randn(2, 1, 1))

        def forward(self, x: Any) -> Any:
            batch, n, _ = x.shape

            def split(t: Any) -> Any:
                return t.view(batch, n, heads, width).transpose(1, 2).reshape(batch * heads, n, width)

            def join(t: Any) -> Any:
                return t.reshape(batch, heads, n, width).transpose(1, 2).reshape(batch, n, inner)

            projected = functional.silu(self.project(x))
            if kind == "hstu":
                gate, v, q, k = projected.chunk(4, dim=-1)
                attention = functional.silu(split(q) @ split(k).transpose(1, 2)) / n
                return x + self.out(functional.layer_norm(join(attention @ split(v)), (inner,)) * gate)
            q, k, v = projected.chunk(3, dim=-1)
            semantic = functional.silu(split(q) @ split(k).transpose(1, 2)) / n
            fixed = [self.bias[i].expand(batch * heads, n, n) for i in range(2)]
            channels = torch.cat([join(weights @ split(v)) for weights in (semantic, *fixed)], dim=-1)
            mixed = self.out(functional.layer_norm(channels, (3 * inner,)) * functional.silu(self.gate(x))) + x
            return self.down(functional.silu(self.up(mixed)) * self.mul(mixed)) + mixed

    return nn.Sequential(*(Block() for _ in range(layers)))


@pytest.mark.parametrize("kind", ["hstu", "fuxi_alpha"])
def test_sequence_models_count_as_torch_counts(kind: str) -> None:
    torch = pytest.importorskip("torch")
    sizes: dict[str, int] = {"layers": 2, "dim": 24, "heads": 3, "head_dim": 5, "sequence_length": 7}
    ours = hstu(**sizes) if kind == "hstu" else fuxi_alpha(**sizes, feed_forward=20)
    net = sequence_blocks(kind, 2, 24, 3, 5, 20)
    forward, backward = counted(net, torch.randn(4, 7, 24, requires_grad=True))
    assert ours.forward_flops(4) == forward
    assert ours.backward_flops(4) == backward
    weights = sum(p.numel() for name, p in net.named_parameters() if not name.endswith("bias"))
    assert ours.dense_parameters == weights


def test_dlrm_counts_as_torch_counts() -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    bottom, top, tables, dim = (16, 8), (12, 6, 1), 5, 8
    ours = dlrm(num_tables=tables, dim=dim, dense_features=4, bottom=bottom, top=top)

    def perceptron(*widths: int) -> Any:
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers)

    lower, upper = perceptron(4, *bottom), perceptron((tables + 1) * tables // 2 + dim, *top)
    rows = torch.randn(3, tables, dim, requires_grad=True)
    one, two = np.tril_indices(tables + 1, -1)

    def forward(dense: Any) -> Any:
        z = lower(dense)
        vectors = torch.cat([z[:, None], rows], dim=1)
        crossed = torch.bmm(vectors, vectors.transpose(1, 2))[:, one, two]
        return upper(torch.cat([z, crossed], dim=1))

    assert (ours.forward_flops(3), ours.backward_flops(3)) == counted(forward, torch.randn(3, 4))
    assert ours.dense_parameters == sum(p.numel() for net in (lower, upper) for p in net.parameters())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_sound(name: str) -> None:
    model = preset(name)
    assert model.backward_flops(8) <= 2 * model.forward_flops(8)
    assert model.forward_flops(8) == 8 * model.forward_flops(1)
    assert model.forward_bytes(8) < 8 * model.forward_bytes(1)
    assert model.source.startswith("formula: ")
    assert model.lookups(8) == 8 * model.lookups(1)


def test_unknown_preset_and_impossible_sizes() -> None:
    with pytest.raises(TraceError, match=r"unknown workload model 'hstuu'.*did you mean 'hstu'"):
        preset("hstuu")
    with pytest.raises(TraceError, match="layers must be at least 1, got 0"):
        hstu(layers=0)
    with pytest.raises(TraceError, match="bottom must end in the embedding dim 64"):
        dlrm(dim=64)
    with pytest.raises(TraceError, match="flops_per_s must be positive, got 0"):
        replace(RATES, flops_per_s=0)
    with pytest.raises(TraceError, match="at most 4 micro-batches, got 4, 1 and 5"):
        synthesise(preset("dlrm"), RATES, batch=4, world_size=1, micro_batches=5)


def test_a_batch_whose_numbers_no_table_holds_is_refused_with_op_and_column() -> None:
    with pytest.raises(TraceError, match=r"batch per worker of 1,000,000,000,000: \w+ has flops of .*smaller batch"):
        synthesise(preset("dlrm"), RATES, batch=10**12, world_size=8)


def trace(model: WorkloadModel, **changes: Any) -> pd.DataFrame:
    return synthesise(model, RATES, **{"batch": 64, "world_size": 8, "micro_batches": 4, **changes})


def test_synthetic_trace_is_a_valid_trace_table() -> None:
    frame = trace(preset("dlrm"))
    assert tuple(frame.columns) == SYNTHETIC_COLUMNS
    assert len(make_table(frame).frame) == len(frame)
    assert frame["source"].str.startswith("assumed: roofline").all()
    counts = frame["kind"].value_counts()
    assert (counts[OpKind.FORWARD], counts[OpKind.ALL_TO_ALL_ROWS], counts[OpKind.LOOKUP]) == (4, 4, 1)


def test_compute_takes_the_longer_of_arithmetic_and_traffic() -> None:
    model = preset("hstu")
    forward = trace(model).query("kind == 'forward'").iloc[0]
    assert forward["flops"] == model.forward_flops(16)
    longest = max(forward["flops"] / RATES.flops_per_s, forward["bytes"] / RATES.memory_bandwidth_bytes_per_s)
    assert forward["duration_ns"] == round(longest * NS_PER_S)


def test_a_collective_sends_what_others_own_and_a_lone_rank_sends_nothing() -> None:
    rows = trace(preset("dlrm")).query("kind == 'all_to_all[rows]'").iloc[0]
    expected = RATES.network_latency_ns + round(rows["bytes"] * 7 / 8 / 25e9 * NS_PER_S)
    assert rows["duration_ns"] == expected
    alone = trace(preset("dlrm"), world_size=1)
    assert alone[alone["kind"].isin(["all_to_all[rows]", "all_reduce"])]["duration_ns"].sum() == 0


def test_key_statistics_drive_keys_and_bytes() -> None:
    model = preset("dlrm")
    stream = generate_stream(criteo_like(), 64 * 16, np.random.default_rng(0))
    duplication = micro_batch_duplication(
        stream, batch=64, micro_batches=4, rng=np.random.default_rng(0), clustering=cluster_stream
    )
    statistics = key_statistics(stream, batch=64, world_size=8, duplication=(duplication,))
    counts = key_counts(model, 64, 4, statistics)
    assert counts.lookups == 64 * 26
    assert counts.sent == round(counts.lookups * statistics.unique_ratio_per_rank)
    skew = statistics.owner_skew
    assert counts.received == pytest.approx(counts.sent * skew, abs=1)
    assert counts.rows == pytest.approx(
        counts.sent * statistics.rows_per_owner_max / statistics.unique_keys_per_rank, abs=1
    )
    assert counts.rows < counts.sent < counts.received < sum(counts.rows_by_micro_batch) < counts.lookups * skew
    frame = trace(model, statistics=statistics)
    keys = frame.query("kind == 'all_to_all[keys]'").iloc[0]
    assert keys["bytes"] == 8 * counts.received
    sent = frame.query("kind == 'all_to_all[rows]'")["bytes"].sum()
    assert sent == pytest.approx(sum(counts.rows_by_micro_batch) * model.row_bytes)
    assert frame.query("kind == 'sync'")["unique_keys"].iloc[0] == counts.shared_rows > 0
    with pytest.raises(TraceError, match="no duplication for 2 micro-batches; they have 4"):
        trace(model, statistics=statistics, micro_batches=2)


def test_without_statistics_no_key_repeats() -> None:
    counts = key_counts(preset("dlrm"), 10, 3, None)
    assert counts.sent == counts.rows == counts.lookups == sum(counts.rows_by_micro_batch)
    assert counts.shared_rows == 0


def test_sizes_of_a_preset_can_be_replaced_and_wrong_ones_are_refused() -> None:
    small, large = preset("hstu", {"dim": 64}), preset("hstu", {"dim": 128, "sequence_length": 512})
    assert large.row_bytes == 2 * small.row_bytes
    assert large.lookups(1) == 2 * small.lookups(1)
    assert "dim=128" in large.source
    assert preset("hstu_large_ml1m", {"layers": 2}).row_bytes == preset("hstu_large_ml1m").row_bytes
    with pytest.raises(TraceError, match="did you mean 'dim'"):
        preset("hstu", {"dims": 64})
    with pytest.raises(TraceError, match="dim must be at least 1, got 0"):
        preset("hstu", {"dim": 0})
