"""The ten functions of the Python library, which ``import mistlab`` exports, and the types of their
answers.

A plan is given as the path of a plan file, a mapping with its content, or a ``Job``. Wrong input
raises ``mistlab.InputError``, whose message has field, value and remedy. So does a question without
an answer, such as a search in which no plan fits.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.bench.problem import on_cluster_with
from experiments.budget.will_it_fit import cheapest_change
from experiments.cli.command import parser_for
from experiments.commands import COMMANDS
from experiments.interchange.fidelity import exported
from experiments.interchange.import_plan import read_plan
from experiments.library.frames import table_path
from experiments.measured.predict_runs import RowPredictor, mapping_of
from experiments.prediction.measured_step import MeasuredStep, StepCorrection
from experiments.serve.serve_plan import served
from experiments.tuning.tune import lacking_words, tuned
from mistlab import catalog
from mistlab.core.values import InputError, near_matches, reject
from mistlab.cost.breakdown import breakdown_of
from mistlab.formats.recipes.exports import EXPORTS, target_of
from mistlab.job.job import Job, job_from_mapping, load_job
from mistlab.plan.named_spaces import SPACES
from simulators.registry import PREDICTORS

if TYPE_CHECKING:
    import pandas as pd
import html
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.bench.bench import Bench, Entry
from experiments.bench.problem import fullest_words, peak_bounds_of, room_words
from experiments.library.frames import frame_of
from experiments.pages.tables import rate_words
from experiments.prediction.predict import lines
from experiments.tuning.search_words import verdict
from mistlab.core.files import format_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import to_mapping
from mistlab.job.job import dump_job, job_to_mapping
from mistlab.job.prediction import PARTS, Breakdown, Prediction
from mistlab.plan.plan import Plan
from mistlab.plan.plan_words import plan_words

if TYPE_CHECKING:
    import pandas as pd


class TextAnswer(ABC):
    """An answer that a notebook shows as lines of text; ``str`` gives the same lines."""

    __slots__ = ()

    @abstractmethod
    def text_lines(self) -> Iterator[str]:
        """The lines of text that a notebook shows as the answer."""

    def __str__(self) -> str:
        return "\n".join(self.text_lines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPlan(TextAnswer):
    """A training plan with its predicted time and memory.

    ``measured`` are lines of text that compare the prediction with a measured step, if one was
    given.
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
        """The lines to show: the plan's name, its time with bounds, its memory, its stages, and
        remarks.
        """
        fits_words = "fits" if self.fits else "does not fit"
        yield f"{self.name}: {rate_words(self.job.plan, self.prediction)}"
        yield f"{fits_words} {room_words(self.job.cluster)}"
        yield from fullest_words(self.job, self.prediction)
        yield from plan_words(self.job.plan)
        yield from self.measured
        yield from (f"note: {note}" for note in self.prediction.notes)

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, as ``mistlab predict --json`` prints it."""
        bounds = to_mapping(peak_bounds_of(self.job, self.prediction))
        return {"plan": self.name, **to_mapping(self.prediction), **bounds}

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each stage of the plan."""
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
class PredictedPlans(TextAnswer):
    """The predictions of several plans, in the order in which the plans were given."""

    plans: tuple[PredictedPlan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, number: int) -> PredictedPlan:
        return self.plans[number]

    @property
    def best(self) -> PredictedPlan | None:
        """The fastest of the plans that fit; None if none fits."""
        fitting = [plan for plan in self.plans if plan.fits]
        return min(fitting, key=lambda plan: plan.iteration_s, default=None)

    def text_lines(self) -> Iterator[str]:
        """The lines to show: one for each plan."""
        for plan in self.plans:
            fits_words = "" if plan.fits else ", does not fit"
            yield f"{plan.name}: {rate_words(plan.job.plan, plan.prediction)}{fits_words}"

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each plan."""
        return frame_of([_plan_row(plan) for plan in self.plans])


def _plan_row(plan: PredictedPlan) -> dict[str, Any]:
    figures = to_mapping(plan.prediction)
    del figures["stages"]
    peak = plan.prediction.peak_reserved_bytes / GIB_BYTES
    return {"plan": plan.name, **figures, "peak_reserved_gib": peak}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPlan(TextAnswer):
    """The breakdown of an iteration's GPU-seconds into parts that add up to it."""

    job: Job
    breakdown: Breakdown

    def text_lines(self) -> Iterator[str]:
        """The time breakdown as a table, with a line for each part of an iteration."""
        yield from lines(self.breakdown)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each stage and a column for each term of the iteration."""
        rows = [
            {"stage": number, **{name: getattr(parts, name) for name in PARTS}}
            for number, parts in enumerate(self.breakdown.stages)
        ]
        return frame_of(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedPlan(TextAnswer):
    """The plan that a search found, its prediction, and whether it is proven fastest.

    ``lower_bound_s`` is a time below which no plan of the search space is predicted. ``gap`` is how
    far it lies below this plan's predicted time, as a share of that time. Both are None if nothing
    is known.
    """

    job: Job
    prediction: Prediction
    entry: Entry

    @classmethod
    def of(cls, bench: Bench, entry: Entry, answer: tuple[Plan, Prediction]) -> "TunedPlan":
        """The answer that a search of a benchmark problem has given."""
        plan, prediction = answer
        return cls(job=bench.job(plan), prediction=prediction, entry=entry)

    @property
    def iteration_s(self) -> float:
        """The predicted seconds of an iteration."""
        return self.prediction.iteration_s

    @property
    def is_proven(self) -> bool:
        """Whether it is proven that no plan of the space is predicted to be faster than this
        plan.
        """
        return self.entry.result.status == "OPTIMAL"

    @property
    def lower_bound_s(self) -> float | None:
        """A number of seconds below which no plan of the search space is predicted; None if none is
        known.
        """
        return self.entry.result.lower_bound_s

    @property
    def gap(self) -> float | None:
        """The share by which a plan of the search space may still be faster than this plan; None if
        it is not known.
        """
        return self.entry.result.gap

    @property
    def verdict(self) -> str:
        """Whether the plan is proven fastest, or by how much another plan may be faster, in one
        sentence.
        """
        return verdict(self.entry)

    def text_lines(self) -> Iterator[str]:
        """The verdict on the proof, the prediction, and the plan, as lines of text."""
        yield self.verdict
        yield rate_words(self.job.plan, self.prediction)
        yield from plan_words(self.job.plan)
        yield from (f"note: {note}" for note in self.prediction.notes)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with a row for each stage."""
        return self._predicted().to_frame()

    def to_dict(self) -> dict[str, Any]:
        """The search's answer as plain data: the prediction, the plan, and how far it is proven."""
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
class FittingPlan(TextAnswer):
    """Whether a plan fits; if not, the cheapest change that makes it fit, among those tried."""

    asked: PredictedPlan
    changed: PredictedPlan | None
    change: str

    @property
    def fits(self) -> bool:
        """Whether the plan fits as given."""
        return self.asked.fits

    def text_lines(self) -> Iterator[str]:
        """Whether the plan fits, and the cheapest change that makes it fit, as lines of text."""
        yield "Yes." if self.fits else "No."
        yield from fullest_words(self.asked.job, self.asked.prediction)
        if self.changed is not None:
            seconds = self.changed.iteration_s
            yield f"The cheapest change that makes it fit: {self.change}; {seconds:.3f} s."
        elif not self.fits:
            yield "Nothing that was tried makes it fit: search for another plan with tune."


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchText(TextAnswer):
    """A plan as a framework's file, the choices that the file cannot express, and the prediction of
    the file.
    """

    framework: str
    text: str
    remarks: tuple[str, ...]
    is_exact: bool
    job: Job

    def text_lines(self) -> Iterator[str]:
        """The lines to show: those of the framework's file alone."""
        yield self.text.rstrip("\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan(TextAnswer):
    """A plan read from another framework's file, with the assumptions made."""

    framework: str
    job: Job
    remarks: tuple[str, ...]

    def text_lines(self) -> Iterator[str]:
        """The lines to show: the text of the plan file."""
        yield format_yaml(job_to_mapping(self.job, Path())).rstrip("\n")


@dataclass(frozen=True, slots=True)
class PlainRows(TextAnswer):
    """Rows of plain data, such as one answer for each run of a table."""

    rows: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def text_lines(self) -> Iterator[str]:
        """The line to show: the number of rows, and of refused rows."""
        refused = sum("refused" in row or "error" in row for row in self.rows)
        yield f"{len(self.rows):,} rows, {refused:,} of them refused; to_frame() has them"

    def to_frame(self) -> "pd.DataFrame":
        """A pandas frame with these rows."""
        return frame_of(self.rows)


PlanLike = str | Path | Mapping[str, Any] | Job


def predict(
    plan: PlanLike,
    *,
    simulator: str = "symbolic",
    measured_step: float | None = None,
    measured_gib: float | None = None,
    **cluster: Any,
) -> PredictedPlan:
    """Predict a plan's iteration time with bounds, its memory, and whether it fits.

    ``cluster`` has figures that replace the plan's: ``keep_free_gib``, ``intra_node_gbytes_per_s``,
    ``inter_node_gbytes_per_s``, and the path of a ``network`` file. A measured step, if given, is
    compared with the prediction.
    """
    job, name = _job(plan, cluster)
    _check_simulator(simulator)
    predictor = PREDICTORS[simulator](workload=job.workload, cluster=job.cluster)
    prediction = predictor.predict(job.plan)
    measured = MeasuredStep(measured_step=measured_step, measured_gib=measured_gib)
    return PredictedPlan(
        name=name, job=job, prediction=prediction, measured=tuple(measured.words(prediction))
    )


def predict_many(
    plans: Iterable[PlanLike],
    *,
    simulator: str = "symbolic",
    measured_step: float | None = None,
    measured_gib: float | None = None,
    **cluster: Any,
) -> PredictedPlans:
    """Predict several plans; if a measured step time of the first plan is given, it corrects the
    others.
    """
    predicted = [predict(plan, simulator=simulator, **cluster) for plan in plans]
    if not predicted:
        reject("plans: the list is empty: give at least one plan")
    measured = MeasuredStep(measured_step=measured_step, measured_gib=measured_gib)
    if measured == MeasuredStep():
        return PredictedPlans(tuple(predicted))
    correction = StepCorrection.of(measured, predicted[0].prediction)
    corrected = (
        PredictedPlan(
            name=answer.name,
            job=answer.job,
            prediction=correction.corrected(answer.job, answer.prediction),
        )
        for answer in predicted
    )
    return PredictedPlans(tuple(corrected))


def explain(plan: PlanLike, **cluster: Any) -> ExplainedPlan:
    """Break an iteration's time down into parts that add up to it."""
    answer = predict(plan, **cluster)
    breakdown = breakdown_of(answer.job, answer.prediction.iteration_s)
    return ExplainedPlan(job=answer.job, breakdown=breakdown)


def tune(  # noqa: PLR0913 (all by name)
    *,
    model: str,
    hardware: str,
    global_batch: int,
    nodes: int = 1,
    gpus_per_node: int = 8,
    sequence_length: int = 4096,
    attention: str = "flash",
    precision: str = "bf16",
    space: str | None = None,
    engine: str | None = None,
    searcher: str | None = None,
    budget_seconds: float | None = None,
    seed: int = 0,
    **cluster: Any,
) -> TunedPlan:
    """Find the fastest plan that fits, and tell whether it is proven fastest.

    ``model`` and ``hardware`` are names in the catalogue or paths, as on the command line.
    """
    options = _options(
        "tune",
        model=str(model),
        hardware=str(hardware),
        global_batch=global_batch,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        sequence_length=sequence_length,
        attention=attention,
        precision=precision,
        space=space,
        engine=engine,
        searcher=searcher,
        budget_seconds=budget_seconds,
        seed=seed,
        **cluster,
    )
    bench, entry, _ = tuned(options)
    if entry.answer is None:
        raise InputError(lacking_words(entry, bench))
    return TunedPlan.of(bench, entry, entry.answer)


def will_it_fit(plan: PlanLike, **cluster: Any) -> FittingPlan:
    """Tell whether a plan fits, and the cheapest change that makes it fit."""
    job, name = _job(plan, cluster)
    asked, cheapest = cheapest_change(job)
    changed = None
    if cheapest is not None:
        changed = PredictedPlan(
            name=cheapest.words, job=cheapest.job, prediction=cheapest.prediction
        )
    return FittingPlan(
        asked=PredictedPlan(name=name, job=job, prediction=asked.prediction),
        changed=changed,
        change="" if cheapest is None else cheapest.words,
    )


def to_framework(plan: PlanLike, framework: str | None = None) -> LaunchText:
    """Export a plan to one of ``names()["frameworks"]``, such as ``megatron`` or ``trl``; by
    default the framework of its engine.
    """
    job, _ = _job(plan, {})
    if framework is not None and framework not in EXPORTS:
        reject(f"framework: {framework!r} is unknown{near_matches(framework, EXPORTS)}")
    made = exported(job, EXPORTS[framework] if framework else target_of(job))
    return LaunchText(
        framework=made.target.name,
        text=made.text,
        remarks=tuple(map(str, made.found.remarks)),
        is_exact=made.is_exact,
        job=made.found.job,
    )


def from_framework(
    path: str | Path, *, hardware: str = "h100-80gb", variables: Sequence[str] = (), **given: Any
) -> ReadPlan:
    """Import a plan from a launch script or another framework's configuration.

    ``variables`` set variables of a script, as texts such as ``"TP=4"``. ``given`` has further
    settings that the file does not state: ``model``, ``nodes``, ``gpus_per_node``,
    ``sequence_length``, ``global_batch``, ``micro_batch``, ``engine``.
    """
    options = _options(
        "import_plan",
        file=Path(path),
        hardware=str(hardware),
        set=[*variables],
        arguments=[],
        **given,
    )
    imported = read_plan(options)
    return ReadPlan(
        framework=imported.format, job=imported.job, remarks=tuple(map(str, imported.remarks))
    )


def predict_runs(table: "str | Path | pd.DataFrame") -> PlainRows:
    """Predict measured runs, each row of a table separately; measured columns are not used."""
    with table_path(table) as path:
        rows = [mapping_of(one) for one in RowPredictor().answers(path)]
    if not isinstance(table, str | Path):
        rows = [_of_frame(row, str(path)) for row in rows]
    return PlainRows(rows)


def serve(
    *, model: str, gpu: str, gpus: int, plays: bool = True, **question: Any
) -> dict[str, Any]:
    """Find the layout of GPUs that serves a load best, as ``mistlab serve_plan --json`` prints it.

    ``question`` has further options of that command, such as ``tpot=0.03`` or ``prompt=2000.0``.
    With ``plays=False`` the load is not simulated: the answer comes in a fifth of the time, without
    percentiles.
    """
    options = _options("serve_plan", model=model, gpu=gpu, gpus=gpus, **question)
    return served(options, plays=plays)


def names() -> Mapping[str, Sequence[str]]:
    """The names that functions accept: models, hardware, spaces, simulators and frameworks."""
    return {
        "models": catalog.model_names(),
        "hardware": catalog.hardware_names(),
        "spaces": tuple(SPACES),
        "simulators": tuple(PREDICTORS),
        "frameworks": tuple(EXPORTS),
    }


def _job(plan: PlanLike, cluster: Mapping[str, Any]) -> tuple[Job, str]:
    """A plan given as a file, a name or an object, as a job with the hardware figures that are
    overridden; and the plan's name.
    """
    if isinstance(plan, Job):
        job, name = plan, "plan"
    elif isinstance(plan, Mapping):
        job, name = job_from_mapping(plan), "plan"
    else:
        job, name = load_job(Path(plan)), str(plan)
    known = ("keep_free_gib", "intra_node_gbytes_per_s", "inter_node_gbytes_per_s", "network")
    for option in cluster:
        if option not in known:
            reject(f"argument {option!r} is unknown{near_matches(option, known)}")
    return on_cluster_with(job, cluster), name


def _of_frame(row: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The answer for a row of a pandas frame. The row is passed on in a temporary file; messages
    say "frame" in place of its path.
    """
    texts = {key: row[key].replace(path, "frame") for key in ("file", "refused") if key in row}
    return {**row, **texts}


def _check_simulator(simulator: str) -> None:
    if simulator not in PREDICTORS:
        reject(f"simulator: {simulator!r} is unknown{near_matches(simulator, PREDICTORS)}")


def _options(command: str, **values: Any) -> argparse.Namespace:
    """The options of a command with the given values, as if they had been parsed from its command
    line.
    """
    row = COMMANDS[command]
    required = [
        name for name, settings in row.options if settings.get("nargs") == "+" and name[0] != "-"
    ]
    options = parser_for(row, command).parse_args(required)
    for name, value in values.items():
        if not hasattr(options, name) and name != "arguments":
            known = [*vars(options)]
            reject(f"argument {name!r} of {command} is unknown{near_matches(name, known)}")
        setattr(options, name, value)
    return options
