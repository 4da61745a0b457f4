"""Computes the range in which a measured time or memory peak is expected, given its prediction,
from how far measured runs of the same kind were from their predictions.

A source of measurements is one cluster with one software stack, reported by one author. The errors
of a source have a common part, and its rows scatter around that; both are learned from all measured
sources, and give the expected errors of a new source. A prediction can only be wrong about the time
in which GPUs do not compute the model: slow kernels, messages, bubbles, hosts. So errors are
divided by the square root of the *way*, the logarithm of the predicted time over the time of the
model's arithmetic at the GPUs' peak rate. A run at 50 % of the peak has a short way (a factor of
2); a tiny model that waits for its host has a long one (a factor of 50).

Errors depend on the kind of run, which is known before it runs: the engine that predicts it, the
kinds of its blocks, the bits of its GEMMs, and its purpose. They are estimated from the sources of
that kind and, with the weight of a few more sources, from the next wider kind. If runs of a source
are known, they show its common error, in closed form: the bounds of its further runs narrow to the
scatter.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal, Self

from mistlab import catalog
from mistlab.core.values import Checked, bounded, from_mapping
from mistlab.engines.engine import ENGINES, Engine, Precision
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.machine.consistency import doubtful_figures
from mistlab.machine.hardware import EngineCalibration, Hardware, MeasuredAt, OwnRuns
from mistlab.plan.workload import Workload

Blocks = Literal["dense", "experts", "hybrid", "adapters"]
# The purposes of a run: to be timed, to train on real data as users do, or to test that a tiny
# model's loss does not change.
Purpose = Literal["benchmark", "training", "functional test"]

# The bounds of a predicted time lie this many standard deviations above and below the expected
# time. When sources of measurements are left out of the fit, 94 % of all their runs lie within, and
# on average 91 % of a source's runs (docs/results/runs.md).
REACH = 1.9
# For each doubling of the GPUs beyond those of the largest measured run of the same kind, the
# bounds of a predicted time get wider by this share; otherwise too few larger runs lie within them
# (docs/decisions/0041).
STRETCH_A_DOUBLING = 0.08
# The errors expected for a narrow kind of run are averaged with those of the next wider kind, which
# has the weight of this many sources of measurements.
SOURCES_OF_WIDER = 4
# By definition this share of measured times lies below the lower bound, and the same share above
# the upper bound.
TAIL = 0.05
# Each bound is at least this far from the predicted time, as a natural logarithm, since the same
# run measured again differs by a few hundredths (docs/results/runs.md).
LEAST_LOG = 0.03
# The largest believable ratio of measured to predicted time: a run that takes longer is stuck, not
# slow.
MOST_TIMES = 30.0
# The largest believable MFU, set by hand: no measured run exceeds it.
MOST_UTILISED = 0.8
# How often the interval that contains a quantile is halved: to a billionth of its width.
BISECTIONS = 30
# The name of the widest kind of run, which contains all runs.
ANY = "any"
# The bits of a GEMM's operands, by training precision.
BITS: Mapping[Precision, int] = {"fp4": 4, "fp8": 8, "fp16": 16, "bf16": 16, "fp32": 32, "tf32": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """The properties of a run that are known before it starts and that decide how wide the bounds
    of its predicted time are.

    ``software`` is empty for a plan, which no software ran yet; bounds do not depend on it.
    ``engine`` is the engine whose calibration the prediction has; it is empty where the engine is
    only assumed.
    """

    software: str
    engine: str
    hardware: str
    blocks: Blocks
    bits: int
    purpose: Purpose = "benchmark"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds that a run belongs to, the narrowest first.

        The last two kinds are for any engine. Models with experts and hybrid models form one kind.
        """
        blocks = "not dense" if self.blocks in ("experts", "hybrid") else self.blocks
        purpose = "" if self.purpose == "benchmark" else f", {self.purpose}"
        alike = f"{purpose}: {blocks}, {'16 bits' if self.bits >= 16 else 'fewer bits'}"
        of_engine = (f"engine {self.engine}{alike}",) if self.engine else ()
        return (*of_engine, f"{ANY}{alike}", ANY)

    def way(self, mfu: float) -> float:
        """The natural logarithm of predicted time over the time of the model's arithmetic at peak
        rate, from the predicted MFU.
        """
        return -math.log(min(mfu, MOST_UTILISED))


