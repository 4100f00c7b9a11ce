"""Key-centric sample clustering: which samples of a batch go into one micro-batch so that few rows are sent twice.

A micro-batch sends each of its keys once, so a batch sends the sum over its N micro-batches of their unique keys: at
least the unique keys of the batch, and more by one for each further micro-batch that a key appears in. That is balanced
hypergraph partitioning (samples are vertices, keys are nets, the objective is connectivity minus one). It is solved
here with array operations only, many batches at once:

1. keys that one sample alone has are dropped, and so, in heavy batches, are keys too frequent to be kept together
2. in light batches, samples tied by rare keys are merged, so that they move together
3. a start: a few power iterations of the sample-key matrix on random numbers, one column per micro-batch
4. annealed mean field: q[i, m] is the probability of sample i in micro-batch m; its logit is minus beta times the
   number of keys of i that m would not have without i, in expectation over the others; columns are rescaled to equal
   sizes after each step. A frequent key is softened at first, or its gradient would vanish
5. rounding to equal sizes, most certain samples first
6. swaps of two samples at a time that save rows, best first; the best assignment seen is kept
7. two and four micro-batches are made of eight, by the best of all ways to join them, and swaps

Tried and rejected (duplicate rows over those of a multilevel hypergraph partitioner, N = 8): sorting by the most
frequent shared keys, 2.5 on Criteo and 4.7 on MovieLens; swaps from a random order, 2 and more; mean field from noise,
1.3; without merging on MovieLens, 1.5; directly for N = 2 instead of joining, 1.8 on Criteo. At N = 2, joining by
pairs twice with swaps between, 2 to 18 % more than the best way to join at once; swaps of several pairs save nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nestpipe.base import TraceError
from traces.keys.nets import Nets, Stack, leaders, merge
from traces.keys.sets import CodedStream
from traces.keys.stream import KeyStream

__all__ = ["cluster_keys", "cluster_stream", "clustered_order", "duplicate_rows"]

Float = NDArray[np.float32]
Int = NDArray[np.int64]

_STACK = 16
_FINEST = 8
_SWAP_ROUNDS_JOINED = 8
_LIGHT_BELOW = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effort:
    """How hard to try. Tuned on part 0 of the Criteo-like file and on MovieLens ratings.

    Attributes:
        largest_net: most samples of a key that counts, as a share of the batch.
        merge_net: keys of at most this many samples tie them together; 1 merges nothing.
        merged_size: most samples tied together.
        power_steps, spread: iterations of the start and its standard deviation.
        steps, beta_start, beta_end: annealing, beta in units of 1 / sqrt(shared keys a sample).
        balance_steps: Sinkhorn rounds in each step.
        soft, soft_growth: a key of f samples is softened by min(1, soft * soft_growth^step * N / f).
        swap_rounds: each swaps up to N / 2 pairs of samples.
        starts: independent runs, of which each batch keeps the best.
    """

    largest_net: float
    merge_net: int
    merged_size: int
    power_steps: int
    spread: float
    steps: int
    beta_start: float
    beta_end: float
    balance_steps: int
    soft: float
    soft_growth: float
    swap_rounds: int
    starts: int


def _effort(num_micro_batches: int, *, light: bool) -> _Effort:
    """For batches of few shared keys a sample (ratings), or of many (click logs)."""
    if light:
        return _Effort(
            largest_net=1.0,
            merge_net=8,
            merged_size=32,
            power_steps=2,
            spread=0.4,
            steps=12,
            beta_start=5.0,
            beta_end=12.0,
            balance_steps=3,
            soft=0.25,
            soft_growth=1.33,
            swap_rounds=4,
            starts=2,
        )
    root = num_micro_batches**0.5
    return _Effort(
        largest_net=0.1875 if num_micro_batches <= 8 else 0.25,
        merge_net=1,
        merged_size=1,
        power_steps=max(2, 48 // num_micro_batches),
        spread=0.1 * root,
        steps=13,
        beta_start=0.75 * root,
        beta_end=9.0,
        balance_steps=3,
        soft=2.5,
        soft_growth=1.1,
        swap_rounds=max(0, min(4, num_micro_batches // 8 - 1)),
        starts=1,
    )


def cluster_stream(stream: KeyStream | CodedStream, batch: int, num_micro_batches: int, *, seed: int = 0) -> Int:
    """The micro-batch of each sample of each full batch of a stream: int64 (batches * batch,). See `cluster_keys`."""
    batches = stream.num_samples // batch if batch > 0 else 0
    if batches < 1:
        raise TraceError(f"{stream.source}: {stream.num_samples} samples do not fill one batch of {batch}")
    part = stream.slice(0, batches * batch)
    return cluster_keys(part.row_keys(), part.sample_offsets, batch, num_micro_batches, seed=seed)


def cluster_keys(
    keys: NDArray[np.uint64], sample_offsets: Int, batch: int, num_micro_batches: int, *, seed: int = 0
) -> Int:
    """The micro-batch of each sample, batch by batch.

    Args:
        keys: uint64 (lookups,), row keys sample by sample.
        sample_offsets: int64 (samples + 1,); the samples must fill whole batches.
        batch: samples of a batch.
        num_micro_batches: N, from 1 to `batch`.
        seed: of the random start; same keys and seed, same answer.

    Returns:
        int64 (samples,) in [0, N). In each batch, micro-batch m gets `split_evenly(batch, N, m)` samples.

    Raises:
        ValueError: N out of range, or a partial batch.
    """
    num_samples = len(sample_offsets) - 1
    if not 1 <= num_micro_batches <= batch:
        raise ValueError(f"num_micro_batches must lie between 1 and the batch of {batch}, got {num_micro_batches}")
    if num_samples % batch:
        raise ValueError(f"{num_samples} samples do not fill whole batches of {batch}")
    if num_micro_batches == 1:
        return np.zeros(num_samples, dtype=np.int64)
    fine = num_micro_batches
    while 2 * fine <= _FINEST and batch % (2 * fine) == 0:
        fine *= 2
    parts = [np.zeros(0, dtype=np.int64)]
    for start in range(0, num_samples, batch * _STACK):
        offsets = sample_offsets[start : start + batch * _STACK + 1]
        stack = Stack.of(keys[offsets[0] : offsets[-1]], offsets - offsets[0], batch, fine)
        parts.append(_cluster_stack(stack, num_micro_batches, np.random.default_rng(seed)))
    return np.concatenate(parts)


def clustered_order(micro_batch: Int, batch: int) -> Int:
    """The samples in micro-batch order, batch by batch, each micro-batch in stream order: int64 (samples,).

    >>> clustered_order(np.array([1, 0, 1, 0]), 4).tolist()
    [1, 3, 0, 2]
    """
    return np.lexsort((micro_batch, np.arange(len(micro_batch)) // batch)).astype(np.int64)


def duplicate_rows(stream: KeyStream, batch: int, micro_batch: Int, num_micro_batches: int) -> Int:
    """Rows that the micro-batches of each batch send beyond the unique keys of the batch: int64 (batches,)."""
    coded = CodedStream.of(stream.slice(0, len(micro_batch)))
    sent = coded.micro_batch_sets(batch, micro_batch, num_micro_batches).sizes()
    least = coded.sets(batch).sizes()
    return np.asarray(sent.reshape(-1, num_micro_batches).sum(axis=1) - least, dtype=np.int64)


def _cluster_stack(stack: Stack, num_micro_batches: int, rng: np.random.Generator) -> Int:
    """The micro-batch of each sample of a stack, made finer first and merged where `num_micro_batches` is smaller."""
    effort = _effort(len(stack.sizes), light=False)
    nets = stack.nets.only(stack.nets.size <= stack.batch * effort.largest_net)
    if len(nets.sample) < _LIGHT_BELOW * stack.num_samples:
        effort, nets = _effort(len(stack.sizes), light=True), stack.nets
    leader = leaders(nets, effort.merge_net, effort.merged_size)
    merged = merge(nets, leader) if effort.merge_net > 1 else nets
    weight = np.bincount(leader, minlength=stack.num_samples)
    micro_batch, least = np.zeros(stack.num_samples, dtype=np.int64), np.full(stack.batches, np.inf)
    for _ in range(effort.starts):
        q = _anneal(stack, merged, weight, effort, rng)
        found, cost = _swap(stack, _round(stack, q[leader], leader), effort.swap_rounds, rng)
        if len(stack.sizes) > num_micro_batches:
            joined, found = _join(stack, found, num_micro_batches)
            found, cost = _swap(joined, found, _SWAP_ROUNDS_JOINED, rng)
        micro_batch = np.where(np.repeat(cost < least, stack.batch), found, micro_batch)
        least = np.minimum(cost, least)
    return micro_batch


def _join(stack: Stack, micro_batch: Int, num_micro_batches: int) -> tuple[Stack, Int]:
    """Joins micro-batches, as many into each of fewer, by the grouping that sends least; in each batch its own.

    A key sends one row for each group that has it, so the batch's rows follow from how many keys lie in which set of
    micro-batches: the groupings of eight are all tried.
    """
    num, total = len(stack.sizes), stack.num_samples
    held = np.zeros((total, num), dtype=np.float32)
    held[np.arange(total), micro_batch] = 1
    where = (stack.nets.by_key @ held > 0) @ (1 << np.arange(num))
    keys = np.bincount((stack.batch_of_net << num) + where, minlength=stack.batches << num).reshape(-1, 1 << num)
    target = np.array(list(_groupings(num, num_micro_batches)))
    groups = ((target[:, :, None] == np.arange(num_micro_batches)) << np.arange(num)[:, None]).sum(axis=1)
    rows = ((np.arange(1 << num)[:, None, None] & groups) > 0).sum(axis=2)
    best = target[(keys @ rows).argmin(axis=1)]
    joined = replace(stack, sizes=stack.sizes.reshape(num_micro_batches, -1).sum(axis=1))
    return joined, best[np.arange(total) // stack.batch, micro_batch]


def _groupings(num: int, groups: int) -> Iterator[tuple[int, ...]]:
    """For each way to put `num` things into groups of equal size, the group of each thing.

    >>> list(_groupings(4, 2))
    [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    """

    def more(start: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(start) == num:
            yield start
            return
        for group in range(min(max(start, default=-1) + 2, groups)):
            if start.count(group) < num // groups:
                yield from more((*start, group))

    return more(())


def _anneal(stack: Stack, nets: Nets, weight: Int, effort: _Effort, rng: np.random.Generator) -> Float:
    """Probability of each sample in each micro-batch: float32 (samples, N)."""
    weights = weight.astype(np.float32).reshape(stack.batches, 1, stack.batch)
    sizes = stack.sizes.astype(np.float32)
    q = _balance(effort.spread * _start(stack, nets, weights, effort, rng), weights, sizes, effort.balance_steps)
    size = nets.size.astype(np.float32)[:, None]
    scale = np.sqrt(stack.num_samples / max(len(nets.sample), 1))
    betas = np.geomspace(effort.beta_start, effort.beta_end, effort.steps) * scale
    soft = np.float32(effort.soft * len(stack.sizes))
    for beta in betas:
        absent = np.log1p(-np.minimum(q, np.float32(0.999)))
        missing = nets.by_key @ absent
        missing *= np.minimum(np.float32(1), soft / size)
        np.exp(missing, out=missing)
        logits = nets.by_sample @ missing
        logits *= np.exp(-absent)
        logits *= np.float32(-beta)
        q = _balance(logits, weights, sizes, effort.balance_steps)
        soft *= np.float32(effort.soft_growth)
    return q


def _start(stack: Stack, nets: Nets, weights: Float, effort: _Effort, rng: np.random.Generator) -> Float:
    """Numbers that are alike for samples that share keys: float32 (samples, N), mean 0, variance 1 per batch."""
    num = len(stack.sizes)
    inverse = (1 / np.maximum(nets.size, 1)).astype(np.float32)[:, None]
    y = nets.by_sample @ (np.sqrt(inverse) * rng.standard_normal((len(nets.size), num), dtype=np.float32))
    shape = (stack.batches, stack.batch, num)
    for _ in range(effort.power_steps):
        cube = y.reshape(shape)
        cube -= np.matmul(weights, cube) / np.float32(stack.batch)
        z = nets.by_key @ y
        z *= inverse
        y = nets.by_sample @ z
    cube = y.reshape(shape)
    cube -= np.matmul(weights, cube) / np.float32(stack.batch)
    y = cube.reshape(-1, num)
    y -= (y @ np.ones((num, 1), dtype=np.float32)) / np.float32(num)
    deviation = np.sqrt(np.einsum("gbn,gbn->g", cube, cube) / (stack.batch * num)) + np.float32(1e-9)
    return np.asarray(cube / deviation[:, None, None], dtype=np.float32).reshape(-1, num)


def _balance(logits: Float, weights: Float, sizes: Float, rounds: int) -> Float:
    """Softmax over micro-batches, rescaled so that each micro-batch expects its size. Source: Sinkhorn 1967."""
    num = len(sizes)
    ones = np.ones((num, 1), dtype=np.float32)
    logits -= (logits @ ones) / np.float32(num)
    np.clip(logits, -80, 80, out=logits)
    kernel = np.exp(logits, out=logits).reshape(len(weights), -1, num)
    column = np.ones((len(weights), 1, num), dtype=np.float32)
    row = 1 / (kernel @ ones)
    for _ in range(rounds):
        column = sizes / (np.matmul(weights * row.transpose(0, 2, 1), kernel) + np.float32(1e-20))
        row = 1 / (np.matmul(kernel, column.transpose(0, 2, 1)) + np.float32(1e-20))
    kernel *= column
    kernel *= row
    return kernel.reshape(-1, num)


def _round(stack: Stack, q: Float, leader: Int) -> Int:
    """The most probable micro-batch of each sample while it has room, most certain and merged samples first."""
    num, total = len(stack.sizes), stack.num_samples
    by_leader = np.argsort(leader, kind="stable")
    place = np.empty(total, dtype=np.int64)
    place[by_leader] = np.arange(total)
    low = max(total - 1, 1).bit_length()
    room = np.tile(stack.sizes, stack.batches)
    micro_batch = np.zeros(total, dtype=np.int64)
    left = np.arange(total)
    chance = q.copy()
    while len(left):
        choice = chance[left].argmax(axis=1)
        doubt = ((1 - chance[left, choice]) * np.float32(1 << 20)).astype(np.int64)
        target = left // stack.batch * num + choice
        packed = np.sort(((target << 21) + np.clip(doubt, 0, (1 << 21) - 1) << low) + place[left])
        sample = by_leader[packed & ((1 << low) - 1)]
        target = packed >> (21 + low)
        first = np.searchsorted(target, np.arange(len(room)))
        fits = np.arange(len(sample)) - first[target] < room[target]
        micro_batch[sample[fits]] = target[fits] % num
        room = room - np.bincount(target[fits], minlength=len(room))
        left = np.sort(sample[~fits])
        chance[left] = np.where(room.reshape(-1, num)[left // stack.batch] > 0, chance[left], -1)
    return micro_batch


def _swap(stack: Stack, micro_batch: Int, rounds: int, rng: np.random.Generator) -> tuple[Int, Float]:
    """The best assignment of each batch in so many rounds of swaps, and the rows that each batch sends with it."""
    nets, num, total = stack.nets, len(stack.sizes), stack.num_samples
    ones = np.ones((num, 1), dtype=np.float32)
    own = np.arange(total)
    best = micro_batch
    least = np.full(stack.batches, np.inf)
    for step in range(rounds + 1):
        held = np.zeros((total, num), dtype=np.float32)
        held[own, micro_batch] = 1
        count = nets.by_key @ held
        present = (count > 0).astype(np.float32)
        cost = np.bincount(stack.batch_of_net, weights=(present @ ones).ravel(), minlength=stack.batches)
        best = np.where(np.repeat(cost < least, stack.batch), micro_batch, best)
        least = np.minimum(cost, least)
        if step < rounds:
            saved = (nets.by_sample @ (count == 1).astype(np.float32))[own, micro_batch]
            gain = (saved + rng.random(total, dtype=np.float32) * np.float32(0.3))[:, None]
            micro_batch = _best_swaps(stack, micro_batch, gain - nets.by_sample @ (1 - present))
    return best, least


def _best_swaps(stack: Stack, micro_batch: Int, gain: Float) -> Int:
    """Swaps, in each batch, the best disjoint pairs of micro-batches' best samples; gain is float32 (samples, N)."""
    num, total = len(stack.sizes), stack.num_samples
    group = np.arange(total) // stack.batch * num + micro_batch
    order = np.argsort(group, kind="stable")
    first = np.searchsorted(group[order], np.arange(stack.batches * num))
    slots = np.full((stack.batches * num, int(stack.sizes.max())), total, dtype=np.int64)
    slots[group[order], np.arange(total) - first[group[order]]] = order
    offers = np.concatenate([gain, np.full((1, num), -1e6, dtype=np.float32)])[slots]
    pick = offers.argmax(axis=1)
    value = np.take_along_axis(offers, pick[:, None, :], axis=1)[:, 0, :].reshape(stack.batches, num, num)
    pick = np.take_along_axis(slots, pick, axis=1).reshape(stack.batches, num, num)
    both = value + value.transpose(0, 2, 1)
    both[:, np.arange(num), np.arange(num)] = -1e6
    swapped = micro_batch.copy()
    each = np.arange(stack.batches)
    for _ in range(num // 2):
        one, other = np.divmod(both.reshape(stack.batches, -1).argmax(axis=1), num)
        good = both[each, one, other] > 0.7
        if not good.any():
            break
        b, p, r = each[good], one[good], other[good]
        swapped[pick[b, p, r]] = r
        swapped[pick[b, r, p]] = p
        both[each, one] = both[each, other] = -1e6
        both[each, :, one] = both[each, :, other] = -1e6
    return swapped
