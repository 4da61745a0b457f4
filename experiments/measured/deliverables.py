"""Shows how much each part of the predictor matters: the prediction errors of each source of
measured runs if one part is turned off.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import mean, median

from experiments.measured.by_source import (
    Known,
    SourceErrors,
    apart_of,
    errors_by_source,
)
from experiments.measured.from_datasheets import taken_for_its_lenders
from experiments.measured.predict_runs import RowPredictor
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import beside
from experiments.pages.tables import narrow, number
from experiments.runs.configuration import Configuration
from experiments.runs.judged import Judged, judged
from experiments.runs.kept_elsewhere import ALL_KEPT
from experiments.runs.run_sureness import Miss
from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.machine.hardware import Hardware

# Engines for common training software that were added late, each with the engine that predicted
# this software before.
BEFORE: Mapping[str, str] = {"deepspeed": "deepspeed", "trainer": "fsdp", "llmq": "fsdp"}


def _as_before(run: Configuration) -> Configuration:
    """A run as predicted by the engine that stood for its training software before the software got
    an engine of its own.
    """
    engine = ENGINES[run.engine]
    name = BEFORE.get(engine.family, run.engine)
    if engine.memory and any(row.whole_logits for row in engine.memory.values()):
        name = engine.system
    known = run.precision in ENGINES[name].memory and name != run.engine
    return replace(run, engine=name, otherwise="") if known else run


def _without_columns(run: Configuration) -> Configuration:
    """A run without what its row says about kernels, losses, optimizer states and offloading."""
    return replace(
        run,
        attention_kernel="",
        loss="whole",
        states="mixed",
        optimizer="adamw",
        drops_tokens=False,
        elsewhere=ALL_KEPT,
    )


@contextmanager
def _free_hosts() -> Iterator[None]:
    """In the ``with`` block, launching kernels takes no host time on any engine."""
    kept = {name: ENGINES[name] for name in ENGINES}
    ENGINES.update({name: replace(row, host=None) for name, row in kept.items()})
    try:
        yield
    finally:
        ENGINES.update(kept)


def _lent_unscaled(gpu: str) -> Hardware | None:
    """An unmeasured GPU with the measured curves of another GPU, which are not scaled to it; None
    for measured GPUs.
    """
    measured = catalog.stated_hardware(gpu).provenance.compute
    return taken_for_its_lenders(catalog.hardware(gpu)) if measured is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOff:
    """A part of the predictor that is turned off, to see how much it matters. ``edit`` changes the
    runs, ``hardware`` replaces a GPU, ``within`` is a ``with`` block that changes engines,
    ``allocated`` predicts the bytes of tensors for any kind of memory peak, and ``by_rows`` counts
    each row as a source.
    """

    edit: Callable[[Configuration], Configuration] | None = None
    hardware: Callable[[str], Hardware | None] | None = None
    within: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    allocated: bool = False
    by_rows: bool = False

    def again(self, rows: Sequence[Judged]) -> list[Judged]:
        """The predictions of rows with this part of the predictor turned off."""
        if self.allocated:
            return [_as_allocated(row) for row in rows]
        if self.hardware is not None:
            return self._on_other(rows)
        if self.edit is None and self.within is nullcontext:
            return [*rows]
        with self.within():
            return _again(rows, RowPredictor(edit=self.edit))

    def _on_other(self, rows: Sequence[Judged]) -> list[Judged]:
        assert self.hardware is not None
        of_gpu: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            if row.answer.doubt is not None:
                of_gpu[row.answer.doubt.kind.hardware].append(index)
        again = [*rows]
        for gpu, indices in of_gpu.items():
            if (other := self.hardware(gpu)) is not None:
                on_it = _again([rows[index] for index in indices], RowPredictor(hardware=other))
                for index, row in zip(indices, on_it, strict=True):
                    again[index] = row
        return again


def _again(rows: Sequence[Judged], predictor: RowPredictor) -> list[Judged]:
    """Rows that are predicted again, each with its measurements."""
    answers = predictor.answers_of(row.row for row in rows)
    return [
        replace(judged(row.row, answered.answer), measured_s=row.measured_s)
        if answered.answer.prediction is not None
        else row
        for row, answered in zip(rows, answers, strict=True)
    ]


def _as_allocated(row: Judged) -> Judged:
    """A row whose predicted peak is that of allocated bytes (tensors), whatever kind of peak was
    measured.
    """
    if row.answer.prediction is None:
        return row
    stages = tuple(
        replace(stage, peak_reserved_bytes=stage.peak_allocated_bytes)
        for stage in row.answer.prediction.stages
    )
    prediction = replace(row.answer.prediction, stages=stages)
    return replace(row, answer=replace(row.answer, prediction=prediction, buffers_bytes=()))


PARTS: Mapping[str, PartOff] = {
    "any GPU": PartOff(hardware=_lent_unscaled),
    "what is written": PartOff(edit=lambda run: replace(run, node_gbytes_per_s=None)),
    "what rows say": PartOff(edit=_without_columns),
    "engines": PartOff(edit=_as_before),
    "what grows": PartOff(within=_free_hosts),
    "memory": PartOff(allocated=True),
    "bounds": PartOff(by_rows=True),
}
HEAD = (
    *("without", "runs changed", "sources changed", "mean error of these", "without it"),
    *("all sources", "without it", "peaks", "without it", "in bounds", "without it"),
    *("width", "without it"),
)


# The figures of each source that the table on the page shows.
FIGURES = {"times": "mean_time", "peaks": "mean_peak", "in bounds": "inside"}


def deliverable_lines(known: Sequence[Known]) -> Iterator[str]:
    """A section of the page: errors of times and memory peaks, and how often bounds hold, by
    source, with each part of the predictor turned off.
    """
    asked = [entry for entry in known if not apart_of(entry[1].row.cells)]
    yield "\n\n".join(beside("report_runs-deliverables")) + "\n"
    whole = {source.name: source for source in errors_by_source(asked)}
    without = {name: _without(part, asked) for name, part in PARTS.items()}
    lines = [_line(name, asked, whole, *off) for name, off in without.items()]
    yield from (*narrow(HEAD, lines), "")
    yield "By source with each part off: mean errors of times and of peaks, shares within bounds:\n"
    names = [f"{figure}{off}" for figure in FIGURES for off in ("", *map(", {}".format, PARTS))]
    rows = (_source_cells(name, whole, without) for name in whole)
    yield from (f"{IN_A_FILE}\n", *narrow(("", *names), rows), "")


Sources = Mapping[str, SourceErrors]
Figure = Callable[[SourceErrors], float | None]


def _without(part: PartOff, asked: Sequence[Known]) -> tuple[list[Judged], Sources]:
    again = part.again([row for _, row, _ in asked])
    changed = [
        (source, row, None if miss is None else _missed(row, miss))
        for (source, _, miss), row in zip(asked, again, strict=True)
    ]
    errors = errors_by_source(changed, by_rows=part.by_rows)
    return again, {source.name: source for source in errors}


def _missed(row: Judged, miss: Miss) -> Miss:
    doubt, measured_s = row.answer.doubt, row.measured_s
    assert doubt is not None
    assert measured_s is not None
    return replace(miss, roots=doubt.range.miss(measured_s))


def _line(
    name: str, asked: Sequence[Known], whole: Sources, again: Sequence[Judged], without: Sources
) -> list[object]:
    changed = [
        source
        for (source, before, _), row in zip(asked, again, strict=True)
        if (before.predicted_s, before.predicted_gib) != (row.predicted_s, row.predicted_gib)
    ]
    touched = {*changed}
    cells: list[object] = [name, len(changed), len(touched)]
    for sources, names in ((whole, touched), (without, touched), (whole, None), (without, None)):
        cells.append(_mean(sources, lambda source: source.mean_time, names))
    figures: tuple[Figure, ...] = (
        lambda source: source.mean_peak,
        lambda source: source.inside,
    )
    cells += [_mean(sources, figure) for figure in figures for sources in (whole, without)]
    return [*cells, *(_width(sources) for sources in (whole, without))]


def _mean(sources: Sources, figure: Figure, names: set[str] | None = None) -> str:
    figures = [figure(source) for name, source in sources.items() if names is None or name in names]
    known = [size for size in figures if size is not None]
    return number(mean(known) if known else None, ".1%", none="")


def _width(sources: Sources) -> str:
    widths = [held.width for source in sources.values() for held in source.bounded]
    return number(median(widths) if widths else None, ".2f", none="")


def _source_cells(
    name: str, whole: Sources, without: Mapping[str, tuple[list[Judged], Sources]]
) -> list[object]:
    cells: list[object] = [name]
    for figure in FIGURES.values():
        every = (whole, *(sources for _, sources in without.values()))
        cells += [number(getattr(sources[name], figure), ".1%", none="") for sources in every]
    return cells
