"""Fits the allocator's memory constants again for each row of a table, without the rows of the same
source, so that no row is predicted by constants that were fitted to it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean, median

from experiments.measured.by_source import Known, apart_of, is_peak_of_run
from experiments.measured.predict_runs import RowPredictor
from experiments.runs.dialects.dialect import row_of
from experiments.runs.judged import Judged, judged
from mistlab.core.units import GIB_BYTES
from mistlab.engines.engine import ENGINES
from mistlab.engines.fitted import fitted

# The family of engines for which the share of freed memory that the allocator keeps is fitted to
# runs: the mean over sources of each source's median (mistlab/catalog/engines.yaml).
FAMILY = "fsdp"


def without_own_rows(known: Sequence[Known]) -> list[Known]:
    """All rows with their predictions. If the allocator's cached share was fitted to a row's
    source, the row is predicted again with the share that the other sources give.
    """
    shares = shares_of_sources(known)
    if len(shares) <= 1:
        return [*known]
    again: dict[int, Judged] = {}
    for source in shares:
        others = mean(share for name, share in shares.items() if name != source)
        numbers = [number for number, (name, *_) in enumerate(known) if name == source]
        with _caching(others):
            rows = [*RowPredictor().answers_of(known[number][1].row for number in numbers)]
        again |= {
            number: judged(answered.row, answered.answer)
            for number, answered in zip(numbers, rows, strict=True)
        }
    return [
        (source, again.get(number, row), miss) for number, (source, row, miss) in enumerate(known)
    ]


def shares_of_sources(known: Sequence[Known]) -> Mapping[str, float]:
    """The allocator's cached share by source, for sources that report reserved memory peaks: the
    share of freed memory that the allocator keeps, in the median run of the source.
    """
    shares: dict[str, list[float]] = defaultdict(list)
    for source, row, _ in known:
        if (share := _cached_share(row)) is not None:
            shares[source].append(share)
    return {source: median(of_rows) for source, of_rows in shares.items()}


def _cached_share(row: Judged) -> float | None:
    answer, cells = row.answer, row_of(row.row.cells)
    is_measured = row.measured_gib is not None and is_peak_of_run(row)
    if answer.prediction is None or answer.doubt is None or not is_measured:
        return None
    if answer.doubt.kind.engine != FAMILY or not cells.reserved or cells.of_driver:
        return None
    if apart_of(row.row.cells):
        return None
    stage = answer.prediction.stages[answer.place_of(cells.peak_of)]
    cached = stage.peak_reserved_bytes - stage.peak_allocated_bytes
    if cached <= 0:
        return None
    assert row.measured_gib is not None
    missing = row.measured_gib * GIB_BYTES - stage.peak_allocated_bytes
    share: float = fitted(FAMILY)["cached_share"]
    return share * missing / cached


@contextmanager
def _caching(share: float) -> Iterator[None]:
    """In the ``with`` block, predictions for engines like FSDP count this share of freed memory as
    kept by torch's caching allocator.
    """
    kept = {name: ENGINES[name] for name in ENGINES if ENGINES[name].family == FAMILY}
    ENGINES.update({name: replace(row, cached_share=share) for name, row in kept.items()})
    try:
        yield
    finally:
        ENGINES.update(kept)