def peak_kinds(engine: str) -> tuple[str, ...]:
    """The names of the kinds of runs by which measured memory peaks are grouped, for one family of
    engines, the narrowest kind first.
    """
    return (f"engine {engine}", ANY) if engine else (ANY,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of the errors of predicted times: of the logarithm of measured over
    predicted time.

    Errors are divided by the square root of the run's ``way`` (``RunKind.way``).

    The mean error of a source is ``offset``, with the standard deviation ``between``; errors of its
    rows scatter around that by ``within``. Bounds are wider by the factor ``stretch`` if a run has
    more GPUs than were measured.
    """

    offset: float
    between: float
    within: float
    stretch: float = 1.0

    def around(self, way: float) -> tuple[float, float]:
        """The range in which 90 % of measured times lie, as two multiples of the predicted time."""
        root = math.sqrt(way)
        reach = REACH * self.stretch * math.hypot(self.between, self.within)
        below = min(-LEAST_LOG, (self.offset - reach) * root)
        above = max(LEAST_LOG, (self.offset + reach) * root)
        return math.exp(max(-way, below)), min(MOST_TIMES, math.exp(above))

    def knowing(self, source_runs: OwnRuns | None) -> Self:
        """The distribution of errors for a source of measurements of which some runs are already
        known.

        The source's mean error and the errors of its runs are normal, so their precisions (inverse
        variances) add up.
        """
        if source_runs is None or source_runs.runs == 0:
            return self
        prior, precision = self.between**-2, source_runs.runs * self.within**-2
        offset = (prior * self.offset + precision * source_runs.offset) / (prior + precision)
        return replace(self, offset=offset, between=(prior + precision) ** -0.5)

    def below(self, log: float) -> float:
        """The probability that the logarithm of measured over predicted time is below ``log``, by
        Student's t distribution with 3 degrees of freedom.
        """
        off = (log - self.offset) / math.hypot(self.between, self.within) / math.sqrt(3)
        return 0.5 + (off / (1 + off * off) + math.atan(off)) / math.pi

    def quantile(self, probability: float) -> float:
        """The logarithm of measured over predicted below which errors lie with this probability."""
        low = high = self.offset
        step = math.hypot(self.between, self.within)
        while self.below(low) > probability:
            low -= step
        while self.below(high) < probability:
            high += step
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.below(middle) < probability else (low, middle)
        return high

    def beside(self, other: "Spread") -> Self:
        """The distribution of the sum of two independent errors."""
        return replace(
            self,
            offset=self.offset + other.offset,
            between=math.hypot(self.between, other.between),
            within=math.hypot(self.within, other.within),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKind(Checked):
    """A measured kind of run with the errors that its predictions are expected to have, estimated
    from runs of this and of wider kinds.
    """

    name: str
    offset: float
    between: float = field(metadata=bounded(above=0))
    within: float = field(metadata=bounded(above=0))
    runs: int = field(metadata=bounded(minimum=0))
    sources: int = field(metadata=bounded(minimum=0))
    most_gpus: int = field(metadata=bounded(minimum=1))

    @property
    def spread(self) -> Spread:
        """The distribution of the errors of predicted times for this kind of run."""
        return Spread(offset=self.offset, between=self.between, within=self.within)


@dataclass(frozen=True, kw_only=True)
class Sureness:
    """All measured kinds of run with the errors that predictions are expected to have, and the
    sources of the measurements.

    ``datasheet`` has the differences between predictions by scaled rates of another GPU and
    predictions by a GPU's measured rates; its sources are GPUs. ``peaks`` are kinds of memory
    peaks, whose spreads are plain logarithms, not divided by a way.
    """

    source: str
    kinds: tuple[KnownKind, ...]
    datasheet: KnownKind | None = None
    peaks: tuple[KnownKind, ...] = ()

    @cached_property
    def _known(self) -> Mapping[str, KnownKind]:
        return {one.name: one for one in self.kinds}

    def spread(
        self, kind: RunKind, gpus: int, *, source_runs: OwnRuns | None = None, scaled: bool = False
    ) -> Spread:
        """The expected distribution of a run's measured time around its prediction.

        It is narrower if runs of its source are known, and wider if its GPU was not measured and
        uses another GPU's scaled rates.
        """
        known = self._kind_of(kind)
        doublings = max(0.0, math.log2(gpus / known.most_gpus))
        spread = replace(
            known.spread.knowing(source_runs), stretch=1 + STRETCH_A_DOUBLING * doublings
        )
        is_wider = (
            scaled and self.datasheet is not None and (source_runs is None or not source_runs.runs)
        )
        return spread.beside(self.datasheet.spread) if is_wider and self.datasheet else spread

    def peak_spread(self, engine: str) -> Spread:
        """The expected distribution of measured memory peaks around their predictions, for one
        family of engines.
        """
        known = {one.name: one.spread for one in self.peaks}
        return next(known[name] for name in peak_kinds(engine) if name in known)

    def words(self, kind: RunKind) -> str:
        """A note for the user that says which measured runs the bounds of a prediction come from.

        These are the runs of the narrowest measured kind; the note also says how much they count
        beside those of wider kinds.
        """
        narrowest = self._kind_of(kind)
        runs = f"{_counted(narrowest.runs, 'measured run')} of kind {narrowest.name!r}"
        runs += f" ({_counted(narrowest.sources, 'source')})"
        if narrowest.name == ANY:
            return f"bounds are those of {runs}"
        part = narrowest.sources / (narrowest.sources + SOURCES_OF_WIDER)
        return f"bounds count {runs} for {part:.0%}, and runs of wider kinds"

    def _kind_of(self, kind: RunKind) -> KnownKind:
        """The narrowest of a run's kinds that was measured."""
        return next(self._known[name] for name in kind.names if name in self._known)


