"""What software makes of the wire: protocols of a communication library, fitted on measured collectives.

A library sends in one of a few protocols, and takes the one that is least for the size: some start soon and get a small
share of the wire, others take longer to start and get most of it (NCCL's LL, LL128 and Simple; the names here are only
numbers). A step takes the wire's own latency, a latency per message, and its bytes over a share of the wire; what a
rank keeps for itself is copied meanwhile by the same kernels. Shares and latencies come from `protocols.yaml`, which
`benchmarks/fit_collectives.py` writes; they are fitted, and those of a generation that nobody measured are the mean of
the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files

import msgspec

from nestpipe.base import NS_PER_S, TopologyError, decode, unknown_name

__all__ = ["Fits", "Pattern", "Protocol", "Software", "StepOnWire", "load_fits", "software"]


class Pattern(StrEnum):
    """How an algorithm sends, as far as software cares."""

    EXCHANGE = "exchange"  # everybody to everybody
    CHAIN = "chain"  # rings and trees: what arrives is sent on
    IN_SWITCH = "in_switch"  # switches add up


class Protocol(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One protocol.

    Attributes:
        base_ns: once a collective
        step_ns, step_across_ns: of each message that waits for the one before, inside and between scale-up domains
        share, share_across: of the wire's rate, inside and between scale-up domains
    """

    base_ns: float
    step_ns: float
    step_across_ns: float
    share: float
    share_across: float


class _Factors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What sets a generation of accelerators apart from the mean of all: factors on latencies and on shares."""

    latency: float = 1.0
    share: float = 1.0


class _Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    patterns: dict[Pattern, list[Protocol]]
    own_copy: dict[Pattern, float]
    generations: dict[str, _Factors]


class Fits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file: fits by name, `all` and one without each machine; what they were fitted on."""

    source: str
    fits: dict[str, _Fit]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOnWire:
    """A step as hardware takes it: `times` rounds of `hops` messages in a chain.

    Attributes:
        latency_s: of a message; moving_s: of the bytes of a round at the wire's rate
        inside_s, across_s: how long the bytes keep the busiest link busy, in a scale-up domain and outside
        share_across: of the messages, those that leave their domain
    """

    times: float
    hops: int
    latency_s: float
    moving_s: float
    inside_s: float
    across_s: float
    share_across: float

    @property
    def waiting_s(self) -> float:
        """Of all rounds, what does not grow with the bytes."""
        return self.times * self.hops * self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """The protocols by pattern, and how much of the wire's time a copy of a rank's own share takes.

    `Software.none()` is hardware as described: no latency but the wire's, and all of its rate.
    """

    protocols: Mapping[Pattern, tuple[Protocol, ...]]
    own_copy: Mapping[Pattern, float]

    @staticmethod
    def none() -> Software:
        wire = Protocol(base_ns=0.0, step_ns=0.0, step_across_ns=0.0, share=1.0, share_across=1.0)
        return Software(protocols=dict.fromkeys(Pattern, (wire,)), own_copy=dict.fromkeys(Pattern, 0.0))

    def time_s(self, steps: Sequence[StepOnWire], pattern: Pattern, num_inside: int) -> tuple[float, float]:
        """Seconds of a collective with the protocol that is least for it, and of these the latency.

        Args:
            num_inside: ranks of the group in one scale-up domain
        """
        waiting_s, moving_s = min(self.options(steps, pattern, num_inside), key=sum)
        return waiting_s + moving_s, waiting_s

    def options(self, steps: Sequence[StepOnWire], pattern: Pattern, num_inside: int) -> list[tuple[float, float]]:
        """With each protocol: seconds that do not grow with the bytes, and seconds that do."""
        own = 1 + (self.own_copy[pattern] / (num_inside - 1) if num_inside > 1 else 0.0)
        return [_with_protocol(steps, each, own) for each in self.protocols[pattern]]


def _with_protocol(steps: Sequence[StepOnWire], protocol: Protocol, own: float) -> tuple[float, float]:
    waiting_s, moving_s = protocol.base_ns / NS_PER_S, 0.0
    for step in steps:
        message_ns = protocol.step_ns + step.share_across * (protocol.step_across_ns - protocol.step_ns)
        waiting_s += step.waiting_s + step.times * step.hops * message_ns / NS_PER_S
        busiest_s = max(step.inside_s, step.across_s)
        if busiest_s:
            slower = max(step.inside_s * own / protocol.share, step.across_s / protocol.share_across) / busiest_s
            moving_s += step.times * step.moving_s * slower
    return waiting_s, moving_s


@cache
def load_fits() -> Fits:
    """The fits that come with this version."""
    text = (files("sim.network") / "protocols.yaml").read_text(encoding="utf-8")
    return decode(text, Fits, TopologyError, source="protocols.yaml")


@cache
def software(generation: str, fit: str = "all") -> Software:
    """The protocols of a generation of accelerators; the mean of all where nobody measured it.

    Args:
        generation: `generation` of a topology's accelerator
        fit: `all`, or `without_` and a machine: fitted without that machine's curves

    Raises:
        TopologyError: unknown fit.
    """
    fits = load_fits().fits
    if fit not in fits:
        raise TopologyError(unknown_name("fit", fit, fits))
    found = fits[fit]
    factors, patterns = found.generations.get(generation, _Factors()), found.patterns
    return Software(
        protocols={
            pattern: tuple(_scaled(each, factors) for each in protocols) for pattern, protocols in patterns.items()
        },
        own_copy=found.own_copy,
    )


def _scaled(protocol: Protocol, factors: _Factors) -> Protocol:
    return msgspec.structs.replace(
        protocol,
        base_ns=protocol.base_ns * factors.latency,
        step_ns=protocol.step_ns * factors.latency,
        step_across_ns=protocol.step_across_ns * factors.latency,
        share=min(1.0, protocol.share * factors.share),
    )
