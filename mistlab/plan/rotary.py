"""Scaled rotary position embeddings, for sequences longer than those of pre-training."""

import math
from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.values import MOST_TOKENS, bounded, check_fields, refuse

ScalingKind = Literal["linear", "llama3", "yarn", "dynamic", "longrope", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """The scaling of a model's rotary frequencies: its kind and its parameters.

    - ``linear`` divides all frequencies by ``factor``.
    - ``llama3`` divides the slow frequencies, which turn less than ``low`` times in ``positions``
      tokens, keeps the fast ones, which turn more than ``high`` times, and interpolates between.
    - ``yarn`` does the same, but interpolates by the number of a channel, between the channels that
      turn ``high`` and ``low`` times (Peng et al. 2023, arXiv 2309.00071); their numbers are
      rounded outwards if it ``truncates``.
    - ``dynamic`` has a larger base for sequences longer than ``positions``.
    - ``longrope`` divides each pair of channels by a number of its own: from ``long`` for sequences
      longer than ``positions``, from ``short`` for others (Ding et al. 2024, arXiv 2402.13753).
    - ``other`` is a scaling that only the model's own code has; it can be predicted, since no cost
      depends on the scaling.

    Rotated channels are multiplied by ``amplitude``, and attention scores by ``score_factor``.
    """

    kind: ScalingKind
    factor: float = field(metadata=bounded(above=0, most=1e9))
    positions: int = field(default=8192, metadata=bounded(minimum=1, most=MOST_TOKENS))
    low: float = field(default=1.0, metadata=bounded(above=0, most=1e9))
    high: float = field(default=4.0, metadata=bounded(above=0, most=1e9))
    truncates: bool = True
    amplitude: float = field(default=1.0, metadata=bounded(above=0, most=1e9))
    score_factor: float = field(default=1.0, metadata=bounded(above=0, most=1e9))
    short: tuple[float, ...] = field(default=(), metadata=bounded(above=0, most=1e9))
    long: tuple[float, ...] = field(default=(), metadata=bounded(above=0, most=1e9))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind in ("llama3", "yarn") and self.high <= self.low:
            refuse(
                "high",
                f"{self.high:g} is not above low {self.low:g}: give a number above low",
            )
        for name in ("short", "long"):
            if bool(factors := getattr(self, name)) != (self.kind == "longrope"):
                refuse(
                    name,
                    f"has {len(factors)} numbers with kind {self.kind}: "
                    + ("leave it out" if factors else "give one for each pair of rotated channels"),
                )

    def check(self, channels: int) -> None:
        """Refuse lists of longrope factors whose length is not the number of pairs of rotated
        channels.
        """
        for name in ("short", "long"):
            if (factors := getattr(self, name)) and len(factors) != channels // 2:
                refuse(
                    name,
                    f"has {len(factors)} numbers for {channels // 2} pairs of rotated channels: "
                    "give one for each pair",
                )


def frequencies(
    channels: int, base: float, scaling: RotaryScaling | None, tokens: int
) -> list[float]:
    """The angle in radians between neighbouring tokens, for each pair of rotated channels, in
    sequences of this length.

    >>> frequencies(4, 10000.0, None, 8)
    [1.0, 0.01]
    >>> frequencies(4, 10000.0, RotaryScaling(kind="linear", factor=2.0), 8)
    [0.5, 0.005]
    >>> own = {"short": (1.0, 2.0), "long": (1.0, 4.0)}
    >>> longer = RotaryScaling(kind="longrope", factor=2.0, positions=4, **own)
    >>> [frequencies(4, 10000.0, longer, tokens) for tokens in (4, 5)]
    [[1.0, 0.005], [1.0, 0.0025]]
    """
    half = channels // 2
    if scaling is not None and scaling.kind == "dynamic" and half > 1:
        longer = max(tokens, scaling.positions) / scaling.positions
        base *= (scaling.factor * longer - (scaling.factor - 1)) ** (half / (half - 1))
    plain = [base ** (-at / half) for at in range(half)]
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "longrope":
        factors = scaling.long if tokens > scaling.positions else scaling.short
        return [one / by for one, by in zip(plain, factors, strict=True)]
    shares = _SLOWED[scaling.kind](plain, channels, base, scaling)
    pairs = zip(plain, shares, strict=True)
    return [one * (share / scaling.factor + 1 - share) for one, share in pairs]


def _linear(plain: list[float], channels: int, base: float, scaling: RotaryScaling) -> list[float]:
    return [1.0] * len(plain)


def _llama3(plain: list[float], channels: int, base: float, scaling: RotaryScaling) -> list[float]:
    turns = [scaling.positions * one / (2 * math.pi) for one in plain]
    width = scaling.high - scaling.low
    return [min(max((scaling.high - many) / width, 0.0), 1.0) for many in turns]


def _yarn(plain: list[float], channels: int, base: float, scaling: RotaryScaling) -> list[float]:
    def place(turns: float) -> float:
        """The index, with a fraction, of the pair of channels that rotates ``turns`` times over the
        original context.
        """
        return channels * math.log(scaling.positions / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = place(scaling.high), place(scaling.low)
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    if first == last:
        last += 0.001
    return [min(max((at - first) / (last - first), 0.0), 1.0) for at in range(len(plain))]


_SLOWED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def yarn_amplitude(factor: float, times: float = 1.0) -> float:
    """YaRN's factor on attention scores, for contexts ``factor`` times as long as in pre-training.

    >>> yarn_amplitude(1.0), round(yarn_amplitude(40.0), 4)
    (1.0, 1.3689)
    """
    return 0.1 * times * math.log(factor) + 1.0 if factor > 1 else 1.0
