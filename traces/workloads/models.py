"""Recommendation models as arithmetic: the matrix products, tables and parameters of HSTU, FuXi-alpha and DLRM.

A model is counted as dense kernels execute it: a product of (m, k) by (k, n) is 2 m k n floating-point operations, and
its backward is one such product for each operand that needs a gradient. Attention is counted over all n x n pairs,
masked or not, as torch computes it. Element-wise work (activations, norms, biases, gates) is no FLOPs here, as in
torch's own counter, but its memory traffic counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final

from nestpipe.base import TraceError, unknown_name

__all__ = ["PRESETS", "MatMul", "Table", "WorkloadModel", "dlrm", "fuxi_alpha", "hstu", "preset"]

FLOAT_BYTES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MatMul:
    """`count` products of (m, k) by (k, n) for each sample; parameters are shared between samples.

    Attributes:
        name: what it computes.
        m, k, n: sizes; m counts rows of one sample.
        count: products a sample, e.g. attention heads.
        weight: whether the second operand is a parameter (read once a micro-batch, not once a sample).
        input_gradient: whether the first operand needs a gradient; the second always does.
    """

    name: str
    m: int
    k: int
    n: int
    count: int = 1
    weight: bool = True
    input_gradient: bool = True

    @property
    def flops(self) -> int:
        """Forward, a sample."""
        return 2 * self.count * self.m * self.k * self.n

    @property
    def backward_flops(self) -> int:
        """Backward, a sample: one product of the same size for each operand with a gradient."""
        return self.flops * (1 + self.input_gradient)

    def elements_moved(self, samples: int) -> int:
        """Both operands and the result once each, over a micro-batch."""
        second = self.k * self.n * self.count * (1 if self.weight else samples)
        return second + samples * self.count * self.m * (self.k + self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An embedding table and how a sample looks it up.

    Attributes:
        name: of the table.
        num_rows: rows.
        dim: floats a row.
        lookups: a sample.
    """

    name: str
    num_rows: int
    dim: int
    lookups: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadModel:
    """What one training step has to do, a sample at a time.

    Attributes:
        name: of the model.
        tables: looked up by every sample.
        matmuls: forward, in order.
        dense_parameters: floats that all_reduce carries.
        elementwise: floats a sample that forward reads and writes outside the products (activations, norms, gates).
        dense_features: floats a sample that are input beside the keys.
        sequence_length: tokens of a sample; None where there is no sequence.
        source: where formula and sizes come from.
    """

    name: str
    tables: tuple[Table, ...]
    matmuls: tuple[MatMul, ...]
    dense_parameters: int
    elementwise: int
    dense_features: int
    sequence_length: int | None
    source: str

    def forward_flops(self, samples: int) -> int:
        """Floating-point operations of the forward of so many samples."""
        return samples * sum(product.flops for product in self.matmuls)

    def backward_flops(self, samples: int) -> int:
        """Floating-point operations of the backward of so many samples."""
        return samples * sum(product.backward_flops for product in self.matmuls)

    def forward_bytes(self, samples: int, value_bytes: int = FLOAT_BYTES) -> int:
        """Device memory traffic of the forward: operands and results of every product once, and element-wise work."""
        products = sum(product.elements_moved(samples) for product in self.matmuls)
        return value_bytes * (products + samples * self.elementwise)

    def backward_bytes(self, samples: int, value_bytes: int = FLOAT_BYTES) -> int:
        """The same for the backward: one product's traffic for each gradient, element-wise work twice."""
        products = sum((1 + p.input_gradient) * p.elements_moved(samples) for p in self.matmuls)
        return value_bytes * (products + 2 * samples * self.elementwise)

    def lookups(self, samples: int) -> int:
        """Keys that so many samples look up, over all tables."""
        return round(samples * sum(table.lookups for table in self.tables))

    @property
    def row_bytes(self) -> float:
        """Bytes of a looked-up row, mean over lookups, in float32."""
        total = sum(table.lookups for table in self.tables)
        return FLOAT_BYTES * sum(table.lookups * table.dim for table in self.tables) / total


def _linear(name: str, rows: int, fan_in: int, fan_out: int, *, input_gradient: bool = True) -> MatMul:
    return MatMul(name=name, m=rows, k=fan_in, n=fan_out, input_gradient=input_gradient)


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise TraceError(f"{name} must be at least 1, got {size}")


