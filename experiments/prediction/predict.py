"""Predicts plan files: their times with bounds, their memory, and the breakdown of their times, as
text and JSON.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from experiments.bench.problem import (
    fullest_words,
    numbers_of,
    on_cluster_with,
    peak_bounds_of,
    predicted_each,
    room_words,
)
from experiments.cli.commandline import as_options, batch_status, print_json, progress, writable
from experiments.pages.tables import aligned, rate_words
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, check_field, reject, to_mapping
from mistlab.cost.breakdown import breakdown_of
from mistlab.cost.kernels import captured
from mistlab.job.job import Job, load_job
from mistlab.job.prediction import PARTS, Breakdown, Prediction, Predictor, compared
from mistlab.machine.cluster import Cluster
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER
from simulators.registry import PREDICTORS
from simulators.symbolic import NAME as CLOSED_FORM

if TYPE_CHECKING:
    from experiments.prediction.disturbed import Disturbed
    from experiments.prediction.solve import Solved
    from mistlab.reduction.forecast import Forecast
    from simulators.events import Simulation
    from simulators.variability import Variability

# Shows what an iteration's GPU time is spent on, as a table and in a sentence.


WORDS: Mapping[str, str] = {
    "arithmetic_s": "the model's arithmetic at the peak rate",
    "products_s": "products below the peak rate",
    "attention_s": "attention below the peak rate",
    "memory_bound_s": "operators that memory limits",
    "recomputation_s": "recomputation",
    "tensor_exchange_s": "exposed exchanges of tensor parallelism",
    "context_exchange_s": "exposed exchanges of context parallelism",
    "expert_exchange_s": "exposed exchanges of experts",
    "data_parallel_s": "exposed reductions and gathers of data parallelism",
    "averaging_s": "averages of weights, in the mean of a cycle",
    "sends_s": "sends between stages",
    "copies_s": "exposed copies of offloading",
    "hosts_s": "hosts that launch late",
    "step_s": "the optimizer's step",
    "imbalance_s": "waiting for the busiest stage",
    "bubble_s": "the bubble of the pipeline",
}
# The least share of an iteration's time from which a part is shown at all, and the least share from
# which it is mentioned in the sentence.
NEGLIGIBLE, SMALL = 5e-4, 0.015


def lines(breakdown: Breakdown) -> list[str]:
    """A table with a line for each part of an iteration's time that is not negligible: its mean
    over all GPUs and, if there are several stages, its time on a GPU of the busiest stage.
    """
    mean, whole_s = breakdown.parts, breakdown.parts.total_s
    busiest = breakdown.stages[breakdown.busiest_stage]
    rows = [["where a GPU's time goes", "s", "share"]]
    of_stage = [f"stage {breakdown.busiest_stage}, the busiest: s"]
    tiers = {one.part: one.tier for one in breakdown.tiers}
    for name in PARTS:
        seconds = getattr(mean, name), getattr(busiest, name)
        if max(seconds) >= NEGLIGIBLE * whole_s:
            bound = f", bound by tier {tiers[name]}" if name in tiers else ""
            rows.append(
                [f"{WORDS[name]}{bound}", f"{seconds[0]:.3f}", f"{seconds[0] / whole_s:.1%}"]
            )
            of_stage.append(f"{seconds[1]:.3f}")
    rows.append(["the iteration", f"{whole_s:.3f}", "100.0%"])
    of_stage.append(f"{busiest.total_s:.3f}")
    if len(breakdown.stages) > 1:
        rows = [[*row, cell] for row, cell in zip(rows, of_stage, strict=True)]
    return aligned(rows)


def sentence(breakdown: Breakdown) -> str:
    """A sentence with the share of arithmetic in an iteration's time, followed by all other parts
    that are not small, largest first.
    """
    whole_s = breakdown.parts.total_s
    first, *others = ((name, getattr(breakdown.parts, name) / whole_s) for name in PARTS)
    large = sorted((one for one in others if one[1] >= SMALL), key=lambda one: -one[1])
    rest = sum(share for _, share in others) - sum(share for _, share in large)
    phrases = [f"{share:.0%} {WORDS[name]}" for name, share in (first, *large)]
    phrases += [f"{rest:.0%} the rest"] if rest >= NEGLIGIBLE else []
    return f"Where a GPU's time goes: {', '.join(phrases)}."


# Predicts plan files, all plans of one workload and cluster together, and prints text or JSON.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The prediction of a plan file, or the reason why it was refused. If asked for, also a
    simulated iteration, the effect of a disturbance, the time breakdown, and a measured step.
    """

    path: Path
    job: Job | None
    prediction: Prediction | None
    simulation: "Simulation | None" = None
    disturbed: "Disturbed | None" = None
    breakdown: Breakdown | None = None
    measured: tuple[str, ...] = ()
    forecast: "Forecast | None" = None
    solved: "Solved | None" = None
    error: str = ""


