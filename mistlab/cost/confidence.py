"""Prediction bounds: how far measured runs lie from their predictions, by kind of run.

What a prediction can be wrong about is the time in which GPUs do not compute the model: slow
kernels, messages, bubbles, hosts. So bounds are counted on the way from the predicted time to the
time of the model's arithmetic at the GPUs' peak rate, in logarithms. A run at 50 % of the peak has
a short way (a factor of 2); a tiny model that waits for its host has a long one (a factor of 50).
A bound lies a *share* of this way below or above the prediction: never below the arithmetic itself.

Shares belong to the kind of run, which is known before it runs: its software, the engine that it is
predicted as, its GPUs, the kinds of its blocks, the bits of its products, and whether it is a
benchmark or training as users do it. A run is expected to be like the measured runs of its kind, or
like those of the next wider kind, and so on: the less of its own kind was measured, the more the
wider kinds count. 5 % of what is expected lie below the lower bound, 5 % above the upper one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np

from mistlab import catalog
from mistlab.core.values import Checked, bounded, from_mapping
from mistlab.engines.engine import ENGINES, Engine, Precision
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import EngineCalibration, Hardware, MeasuredAt
from mistlab.plan.workload import Workload

Blocks = Literal["dense", "experts", "hybrid", "adapters"]

# The factor on observed errors, because engine constants were fitted to all measured runs. With a
# model left out of the fit, errors were 1.03 to 1.68 times as large (mean of four: 1.3).
STRETCH = 1.3
# The additional factor for each doubling of GPUs beyond the largest measured run of a kind: without
# it, runs on more GPUs than any known run lie outside bounds too often (docs/decisions/0041).
STRETCH_A_DOUBLING = 0.1
# The weight of all wider kinds together, in groups (models of one software, else tables); a kind's
# own weight is its number of groups.
GROUPS_OF_WIDER = 8
# The weight, in tables, of runs unlike any measured one.
NEW_TABLES = 1
# The share of measured times below the lower bound, and above the upper bound: by definition.
TAIL = 0.05
# The smallest half-width: repeated measurements of one run differ by a few hundredths
# (docs/results/runs.md).
LEAST_SHARE = 0.05
# The largest believable multiple of a prediction: a run that takes longer is stuck, not slow.
MOST_TIMES = 30.0
# The largest believable MFU: no measured run exceeds it; set by hand.
MOST_UTILISED = 0.8
# The additional factor where rates are scaled by datasheets from another GPU: H100, A100 and B200,
# each predicted from another, take 0.87 to 1.2 times as long as by their own rates
# (docs/results/predictor-error.md).
WIDER_WHERE_SCALED = 1.2
# The kind that all runs belong to.
ANY = "any"
# Bits of the operands of products, by precision.
BITS: Mapping[Precision, int] = {"fp4": 4, "fp8": 8, "fp16": 16, "bf16": 16, "fp32": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """The properties of a run, known before it runs, that its bounds depend on.

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
        """The names of the kinds that contain the run, narrowest first: those of its software, then
        those of any software.
        """
        return (*self.of_software, *self.of_any_software)

    @property
    def of_software(self) -> tuple[str, ...]:
        """The names of the kinds of the run's own software; empty if it is unknown."""
        if not self.software:
            return ()
        software = f"{self.software}{self._use}"
        blocks = f"{self.blocks}, {self.bits} bits"
        return f"{software}: {blocks}, {self.hardware}", f"{software}: {blocks}", f"{software}: any"

    @property
    def of_any_software(self) -> tuple[str, ...]:
        """The names of kinds of any software; the last two span all engines. Across engines, models
        with experts and hybrid models are one kind.
        """
        blocks = "not dense" if self.blocks in ("experts", "hybrid") else self.blocks
        alike = f"{self._use}: {blocks}, {'16 bits' if self.bits >= 16 else 'fewer bits'}"
        of_engine = (f"engine {self.engine}{alike}",) if self.engine else ()
        return (*of_engine, f"{ANY}{alike}", ANY)

    @property
    def _use(self) -> str:
        return "" if self.is_benchmark else ", as users train"

    def way(self, mfu: float) -> float:
        """The log of the predicted time over the time of the model's arithmetic at peak rate, from
        the predicted MFU.
        """
        return -math.log(min(mfu, MOST_UTILISED))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKind(Checked):
    """A measured kind of runs: ``shares`` are equally likely relative errors (as shares of
    ``way``), ascending.

    Shares are below 0 for runs that are faster than predicted. ``groups`` are the models of one
    software, or the tables of a kind of any software.
    """

    name: str
    shares: tuple[float, ...]
    runs: int = field(metadata=bounded(minimum=1))
    models: int = field(metadata=bounded(minimum=1))
    groups: int = field(metadata=bounded(minimum=1))
    most_gpus: int = field(metadata=bounded(minimum=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The distances of the lower and the upper bound from a prediction, as shares of its
    ``way``.
    """

    below: float
    above: float

    def around(self, way: float) -> tuple[float, float]:
        """The multiples of a prediction that contain 90 % of measurements."""
        return math.exp(-self.below * way), min(MOST_TIMES, math.exp(self.above * way))


@dataclass(frozen=True, kw_only=True)
class Sureness:
    """All measured kinds of runs, and the source of the measurements."""

    source: str
    kinds: tuple[KnownKind, ...]

    @cached_property
    def _known(self) -> Mapping[str, KnownKind]:
        return {one.name: one for one in self.kinds}

    @cached_property
    def _found(self) -> dict[tuple[str, ...], tuple[Shares, int]]:
        """Cached shares, and the largest number of GPUs of the narrowest kind, by kinds."""
        return {}

    def shares(self, kind: RunKind, gpus: int) -> Shares:
        """The shares of ``way`` within which 90 % of a run's measurements lie."""
        if kind.names not in self._found:
            known = self._kinds_of(kind)
            self._found[kind.names] = _expected(known), known[0].most_gpus
        shares, most_gpus = self._found[kind.names]
        stretch = STRETCH + STRETCH_A_DOUBLING * max(0.0, math.log2(gpus / most_gpus))
        return Shares(
            below=min(1.0, max(LEAST_SHARE, shares.below * stretch)),
            above=max(LEAST_SHARE, shares.above * stretch),
        )

    def words(self, kind: RunKind) -> str:
        """A sentence saying which measured runs the bounds come from: the narrowest kind's, and
        their weight beside wider kinds.
        """
        narrowest, *wider = self._kinds_of(kind)
        runs = f"{_counted(narrowest.runs, 'measured run')} of kind {narrowest.name!r}"
        runs += f" ({_counted(narrowest.models, 'model')})"
        if not wider:
            return f"bounds are those of {runs}"
        return f"bounds count {runs} for {_part(narrowest):.0%}, and runs of wider kinds"

    def _kinds_of(self, kind: RunKind) -> tuple[KnownKind, ...]:
        """The measured kinds that contain a run, narrowest first."""
        return tuple(self._known[name] for name in kind.names if name in self._known)


def _part(known: KnownKind) -> float:
    """The weight of a kind relative to all wider kinds."""
    return known.groups / (known.groups + (NEW_TABLES if known.name == ANY else GROUPS_OF_WIDER))


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _expected(kinds: Sequence[KnownKind]) -> Shares:
    """The shares that are expected to contain 90 % of runs, given their kinds, narrowest first."""
    left, shares, weights = 1.0, list[float](), list[float]()
    for known in kinds:
        part = left * _part(known)
        shares += known.shares
        weights += [part / len(known.shares)] * len(known.shares)
        left -= part
    # The remaining weight is for runs unlike any measured one: half of it below all shares, half
    # above.
    order = np.argsort(shares, kind="stable")
    passed = left / 2 + np.cumsum(np.take(weights, order))
    low, high = np.searchsorted(passed, (TAIL, 1 - TAIL)).clip(max=len(order) - 1)
    return Shares(below=-shares[order[low]], above=shares[order[high]])


@cache
def known_sureness() -> Sureness:
    """The measured kinds shipped with this package, from the tables that predictions were compared
    with.
    """
    return from_mapping(Sureness, catalog.sureness(), "sureness")


# The bounds of a predicted time, from the measured runs of its engine.
#
# Bounds widen with the distance to the nearest measured run, in doublings of width, GPUs and
# sequence length. At distance zero they cover the errors of runs that were left out of the fit
# while runs near them were in it. At one doubling they cover the errors of whole model widths that
# were left out. Each further doubling adds half as much again.
#
# Where a hardware file has no calibration of an engine, the bounds are those of measured runs of
# the same kind: of the engine, or of any engine, on any hardware (``mistlab.cost.confidence``). A
# note names the kind.
#
# None of this covers slow clusters. On a cluster without a profile, a run may take as long as on
# the slowest cluster on which its engine was measured, so the upper bound is that cluster's; the
# lower bound is not changed.


# A prediction gets a note if a quantity differs from the measured runs' by more than this factor.
SLACK = 1.25
# The note of every prediction on heterogeneous nodes.
UNLIKE = "no run on unlike nodes was measured: bounds are those of the least sure group of nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBounds:
    """The bounds of one workload's plans under one engine."""

    engine: str
    hardware: str
    calibration: EngineCalibration | None
    kind: RunKind
    hidden: int
    sequence_length: int
    # Why measured rates were scaled: from another GPU, or because of edited figures.
    scaled: str = ""
    # Why an edit of the hardware's figures leaves all of its curves unchanged.
    curves_win: str = ""
    # The bounds of the same plans on the other groups of heterogeneous nodes.
    others: "tuple[PredictionBounds, ...]" = ()

    _known: dict[int, "_Sure"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def around(self, gpus: int, mfu: float) -> tuple[float, float]:
        """The multiples of a prediction on ``gpus`` GPUs that contain 90 % of measurements, given
        the predicted MFU.
        """
        widths = [one._on(gpus).around(one.kind.way(mfu)) for one in (self, *self.others)]
        wider = WIDER_WHERE_SCALED if self.scaled else 1.0
        return min(below for below, _ in widths) / wider, max(above for _, above in widths) * wider

    def notes(self, gpus: int) -> tuple[str, ...]:
        """The assumptions of a prediction on ``gpus`` GPUs that no measurement covers."""
        if not self.others:
            of_rates = (note for note in (self.scaled, self.curves_win) if note)
            return (*of_rates, *self._on(gpus).notes)
        all_notes = (note for one in (self, *self.others) for note in one._on(gpus).notes)
        return (*dict.fromkeys(all_notes), UNLIKE)

    def _on(self, gpus: int) -> "_Sure":
        if gpus not in self._known:
            self._known[gpus] = self._worked_out(gpus)
        return self._known[gpus]

    def _worked_out(self, gpus: int) -> "_Sure":
        if self.calibration is None:
            known = known_sureness()
            note = f"engine {self.engine} is not calibrated on {self.hardware}: "
            note += known.words(self.kind)
            return _Sure(shares=known.shares(self.kind, gpus), notes=(note,))
        asked_at = MeasuredAt(hidden=self.hidden, gpus=gpus, sequence_length=self.sequence_length)
        nearest = min(self.calibration.at, key=asked_at.doublings)
        return _Sure(
            half_width=half_width_at(self.calibration, nearest.doublings(asked_at)),
            notes=tuple(
                f"{name} differs by a factor of {ratio:.1f} from the nearest runs measured"
                for name, ratio in nearest.ratios(asked_at).items()
                if ratio > SLACK
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sure:
    """The confidence of predictions for one number of GPUs, with notes: a half-width from measured
    runs near them, or shares of ``way`` from runs of their kind.
    """

    half_width: float = 0.0
    shares: Shares | None = None
    notes: tuple[str, ...]

    def around(self, way: float) -> tuple[float, float]:
        if self.shares is not None:
            return self.shares.around(way)
        return max(0.0, 1 - self.half_width), 1 + self.half_width


def half_width_at(calibration: EngineCalibration, doublings: float) -> float:
    """The half-width at a distance, in doublings, from the nearest measured runs."""
    near, far = calibration.half_width, calibration.far_half_width
    share = min(1.0, doublings / min(1.0, calibration.reach))
    beyond = max(0.0, doublings - max(1.0, calibration.reach))
    return (near + (far - near) * share) * (1 + beyond / 2)


def bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    """The bounds of a workload's plans on a cluster under an engine; on heterogeneous nodes, those
    of the group with the widest bounds.
    """
    first, *others = (_bounds_of(workload, group, engine) for group in cluster.of_groups)
    return replace(first, others=tuple(others)) if others else first


def _bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    calibrations = {c.engine: c for c in cluster.hardware.engines or ()}
    return PredictionBounds(
        engine=engine,
        hardware=cluster.hardware.name,
        calibration=calibrations.get(ENGINES[engine].family),
        kind=_kind_of(workload, cluster, engine),
        scaled=_scaled_rates(cluster.hardware),
        curves_win=_curves_that_win(cluster.hardware),
        hidden=workload.model.hidden,
        sequence_length=workload.sequence_length,
    )


def _scaled_rates(hardware: Hardware) -> str:
    """A sentence saying why rates of a hardware were scaled; empty if none were."""
    of = hardware.provenance
    if of.compute is not None and of.compute.kind == "scaled":
        lender = of.compute.source
        return f"nobody measured {hardware.name}: rates of {lender}, scaled by datasheets"
    sources = (one for one in (of.compute, of.transfers) if one is not None)
    restated = next((one.source for one in sources if one.kind == "restated"), "")
    return restated and f"{hardware.name}: {restated}"


def _curves_that_win(hardware: Hardware) -> str:
    """A sentence saying why a hardware's edited figures leave its curves unchanged; empty if they
    do not.
    """
    of = hardware.provenance
    measured = [
        name
        for name, source in (("compute", of.compute), ("transfers", of.transfers))
        if source is not None and source.kind == "measured"
    ]
    if hardware.measured_with is not None or not measured:
        return ""
    return (
        f"{hardware.name}: its curves ({', '.join(measured)}) win over the figures of gpu and "
        "node: give measured_with, the figures under which they were measured, and edits scale them"
    )


def _kind_of(workload: Workload, cluster: Cluster, engine: str) -> RunKind:
    """The kind of a workload's plans, before any software has run them."""
    model = workload.model
    blocks: Blocks = "hybrid" if model.is_hybrid else "experts" if model.experts else "dense"
    return RunKind(
        software="",
        engine=ENGINES[engine].family,
        hardware=cluster.hardware.name,
        blocks="adapters" if workload.train == "adapters" else blocks,
        bits=BITS[workload.precision],
        is_benchmark=True,
    )


def slowest_cluster(cluster: Cluster, engine: Engine) -> Cluster | None:
    """The cluster slowed to the slowest one on which an engine was measured; None where that does
    not apply: inside a node, with a profile of its own, or without a measured cluster.
    """
    if cluster.profile is not None or cluster.nodes == 1 or not engine.slowest:
        return None
    return replace(cluster, profile=catalog.profile(engine.slowest))


# Figures derived from an iteration's time: its bounds, tokens per second, and MFU.


def iteration_figures(
    seconds: float,
    *,
    num_gpus: int,
    flop: float,
    workload: Workload,
    peak_flop_per_s: float,
    bounds: PredictionBounds,
    slowest_s: float = 0.0,
) -> Mapping[str, Any]:
    """The derived figures of a ``Prediction`` whose iteration takes ``seconds``.

    ``flop`` is the number of operations that all GPUs together do in the iteration,
    ``peak_flop_per_s`` the peak rate of one of them, ``slowest_s`` how long the iteration takes on
    the slowest cluster known.
    """
    mfu = flop / (seconds * num_gpus * peak_flop_per_s)
    below, above = bounds.around(num_gpus, mfu)
    return {
        "iteration_s": seconds,
        "iteration_s_low": seconds * below,
        "iteration_s_high": max(seconds, slowest_s) * above,
        "tokens_per_s": workload.tokens / seconds,
        "mfu": mfu,
    }
