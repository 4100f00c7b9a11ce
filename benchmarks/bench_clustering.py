"""Duplicate rows and speed of key-centric sample clustering, against random, sorted and slow reference orders.

    python benchmarks/bench_clustering.py KEYS_FOLDER [--reference-batches 8] [--micro-batches 2 4 8 16 32]

KEYS_FOLDER holds the public key files (criteo_tb_recis_part-*.csv.gz, movielens_latest_small_ratings.csv.gz). Samples
of MovieLens are ratings with the keys (userId, movieId), in time and in file order, and user histories of 32 items.

References, both slow: simulated annealing over swaps of two samples (here, in Python, best of --starts), and the
multilevel hypergraph partitioner Mt-KaHyPar at its highest quality (best of 3 seeds) after `pip install mtkahypar`.
Speed is samples per second of processor time in one thread, best of 5, so that other load counts little.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from traces.keys import KeyStream, cluster_keys, dense_codes, duplicate_rows, group_sequences, read_keys

BATCH = 512


def annealed_swaps(
    keys_of: list[np.ndarray], num_micro_batches: int, rng: np.random.Generator, proposals: int = 300_000
) -> np.ndarray:
    """Simulated annealing over swaps of two samples: the micro-batch of each sample.

    `keys_of` are each sample's keys as indices from 0. The temperature falls from 2 rows to 0.1 rows a swap.
    """
    num = len(keys_of)
    micro_batch = rng.permutation(num) % num_micro_batches
    held = np.zeros((num_micro_batches, 1 + max(int(keys.max(initial=0)) for keys in keys_of)), dtype=np.int32)
    for sample, keys in enumerate(keys_of):
        held[micro_batch[sample], keys] += 1
    cost = best_cost = int((held > 0).sum())
    best = micro_batch.copy()
    first, second = rng.integers(0, num, (2, proposals))
    chance = np.log(rng.random(proposals))
    cooling = np.geomspace(2.0, 0.1, proposals)
    for i, j, luck, temperature in zip(first.tolist(), second.tolist(), chance.tolist(), cooling.tolist(), strict=True):
        one, other = micro_batch[i], micro_batch[j]
        if one == other:
            continue
        mine, theirs, a, b = keys_of[i], keys_of[j], held[one], held[other]
        a[mine] -= 1
        change = -np.count_nonzero(a[mine] == 0) + np.count_nonzero(b[mine] == 0)
        b[mine] += 1
        b[theirs] -= 1
        change += -np.count_nonzero(b[theirs] == 0) + np.count_nonzero(a[theirs] == 0)
        a[theirs] += 1
        if change <= 0 or luck < -change / temperature:
            micro_batch[i], micro_batch[j] = other, one
            cost += change
            if cost < best_cost:
                best_cost, best = cost, micro_batch.copy()
        else:
            a[theirs] -= 1
            b[theirs] += 1
            b[mine] -= 1
            a[mine] += 1
    return best


@functools.cache
def kahypar() -> Callable[[list[np.ndarray], int, int], np.ndarray] | None:
    """Mt-KaHyPar as a function of each sample's keys, N and a seed; None where it is not installed."""
    try:
        import mtkahypar
    except ImportError:
        return None
    partitioner = mtkahypar.initialize(1)

    def partition(keys_of: list[np.ndarray], num_micro_batches: int, seed: int) -> np.ndarray:
        sample = np.repeat(np.arange(len(keys_of)), [len(keys) for keys in keys_of])
        key = np.concatenate(keys_of)
        order = np.argsort(key, kind="stable")
        nets = [net.tolist() for net in np.split(sample[order], np.cumsum(np.bincount(key))[:-1])]
        context = partitioner.context_from_preset(mtkahypar.PresetType.HIGHEST_QUALITY)
        context.set_partitioning_parameters(num_micro_batches, 0.0, mtkahypar.Objective.KM1)
        context.logging = False
        mtkahypar.set_seed(seed)
        graph = partitioner.create_hypergraph(context, len(keys_of), len(nets), nets)
        result = graph.partition(context)
        return np.array([result.block_id(i) for i in range(len(keys_of))])

    return partition


def shared_keys_of(batch: KeyStream) -> list[np.ndarray]:
    """The keys that two samples or more of a batch have, sample by sample, numbered from 0."""
    _, codes = dense_codes(batch)
    pairs = np.unique(np.stack([batch.sample_of_lookup(), codes], axis=1), axis=0)
    counts = np.bincount(pairs[:, 1])
    pairs = pairs[counts[pairs[:, 1]] > 1]
    number = np.unique(pairs[:, 1], return_inverse=True)[1]
    return np.split(number, np.searchsorted(pairs[:, 0], np.arange(1, batch.num_samples)))