def _sequence_model(
    name: str, items: Table, block: tuple[MatMul, ...], layers: int, *, elementwise: int, source: str
) -> WorkloadModel:
    """`layers` blocks over a sequence of items; `elementwise` is a block's."""
    return WorkloadModel(
        name=name,
        tables=(items,),
        matmuls=block * layers,
        dense_parameters=layers * sum(product.k * product.n for product in block if product.weight),
        elementwise=layers * elementwise,
        dense_features=0,
        sequence_length=round(items.lookups),
        source=source,
    )


def hstu(
    *,
    layers: int = 8,
    dim: int = 256,
    heads: int = 4,
    head_dim: int | None = None,
    sequence_length: int = 256,
    num_items: int = 10_000_000,
    source: str = "sizes chosen for illustration",
) -> WorkloadModel:
    """Hierarchical sequential transduction units over a user's item sequence.

    A layer: U, V, Q, K = split(SiLU(X W1)), Y = norm(SiLU(Q K^T + bias) V) * U, X + Y W2. With h heads of d:
    W1 is (dim, 4 h d), W2 is (h d, dim).

    Args:
        layers, dim, heads: as the paper's.
        head_dim: width of queries, keys and values of a head; dim / heads where None.
        sequence_length: tokens a sample.
        num_items: rows of the item table.
        source: of the sizes.

    Source: Zhai et al., "Actions speak louder than words", arXiv 2402.17152, equations 1 to 3.
    """
    _check_positive(layers=layers, dim=dim, heads=heads, sequence_length=sequence_length, num_items=num_items)
    width = head_dim if head_dim is not None else max(dim // heads, 1)
    n, inner = sequence_length, heads * width
    block = (
        _linear("uvqk", n, dim, 4 * inner),
        MatMul(name="q k^T", m=n, k=width, n=n, count=heads, weight=False),
        MatMul(name="attention v", m=n, k=n, n=width, count=heads, weight=False),
        _linear("output", n, inner, dim),
    )
    per_layer = 2 * 4 * n * inner + 2 * heads * n * n + 3 * n * inner + 3 * n * dim
    return _sequence_model(
        "hstu",
        Table(name="item", num_rows=num_items, dim=dim, lookups=float(n)),
        block,
        layers,
        elementwise=per_layer,
        source=f"formula: HSTU, arXiv 2402.17152 eq. 1-3; {source}",
    )


def fuxi_alpha(
    *,
    layers: int = 8,
    dim: int = 256,
    heads: int = 4,
    head_dim: int | None = None,
    feed_forward: int | None = None,
    sequence_length: int = 256,
    num_items: int = 10_000_000,
    source: str = "sizes chosen for illustration",
) -> WorkloadModel:
    """FuXi-alpha blocks over a user's item sequence: three attention channels, then a gated feed-forward.

    A block: Q, K, V = SiLU(X W); semantic SiLU(Q K^T) V, temporal A_t V and positional A_p V; their concatenation is
    normalised, gated by SiLU(X W_u) (3 h d wide) and projected by W_0 (3 h d, dim); then the multi-stage feed-forward
    with (SiLU(x W_1) * x W_2) W_3.

    Args:
        layers, dim, heads: as the paper's.
        head_dim: width of a head; dim / heads where None.
        feed_forward: hidden width; `dim` where None.
        sequence_length: tokens a sample.
        num_items: rows of the item table.
        source: of the sizes.

    Source: Ye et al., "FuXi-alpha: scaling recommendation model with feature interaction enhanced transformer",
    arXiv 2502.03036, section 4.
    """
    _check_positive(layers=layers, dim=dim, heads=heads, sequence_length=sequence_length, num_items=num_items)
    width = head_dim if head_dim is not None else max(dim // heads, 1)
    hidden = feed_forward if feed_forward is not None else dim
    n, inner = sequence_length, heads * width
    block = (
        _linear("qkv", n, dim, 3 * inner),
        _linear("gate", n, dim, 3 * inner),
        MatMul(name="q k^T", m=n, k=width, n=n, count=heads, weight=False),
        *(
            MatMul(name=f"{channel} v", m=n, k=n, n=width, count=heads, weight=False)
            for channel in ("attention", "temporal", "positional")
        ),
        _linear("output", n, 3 * inner, dim),
        _linear("feed-forward gate", n, dim, hidden),
        _linear("feed-forward up", n, dim, hidden),
        _linear("feed-forward down", n, hidden, dim),
    )
    per_layer = 2 * 6 * n * inner + 2 * heads * n * n + 9 * n * inner + 6 * n * dim + 3 * n * hidden
    return _sequence_model(
        "fuxi_alpha",
        Table(name="item", num_rows=num_items, dim=dim, lookups=float(n)),
        block,
        layers,
        elementwise=per_layer,
        source=f"formula: FuXi-alpha, arXiv 2502.03036 sec. 4; {source}",
    )


def dlrm(
    *,
    num_tables: int = 26,
    rows_per_table: int = 1_000_000,
    dim: int = 128,
    lookups_per_table: float = 1.0,
    dense_features: int = 13,
    bottom: tuple[int, ...] = (512, 256, 128),
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1),
    source: str = "layer widths of the MLPerf training benchmark, table sizes chosen for illustration",
) -> WorkloadModel:
    """DLRM with pairwise dot interaction.

    The bottom perceptron turns the dense features into a vector of `dim`; the dot products of the (tables + 1) vectors,
    (tables + 1) tables / 2 of them, and that vector feed the top perceptron.

    Source: Naumov et al., "Deep learning recommendation model", arXiv 1906.00091, section 2.
    """
    _check_positive(num_tables=num_tables, rows_per_table=rows_per_table, dim=dim, dense_features=dense_features)
    if not bottom or bottom[-1] != dim or not top:
        raise TraceError(f"bottom must end in the embedding dim {dim} and top must not be empty, got {bottom}, {top}")
    vectors = num_tables + 1
    crossed = vectors * num_tables // 2 + dim
    lower = [
        _linear(f"bottom {i}", 1, fan_in, fan_out, input_gradient=i > 0)
        for i, (fan_in, fan_out) in enumerate(pairwise((dense_features, *bottom)))
    ]
    upper = [_linear(f"top {i}", 1, a, b) for i, (a, b) in enumerate(pairwise((crossed, *top)))]
    cross = MatMul(name="interaction", m=vectors, k=dim, n=vectors, weight=False)
    layers = [*lower, *upper]
    return WorkloadModel(
        name="dlrm",
        tables=tuple(
            Table(name=f"table {i}", num_rows=rows_per_table, dim=dim, lookups=lookups_per_table)
            for i in range(num_tables)
        ),
        matmuls=(*lower, cross, *upper),
        dense_parameters=sum(layer.k * layer.n + layer.n for layer in layers),
        elementwise=2 * sum(layer.n for layer in layers) + 2 * crossed + round(num_tables * lookups_per_table * dim),
        dense_features=dense_features,
        sequence_length=None,
        source=f"formula: DLRM, arXiv 1906.00091 sec. 2; {source}",
    )


PRESETS: Final[Mapping[str, Callable[..., WorkloadModel]]] = MappingProxyType(
    {
        "hstu": hstu,
        "hstu_large_ml1m": partial(
            hstu,
            layers=8,
            dim=50,
            heads=2,
            head_dim=25,
            sequence_length=200,
            num_items=3_953,
            source="sizes: HSTU-large on MovieLens-1M, public configuration hstu-sampled-softmax-n128-large-final",
        ),
        "fuxi_alpha": fuxi_alpha,
        "dlrm": dlrm,
    }
)


def preset(name: str, sizes: Mapping[str, int] | None = None) -> WorkloadModel:
    """The model of that name, with some of its sizes replaced.

    Args:
        name: one of `PRESETS`.
        sizes: whole-number parameters of the preset's function by name, such as dim, layers or sequence_length.

    Raises:
        TraceError: there is no such model or size, or a size is less than 1.
    """
    if name not in PRESETS:
        raise TraceError(unknown_name("workload model", name, PRESETS))
    if not sizes:
        return PRESETS[name]()
    maker = PRESETS[name]
    known = [key for key, each in inspect.signature(maker).parameters.items() if str(each.annotation).startswith("int")]
    for key, value in sizes.items():
        if key not in known:
            raise TraceError(f"model {name}: " + unknown_name("size", key, known))
        _check_positive(**{key: value})
    return maker(**sizes, source=f"sizes given: {', '.join(f'{key}={value}' for key, value in sizes.items())}")
