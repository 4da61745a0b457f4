"""Two tests of predicted memory peaks on measured runs: their errors by source, and the predicted
probability that a run fits.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from experiments.measured.by_source import Known, apart_of, is_peak_of_run
from experiments.runs.judged import Judged
from mistlab.calibration.fitted_sureness import SourceSpreads, spreads_of_kinds
from mistlab.core.arrays import Ints
from mistlab.cost.confidence import REACH, SOURCES_OF_WIDER, KnownKind, peak_kinds

# For runs that did fit, a predicted probability of running out of memory above this counts as
# wrong.
MOST_WRONG = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMiss:
    """The error of a predicted memory peak, as the logarithm of measured over predicted bytes;
    ``names`` are the kinds of run for which it counts.
    """

    names: tuple[str, ...]
    source: str
    gpus: int
    log: float
    is_apart: bool


def peak_misses(known: Sequence[Known]) -> list[PeakMiss]:
    """The errors of predicted memory peaks, for all rows that state the memory peak of their
    run.
    """
    return [
        PeakMiss(
            names=peak_kinds(doubt.kind.engine),
            source=source,
            gpus=doubt.gpus,
            log=-math.log1p(row.memory_error),
            is_apart=bool(apart_of(row.row.cells)),
        )
        for source, row, _ in known
        if (doubt := row.answer.doubt) is not None
        and row.memory_error is not None
        and is_peak_of_run(row)
    ]


def known_peaks(misses: Sequence[PeakMiss]) -> tuple[KnownKind, ...]:
    """How far measured memory peaks are from predicted ones for each kind of run, as rows of the
    catalogue's file on uncertainty.
    """
    spreads = _spreads(misses, np.full(len(misses), -1))
    together: dict[str, list[PeakMiss]] = defaultdict(list)
    for miss in misses:
        for name in miss.names:
            together[name].append(miss)
    return tuple(
        KnownKind(
            name=name,
            offset=round(float(spreads[name].offset[0]), 4),
            between=round(float(spreads[name].between[0]) ** 0.5, 4),
            within=round(float(spreads[name].within[0]) ** 0.5, 4),
            runs=len(alike),
            sources=len({miss.source for miss in alike}),
            most_gpus=max(miss.gpus for miss in alike),
        )
        for name, alike in sorted(together.items())
    )


def _spreads(misses: Sequence[PeakMiss], folds: Ints) -> dict[str, SourceSpreads]:
    sources = np.unique([one.source for one in misses], return_inverse=True)[1]
    logs = np.array([one.log for one in misses])
    return spreads_of_kinds(logs, [one.names for one in misses], sources, folds, SOURCES_OF_WIDER)


def peak_lines(known: Sequence[Known]) -> Iterator[str]:
    """Lines of the page on memory peaks: how many lie inside bounds that were fitted without their
    source, and the predicted probability of fitting for the runs that did fit.
    """
    misses = peak_misses(known)
    sources = np.unique([miss.source for miss in misses], return_inverse=True)[1]
    if misses and sources.max() > 0:
        spreads = _spreads(misses, sources)
        inside: dict[str, list[bool]] = defaultdict(list)
        for miss, fold in zip(misses, sources, strict=True):
            spread = spreads[miss.names[0]]
            reach = REACH * math.sqrt(spread.between[fold] + spread.within[fold])
            if not miss.is_apart:
                inside[miss.source].append(bool(abs(miss.log - spread.offset[fold]) <= reach))
        yield (
            f"Bounds of peaks without a run's source hold for "
            f"{mean(one for some in inside.values() for one in some):.0%} of rows, and for "
            f"{mean(map(mean, inside.values())):.0%} of a source's rows in the mean of sources."
        )
    ran = [_fit_probability(row) for _, row, _ in known if not row.failed]
    failed = [_fit_probability(row) for _, row, _ in known if row.failed]
    fits = [[one for one in some if one is not None] for some in (ran, failed)]
    if fits[0]:
        wrong = sum(one < 1 - MOST_WRONG for one in fits[0])
        of_failed = ""
        if fits[1]:
            of_failed = f" Runs that failed fit with a probability of {mean(fits[1]):.2f}."
        yield (
            f"Runs that ran fit with a probability of {mean(fits[0]):.2f} in the mean, "
            f"{min(fits[0]):.2f} at least; {wrong} are said not to fit with a probability above "
            f"{MOST_WRONG}.{of_failed}"
        )


def _fit_probability(row: Judged) -> float | None:
    return None if row.answer.peak is None else row.answer.peak.fit_probability