def sorted_assignment(stream: KeyStream, num_micro_batches: int) -> np.ndarray:
    """Samples of each batch sorted by their most frequent shared keys, cut into runs."""
    parts = []
    for batch in stream.batches(BATCH):
        _, codes = dense_codes(batch)
        counts = np.bincount(codes)
        score = np.where(counts > 1, counts * (len(counts) + 1) + np.arange(len(counts)), 0)[codes]
        bags = np.split(score, batch.sample_offsets[1:-1])
        width = max(len(bag) for bag in bags)
        ranked = np.zeros((BATCH, width), dtype=np.int64)
        for row, bag in enumerate(bags):
            ranked[row, : len(bag)] = -np.sort(-bag)
        order = np.lexsort(ranked.T[::-1])
        place = np.empty(BATCH, dtype=np.int64)
        place[order] = np.arange(BATCH) * num_micro_batches // BATCH
        parts.append(place)
    return np.concatenate(parts)


def streams(folder: Path) -> dict[str, KeyStream]:
    """What is measured, by title; only whole batches."""
    parts = sorted(folder.glob("criteo_tb_recis_part-*.csv.gz"))
    ratings = folder / "movielens_latest_small_ratings.csv.gz"
    by_time = read_keys(ratings, columns=["userId", "movieId"], order_by="timestamp")
    found = {
        "Criteo-like, 26 columns, part 0 (tuned on)": read_keys(parts[0]),
        "Criteo-like, 26 columns, parts 1 and 2": read_keys(parts[1:]),
        "MovieLens ratings by time": by_time,
        "MovieLens ratings in file order": read_keys(ratings, columns=["userId", "movieId"]),
        "MovieLens histories of 32 items": group_sequences(by_time, "userId", "movieId", 32),
    }
    return {title: stream.slice(0, stream.num_samples // BATCH * BATCH) for title, stream in found.items()}


def speed(stream: KeyStream, num_micro_batches: int) -> float:
    """Samples per second of processor time, best of 5."""
    keys, offsets = stream.row_keys(), stream.sample_offsets.copy()
    best = np.inf
    for _ in range(5):
        begin = time.process_time()
        cluster_keys(keys, offsets, BATCH, num_micro_batches)
        best = min(best, time.process_time() - begin)
    return stream.num_samples / best


def references(stream: KeyStream, chosen: np.ndarray, num_micro_batches: int, starts: int) -> dict[str, float]:
    """Duplicate rows of the slow references, mean over the chosen batches."""
    partition = kahypar()
    found: dict[str, list[int]] = {}
    for batch in chosen:
        part = stream.slice(int(batch) * BATCH, int(batch + 1) * BATCH)
        keys_of = shared_keys_of(part)

        def rows(assigned: np.ndarray, part: KeyStream = part) -> int:
            return int(duplicate_rows(part, BATCH, assigned, num_micro_batches)[0])

        if starts:
            rngs = [np.random.default_rng(seed) for seed in range(starts)]
            least = min(rows(annealed_swaps(keys_of, num_micro_batches, rng)) for rng in rngs)
            found.setdefault("annealed swaps", []).append(least)
        if partition is not None:
            least = min(rows(partition(keys_of, num_micro_batches, seed)) for seed in range(3))
            found.setdefault("Mt-KaHyPar", []).append(least)
    return {name: float(np.mean(values)) for name, values in found.items()}


def report(title: str, stream: KeyStream, args: argparse.Namespace) -> None:
    """A table for one stream: a line per number of micro-batches."""
    batches = stream.num_samples // BATCH
    chosen = np.unique(np.linspace(0, batches - 1, args.reference_batches).astype(int))
    keys = np.mean([len(np.unique(batch.row_keys())) for batch in stream.batches(BATCH)])
    print(
        f"\n{title}: {batches} batches of {BATCH}, {stream.num_lookups / stream.num_samples:.1f} keys a sample, ",
        end="",
    )
    print(f"{keys:.0f} unique rows a batch; references on {len(chosen)} batches")
    print(f"{'N':>3} {'random':>8} {'sorted':>8} {'clustered':>9} {'on the reference batches':>25} {'samples/s':>10}")
    for number in args.micro_batches:
        clustered = cluster_keys(stream.row_keys(), stream.sample_offsets.copy(), BATCH, number)
        dealt = np.tile(np.arange(BATCH) * number // BATCH, batches)
        shuffled = np.random.default_rng(0).permuted(dealt.reshape(-1, BATCH), axis=1).ravel()
        rows = duplicate_rows(stream, BATCH, clustered, number)
        ours = rows[chosen].mean()
        slow = references(stream, chosen, number, args.starts)
        texts = [
            f"{ours:.1f}",
            *(f"{name} {value:.1f} ({ours / max(value, 1e-9):.3f})" for name, value in slow.items()),
        ]
        print(
            f"{number:>3} {duplicate_rows(stream, BATCH, shuffled, number).mean():>8.1f} "
            f"{duplicate_rows(stream, BATCH, sorted_assignment(stream, number), number).mean():>8.1f} "
            f"{rows.mean():>9.1f} {'; '.join(texts):>25} {speed(stream, number):>10,.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reference-batches", type=int, default=8)
    parser.add_argument("--starts", type=int, default=2, help="of the annealed swaps; 0 leaves them out")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    args = parser.parse_args()
    print(f"numpy {np.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} (machine may be shared)")
    for title, stream in streams(args.folder).items():
        report(title, stream, args)


if __name__ == "__main__":
    main()