def predict(options: argparse.Namespace) -> int:
    """Predict plans: the time of an iteration with bounds, the memory of its GPUs, and whether the
    plan fits.

    Bounds hold for 90 % of measurements: they come from runs that the calibration did not see, and
    are wider for plans outside of what was measured. Plans that are predicted together are
    compared; those whose times differ by less than their bounds cannot be told apart. With
    --simulator events, the event simulator plays an iteration task by task; --timeline draws it,
    and --variability plays many iterations with slow parts and random task times. A measured step
    of the first plan is compared with its prediction, and corrects those of the other plans.
    """
    disturbs = _checked(options)
    if options.timeline is not None:
        writable(options.timeline / "x", "folder", "--timeline")
    if options.picture is not None:
        writable(options.picture, "file", "--picture")
    answers = predicted(
        options.plans,
        options.simulator,
        drawn=options.timeline is not None,
        numbers=numbers_of(options),
        captures=options.cuda_graphs,
    )
    answers = _with_more(answers, disturbs, options)
    for answer in answers:
        if answer.simulation is not None:
            from experiments.prediction.lanes import draw  # noqa: PLC0415 (needs SimPy)

            assert answer.job is not None
            draw(answer.job, answer.simulation, answer.path.stem, options.timeline)
    if options.picture is not None:
        _draw_picture(answers[0], options.picture)
    for answer in answers:
        if options.json:
            print_json(_mapping(answer))
        elif answer.prediction is None:
            progress(f"error: {answer.error}")
        else:
            print(_table(answer))
    if not options.json:
        print("".join(f"{line}\n" for line in _comparisons(answers)), end="")
    return batch_status(
        len(answers),
        sum(answer.job is None for answer in answers),
        all_answered=all(answer.prediction is not None for answer in answers),
    )


def _draw_picture(answer: PlanAnswer, path: Path) -> None:
    """Draw the picture of the first plan; without a prediction of this plan there is no picture."""
    from experiments.prediction.plan_picture import write_picture  # noqa: PLC0415 (needs SimPy)

    if answer.job is not None and answer.prediction is not None:
        write_picture(answer.job, answer.prediction, WORDS, path)
        progress(f"{path}")


def _checked(options: argparse.Namespace) -> "tuple[Variability, int | None] | None":
    """The disturbance of task times that the options ask for, and how many iterations are
    simulated; None without a disturbance. Options that are invalid or incompatible are refused.
    """
    for name in ("timeline", "variability"):
        if getattr(options, name) is not None and options.simulator != "events":
            reject(
                f"--{name}: works only with --simulator events: give that option too, or leave "
                f"--{name} out"
            )
    if options.picture is not None and len(options.plans) > 1:
        reject(
            f"--picture {options.picture}: can draw only one plan, but {len(options.plans)} are "
            "given: give one plan file"
        )
    if options.goal is not None and options.solve is None:
        reject(
            f"--for {options.goal}: is a goal for the figure that --solve names: give --solve too, "
            "such as --solve gpus"
        )
    if options.breakdown and options.simulator != CLOSED_FORM:
        reject(
            "--breakdown: shows the terms of the closed-form prediction, which --simulator "
            f"{options.simulator} has not: leave out --simulator or --breakdown"
        )
    with as_options():
        for name, number in numbers_of(options).items():
            check_field(Cluster, name, number)
    if options.variability is None:
        return None
    from experiments.prediction.disturbed import variability_of  # noqa: PLC0415 (needs SimPy)

    return variability_of(options.variability)


def _with_more(
    answers: list[PlanAnswer],
    disturbs: "tuple[Variability, int | None] | None",
    options: argparse.Namespace,
) -> list[PlanAnswer]:
    """The predictions of plan files, with all else that the options ask for, such as the time
    breakdown.
    """
    if disturbs is not None:
        answers = _disturbed(answers, *disturbs)
    if options.breakdown:
        answers = [_broken_down(answer) for answer in answers]
    if options.measured_step is not None or options.measured_gib is not None:
        answers = _beside_measured(answers, options)
    answers = [_with_forecast(answer) for answer in answers]
    if options.solve is not None:
        answers = [_solved(answer, options) for answer in answers]
    return answers


