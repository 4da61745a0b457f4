"""Compares the prediction of a plan with the prediction of the text that it is exported as.

An export is exact if the target can express every choice of the plan, and the two predictions are
equal in every figure (times and bytes of all stages), to a billionth. To predict an export, its
text is imported again.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.bench.problem import (
    Answer,
    fullest_words,
    lacking_bytes,
    predicted,
    predicted_each,
)
from experiments.interchange.single_changes import single_changes
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, to_mapping
from mistlab.export.given import Remark, changes
from mistlab.export.nearest import Nearest, canonical, nearest
from mistlab.export.target import Target, read_back
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from simulators.symbolic import SymbolicPredictor

NEAR = 1e-9
# The fields of a prediction that are text rather than numbers.
_WORDS = ("predictor", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """An exported plan: the nearest plan that the framework can express, its text, and the
    predictions of the original and of the nearest plan.
    """

    wanted: Job
    target: Target
    found: Nearest
    text: str
    given: Answer
    near: Answer
    is_exact: bool

    @property
    def no_longer_fits(self) -> bool:
        """Whether the original plan fits in memory, but the exported plan does not."""
        return fits(self.given) is True and fits(self.near) is False

    @property
    def lacking(self) -> Sequence[str]:
        """A sentence on the stage of the exported plan that does not fit, and on the memory that it
        lacks.
        """
        if isinstance(self.near, InputError) or self.near.fits:
            return ()
        return tuple(fullest_words(self.found.job, self.near))


def exported(job: Job, target: Target) -> Export:
    """The export of a job: the nearest plan that the framework can express. If that plan no longer
    fits, another similar plan that does.
    """
    form, given = nearest(job, target), predicted(job)
    near = predicted(form.job)
    if fits(given) and isinstance(near, Prediction) and not near.fits:
        form = fitting_form(form, near, target) or form
        near = predicted(form.job)
    text = target.write(form.job)
    back = _back(target, text, form.job)
    if isinstance(back, InputError) or back != form.job:
        form = replace(form, remarks=(*form.remarks, _misread(form.job, back)))
    is_exact = form.is_exact and not isinstance(back, InputError) and costs_as(job, back, given)
    return Export(
        wanted=job,
        target=target,
        found=form,
        text=text,
        given=given,
        near=near,
        is_exact=is_exact,
    )


def fits(prediction: Answer) -> bool | None:
    """Whether a plan fits in memory; None if it cannot be predicted."""
    return None if isinstance(prediction, InputError) else prediction.fits


def same_figures(first: Prediction, second: Prediction) -> bool:
    """Whether two predictions have the same numbers in all fields."""
    figures = [list(_figures(to_mapping(each))) for each in (first, second)]
    names = [[name for name, _ in pairs] for pairs in figures]
    return names[0] == names[1] and all(
        math.isclose(first_figure, other, rel_tol=NEAR, abs_tol=0.0)
        for (_, first_figure), (_, other) in zip(*figures, strict=True)
    )


def _figures(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in nested plain data, each with the path to it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _WORDS:
                yield from _figures(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _figures(inner, f"{name}[{index}]")
    elif isinstance(value, int | float):
        yield name, float(value)


def costs_as(job: Job, back: Job, given: Answer) -> bool:
    """Whether the exported text, imported again, gives a job with the same predicted cost. If
    neither job can be predicted, whether the jobs are equal.
    """
    if isinstance(given, InputError):
        return back == canonical(job)
    again = predicted(back)
    return isinstance(again, Prediction) and same_figures(given, again)


def _back(target: Target, text: str, job: Job) -> Job | InputError:
    try:
        return read_back(target, text, job)
    except InputError as error:
        return error


def _misread(job: Job, back: Job | InputError) -> Remark:
    """A remark on how ``import_plan`` misreads an exported text: it cannot read the text, or reads
    another plan or engine from it.
    """
    if isinstance(back, InputError):
        text = f"import_plan cannot read the exported text: {back}"
    else:
        others = sorted({remark.choice for remark in changes(job, back, "")})
        differing = ", ".join(others)
        text = f"import_plan reads another plan from the exported text: it differs in {differing}"
        if not others:
            assumed = back.plan.engine
            text = f"the text names no engine: import_plan assumes {assumed} without --engine"
    return Remark(kind="noted", choice="text", text=text)


# If the nearest plan that a framework can express does not fit, finds another plan that is close to
# the original, can be expressed, and fits.


# The largest number of changes in a row that are tried.
STEPS = 4
# Dimensions that are never changed to make an export fit: a change only moves memory between
# stages, or saves none, and there would be many changes to try.
_LEFT_OUT = ("layers", "order")


def fitting_form(form: Nearest, near: Prediction, target: Target) -> Nearest | None:
    """The fastest plan that fits, among the expressible plans that take the fewest changes to reach
    from the nearest expressible plan; None if a few changes are not enough.
    """
    job, lacks = form.job, _most_lacking(form.job, near)
    what = f"{lacks / GIB_BYTES:.2f} GiB on a GPU" if lacks > 0 else "host memory"
    because = f"so that the plan fits; without this change it lacks {what}"
    seen = {job}
    for _ in range(STEPS):
        forms = list(_predicted_forms(job, target, seen))
        fitting = [(form, prediction) for form, prediction in forms if prediction.fits]
        if fitting:
            best, _ = min(fitting, key=lambda pair: pair[1].iteration_s)
            remarks = changes(form.job, best, because)
            return Nearest(job=best, remarks=(*form.remarks, *remarks))
        if not forms:
            return None
        job, _ = min(forms, key=lambda pair: _most_lacking(*pair))
    return None


def _most_lacking(job: Job, prediction: Prediction) -> float:
    return max(lacking_bytes(job.cluster, job.plan, prediction))


def _predicted_forms(job: Job, target: Target, seen: set[Job]) -> Iterator[tuple[Job, Prediction]]:
    """Every plan that differs from a job's plan in one choice and that the framework can express,
    with its prediction.
    """
    of_clusters: dict[Cluster, list[Job]] = defaultdict(list)
    for form in _forms(job, target):
        if form not in seen and form.workload == job.workload:
            seen.add(form)
            of_clusters[form.cluster].append(form)
    for cluster, forms in of_clusters.items():
        predictor = SymbolicPredictor(workload=job.workload, cluster=cluster)
        answers = predicted_each(predictor, [form.plan for form in forms])
        for form, answer in zip(forms, answers, strict=True):
            if isinstance(answer, Prediction):
                yield form, answer


def _forms(job: Job, target: Target) -> Iterator[Job]:
    for change in single_changes(job):
        if change.choice not in _LEFT_OUT:
            try:
                yield nearest(change.job, target).job
            except InputError:
                continue
