"""Key streams made up to order: bounded Zipf keys, jagged bags, any number of features, from one seeded generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from traces.keys.stream import KeyStream, offsets_of

__all__ = ["Bag", "ZipfFeature", "criteo_like", "generate_stream", "zipf_ranks"]


class Bag(StrEnum):
    """How many lookups a sample has in a feature."""

    FIXED = "fixed"
    POISSON = "poisson"
    LOGNORMAL = "lognormal"


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfFeature:
    """One feature: a table and how it is looked up.

    Attributes:
        name: of the feature.
        num_keys: rows of the table, at least 1.
        exponent: s of p(rank) proportional to rank^-s over 1..num_keys; 0 is uniform.
        mean_lookups: a sample, at least 0.
        bag: distribution of the number of lookups a sample; fixed needs a whole `mean_lookups`, lognormal has sigma 1.
    """

    name: str
    num_keys: int
    exponent: float
    mean_lookups: float = 1.0
    bag: Bag = Bag.FIXED

    def __post_init__(self) -> None:
        if self.num_keys < 1:
            raise ValueError(f"{self.name}: num_keys must be at least 1, got {self.num_keys}")
        if not 0 <= self.exponent <= 20:
            raise ValueError(f"{self.name}: exponent must lie between 0 and 20, got {self.exponent}")
        if self.mean_lookups < 0:
            raise ValueError(f"{self.name}: mean_lookups must not be negative, got {self.mean_lookups}")
        if self.bag is Bag.FIXED and self.mean_lookups != int(self.mean_lookups):
            raise ValueError(f"{self.name}: a fixed bag needs a whole mean_lookups, got {self.mean_lookups}")


def generate_stream(features: Sequence[ZipfFeature], num_samples: int, rng: np.random.Generator) -> KeyStream:
    """Independent samples; the value of a lookup is its key's popularity rank from 0. Same seed, same stream."""
    lengths = np.stack([_bag_sizes(feature, num_samples, rng) for feature in features], axis=1)
    offsets = offsets_of(lengths.ravel())
    column = np.repeat(np.tile(np.arange(len(features)), num_samples), lengths.ravel())
    values = np.empty(len(column), dtype=np.uint64)
    for index, feature in enumerate(features):
        mine = column == index
        values[mine] = zipf_ranks(feature.num_keys, feature.exponent, int(mine.sum()), rng)
    names = tuple(feature.name for feature in features)
    return KeyStream(features=names, values=values, offsets=offsets, source=f"generated: Zipf, {len(names)} features")


def criteo_like(num_features: int = 26, largest_table: int = 1_000_000) -> tuple[ZipfFeature, ...]:
    """Features with one lookup each, table sizes spread evenly in log scale from 3 rows up, exponent 1 (assumed)."""
    sizes = np.geomspace(3, largest_table, num_features).astype(int)
    return tuple(ZipfFeature(name=f"c{i + 1}", num_keys=int(size), exponent=1.0) for i, size in enumerate(sizes))


def _bag_sizes(feature: ZipfFeature, num_samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if feature.bag is Bag.FIXED:
        return np.full(num_samples, int(feature.mean_lookups), dtype=np.int64)
    if feature.bag is Bag.POISSON:
        return rng.poisson(feature.mean_lookups, num_samples).astype(np.int64)
    sizes = np.floor(feature.mean_lookups * rng.lognormal(-0.5, 1.0, num_samples) + rng.random(num_samples))
    return sizes.astype(np.int64)


def zipf_ranks(num_keys: int, exponent: float, count: int, rng: np.random.Generator) -> NDArray[np.uint64]:
    """Popularity ranks from 0, with p(rank) proportional to (rank + 1)^-exponent, for any number of keys.

    Rejection from the integral of x^-s, so neither time nor memory grow with `num_keys`.

    Source: W. Hoermann, G. Derflinger, "Rejection-inversion to generate variates from monotone discrete
    distributions", ACM TOMACS 6(3), 1996, section 3.

    >>> zipf_ranks(4, 1.0, 6, np.random.default_rng(0)).tolist()
    [1, 0, 0, 2, 3, 1]
    """
    low, high = _area(np.array([0.5, num_keys + 0.5]), exponent)
    out = np.empty(count, dtype=np.uint64)
    done = 0
    while done < count:
        area = rng.uniform(low, high, max(64, int((count - done) * 1.2)))
        x = _inverse_area(area, exponent)
        rank = np.clip(np.rint(x), 1, num_keys)
        # the bar of the histogram over [rank - 1/2, rank + 1/2] covers less than the area under the curve
        accepted = rank[
            rng.random(len(rank)) * (_area(rank + 0.5, exponent) - _area(rank - 0.5, exponent)) <= rank**-exponent
        ]
        take = accepted[: count - done]
        out[done : done + len(take)] = take.astype(np.uint64) - np.uint64(1)
        done += len(take)
    return out


def _area(x: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    """Integral of t^-s from 1 to x."""
    log = np.log(x)
    return log if exponent == 1 else np.expm1((1 - exponent) * log) / (1 - exponent)


def _inverse_area(area: NDArray[np.float64], exponent: float) -> NDArray[np.float64]:
    return np.exp(area) if exponent == 1 else np.exp(np.log1p((1 - exponent) * area) / (1 - exponent))
