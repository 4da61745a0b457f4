"""How far measured runs lie from their predictions, by kind of run, and the bounds that follow.

A run's kind is known before it runs: its software, its GPUs, the kinds of its blocks, the bits of
its products, whether the model is tiny, and whether it is a benchmark or training as users do it. A
kind with enough measured runs of several models has a factor: 90 % of these runs lie within it. A
run of another kind takes the factor of the next wider kind. All factors are stretched, because runs
with a new model or a new number of GPUs are predicted worse than the known runs.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, Self

from mistlab import catalog
from mistlab.values.prediction import Prediction
from mistlab.values.value import bounded, check_fields, from_mapping

Blocks = Literal["dense", "experts", "hybrid", "adapters"]

# The share of measurements that bounds hold.
SHARE = 0.9
# A kind counts from so many runs of so many models on.
FEWEST_RUNS, FEWEST_MODELS = 8, 2
# Logarithms of factors are this much larger than those of known runs; with less, runs of torchtitan
# and NeMo whose model or number of GPUs is left out lie outside too often.
STRETCH = 1.2
# The same for each doubling of the GPUs beyond the most that were measured of a kind, and for each
# wider kind that is taken because a narrower one was not measured.
STRETCH_A_DOUBLING, STRETCH_A_KIND = 0.1, 0.1
# Where the narrowest kind was not measured, constants of hardware or engine are borrowed: then the
# factor is at least about that of a plan whose engine was not measured on its hardware (0.3).
LEAST_BORROWED = 1.35
# Equal runs differ by about this factor themselves.
LEAST_FACTOR = 1.05
# Up to this width of the model its kernels are shorter than the time to launch them.
TINY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """What is known of a run before it runs, as far as bounds depend on it.

    ``is_benchmark`` is not so for runs that train as users do: with unlike experts, on real data,
    from a checkpoint.
    """

    software: str
    hardware: str
    blocks: Blocks
    bits: int
    is_tiny: bool
    is_benchmark: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of kinds that the run belongs to, the narrowest first."""
        size = "tiny " if self.is_tiny else ""
        use = "" if self.is_benchmark else ", as users train"
        parts = "without experts" if self.blocks == "dense" else "not dense"
        bits = "16 bits" if self.bits == 16 else "fewer bits"
        own = f"{self.software}{use}"
        return (
            f"{own}: {size}{self.blocks}, {self.bits} bits, {self.hardware}",
            f"{own}: {size}{self.blocks}, {self.bits} bits",
            f"{own}: {size}{parts}",
            f"{own}: {size or 'any'}".rstrip(),
            f"any{use}: {size}{parts}, {bits}",
            f"any{use}: {size or 'any'}".rstrip(),
            ANY,
        )


ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKind:
    """A kind of runs that was measured: 90 % of ``runs`` lie within ``factor`` of predictions."""

    name: str
    factor: float = field(metadata=bounded(minimum=1))
    runs: int = field(metadata=bounded(minimum=1))
    models: int = field(metadata=bounded(minimum=1))
    most_gpus: int = field(metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sureness:
    """The kinds of runs that were measured, and the source of the measurements."""

    source: str
    kinds: tuple[KnownKind, ...]

    def factor(self, kind: RunKind, gpus: int) -> float:
        """The factor within which a run's measurement lies in 90 %."""
        known = {one.name: one for one in self.kinds}
        wider, own = next(
            (place, known[name]) for place, name in enumerate(kind.names) if name in known
        )
        doublings = max(0.0, math.log2(gpus / own.most_gpus))
        stretch = STRETCH + STRETCH_A_DOUBLING * doublings + STRETCH_A_KIND * wider
        least = LEAST_BORROWED if wider else LEAST_FACTOR
        return float(max(least, own.factor**stretch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How far a measured run lies outside of what is predicted: a factor of at least 1."""

    kind: RunKind
    model: str
    gpus: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The shortest and the longest time that is predicted of a run, before any doubt: the longest
    is that on the slowest cluster known."""

    least_s: float
    longest_s: float

    @classmethod
    def of(cls, prediction: Prediction) -> Self:
        """The range of a prediction, whose upper bound is as much wider as its lower one."""
        width = 1 - prediction.iteration_s_low / prediction.iteration_s
        return cls(
            least_s=prediction.iteration_s, longest_s=prediction.iteration_s_high / (1 + width)
        )

    def miss(self, measured_s: float) -> float:
        """The factor, at least 1, by which a measurement lies outside."""
        return max(1.0, self.least_s / measured_s, measured_s / self.longest_s)

    def bounded(self, prediction: Prediction, factor: float) -> Prediction:
        """A prediction with bounds that lie a factor outside of the range."""
        return replace(
            prediction,
            iteration_s_low=self.least_s / factor,
            iteration_s_high=self.longest_s * factor,
        )


def sureness_of(misses: Iterable[Miss], source: str = "") -> Sureness:
    """The kinds of runs that are known from measured ones."""
    together: dict[str, list[Miss]] = defaultdict(list)
    for one in misses:
        for name in one.kind.names:
            together[name].append(one)
    return Sureness(
        source=source,
        kinds=tuple(
            _known(name, some)
            for name, some in sorted(together.items())
            if name == ANY
            or (len(some) >= FEWEST_RUNS and len({one.model for one in some}) >= FEWEST_MODELS)
        ),
    )


def _known(name: str, misses: Sequence[Miss]) -> KnownKind:
    factors = sorted(one.factor for one in misses)
    # The quantile that holds for one run more than those that are known.
    place = min(len(factors), math.ceil(SHARE * (len(factors) + 1))) - 1
    return KnownKind(
        name=name,
        factor=round(factors[place], 3),
        runs=len(factors),
        models=len({one.model for one in misses}),
        most_gpus=max(one.gpus for one in misses),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run's factor when its group was left out, and whether its measurement lies within."""

    factor: float
    is_inside: bool


def left_out(misses: Sequence[Miss], groups: Sequence[str]) -> Iterator[LeftOut | None]:
    """For each run the factor that is known from the runs of other groups, if there are any."""
    without = {
        group: sureness_of(m for m, own in zip(misses, groups, strict=True) if own != group)
        for group in set(groups)
    }
    for one, group in zip(misses, groups, strict=True):
        if not without[group].kinds:
            yield None
            continue
        factor = without[group].factor(one.kind, one.gpus)
        yield LeftOut(factor=factor, is_inside=one.factor <= factor)


@cache
def known_sureness() -> Sureness:
    """The kinds of runs that this package knows, from the tables that it was held against."""
    return from_mapping(Sureness, catalog.sureness(), "sureness")
