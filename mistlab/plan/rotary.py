"""Rotary embedding that is rescaled, for longer sequences than a model was trained with first."""

import math
from dataclasses import dataclass, field
from typing import Literal

from mistlab.core.values import MOST_TOKENS, bounded, check_fields, refuse

ScalingKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryScaling:
    """How rotary embedding turns slower than its base says.

    ``linear`` divides all frequencies by ``factor``. The others do so to the slow ones, and leave
    the fast ones: ``llama3`` those that turn less than ``low``, or more than ``high`` times in
    ``positions`` tokens; ``yarn`` by the number of a channel, between those that turn ``high`` and
    ``low`` times (Peng et al. 2023, arXiv 2309.00071), which it rounds outwards if it
    ``truncates``. Rotated channels are multiplied by ``amplitude``, and scores of attention by
    ``score_factor``.
    """

    kind: ScalingKind
    factor: float = field(metadata=bounded(above=0, most=1e9))
    positions: int = field(default=8192, metadata=bounded(minimum=1, most=MOST_TOKENS))
    low: float = field(default=1.0, metadata=bounded(above=0, most=1e9))
    high: float = field(default=4.0, metadata=bounded(above=0, most=1e9))
    truncates: bool = True
    amplitude: float = field(default=1.0, metadata=bounded(above=0, most=1e9))
    score_factor: float = field(default=1.0, metadata=bounded(above=0, most=1e9))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kind != "linear" and self.high <= self.low:
            problem = f"{self.high:g} is not above low {self.low:g}: give more turns than low"
            refuse("high", problem)


def frequencies(channels: int, base: float, scaling: RotaryScaling | None) -> list[float]:
    """The angles, in radians, by which a token turns further than the one before it: one for each
    pair of rotated channels.

    >>> frequencies(4, 10000.0, None)
    [1.0, 0.01]
    >>> frequencies(4, 10000.0, RotaryScaling(kind="linear", factor=2.0))
    [0.5, 0.005]
    """
    half = channels // 2
    plain = [base ** (-at / half) for at in range(half)]
    if scaling is None:
        return plain
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
        """The channel that turns so often, half a pair each."""
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
    """By how much yarn makes scores steeper, for a factor of lengths.

    >>> yarn_amplitude(1.0), round(yarn_amplitude(40.0), 4)
    (1.0, 1.3689)
    """
    return 0.1 * times * math.log(factor) + 1.0 if factor > 1 else 1.0
