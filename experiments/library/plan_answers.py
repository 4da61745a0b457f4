"""Answers of the library about plans: values with their numbers, as text, as HTML and as frames."""

import html
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.bench.bench import Bench, Entry
from experiments.bench.problem import fullest_words, room_words
from experiments.library.frames import frame_of
from experiments.pages.tables import rate_words
from experiments.prediction.predict import lines
from experiments.tuning.search_words import verdict
from mistlab.core.files import format_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import to_mapping
from mistlab.job.job import Job, dump_job, job_to_mapping
from mistlab.job.prediction import PARTS, Breakdown, Prediction
from mistlab.plan.plan import Plan
from mistlab.plan.plan_words import plan_words

if TYPE_CHECKING:
    import pandas as pd


class Told(ABC):
    """An answer that notebooks show as its lines of text; ``str`` gives the same lines."""

    __slots__ = ()

    @abstractmethod
    def text_lines(self) -> Iterator[str]:
        """The lines of the answer."""

    def __str__(self) -> str:
        return "\n".join(self.text_lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan(Told):
    """A plan with its prediction.

    ``measured`` are the lines that hold a measured step against it, where one was given.
    """

    name: str
    job: Job
    prediction: Prediction
    measured: tuple[str, ...] = ()

    @property
    def iteration_s(self) -> float:
        """The predicted seconds of an iteration."""
        return self.prediction.iteration_s

    @property
    def fits(self) -> bool:
        """Whether every GPU, and every host, has room for the plan."""
        return self.prediction.fits

    def text_lines(self) -> Iterator[str]:
        """Name, time with bounds, memory, the plan, and notes."""
        said = "fits" if self.fits else "does not fit"
        yield f"{self.name}: {rate_words(self.job.plan, self.prediction)}"
        yield f"{said} {room_words(self.job.cluster)}"
        yield from fullest_words(self.job, self.prediction)
        yield from plan_words(self.job.plan)
        yield from self.measured
        yield from (f"note: {note}" for note in self.prediction.notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as ``mistlab predict --json`` prints it."""
        return {"plan": self.name, **to_mapping(self.prediction)}

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each stage."""
        rows = [
            {"stage": number, **to_mapping(stage), **predicted}
            for number, (stage, predicted) in enumerate(
                zip(self.job.plan.stages, to_mapping(self.prediction)["stages"], strict=True)
            )
        ]
        return frame_of(rows)

    def save(self, path: str | Path) -> Path:
        """Write the plan file, which every command takes."""
        dump_job(self.job, Path(path))
        return Path(path)


@dataclass(frozen=True, slots=True)
class PredictedPlans(Told):
    """Several plans with their predictions, in the order in which they were given."""

    plans: tuple[PredictedPlan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, number: int) -> PredictedPlan:
        return self.plans[number]

    @property
    def best(self) -> PredictedPlan | None:
        """The fastest of the plans that fit."""
        fitting = [plan for plan in self.plans if plan.fits]
        return min(fitting, key=lambda plan: plan.iteration_s, default=None)

    def text_lines(self) -> Iterator[str]:
        """A line for each plan."""
        for plan in self.plans:
            said = "" if plan.fits else ", does not fit"
            yield f"{plan.name}: {rate_words(plan.job.plan, plan.prediction)}{said}"

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each plan."""
        return frame_of([_plan_row(plan) for plan in self.plans])


def _plan_row(plan: PredictedPlan) -> dict[str, Any]:
    figures = to_mapping(plan.prediction)
    del figures["stages"]
    peak = plan.prediction.peak_reserved_bytes / GIB_BYTES
    return {"plan": plan.name, **figures, "peak_reserved_gib": peak}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPlan(Told):
    """Where the GPU-seconds of a plan's iteration go, by parts that add up to it."""

    job: Job
    breakdown: Breakdown

    def text_lines(self) -> Iterator[str]:
        """A table of the parts."""
        yield from lines(self.breakdown)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each stage and a column for each part."""
        rows = [
            {"stage": number, **{name: getattr(parts, name) for name in PARTS}}
            for number, parts in enumerate(self.breakdown.stages)
        ]
        return frame_of(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPlan(Told):
    """The plan that a search found, its prediction, and what is proven of it.

    ``lower_bound_s`` is a time below which no plan of the space is predicted, and ``gap`` the share
    of the best prediction that lies above it; both are None where nothing is known.
    """

    job: Job
    prediction: Prediction
    entry: Entry

    @classmethod
    def of(cls, bench: Bench, entry: Entry, answer: tuple[Plan, Prediction]) -> "TunedPlan":
        """The answer of a search on a bench."""
        plan, prediction = answer
        return cls(job=bench.job(plan), prediction=prediction, entry=entry)

    @property
    def iteration_s(self) -> float:
        """The predicted seconds of an iteration."""
        return self.prediction.iteration_s

    @property
    def is_proven(self) -> bool:
        """Whether no plan of the space is predicted faster than the best one found."""
        return self.entry.result.status == "OPTIMAL"

    @property
    def lower_bound_s(self) -> float | None:
        """Seconds below which no plan of the space is predicted."""
        return self.entry.result.lower_bound_s

    @property
    def gap(self) -> float | None:
        """The share by which a plan of the space may be faster."""
        return self.entry.result.gap

    @property
    def verdict(self) -> str:
        """What is proven, in one sentence."""
        return verdict(self.entry)

    def text_lines(self) -> Iterator[str]:
        """The proof, the prediction, and the plan."""
        yield self.verdict
        yield rate_words(self.job.plan, self.prediction)
        yield from plan_words(self.job.plan)
        yield from (f"note: {note}" for note in self.prediction.notes)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each stage."""
        return self._predicted().to_frame()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the prediction, the plan, and the proof."""
        return {
            "verdict": self.verdict,
            "status": self.entry.result.status,
            "lower_bound_s": self.lower_bound_s,
            "gap": self.gap,
            "prediction": to_mapping(self.prediction),
            "plan": job_to_mapping(self.job, Path()),
        }

    def save(self, path: str | Path) -> Path:
        """Write the plan file, which every command takes."""
        return self._predicted().save(path)

    def _predicted(self) -> PredictedPlan:
        return PredictedPlan(name="tuned", job=self.job, prediction=self.prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingPlan(Told):
    """Whether a plan fits; where it does not, the cheapest change that makes it fit, if any of
    those that were tried does."""

    asked: PredictedPlan
    changed: PredictedPlan | None
    change: str

    @property
    def fits(self) -> bool:
        """Whether the plan fits as it was asked."""
        return self.asked.fits

    def text_lines(self) -> Iterator[str]:
        """The answer, and the change."""
        yield "Yes." if self.fits else "No."
        yield from fullest_words(self.asked.job, self.asked.prediction)
        if self.changed is not None:
            seconds = self.changed.iteration_s
            yield f"The cheapest change that makes it fit: {self.change}; {seconds:.3f} s."
        elif not self.fits:
            yield "Nothing that was tried makes it fit: search for another plan with tune."


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchText(Told):
    """A plan in a framework's words, what they lose, and the prediction of what they say."""

    framework: str
    text: str
    remarks: tuple[str, ...]
    is_exact: bool
    job: Job

    def text_lines(self) -> Iterator[str]:
        """The text alone."""
        yield self.text.rstrip("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan(Told):
    """A plan read from another framework's file, and what was assumed."""

    framework: str
    job: Job
    remarks: tuple[str, ...]

    def text_lines(self) -> Iterator[str]:
        """The plan file."""
        yield format_yaml(job_to_mapping(self.job, Path())).rstrip("\n")


@dataclass(frozen=True, slots=True)
class PlainRows(Told):
    """Rows of plain data, such as the answers to a table of runs."""

    rows: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def text_lines(self) -> Iterator[str]:
        """How many rows there are, and how many were refused."""
        refused = sum("refused" in row or "error" in row for row in self.rows)
        yield f"{len(self.rows):,} rows, {refused:,} of them refused; to_frame() has them"

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with these rows."""
        return frame_of(self.rows)
