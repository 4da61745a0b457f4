"""How far measured runs lie from their predictions, by kind of run, and the bounds that follow.

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

# Constants of engines were fitted to all measured runs. Where a model was left out of such a fit,
# its errors were 1.03 to 1.68 times as large (1.3 in the mean of four), so shares are stretched.
STRETCH = 1.3
# The same for each doubling of the GPUs beyond the most that were measured of a kind: without it,
# runs on more GPUs than all known ones lie within bounds too rarely (docs/decisions/0041).
STRETCH_A_DOUBLING = 0.1
# A kind counts as much as its groups (models of one software, else tables), and all wider kinds
# together as this many groups.
GROUPS_OF_WIDER = 8
# Runs like none that were measured count as one more table.
NEW_TABLES = 1
# The share of measured times below the lower bound, and above the upper one: by definition.
TAIL = 0.05
# Equal runs that were measured again differ by a few hundredths (docs/results/runs.md).
LEAST_SHARE = 0.05
# No run is known to take longer than about this multiple of its prediction: it is stuck, not slow.
MOST_TIMES = 30.0
# Of the measured runs none uses more than about this share of a GPU's peak rate; set by hand.
MOST_UTILISED = 0.8
# Where rates of another GPU are scaled by the datasheets: H100, A100 and B200, each predicted from
# another, take 0.87 to 1.2 times as long as by their own rates (docs/results/predictor-error.md).
WIDER_WHERE_SCALED = 1.2
# The kind that all runs belong to.
ANY = "any"
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
        """The names of kinds that the run belongs to, the narrowest first: those of its software,
        and of any."""
        return (*self.of_software, *self.of_any_software)

    @property
    def of_software(self) -> tuple[str, ...]:
        """The names of kinds of the run's software, if it has one."""
        if not self.software:
            return ()
        software = f"{self.software}{self._use}"
        blocks = f"{self.blocks}, {self.bits} bits"
        return f"{software}: {blocks}, {self.hardware}", f"{software}: {blocks}", f"{software}: any"

    @property
    def of_any_software(self) -> tuple[str, ...]:
        """The names of kinds of any software; the last two are of any engine. Between engines,
        experts and hybrid blocks are one kind."""
        blocks = "not dense" if self.blocks in ("experts", "hybrid") else self.blocks
        alike = f"{self._use}: {blocks}, {'16 bits' if self.bits >= 16 else 'fewer bits'}"
        of_engine = (f"engine {self.engine}{alike}",) if self.engine else ()
        return (*of_engine, f"{ANY}{alike}", ANY)

    @property
    def _use(self) -> str:
        return "" if self.is_benchmark else ", as users train"

    def way(self, mfu: float) -> float:
        """The logarithm of a predicted time over the time of the model's arithmetic at peak rate,
        from the MFU of the prediction."""
        return -math.log(min(mfu, MOST_UTILISED))


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKind(Checked):
    """A kind of runs that was measured: ``shares`` of their ways are as likely, in order.

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
    """How far bounds lie below and above a prediction, as shares of its way."""

    below: float
    above: float

    def around(self, way: float) -> tuple[float, float]:
        """The multiples of a prediction between which 90 % of measurements lie."""
        return math.exp(-self.below * way), min(MOST_TIMES, math.exp(self.above * way))


@dataclass(frozen=True, kw_only=True)
class Sureness:
    """The kinds of runs that were measured, and the source of the measurements."""

    source: str
    kinds: tuple[KnownKind, ...]

    @cached_property
    def _known(self) -> Mapping[str, KnownKind]:
        return {one.name: one for one in self.kinds}

    @cached_property
    def _found(self) -> dict[tuple[str, ...], tuple[Shares, int]]:
        """Shares that are known already, and the most GPUs of the narrowest kind, by kinds."""
        return {}

    def shares(self, kind: RunKind, gpus: int) -> Shares:
        """The shares of the way within which a run's measurement lies in 90 %."""
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
        """Which measured runs a run's bounds are from: those of its narrowest kind, and how much
        they count beside wider kinds."""
        narrowest, *wider = self._kinds_of(kind)
        runs = f"{_counted(narrowest.runs, 'measured run')} of kind {narrowest.name!r}"
        runs += f" ({_counted(narrowest.models, 'model')})"
        if not wider:
            return f"bounds are those of {runs}"
        return f"bounds count {runs} for {_part(narrowest):.0%}, and runs of wider kinds"

    def _kinds_of(self, kind: RunKind) -> tuple[KnownKind, ...]:
        """The known kinds of a run, the narrowest first."""
        return tuple(self._known[name] for name in kind.names if name in self._known)


def _part(known: KnownKind) -> float:
    """How much a kind counts, beside all that is wider."""
    return known.groups / (known.groups + (NEW_TABLES if known.name == ANY else GROUPS_OF_WIDER))


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}{'s' * (number != 1)}"