def _solved(answer: PlanAnswer, options: argparse.Namespace) -> PlanAnswer:
    """The prediction of a plan file, with the value that a figure (such as a network bandwidth)
    must have for the plan to reach a goal.
    """
    from experiments.prediction.solve import solved  # noqa: PLC0415 (seldom asked)

    if answer.job is None or answer.prediction is None:
        return answer
    return replace(answer, solved=solved(answer.job, options.solve, options.goal))


def _with_forecast(answer: PlanAnswer) -> PlanAnswer:
    """The prediction of a plan file, with a forecast of how its gradient reduction affects
    convergence, if its workload names one.
    """
    if answer.job is None or answer.prediction is None or answer.job.workload.reduces_plainly:
        return answer
    from experiments.prediction.converging import (  # noqa: PLC0415 (seldom asked)
        forecast_of,
    )

    return replace(answer, forecast=forecast_of(answer.job, answer.prediction))


def _disturbed(
    answers: Sequence[PlanAnswer], by: "Variability", samples: int | None
) -> list[PlanAnswer]:
    """The predictions of plan files, with the distribution of iteration times under the disturbance
    that the options ask for.
    """
    from experiments.prediction.disturbed import Disturbed  # noqa: PLC0415 (needs SimPy)

    with_disturbed = []
    for answer in answers:
        if answer.job is None or answer.prediction is None:
            with_disturbed.append(answer)
            continue
        try:
            with_disturbed.append(replace(answer, disturbed=Disturbed.of(answer.job, by, samples)))
        except InputError as error:
            with_disturbed.append(_refused(answer.path, answer.job, error))
    return with_disturbed


def _broken_down(answer: PlanAnswer) -> PlanAnswer:
    """The answer for a plan file, with the breakdown of the plan's time if the plan has a
    prediction.
    """
    if answer.job is None or answer.prediction is None:
        return answer
    return replace(answer, breakdown=breakdown_of(answer.job, answer.prediction.iteration_s))


def _beside_measured(
    answers: Sequence[PlanAnswer], options: argparse.Namespace
) -> list[PlanAnswer]:
    """The predictions of plan files, of which the first is compared with a measured step, and the
    others are corrected by the difference.
    """
    from experiments.prediction.measured_step import (  # noqa: PLC0415 (seldom asked)
        MeasuredStep,
        StepCorrection,
    )

    with as_options():
        measured = MeasuredStep(
            measured_step=options.measured_step, measured_gib=options.measured_gib
        )
    first, *others = answers
    if first.prediction is None:
        return list(answers)
    correction = StepCorrection.of(measured, first.prediction)
    beside = [replace(first, measured=tuple(measured.words(first.prediction)))]
    for answer in others:
        if answer.job is None or answer.prediction is None:
            beside.append(answer)
        else:
            corrected = correction.corrected(answer.job, answer.prediction)
            beside.append(replace(answer, prediction=corrected))
    return beside


def predicted(
    paths: Sequence[Path],
    simulator: str = "symbolic",
    *,
    drawn: bool = False,
    numbers: Mapping[str, Any] = MappingProxyType({}),
    captures: bool = False,
) -> list[PlanAnswer]:
    """The answers for plan files, in order; plans of one workload and cluster are predicted
    together.

    Plans that are to be ``drawn`` come with a simulated iteration. ``numbers`` replace figures of
    the clusters. A run that ``captures`` replays iterations as CUDA graphs.
    """
    answers: dict[int, PlanAnswer] = {}
    together: dict[tuple[Workload, Cluster], list[tuple[int, Job]]] = defaultdict(list)
    for index, path in enumerate(paths):
        try:
            job = on_cluster_with(load_job(path), numbers)
            job = captured(job) if captures else job
        except InputError as error:
            answers[index] = PlanAnswer(path=path, job=None, prediction=None, error=str(error))
        else:
            together[job.workload, job.cluster].append((index, job))
    for (workload, cluster), jobs in together.items():
        predictor = PREDICTORS[simulator](workload=workload, cluster=cluster)
        answer = _played if drawn else _together
        places = [place for place, _ in jobs]
        chosen = [(paths[place], job) for place, job in jobs]
        answers |= zip(places, answer(predictor, chosen), strict=True)
    return [answers[place] for place in range(len(paths))]


def _together(predictor: Predictor, jobs: Sequence[tuple[Path, Job]]) -> Iterator[PlanAnswer]:
    """The predictions of jobs that are predicted together; if one of them is refused, each job is
    predicted by itself.
    """
    answers = predicted_each(predictor, [job.plan for _, job in jobs])
    for (path, job), answer in zip(jobs, answers, strict=True):
        if isinstance(answer, InputError):
            yield _refused(path, job, answer)
        else:
            yield PlanAnswer(path=path, job=job, prediction=answer)


