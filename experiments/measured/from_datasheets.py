"""Prediction errors if a measured GPU is treated as unknown: it is predicted from its datasheet,
with rates that are scaled from other GPUs.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from experiments.measured.by_source import Known, apart_of, is_published
from experiments.measured.predict_runs import RowPredictor
from experiments.pages.study import beside
from experiments.pages.tables import narrow, number
from experiments.runs.judged import Judged, judged
from experiments.runs.run_sureness import Held, Miss, left_out
from mistlab import catalog
from mistlab.calibration.fitted_sureness import SourceSpreads, spreads_of_kinds
from mistlab.catalog.completed import completed
from mistlab.cost.confidence import KnownKind, Spread
from mistlab.machine.hardware import LENT, Hardware, Source, can_lend

# When the spread between GPUs is estimated, an unknown GPU adds one to the number of GPUs.
GPUS_OF_UNKNOWN = 1
DATASHEET = "datasheet"


def as_of_datasheet(name: str, kept: str = "") -> Hardware:
    """A GPU of the catalogue reduced to its datasheet: its rates are scaled from GPUs of other
    architectures. Only the group of figures ``kept`` stays as measured.
    """
    stated = catalog.stated_hardware(name)
    nothing: dict[str, Any] = {group: None for group in LENT if group != kept}
    provenance = replace(stated.provenance, **nothing)
    bare = replace(stated, **nothing, provenance=provenance, measured_with=None)
    every = map(catalog.stated_hardware, catalog.calibrated_names())
    mine = stated.gpu.architecture
    return completed(bare, [one for one in every if can_lend(one) and one.gpu.architecture != mine])


def taken_for_its_lenders(hardware: Hardware) -> Hardware:
    """A GPU with the measured rates and links of the most similar other GPU, which are not scaled
    to it; only memory and nodes remain as they were.
    """
    rates, links = (_lender(hardware, group) for group in ("compute", "transfers"))
    node = hardware.node
    return replace(
        hardware,
        gpu=replace(rates.gpu, memory_gib=hardware.gpu.memory_gib),
        node=replace(links.node, gpus=node.gpus, host_memory_gib=node.host_memory_gib),
        compute=rates.compute,
        transfers=links.transfers,
        interference=links.interference,
        measured_with=None,
    )


def _lender(hardware: Hardware, group: str) -> Hardware:
    """The GPU that lends a group of figures to this hardware; the hardware itself if nothing is
    lent.
    """
    source: Source | None = getattr(hardware.provenance, group)
    is_lent = source is not None and source.kind in ("scaled", "borrowed")
    return catalog.hardware(source.source) if is_lent and source is not None else hardware


# Steps of knowledge about a GPU that is left out: nothing, its datasheet, and then one group of its
# measurements after another.
TOLD: Mapping[str, Callable[[str], Hardware]] = {
    "not scaled": lambda name: taken_for_its_lenders(as_of_datasheet(name)),
    "peaks and bandwidths": as_of_datasheet,
    "and own kernels": lambda name: as_of_datasheet(name, "compute"),
    "and own links": lambda name: as_of_datasheet(name, "transfers"),
    "and own interference": lambda name: as_of_datasheet(name, "interference"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LentRun:
    """A run on a measured GPU, predicted with rates that are scaled from other GPUs; ``place`` is
    the index of the run's row in the table.
    """

    place: int
    gpu: str
    lender: str
    own: Judged
    lent: Judged
    miss: Miss

    @property
    def roots(self) -> float:
        """How far two predicted times of the run are apart: the logarithm of the time by the GPU's
        own rates over the time by scaled rates, in the unit in which bounds are stated.
        """
        assert self.own.predicted_s is not None
        assert self.lent.predicted_s is not None
        doubt = self.lent.answer.doubt
        assert doubt is not None
        return math.log(self.own.predicted_s / self.lent.predicted_s) / math.sqrt(doubt.range.way)


def runs_from_datasheets(
    known: Sequence[Known], made: Callable[[str], Hardware] = as_of_datasheet
) -> list[LentRun]:
    """The published runs on measured GPUs, where each GPU in turn is treated as unknown: it is
    replaced by the hardware that ``made`` returns for it.
    """
    of_gpu: dict[str, list[tuple[int, Judged, Miss]]] = defaultdict(list)
    for index, (_, row, miss) in enumerate(known):
        if miss is not None and not apart_of(row.row.cells) and is_published(row):
            of_gpu[miss.kind.hardware].append((index, row, miss))
    runs: list[LentRun] = []
    for name in catalog.calibrated_names():
        if name not in of_gpu or catalog.stated_hardware(name).provenance.compute is None:
            continue
        hardware = made(name)
        lender = hardware.provenance.compute
        assert lender is not None
        answers = RowPredictor(hardware=hardware).answers_of(row.row for _, row, _ in of_gpu[name])
        runs += (
            LentRun(
                place=index,
                gpu=name,
                lender=lender.source,
                own=row,
                lent=judged(answered.row, answered.answer),
                miss=miss,
            )
            for (index, row, miss), answered in zip(of_gpu[name], answers, strict=True)
            if answered.answer.prediction is not None
        )
    return runs


def _spreads(lent: Sequence[LentRun], *, by_gpu: bool) -> SourceSpreads:
    """For each GPU, how far the predictions with rates scaled from other GPUs are from the
    predictions with its measured rates.
    """
    _, gpus = np.unique([one.gpu for one in lent], return_inverse=True)
    folds = gpus if by_gpu else np.full(len(lent), -1)
    roots = np.array([one.roots for one in lent])
    return spreads_of_kinds(roots, [(DATASHEET,)] * len(lent), gpus, folds, GPUS_OF_UNKNOWN)[
        DATASHEET
    ]


def _of_fold(spreads: SourceSpreads, fold: int) -> Spread:
    return Spread(
        offset=round(float(spreads.offset[fold]), 4),
        between=round(float(spreads.between[fold]) ** 0.5, 4),
        within=round(float(spreads.within[fold]) ** 0.5, 4),
    )


def datasheet_kind(lent: Sequence[LentRun]) -> KnownKind | None:
    """The kind of run for GPUs of which only the datasheet is known. Its uncertainty is how far
    predictions with scaled rates are from predictions with measured rates.
    """
    if not lent:
        return None
    spread = _of_fold(_spreads(lent, by_gpu=False), 0)
    return KnownKind(
        name=DATASHEET,
        offset=spread.offset,
        between=spread.between,
        within=spread.within,
        runs=len(lent),
        sources=len({one.gpu for one in lent}),
        most_gpus=max(one.miss.gpus for one in lent),
    )


def _held(known: Sequence[Known], lent: Sequence[LentRun]) -> list[Held]:
    """How often measurements lie inside the bounds of predictions with scaled rates, where bounds
    are fitted to runs on other GPUs and of other sources.
    """
    misses = [(index, miss) for index, (*_, miss) in enumerate(known) if miss is not None]
    spreads = left_out([miss for _, miss in misses], [miss.source for _, miss in misses])
    of_place = dict(zip((index for index, _ in misses), spreads, strict=True))
    costs = _spreads(lent, by_gpu=True)
    _, folds = np.unique([run.gpu for run in lent], return_inverse=True)
    held: list[Held] = []
    for run, fold in zip(lent, folds, strict=True):
        spread, doubt = of_place[run.place], run.lent.answer.doubt
        assert doubt is not None
        assert run.lent.measured_s is not None
        cost = _of_fold(costs, fold)
        wider = cost if spread is None else spread.beside(cost)
        held.append(Held.of(run.lent.measured_s, doubt.range.bounds_s(wider)))
    return held


HEAD = ("", "rates of", "runs", "median, own rates", "median", "bias", "in bounds", "width")


def datasheet_lines(known: Sequence[Known], lent: Sequence[LentRun]) -> Iterator[str]:
    """A section of the page with the errors for measured GPUs that are predicted from their
    datasheets alone.
    """
    yield "\n\n".join(beside("report_runs-datasheets")) + "\n"
    if lent:
        held = _held(known, lent)
        errors = [one.lent.time_error or 0.0 for one in lent]
        yield (
            f"All {len(lent)} runs: median error {median(map(abs, errors)):.1%}, "
            f"{mean(one.is_inside for one in held):.0%} within bounds, of which the upper one is "
            f"{median(one.width for one in held):.2f} times the lower one in the median.\n"
        )
        names = dict.fromkeys(one.gpu for one in lent)
        yield from (*narrow(HEAD, (_cells(name, lent, held) for name in names)), "")


def _cells(name: str, lent: Sequence[LentRun], held: Sequence[Held]) -> list[object]:
    pairs = [(one, its) for one, its in zip(lent, held, strict=True) if one.gpu == name]
    own_errors = [abs(one.own.time_error or 0.0) for one, _ in pairs]
    errors = [one.lent.time_error or 0.0 for one, _ in pairs]
    return [
        name,
        pairs[0][0].lender,
        len(pairs),
        number(median(own_errors), ".1%", none=""),
        number(median(map(abs, errors)), ".1%", none=""),
        f"{median(errors):+.1%}",
        f"{mean(its.is_inside for _, its in pairs):.0%}",
        f"{median(its.width for _, its in pairs):.2f}",
    ]


def figure_lines(known: Sequence[Known]) -> Iterator[str]:
    """A section of the page with prediction errors for a GPU without measurements, and the errors
    as each group of its measured figures is added.
    """
    yield "\n\n".join(beside("report_runs-figures")) + "\n"
    every = {name: runs_from_datasheets(known, made) for name, made in TOLD.items()}
    gpus = dict.fromkeys(run.gpu for runs in every.values() for run in runs)
    lines = [_told_cells(gpu, every, [gpu]) for gpu in gpus]
    head = ("", "runs", *TOLD, "all own")
    yield from (*narrow(head, [_told_cells("all runs", every, [*gpus]), *lines]), "")


def _told_cells(
    name: str, every: Mapping[str, Sequence[LentRun]], gpus: Sequence[str]
) -> list[object]:
    chosen = [[run for run in runs if run.gpu in gpus] for runs in every.values()]
    errors = [[abs(run.lent.time_error or 0.0) for run in runs] for runs in chosen]
    errors.append([abs(run.own.time_error or 0.0) for run in chosen[0]])
    medians = [median(sizes) if sizes else None for sizes in errors]
    return [name, len(chosen[0]), *(number(size, ".1%") for size in medians)]
