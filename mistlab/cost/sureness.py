"""How far measured runs lie from their predictions, by kind of run, and the bounds that follow.

What a prediction can be wrong about is the time in which GPUs do not compute the model: slow
kernels, messages, bubbles, hosts. So bounds are counted on the way from the predicted time to the
time of the model's arithmetic at the GPUs' peak rate, in logarithms. A run at 50 % of the peak has
a short way (a factor of 2); a tiny model that waits for its host has a long one (a factor of 50).
A bound lies a *share* of this way below or above the prediction.

The share belongs to the kind of run, which is known before it runs: its software, the engine that
it is predicted as, its GPUs, the kinds of its blocks, the bits of its products, and whether it is a
benchmark or training as users do it. 90 % of a kind's measured runs lie within its share. A kind of
runs of one software takes part of the next wider kind's share, the more the fewer its models are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal

from mistlab import catalog
from mistlab.values.value import bounded, check_fields, from_mapping
from mistlab.values.workload import Precision

Blocks = Literal["dense", "experts", "hybrid", "adapters"]

# Shares are this much larger than those of known runs, because a run has a new model or a new
# number of GPUs. This number and the next two were chosen on the given runs, left out by groups:
# with 1.25 here 81 % of the smallest table of experts lie within bounds.
STRETCH = 1.35
# The same for each doubling of the GPUs beyond the most that were measured of a kind.
STRETCH_A_DOUBLING = 0.1
# A kind's own share counts as much as its models, the next wider kind's as much as this many.
MODELS_OF_WIDER = 8
# Equal runs differ by a few hundredths themselves.
LEAST_SHARE = 0.05
# No run is known to use more than about this share of a GPU's peak rate.
MOST_UTILISED = 0.8
# Where adapters alone are trained, the backward pass has no gradients of weights: of three products
# two are left.
ARITHMETIC_OF_ADAPTERS = 2 / 3
# The kind that all runs belong to, and what names of kinds begin with.
ANY, ENGINE = "any", "engine "
# The bits of a precision's products.
BITS: Mapping[Precision, int] = {"fp4": 4, "fp8": 8, "fp16": 16, "bf16": 16, "fp32": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """What is known of a run before it runs, as far as bounds depend on it.

    ``software`` is empty for a plan, which no software ran yet. ``engine`` is the engine whose
    calibration the prediction has; it is empty where the engine is only assumed. ``is_benchmark``
    is not so for runs that train as users do: with unlike experts, on real data, from a checkpoint.
    """

    software: str
    engine: str
    hardware: str
    blocks: Blocks
    bits: int
    is_benchmark: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of kinds that the run belongs to, the narrowest first; the last two are of any
        engine. Between engines, experts and hybrid blocks are one kind."""
        use = "" if self.is_benchmark else ", as users train"
        own, engine = f"{self.software}{use}", f"{ENGINE}{self.engine}{use}"
        blocks = "not dense" if self.blocks in ("experts", "hybrid") else self.blocks
        alike = f"{blocks}, {'16 bits' if self.bits >= 16 else 'fewer bits'}"
        of_software = (
            f"{own}: {self.blocks}, {self.bits} bits, {self.hardware}",
            f"{own}: {self.blocks}, {self.bits} bits",
            f"{own}: any",
        )
        of_engine = (f"{engine}: {alike}",)
        return (
            *(of_software if self.software else ()),
            *(of_engine if self.engine else ()),
            f"{ANY}{use}: {alike}",
            ANY,
        )

    def way(self, mfu: float) -> float:
        """The logarithm of a predicted time over the time of the model's arithmetic at peak rate,
        from the MFU of the prediction."""
        utilised = mfu * (ARITHMETIC_OF_ADAPTERS if self.blocks == "adapters" else 1)
        return -math.log(min(utilised, MOST_UTILISED))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKind:
    """A kind of runs that was measured: 90 % of ``runs`` lie within ``share`` of the way."""

    name: str
    share: float = field(metadata=bounded(minimum=0))
    runs: int = field(metadata=bounded(minimum=1))
    models: int = field(metadata=bounded(minimum=1))
    most_gpus: int = field(metadata=bounded(minimum=1))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Sureness:
    """The kinds of runs that were measured, and the source of the measurements."""

    source: str
    kinds: tuple[KnownKind, ...]

    @cached_property
    def _known(self) -> Mapping[str, KnownKind]:
        return {one.name: one for one in self.kinds}

    def share(self, kind: RunKind, gpus: int) -> float:
        """The share of the way within which a run's measurement lies in 90 %."""
        found, *narrower = self._kinds_of(kind)
        share = found.share
        for one in narrower:
            wider, found = found, one
            together = found.models * found.share + MODELS_OF_WIDER * share
            share = together / (found.models + MODELS_OF_WIDER)
            if wider.name == ANY:
                # The least sure table stands for what nobody knows: it makes no kind surer.
                share = max(share, found.share)
        doublings = max(0.0, math.log2(gpus / found.most_gpus))
        return max(LEAST_SHARE, share * (STRETCH + STRETCH_A_DOUBLING * doublings))

    def words(self, kind: RunKind) -> str:
        """Which measured runs a run's bounds are from: those of the narrowest kind, and wider ones
        as far as they count."""
        *wider, found = self._kinds_of(kind)
        runs = f"{found.runs:,} measured runs of kind {found.name!r} ({found.models} models)"
        return f"bounds are those of {runs}{' and of wider kinds' * bool(wider)}"

    def _kinds_of(self, kind: RunKind) -> tuple[KnownKind, ...]:
        """The known kinds that count for a run, the widest first."""
        *narrower, alike, anything = kind.names
        widest = self._known.get(alike) or self._known[anything]
        return (widest, *(self._known[name] for name in reversed(narrower) if name in self._known))


@cache
def known_sureness() -> Sureness:
    """The kinds of runs that this package knows, from the tables that it was held against."""
    return from_mapping(Sureness, catalog.sureness(), "sureness")