def _expected(kinds: Sequence[KnownKind]) -> Shares:
    """The shares between which 90 % of runs are expected, from their kinds, the narrowest first."""
    left, shares, weights = 1.0, list[float](), list[float]()
    for known in kinds:
        part = left * _part(known)
        shares += known.shares
        weights += [part / len(known.shares)] * len(known.shares)
        left -= part
    # What is left is like nothing that was measured: half of it below all shares, half above.
    order = np.argsort(shares, kind="stable")
    passed = left / 2 + np.cumsum(np.take(weights, order))
    low, high = np.searchsorted(passed, (TAIL, 1 - TAIL)).clip(max=len(order) - 1)
    return Shares(below=-shares[order[low]], above=shares[order[high]])


@cache
def known_sureness() -> Sureness:
    """The kinds of runs that this package knows, from the tables that it was held against."""
    return from_mapping(Sureness, catalog.sureness(), "sureness")


# The bounds of a predicted time, from the measured runs of its engine.
#
# Bounds widen with the distance to the nearest measured run, counted in doublings of width, GPUs
# and sequence length. At distance zero they are as wide as the errors of runs that were left out
# of the fit while runs near them were in it. From one doubling on they are as wide as the errors
# of whole model widths that were left out, as far as such widths lay from the others. Each
# doubling beyond adds half as much again.
#
# Where a hardware file has no calibration of an engine, bounds are those of measured runs of the
# same kind: of the engine, or of any engine, on any hardware (``mistlab.cost.confidence``). A note
# says of which.
#
# What is slow on some clusters is in none of this. On a cluster without a profile, a run may take
# as long as on the slowest cluster on which its engine was measured, so its upper bound is the one
# of there. Its lower bound stays.


# A prediction gets a note if a quantity differs from measured runs by more than this factor.
SLACK = 1.25
# The note of every prediction on unlike nodes.
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
    # Why measured rates were scaled: another GPU's, or this one's under other figures.
    scaled: str = ""
    # Why an edit of the hardware's figures changes none of its curves.
    curves_win: str = ""
    # The same plans on the other groups of unlike nodes.
    others: "tuple[PredictionBounds, ...]" = ()

    _known: dict[int, "_Sure"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def around(self, gpus: int, mfu: float) -> tuple[float, float]:
        """The multiples of a prediction on ``gpus`` GPUs between which 90 % of measurements lie,
        from the MFU that is predicted."""
        widths = [one._on(gpus).around(one.kind.way(mfu)) for one in (self, *self.others)]
        wider = WIDER_WHERE_SCALED if self.scaled else 1.0
        return min(below for below, _ in widths) / wider, max(above for _, above in widths) * wider

    def notes(self, gpus: int) -> tuple[str, ...]:
        """Assumptions of a prediction on ``gpus`` GPUs that were not measured."""
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
    """How sure predictions for one number of GPUs are, and their notes: a half-width of measured
    runs near them, or a share of the way of runs of their kind."""

    half_width: float = 0.0
    shares: Shares | None = None
    notes: tuple[str, ...]

    def around(self, way: float) -> tuple[float, float]:
        if self.shares is not None:
            return self.shares.around(way)
        return max(0.0, 1 - self.half_width), 1 + self.half_width


def half_width_at(calibration: EngineCalibration, doublings: float) -> float:
    """The half-width at a distance, in doublings, from the nearest runs."""
    near, far = calibration.half_width, calibration.far_half_width
    share = min(1.0, doublings / min(1.0, calibration.reach))
    beyond = max(0.0, doublings - max(1.0, calibration.reach))
    return (near + (far - near) * share) * (1 + beyond / 2)


def bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    """The bounds of a workload's plans on a cluster, under an engine; of unlike nodes, those of the
    group whose bounds are widest."""
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
    """Why rates of a hardware were scaled, in words; empty if none were."""
    of = hardware.provenance
    if of.compute is not None and of.compute.kind == "scaled":
        lender = of.compute.source
        return f"nobody measured {hardware.name}: rates of {lender}, scaled by datasheets"
    sources = (one for one in (of.compute, of.transfers) if one is not None)
    restated = next((one.source for one in sources if one.kind == "restated"), "")
    return restated and f"{hardware.name}: {restated}"


def _curves_that_win(hardware: Hardware) -> str:
    """Why figures of a hardware change none of its curves, in words; empty if they do."""
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
    """The kind of a workload's plans, which no software ran yet."""
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
    """The same cluster as slow as the slowest on which an engine was measured; None where that says
    nothing: inside a node, with a profile of its own, or if no such cluster is known."""
    if cluster.profile is not None or cluster.nodes == 1 or not engine.slowest:
        return None
    return replace(cluster, profile=catalog.profile(engine.slowest))


# Figures that follow from an iteration's time: its bounds, tokens a second, and MFU.


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
    """The figures of a ``Prediction`` whose iteration takes ``seconds``.

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