def _counted(number: int, singular: str, several: str = "") -> str:
    return f"{number:,} {singular if number == 1 else several or f'{singular}s'}"


@cache
def known_sureness() -> Sureness:
    """The measured kinds of run that come with this package, from comparisons of its predictions
    with published measurements.
    """
    return from_mapping(Sureness, catalog.sureness(), "sureness")


# Computes the bounds of a predicted time from the measured runs of its engine.


# A prediction gets a note if its model width, number of GPUs or sequence length is more than this
# factor away from those of all measured runs.
SLACK = 1.25
# A prediction for a cluster with different kinds of nodes comes with this note.
UNLIKE = (
    "no run on several kinds of nodes together was measured: bounds are the widest of those of "
    "each kind"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBounds:
    """Computes the bounds of predicted times for the plans of one workload under one engine.

    Bounds widen with the distance to the nearest measured run, in doublings of width, GPUs and
    sequence length. At distance zero they cover the errors of runs that were left out of the fit
    while similar runs were in it. At one doubling they cover the errors when all runs of a model
    width were left out. Each further doubling adds half as much again.

    If a hardware file has no calibration of an engine, the bounds come from measured runs of the
    same kind on any hardware: runs of the engine or, failing that, of any engine. A note names the
    kind.

    None of this covers slow clusters. On a cluster without a profile, a run may take as long as on
    the slowest cluster on which its engine was measured, so the upper bound is that cluster's; the
    lower bound is not changed.
    """

    engine: str
    hardware: str
    calibration: EngineCalibration | None
    # The errors of predictions for the user's own measured runs with this engine, if any were
    # given.
    own: OwnRuns | None = None
    kind: RunKind
    hidden: int
    sequence_length: int
    # Why the hardware's measured rates were scaled: they are another GPU's, or its figures were
    # edited.
    scaled: str = ""
    # That collectives inside a node are another machine's, and slow for their links; else empty.
    slow_links: str = ""
    # Why edited datasheet figures of the hardware have no effect (measured curves take precedence);
    # empty if they have one.
    curves_win: str = ""
    # Figures of the cluster that were probably meant in another unit.
    doubtful: tuple[str, ...] = ()
    # On a cluster with several kinds of nodes, the bounds for each of the other kinds.
    others: "tuple[PredictionBounds, ...]" = ()

    _known: dict[int, "_Sure"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def around(self, gpus: int, mfu: float) -> tuple[float, float]:
        """The range in which 90 % of measured times lie, as two multiples of the predicted time,
        for a plan with this number of GPUs and this predicted MFU.
        """
        widths = [one._on(gpus).around(one.kind.way(mfu)) for one in (self, *self.others)]
        return min(below for below, _ in widths), max(above for _, above in widths)

    def spread(self, gpus: int) -> Spread:
        """The expected distribution of the measured times of the workload's plans around their
        predictions.
        """
        return known_sureness().spread(
            self.kind, gpus, source_runs=self.own, scaled=bool(self.scaled)
        )

    def notes(self, gpus: int) -> tuple[str, ...]:
        """Notes for the user on assumptions of a prediction for ``gpus`` GPUs that no measurement
        covers.
        """
        if not self.others:
            of_rates = (note for note in (self.scaled, self.curves_win) if note)
            of_links = (self.slow_links,) if self.slow_links and gpus > 1 else ()
            return (*of_rates, *of_links, *self.doubtful, *self._on(gpus).notes)
        groups = (self, *self.others)
        all_notes = (note for one in groups for note in (*one.doubtful, *one._on(gpus).notes))
        return (*dict.fromkeys(all_notes), UNLIKE)

    def _on(self, gpus: int) -> "_Sure":
        if gpus not in self._known:
            self._known[gpus] = self._worked_out(gpus)
        return self._known[gpus]

    def _worked_out(self, gpus: int) -> "_Sure":
        if self.calibration is None or self.own is not None or self.scaled:
            note = known_sureness().words(self.kind)
            if self.own is not None:
                runs = _counted(self.own.runs, "run of your own", "runs of your own")
                note = f"{note}, narrowed by {runs} of engine {self.engine}"
            else:
                figures = "such figures of " if self.calibration is not None else ""
                where = f"{figures}{self.hardware}"
                note = f"engine {self.engine} is not calibrated on {where}: {note}"
            return _Sure(spread=self.spread(gpus), notes=(note,))
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
    """How far measured times are expected to be from predictions on a given number of GPUs, with
    notes for the user.

    If similar runs were measured, it has half the width of the bounds; otherwise the distribution
    of errors for runs of the same kind.
    """

    half_width: float = 0.0
    spread: Spread | None = None
    notes: tuple[str, ...]

    def around(self, way: float) -> tuple[float, float]:
        if self.spread is not None:
            return self.spread.around(way)
        return max(0.0, 1 - self.half_width), 1 + self.half_width


def half_width_at(calibration: EngineCalibration, doublings: float) -> float:
    """Half the width of the bounds, as a share of the predicted time, at this many doublings of
    model width, GPUs or sequence length from the nearest measured run.
    """
    near, far = calibration.half_width, calibration.far_half_width
    share = min(1.0, doublings / min(1.0, calibration.reach))
    beyond = max(0.0, doublings - max(1.0, calibration.reach))
    return (near + (far - near) * share) * (1 + beyond / 2)


def bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    """Make the bounds of predicted times for a workload's plans on a cluster under an engine.

    On heterogeneous nodes they are those of the group of equal nodes with the widest bounds.
    """
    first, *others = (_bounds_of(workload, group, engine) for group in cluster.of_groups)
    return replace(first, others=tuple(others)) if others else first


def _bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    calibrations = {c.engine: c for c in cluster.hardware.engines or ()}
    family = ENGINES[engine].family
    return PredictionBounds(
        engine=engine,
        hardware=cluster.hardware.name,
        calibration=calibrations.get(family),
        own=next((one for one in cluster.hardware.own_runs if one.engine == family), None),
        kind=_kind_of(workload, cluster, engine),
        scaled=_scaled_rates(cluster.hardware),
        slow_links=_slow_links(cluster),
        curves_win=_curves_that_win(cluster.hardware),
        doubtful=doubtful_figures(cluster),
        hidden=workload.model.hidden,
        sequence_length=workload.sequence_length,
    )


def _scaled_rates(hardware: Hardware) -> str:
    """A sentence for the user that says why the measured rates of a hardware were scaled; empty if
    they were not.
    """
    of = hardware.provenance
    if of.compute is not None and of.compute.kind == "scaled":
        lender = of.compute.source
        return f"nobody measured {hardware.name}: rates of {lender}, scaled by datasheets"
    sources = (one for one in (of.compute, of.transfers) if one is not None)
    restated = next((one.source for one in sources if one.kind == "restated"), "")
    return restated and f"{hardware.name}: {restated}"


def _slow_links(cluster: Cluster) -> str:
    """A sentence that warns the user of slow collectives between the GPUs of a node: predictions
    take them from another machine, where they reached less than half of the links' rate. Empty if
    they do not, or if each node has only one GPU.
    """
    hardware = cluster.hardware
    if cluster.gpus_per_node == 1:
        return ""
    source, link = hardware.provenance.transfers, hardware.node.intra_node_gbytes_per_s
    if hardware.transfers is None or source is None or source.kind not in ("scaled", "borrowed"):
        return ""
    lines = (group.all_gather for group in hardware.transfers.groups if group.nodes == 1)
    rates = [line.gbytes_per_s for line in lines if line is not None]
    if not rates or max(rates) > link / 2:
        return ""
    return (
        f"{hardware.name}: collectives inside a node are as measured on {source.source}, at "
        f"{max(rates):.0f} of {link:g} GB/s: where GPUs have peer-to-peer access or bridges, scale "
        f"them, such as by --intra-node-gbytes-per-s {2 * link:g} for twice the rate"
    )


def _curves_that_win(hardware: Hardware) -> str:
    """A sentence for the user that says why edits of a hardware's datasheet figures have no effect;
    empty if they have one.
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
        f"{hardware.name}: predictions use the measured {' and '.join(measured)}, whatever gpu and "
        "node state: to scale them, give measured_with, the figures of the machine then measured"
    )


def _kind_of(workload: Workload, cluster: Cluster, engine: str) -> RunKind:
    """The kind of run that a workload's plans are, if nothing is known about the software versions
    that run them.
    """
    model = workload.model
    blocks: Blocks = "hybrid" if model.is_hybrid else "experts" if model.experts else "dense"
    return RunKind(
        software="",
        engine=ENGINES[engine].family,
        hardware=cluster.hardware.name,
        blocks="adapters" if workload.train == "adapters" else blocks,
        bits=BITS[workload.precision],
    )


def slowest_cluster(cluster: Cluster, engine: Engine) -> Cluster | None:
    """The cluster as slow as the slowest one on which an engine was measured, or None.

    None inside a node, for a cluster with a profile of its own, and for an engine that was measured
    on no cluster.
    """
    if cluster.profile is not None or cluster.nodes == 1 or not engine.slowest:
        return None
    return replace(cluster, profile=catalog.profile(engine.slowest))


# Computes an iteration's bounds, tokens per second and MFU from its time.


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
    """The fields of a ``Prediction`` that follow from its iteration time, which is ``seconds``.

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


# Computes the probability that a plan fits in memory, and the bounds of its memory peak.


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBounds(Checked):
    """The probability that a plan fits in memory, and the range that contains the memory reserved
    on its fullest GPU with 90 % probability.
    """

    fit_probability: float = field(metadata=bounded(minimum=0, maximum=1))
    peak_reserved_bytes_low: int = field(metadata=bounded(minimum=0))
    peak_reserved_bytes_high: int = field(metadata=bounded(minimum=0))


def peak_bounds(
    prediction: Prediction, rooms: Sequence[float], family: str, *, lacks_host: bool
) -> PeakBounds:
    """The probability that a plan fits and the bounds of its memory peak, for an engine family, or
    for any engine if the name is empty; ``rooms`` are the bytes available on a GPU of each stage.

    The memory peaks of a source have a common error, so the stage with the least free memory
    decides. A plan that ``lacks_host`` memory does not fit, whatever the GPUs' peaks turn out to
    be.
    """
    spread = known_sureness().peak_spread(family)
    peaks = [max(1, stage.peak_reserved_bytes) for stage in prediction.stages]
    slack = min(room / peak for room, peak in zip(rooms, peaks, strict=False))
    low, high = peak_range(family)
    return PeakBounds(
        fit_probability=0.0 if lacks_host else round(spread.below(math.log(slack)), 4),
        peak_reserved_bytes_low=int(max(peaks) * low),
        peak_reserved_bytes_high=int(max(peaks) * high),
    )


def peak_range(family: str) -> tuple[float, float]:
    """The range in which 90 % of measured memory peaks lie, as two multiples of the predicted peak,
    for an engine family, or for any engine if the name is empty.
    """
    spread = known_sureness().peak_spread(family)
    reach = REACH * math.hypot(spread.between, spread.within)
    low, high = (math.exp(spread.offset + side * reach) for side in (-1, 1))
    return min(1.0, low), max(1.0, high)


def margin_share(family: str, probability: float) -> float:
    """The share of a GPU's memory that plans of an engine family must leave free so that each of
    them fits with this probability.
    """
    spread = known_sureness().peak_spread(family)
    return max(0.0, 1 - math.exp(-spread.quantile(probability)))
