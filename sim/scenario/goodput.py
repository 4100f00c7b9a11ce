"""What failures leave of a month: checkpoints, lost work and restarts as expected goodput, and its spread.

Failures of a job are a Poisson process with mean time M = MTBF of one accelerator / number of accelerators. A segment
is `interval` of work and one checkpoint; a failure inside costs everything since the last checkpoint and a restart,
during which the next failure may strike.

Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
Computer Systems 22 (2006), the complete model, expected wall time M exp(R/M) (exp((interval + checkpoint)/M) - 1) per
interval of work; its exact minimum is by Lambert's W (Bougeret, Casanova, Rabie, Robert, Vivien, Checkpointing
strategies for parallel jobs, SC 2011). J. W. Young, A first order approximation to the optimum checkpoint interval,
Communications of the ACM 17 (1974).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from scipy.special import lambertw

from nestpipe.base import CaseError
from sim.scenario.sections import Failures

__all__ = ["Goodput", "daly_interval_s", "expected_goodput", "goodput", "optimal_interval_s", "young_interval_s"]

_S_PER_HOUR = 3600.0
#: Failures that a simulated horizon holds at most; the spread over a longer one follows from that over a shorter.
_FAILURES_MAX = 2_000
#: Below this checkpoint time over mean time between failures, Daly's series is exact and Lambert's W is not.
_TINY = 1e-10


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The share of wall time that trains, over a horizon.

    Attributes:
        expected: expected share, from 0 to 1.
        low, high: 5th and 95th percentile of simulated horizons; equal to `expected` if none were simulated. Where a
            horizon has more than 2,000 failures, shorter ones are simulated, and the distance from `expected` shrinks
            with the square root of the length, as that of a mean of independent segments does.
        interval_s: training time between checkpoints; infinite where nothing fails.
        is_optimal: whether the interval was chosen here.
        young_s, daly_s: the two published approximations of the best interval, for comparison.
        mtbf_s: of the whole job.
        failures: expected number within the horizon.
    """

    expected: float
    low: float
    high: float
    interval_s: float
    is_optimal: bool
    young_s: float
    daly_s: float
    mtbf_s: float
    failures: float


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Young's first-order optimum, seconds.

    >>> round(young_interval_s(60, 36_000))
    2078
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum, seconds.

    >>> round(daly_interval_s(60, 36_000))
    2039
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def optimal_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The interval that maximises `expected_goodput`, seconds: M (1 + W(-exp(-1 - checkpoint / M))).

    >>> round(optimal_interval_s(60, 36_000))
    2039
    """
    if checkpoint_s / mtbf_s < _TINY:
        return daly_interval_s(checkpoint_s, mtbf_s)
    return float(mtbf_s * (1 + lambertw(-math.exp(-1 - checkpoint_s / mtbf_s)).real))


def expected_goodput(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """The expected share of wall time that trains: interval over the expected wall time of a segment."""
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent > 500 or restart_s / mtbf_s > 500:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))


def goodput(failures: Failures, world_size: int, *, seeds: int = 0, seed: int = 0) -> Goodput:
    """The goodput of a job of `world_size` accelerators.

    Args:
        failures: rates and costs.
        world_size: number of accelerators.
        seeds: number of horizons to simulate for the interval; none if 0.
        seed: of the first horizon.

    Raises:
        CaseError: if checkpoints cost nothing and no interval is given: then there is no best one.
    """
    mtbf_s = max(failures.accelerator_mtbf_hours * _S_PER_HOUR / world_size, sys.float_info.min)
    interval_s = failures.checkpoint_interval_s
    if interval_s is None and failures.checkpoint_s == 0:
        raise CaseError("failures: checkpoint_s is 0, so there is no best interval; give checkpoint_interval_s")
    chosen = optimal_interval_s(failures.checkpoint_s, mtbf_s) if interval_s is None else interval_s
    expected = expected_goodput(chosen, failures.checkpoint_s, failures.restart_s, mtbf_s)
    horizon_s = failures.horizon_hours * _S_PER_HOUR
    low = high = expected
    if seeds and expected > 0:
        simulated_s = min(horizon_s, _FAILURES_MAX * mtbf_s)
        drawn = [_horizon(failures, chosen, mtbf_s, simulated_s, [seed + i, world_size]) for i in range(seeds)]
        low, high = (float(each) for each in np.percentile(drawn, [5, 95]))
        if simulated_s < horizon_s:
            shrink = math.sqrt(simulated_s / horizon_s)
            low, high = (max(0.0, expected + (each - expected) * shrink) for each in (low, high))
    return Goodput(
        expected=expected,
        low=low,
        high=high,
        interval_s=chosen,
        is_optimal=interval_s is None,
        young_s=young_interval_s(failures.checkpoint_s, mtbf_s),
        daly_s=daly_interval_s(failures.checkpoint_s, mtbf_s),
        mtbf_s=mtbf_s,
        failures=horizon_s / mtbf_s,
    )


def _horizon(failures: Failures, interval_s: float, mtbf_s: float, horizon_s: float, seed: list[int]) -> float:
    """The share of one simulated horizon that trained and was saved, or was still running when it ended."""
    generator = np.random.default_rng(seed)
    segment_s = interval_s + failures.checkpoint_s
    now, saved = 0.0, 0.0
    while now < horizon_s:
        lasts = min(float(generator.exponential(mtbf_s)), horizon_s - now)
        segments = math.floor(lasts / segment_s)
        saved += segments * interval_s
        now += lasts
        if now >= horizon_s:
            saved += min(lasts - segments * segment_s, interval_s)
            break
        while now < horizon_s:
            quiet = float(generator.exponential(mtbf_s))
            now += min(quiet, failures.restart_s)
            if quiet >= failures.restart_s:
                break
    return saved / horizon_s