def _played(predictor: Predictor, jobs: Sequence[tuple[Path, Job]]) -> Iterator[PlanAnswer]:
    """The predictions of jobs, each with a simulated iteration."""
    from simulators.events import EventSimulator  # noqa: PLC0415 (needs SimPy)

    assert isinstance(predictor, EventSimulator)
    for path, job in jobs:
        try:
            simulation = predictor.simulate(job.plan)
            prediction = predictor.prediction_of(job.plan, simulation)
        except InputError as error:
            yield _refused(path, job, error)
        else:
            yield PlanAnswer(path=path, job=job, prediction=prediction, simulation=simulation)


def _refused(path: Path, job: Job, error: InputError) -> PlanAnswer:
    return PlanAnswer(path=path, job=job, prediction=None, error=f"{path}: {error}")


def _mapping(answer: PlanAnswer) -> Mapping[str, Any]:
    if answer.prediction is None:
        return {"plan": str(answer.path), "error": answer.error}
    assert answer.job is not None
    order = answer.job.plan.order
    order_told = {} if order == DEFAULT_ORDER else {"order": order}
    disturbed = {} if answer.disturbed is None else {"disturbed": answer.disturbed.mapping()}
    goes = {} if answer.breakdown is None else {"breakdown": to_mapping(answer.breakdown)}
    beside = {"measured": [*answer.measured]} if answer.measured else {}
    needs = {} if answer.solved is None else {"solved": answer.solved.mapping()}
    if answer.forecast is not None:
        needs = {**needs, "convergence": answer.forecast.mapping()}
    figures = to_mapping(answer.prediction)
    return {
        "plan": str(answer.path),
        **order_told,
        **figures,
        **to_mapping(peak_bounds_of(answer.job, answer.prediction)),
        **goes,
        **disturbed,
        **beside,
        **needs,
    }


def _table(answer: PlanAnswer) -> str:
    job, prediction = answer.job, answer.prediction
    assert job is not None
    assert prediction is not None
    times = ["steady s", "first s", "last s"]
    head = ["", "blocks", *times, *(f"{kind} GiB" for kind in ("allocated", "reserved", "host"))]
    rows = [head]
    for index, (stage, figures) in enumerate(zip(job.plan.stages, prediction.stages, strict=True)):
        seconds = (figures.stable_s, figures.delta_forward_s, figures.delta_backward_s)
        sizes = (figures.peak_allocated_bytes, figures.peak_reserved_bytes, figures.host_bytes)
        rows.append(
            [
                f"stage {index}",
                str(stage.layers),
                *(f"{value:z.3f}" for value in seconds),
                *(f"{size / GIB_BYTES:.2f}" for size in sizes),
            ]
        )
    verdict = "fits" if prediction.fits else "does not fit"
    summary = (
        f"{answer.path}\n{rate_words(job.plan, prediction)}; {verdict} {room_words(job.cluster)}"
    )
    notes = [f"note: {note}" for note in prediction.notes]
    if answer.disturbed is not None:
        notes.insert(0, answer.disturbed.words(prediction.iteration_s))
    goes = () if answer.breakdown is None else lines(answer.breakdown)
    fullest = fullest_words(job, prediction)
    table = aligned(rows, left=())
    solved = () if answer.solved is None else (answer.solved.words,)
    forecast = () if answer.forecast is None else answer.forecast.lines()
    return "\n".join(
        [summary, *table, *fullest, *goes, *forecast, *answer.measured, *solved, *notes]
    )


def _comparisons(answers: Sequence[PlanAnswer]) -> Iterator[str]:
    """For each workload, a table that compares the fastest plan that fits with the others."""
    by_workload: dict[Workload, list[tuple[Path, Prediction]]] = defaultdict(list)
    for answer in answers:
        if answer.job is not None and answer.prediction is not None and answer.prediction.fits:
            by_workload[answer.job.workload].append((answer.path, answer.prediction))
    for plans in by_workload.values():
        (first, best), *others = sorted(plans, key=lambda plan: plan[1].iteration_s)
        for path, prediction in others:
            comparison = compared(best, prediction)
            sure = "beyond" if comparison.exceeds_bounds else "within"
            yield (
                f"{first} is {comparison.ratio - 1:.1%} faster than {path}, "
                f"{sure} what the bounds leave open"
                if not math.isclose(comparison.ratio, 1.0)
                else f"{first} and {path} take equally long"
            )
